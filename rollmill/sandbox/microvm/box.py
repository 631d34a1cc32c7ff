"""A box that is a virtual machine, and its snapshots: memory and devices, so that forks go on with every process where it was."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable

import msgspec

from rollmill.records import Boundary, RunFailure
from rollmill.sandbox.agent import wire
from rollmill.sandbox.agent.client import AgentBox
from rollmill.sandbox.agent.link import BoxRuined
from rollmill.sandbox.group import fork_by_snapshot
from rollmill.sandbox.microvm import stored
from rollmill.sandbox.microvm.machine import Ending, Saved
from rollmill.sandbox.microvm.stored import Standing
from rollmill.sandbox.microvm.stream import MachineStream
from rollmill.sandbox.microvm.vmm import Machine
from rollmill.sandbox.records import SandboxSpec
from rollmill.sandbox.snapshots.store import open_store

PING_DEADLINE_S = 60.0
IDENTITY_DEADLINE_S = 60.0
_SEED_BYTES = 32
_FIXED = ("image", "root", "memory_bytes", "disk_bytes", "num_processes", "egress")
"""What a fork has from its parent and cannot have otherwise."""


class MicrovmBox(AgentBox):
    """One machine; made by `MicrovmBackend` only."""

    def __init__(
        self, name: str, spec: SandboxSpec, machine: Machine, hostname: str, keep: Callable[[MicrovmBox, Saved, Standing], MicrovmSnapshot]
    ) -> None:
        super().__init__(name, spec, kill=machine.kill)
        self.machine = machine
        self.hostname = hostname
        self._keep = keep
        self._saving = asyncio.Lock()
        self._suspended = False
        self._stream: MachineStream | None = None
        self._lifetime: asyncio.TimerHandle | None = None
        machine.ended.add_done_callback(self._buried)

    def join(self, standing: Standing | None = None) -> None:
        """Begin to talk: with a machine that boots, or with one that was restored where `standing` says."""
        begun, num_before = (standing.begun, standing.num_requests) if standing is not None else (b"", 0)
        self._stream = MachineStream(self.machine.agent, begun=begun, num_before=num_before)
        self.attach(self._stream)
        # Commands of the saved machine run on under their old numbers; ours must not meet them.
        self._life()._next_request = num_before

    def begin(self) -> None:
        """The box's lifetime runs from now; until it stood, the deadline for booting did."""
        self._lifetime = asyncio.get_running_loop().call_later(self.spec.lifetime_s, self._expire)

    async def renew(self) -> None:
        """Give a restored machine a name, a clock and random numbers of its own."""
        line = f"identity {time.time_ns()} {self.hostname} {secrets.token_hex(_SEED_BYTES)}\n"
        sock, loop = self.machine.warden, asyncio.get_running_loop()
        sock.setblocking(False)
        answer = b""
        try:
            async with asyncio.timeout(IDENTITY_DEADLINE_S):
                await loop.sock_sendall(sock, line.encode())
                while not answer.endswith(b"\n"):
                    data = await loop.sock_recv(sock, 64)
                    if not data:
                        raise RunFailure(Boundary.SANDBOX, f"box {self.name} ended before it had an identity of its own")
                    answer += data
        except TimeoutError:
            raise RunFailure(
                Boundary.SANDBOX, f"box {self.name} did not take an identity of its own within {IDENTITY_DEADLINE_S:g} s"
            ) from None
        except OSError as error:
            raise RunFailure(Boundary.SANDBOX, f"box {self.name} could not be given an identity of its own: {error}") from None
        if int(answer):
            raise RunFailure(Boundary.SANDBOX, f"box {self.name} could not be given an identity of its own: errno {int(answer)}")

    async def snapshot(self, *, live: bool = False) -> MicrovmSnapshot:
        """Always live: a machine has no state without its processes. It stands still while its memory is written, then goes on."""
        async with self._saving:
            if not self._suspended:
                await self._halt()
            try:
                saved, standing = await self.machine.save(), self._standing()
            except BaseException:
                if not self._suspended:
                    await self._go_on()
                raise
            snapshot = self._keep(self, saved, standing)
            if not self._suspended:
                try:
                    await self._go_on()
                except BaseException:
                    await snapshot.close()
                    raise
            return snapshot

    async def fork(self, num: int) -> list[MicrovmBox]:
        return await fork_by_snapshot(self, num)

    async def suspend(self) -> None:
        async with self._saving:
            if not self._suspended:
                await self._halt()
                self._suspended = True

    async def resume(self) -> None:
        async with self._saving:
            if self._suspended:
                await self._go_on()
                self._suspended = False

    async def _halt(self) -> None:
        """Stop the machine between two requests: an answer to the last one shows that its agent has read all that was sent."""
        link, stream = self._life(), self._stream
        assert stream is not None
        try:
            _, answer = link.ask(wire.Ask.PING)
            stream.hold()
            async with asyncio.timeout(PING_DEADLINE_S):
                await answer
        except BoxRuined as ruin:
            stream.release()
            raise RunFailure(Boundary.SANDBOX, str(ruin)) from None
        except TimeoutError:
            await self.end(f"its agent did not answer within {PING_DEADLINE_S:g} s")
            raise RunFailure(Boundary.SANDBOX, f"box {self.name} did not answer within {PING_DEADLINE_S:g} s and was killed") from None
        except BaseException:
            stream.release()
            raise
        try:
            await self.machine.pause()
            await stream.drained()
        except BaseException:
            await self._go_on()
            raise

    async def _go_on(self) -> None:
        stream = self._stream
        assert stream is not None
        try:
            if await self.machine.resume():
                self.join(msgspec.structs.replace(self._standing(), begun=b""))
        finally:
            stream.release()

    def _standing(self) -> Standing:
        assert self._stream is not None
        return Standing(begun=self._stream.begun(), num_requests=self._life()._next_request, hostname=self.hostname, shell=self.shell[0])

    def _expire(self) -> None:
        # The link hears of it as of any other death; the reason must be there before the monitor is reaped.
        self.gone(f"its lifetime of {self.spec.lifetime_s:g} s ended")
        self.machine.kill()

    def _buried(self, ended: asyncio.Future[Ending]) -> None:
        if self._lifetime is not None:
            self._lifetime.cancel()
        self.machine.warden.close()
        if self._link is not None:
            self.gone(ended.result().why, ruined=ended.result().by_guest)


class MicrovmSnapshot:
    """A machine that stands still; its forks read it and share nothing else."""

    def __init__(
        self,
        spec: SandboxSpec,
        saved: Saved,
        standing: Standing,
        *,
        maker: str,
        wake: Callable[[MicrovmSnapshot, SandboxSpec], Awaitable[MicrovmBox]],
    ) -> None:
        self.spec = spec
        self.saved = saved
        self.standing = standing
        self.maker = maker
        self._wake = wake

    async def fork(self, num: int, spec: SandboxSpec | None = None) -> list[MicrovmBox]:
        if num < 1:
            raise ValueError(f"{num} forks were asked for; ask for at least one")
        if not self.saved.files:
            raise ValueError("the snapshot is closed; fork it before `close`")
        spec = spec or self.spec
        for name in _FIXED:
            if getattr(spec, name) != getattr(self.spec, name):
                raise ValueError(f"a fork keeps its parent's {name} {getattr(self.spec, name)!r}, {getattr(spec, name)!r} needs a new box")
        results = await asyncio.gather(*(self._wake(self, spec) for _ in range(num)), return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        boxes = [result for result in results if not isinstance(result, BaseException)]
        if failures:
            await asyncio.gather(*(box.close() for box in boxes), return_exceptions=True)
            raise failures[0]
        return boxes

    async def save(self, store: str) -> str:
        """Keep it in a store of blobs; the digest leads back to it, there and on machines like this one."""
        return await stored.save(open_store(store), self)

    async def close(self) -> None:
        self.saved.close()
