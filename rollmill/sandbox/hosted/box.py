"""One hosted sandbox as a box, and a state that the provider keeps; every verb that is not the agent's is one request to the provider."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rollmill.records import Boundary, RunFailure
from rollmill.sandbox.agent.client import AgentBox
from rollmill.sandbox.group import all_or_none, fork_by_snapshot
from rollmill.sandbox.hosted.api import Client, Missing
from rollmill.sandbox.hosted.stream import DaemonStream
from rollmill.sandbox.interface import Sandbox
from rollmill.sandbox.records import Change, SandboxSpec, Service

if TYPE_CHECKING:
    from rollmill.sandbox.hosted.backend import HostedBackend

AGENT = "/tmp/.rollmill-box"
READY_DEADLINE_S = 60.0
SNAPSHOT_DEADLINE_S = 300.0
_NUM_TRIES = 3


class HostedBox(AgentBox):
    """Made by `HostedBackend` only."""

    def __init__(self, name: str, spec: SandboxSpec, backend: HostedBackend, daemon: Client, shell: tuple[str, ...]) -> None:
        super().__init__(name, spec, kill=self.begin_end)
        self.shell = shell
        self._backend = backend
        self._daemon = daemon
        self._stream = DaemonStream(daemon)
        self._ending: asyncio.Task[None] | None = None
        self._changing = asyncio.Lock()
        self._end_s = time.monotonic() + spec.lifetime_s

    async def enter(self) -> None:
        """Start the agent that lies in the sandbox, and begin a life with it."""
        self._stream = DaemonStream(self._daemon)
        await self._stream.start(["/bin/sh", "-c", f"chmod 755 {AGENT} && exec {AGENT} serve ."])
        self.attach(self._stream)
        await self.ready(READY_DEADLINE_S)

    def hung_up(self) -> None:
        """The connection to the agent is the only news of the box there is."""
        is_over = time.monotonic() >= self._end_s
        self.gone(f"its lifetime of {self.spec.lifetime_s:g} s is over" if is_over else self._stream.why or "its agent hung up")
        self.begin_end()

    async def close(self) -> None:
        if self._link is not None:
            await super().close()
        self.begin_end()
        assert self._ending is not None
        await asyncio.shield(self._ending)

    async def diff(self) -> list[Change]:
        raise ValueError("hosted boxes offer no diff: the provider does not show what changed")

    async def snapshot(self, *, live: bool = False) -> HostedSnapshot:
        if live:
            raise ValueError("hosted boxes give no live snapshot through this backend; leave `live` out")
        async with self._changing:
            self._check_alive()
            services = tuple(self.services)
            await self.services.stop()
            # Files only: children boot, so the agent here is ended as well and each side starts its own.
            await self._stream.end()
            try:
                path = f"/sandboxes/{self.name}/snapshots"
                taken = await self._backend.control.call("POST", path, {"memory": False}, deadline_s=SNAPSHOT_DEADLINE_S)
                return self._backend.keep(HostedSnapshot(self._backend, taken["snapshotID"], self.spec, services))
            finally:
                # Whatever came of it, the box goes on; a snapshot that nobody got is closed with the backend.
                await self.enter()
                for service in services:
                    await self.serve(service)

    async def fork(self, num: int) -> list[Sandbox]:
        return await fork_by_snapshot(self, num)

    async def suspend(self) -> None:
        self._check_alive()
        await self._stream.detach()
        await self._backend.control.call("POST", f"/sandboxes/{self.name}/pause", {}, deadline_s=SNAPSHOT_DEADLINE_S)

    async def resume(self) -> None:
        self._check_alive()
        left_s = max(1, math.ceil(self._end_s - time.monotonic()))
        path = f"/v2/sandboxes/{self.name}/connect"
        await self._backend.control.call("POST", path, {"timeout": left_s}, deadline_s=SNAPSHOT_DEADLINE_S)
        await self._stream.attach()

    # Inside

    def _check_alive(self) -> None:
        if not self.alive:
            raise self._life().failure()

    def begin_end(self) -> None:
        """Have the provider end it, without waiting; again is harmless."""
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end_sandbox())

    async def _end_sandbox(self) -> None:
        for num_left in reversed(range(_NUM_TRIES)):
            try:
                await self._backend.control.call("DELETE", f"/sandboxes/{self.name}")
                break
            except Missing:
                break
            except RunFailure:
                if not num_left:  # the provider ends it at its lifetime; whoever waits for its end hears that it is still there
                    return
        self._backend.forget(self)
        if self._link is not None:
            self.gone("the provider ended it")


class HostedSnapshot:
    """Made by `HostedBox.snapshot` only; the provider keeps it until it is closed."""

    def __init__(self, backend: HostedBackend, name: str, spec: SandboxSpec, services: Sequence[Service]) -> None:
        self.name = name
        self._backend = backend
        self._spec = spec
        self._services = tuple(services)
        self._is_closed = False

    async def fork(self, num: int, spec: SandboxSpec | None = None) -> list[Sandbox]:
        """Boxes from this state; a spec changes their variables and lifetime, never their files or services."""
        if self._is_closed:
            raise RunFailure(Boundary.SANDBOX, f"snapshot {self.name} was closed")
        if num < 1:
            raise ValueError(f"a fork of {num} boxes has none; ask for at least 1")
        makers = [self._backend.make(spec or self._spec, self.name, self._services, is_copy=True) for _ in range(num)]
        return list(await all_or_none(makers))

    async def save(self, store: str) -> str:
        raise ValueError("hosted snapshots offer no save: their states stay at the provider; use the namespace backend")

    async def close(self) -> None:
        """Again is harmless."""
        if self._is_closed:
            return
        self._is_closed = True
        self._backend.forget(self)
        try:
            await self._backend.control.call("DELETE", f"/templates/{self.name}")
        except Missing:
            return
