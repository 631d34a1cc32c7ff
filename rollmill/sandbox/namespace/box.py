"""The owner's end of one box: requests out, answers in, time-outs enforced here and not inside.

A box is alive until the zygote says it is gone; every request pending then fails with one reason.
"""

from __future__ import annotations

import asyncio
import errno
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from rollmill.records import Boundary, RunFailure
from rollmill.sandbox.interface import ExecResult, SandboxSpec
from rollmill.sandbox.namespace.inside import wire

Answer = tuple[wire.Header, bytes]
KILL_GRACE_S = 5.0
"""How long PID 1 may take to end a command that ran out of time, before the whole box is killed."""
FILE_DEADLINE_S = 60.0
MAX_STDIN_BYTES = 16 << 20
WRITE_CHUNK_BYTES = 4 << 20
"""A long file travels in pieces, so that PID 1, which lives under the box's memory bound, never holds more."""
CLOSE_DEADLINE_S = 30.0


class BoxRuined(Exception):
    """The agent's program destroyed its own box. Were that a failure, an agent could escape its grade by doing so: every
    call turns it into an observation."""


class NamespaceBox(asyncio.Protocol):
    """One sandbox; made by `NamespaceBackend.create` only."""

    def __init__(self, name: str, spec: SandboxSpec, kill: Callable[[str], None]) -> None:
        self.name = name
        self._spec = spec
        self._kill = kill
        self._buffer = bytearray()
        self._pending: dict[int, asyncio.Future[Answer]] = {}
        self._next_request = 0
        self._hung_up = False
        self._ruined = False
        self._why: str | None = None
        self._transport: asyncio.Transport | None = None
        self._reaped: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (frame := wire.take(self._buffer)) is not None:
            if frame[0]["id"] == wire.LAST_WORDS:
                self._why = self._why or frame[0]["message"]
                continue
            waiting = self._pending.pop(frame[0]["id"], None)
            if waiting is not None and not waiting.done():
                waiting.set_result(frame)

    def connection_lost(self, exc: Exception | None) -> None:
        self._hung_up = True
        self._bury()

    # The backend's side

    def gone(self, why: str, *, ruined: bool = False) -> None:
        """The zygote reaped the box, or died itself and took the box with it; `ruined`: by the agent's own doing."""
        self._ruined = ruined and self._why is None
        self._why = self._why or why
        if not self._reaped.done():
            self._reaped.set_result(None)
        self._bury()

    def _bury(self) -> None:
        # Both news arrive on different sockets; what PID 1 said last must be read before its death is believed.
        if self._why is None or not self._hung_up:
            return
        for waiting in self._pending.values():
            if not waiting.done():
                waiting.set_exception(self._failure())
        self._pending.clear()

    def _failure(self) -> RunFailure | BoxRuined:
        message = f"box {self.name} is gone: {self._why}"
        return BoxRuined(message) if self._ruined else RunFailure(Boundary.SANDBOX, message)

    async def install(self, deadline_s: float) -> None:
        """Wait until PID 1 stands and has written the initial world."""
        try:
            header, _ = await self._within(self._ask({"op": "world", "files": dict(self._spec.files)}), deadline_s, "creating it")
        except BoxRuined as ruin:  # no agent has run yet
            raise RunFailure(Boundary.SANDBOX, f"{ruin}; give the box more memory") from None
        if "errno" in header:
            raise RunFailure(Boundary.SANDBOX, f"box {self.name} could not be made: {header['message']}")

    # Sandbox

    @property
    def alive(self) -> bool:
        return self._why is None and not self._hung_up

    async def exec(self, argv: Sequence[str], *, timeout_s: float, stdin: bytes = b"", max_output_bytes: int = 1 << 16) -> ExecResult:
        if len(stdin) > MAX_STDIN_BYTES:
            raise ValueError(f"{len(stdin)} bytes of standard input are more than {MAX_STDIN_BYTES}; write them to a file first")
        if not argv or any("\0" in word for word in argv):
            raise ValueError(f"argv {list(argv)!r} must name a program and contain no NUL byte")
        begun = time.monotonic()
        try:
            return await self._exec(list(argv), timeout_s, stdin, max_output_bytes)
        except BoxRuined as ruin:
            words = f"{ruin}\n".encode()
            wall_s = time.monotonic() - begun
            return ExecResult(exit_code=-9, stdout=words[:max_output_bytes], num_output_bytes=len(words), timed_out=False, wall_s=wall_s)

    async def _exec(self, argv: Sequence[str], timeout_s: float, stdin: bytes, max_output_bytes: int) -> ExecResult:
        request = self._next_request
        answer = self._ask({"op": "exec", "argv": argv, "max_output_bytes": max_output_bytes}, stdin)
        try:
            async with asyncio.timeout(timeout_s):
                header, output = await asyncio.shield(answer)
        except TimeoutError:
            self._send({"id": request, "op": "kill", "target": request})
            try:
                async with asyncio.timeout(KILL_GRACE_S):
                    header, output = await asyncio.shield(answer)
            except TimeoutError:
                await self._end(f"it did not end a command within {KILL_GRACE_S:g} s of its time-out")
                return ExecResult(exit_code=-9, stdout=b"", num_output_bytes=0, timed_out=True, wall_s=timeout_s + KILL_GRACE_S)
        except asyncio.CancelledError:
            if self.alive:
                self._send({"id": request, "op": "kill", "target": request})
            raise
        if "errno" in header:
            raise RunFailure(Boundary.SANDBOX, f"box {self.name} could not start a command: {header['message']}")
        return ExecResult(
            exit_code=header["exit_code"],
            stdout=output,
            num_output_bytes=header["num_output_bytes"],
            timed_out=header["timed_out"],
            wall_s=header["wall_s"],
        )

    async def read(self, path: str, *, limit_bytes: int = 1 << 20) -> bytes:
        return (await self._file(path, {"op": "read", "path": path, "limit": limit_bytes}))[1]

    async def write(self, path: str, data: bytes) -> None:
        if len(data) > self._spec.disk_bytes:
            raise OSError(errno.ENOSPC, f"{len(data)} bytes do not fit on a disk of {self._spec.disk_bytes}", path)
        for start in range(0, len(data) or 1, WRITE_CHUNK_BYTES):
            chunk = data[start : start + WRITE_CHUNK_BYTES]
            await self._file(path, {"op": "write", "path": path, "append": start > 0}, chunk)

    async def list(self) -> list[str]:
        names: list[str] = json.loads((await self._file(".", {"op": "list"}))[1])
        return names

    async def close(self) -> None:
        await self._end("its owner closed it")

    # Inside

    async def _file(self, path: str, header: dict[str, Any], payload: bytes = b"") -> Answer:
        try:
            answer = await self._within(self._ask(header, payload), FILE_DEADLINE_S, header["op"])
        except BoxRuined as ruin:
            raise OSError(errno.EIO, str(ruin), path) from None
        if "errno" in answer[0]:
            raise OSError(answer[0]["errno"], answer[0]["message"], path)
        return answer

    async def _within(self, answer: asyncio.Future[Answer], deadline_s: float, what: str) -> Answer:
        try:
            async with asyncio.timeout(deadline_s):
                return await asyncio.shield(answer)
        except TimeoutError:
            await self._end(f"{what} took longer than {deadline_s:g} s")
            raise self._failure() from None

    def _ask(self, header: dict[str, Any], payload: bytes = b"") -> asyncio.Future[Answer]:
        if not self.alive:
            self._why = self._why or "its first process ended"
            raise self._failure()
        request = self._next_request
        self._next_request += 1
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        # An answer nobody waits for any more (cancelled, timed out) may still fail: it counts as seen.
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._pending[request] = answer
        self._send({"id": request, **header}, payload)
        return answer

    def _send(self, header: dict[str, Any], payload: bytes = b"") -> None:
        assert self._transport is not None
        self._transport.write(wire.pack(header, payload))

    async def _end(self, why: str) -> None:
        """Have the zygote kill the box and wait until it is gone; again is harmless."""
        if self._why is None:
            self._why = why
            self._kill(self.name)
        if self._transport is not None:
            self._transport.abort()
        try:
            async with asyncio.timeout(CLOSE_DEADLINE_S):
                await asyncio.shield(self._reaped)
        except TimeoutError:
            raise RunFailure(Boundary.SANDBOX, f"box {self.name} was still there {CLOSE_DEADLINE_S:g} s after it was killed") from None
