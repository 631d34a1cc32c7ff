"""A command that runs beside others, seen by its owner: chunks wait here until they are taken, never more than the window and one pipe."""

from __future__ import annotations

import asyncio
import errno
import struct
import time
from collections import deque

import msgspec

from rollmill.records import RunFailure
from rollmill.sandbox.agent import link as links
from rollmill.sandbox.agent import wire
from rollmill.sandbox.agent.link import BoxRuined, Link, Overdue
from rollmill.sandbox.agent.plain.output import HeadTail
from rollmill.sandbox.records import Chunk, ExecResult, Usage

KEPT_BYTES = 1 << 16
"""How much of the output that nobody iterated is kept, of either stream."""
INPUT_PIECE_BYTES = 1 << 16
INPUT_DEADLINE_S = 60.0
"""How long a command may leave one piece of its input unread."""
START_DEADLINE_S = 60.0
MAX_WAITING_BYTES = wire.WINDOW_BYTES + (4 << 20)
"""More than an honest agent sends unasked: its window, and what the pipes of a command held when it ended."""
_TARGET = struct.Struct("<I")
_ACKNOWLEDGE_BYTES = wire.WINDOW_BYTES // 4
"""Taken bytes are told in batches: with less than this untold the command still has most of its window."""


class AgentProcess:
    """Iterate it for its output, or `wait` for its end: `wait` takes what is left, unless an iteration is waiting for it at that moment."""

    def __init__(self, link: Link, body: bytes, program: str, *, ask: wire.Ask = wire.Ask.EXEC) -> None:
        self.pid = 0
        self._link = link
        self._program = program
        self._chunks: deque[Chunk] = deque()
        self._num_waiting = 0
        self._untold = 0
        self._kept: tuple[HeadTail, HeadTail] | None = None
        self._reader: asyncio.Future[None] | None = None
        self._writing = asyncio.Lock()
        self._begun = time.monotonic()
        self._result: ExecResult | None = None
        self._failure: RunFailure | BoxRuined | None = None
        loop = asyncio.get_running_loop()
        self._started: asyncio.Future[None] = loop.create_future()
        self._ended: asyncio.Future[None] = loop.create_future()
        self._request, _ = link.ask(ask, body, listener=self)

    @classmethod
    def adopted(cls, link: Link, pid: int, program: str) -> AgentProcess:
        """A program that runs in the box already."""
        return cls(link, _TARGET.pack(pid), program, ask=wire.Ask.ADOPT)

    async def started(self) -> None:
        """Until it runs; OSError when it cannot."""
        try:
            done, _ = await asyncio.wait((self._started,), timeout=START_DEADLINE_S)
        except asyncio.CancelledError:
            self.drain()
            self._link.signal(self._request, 9)
            raise
        if not done:
            await self._link.end(f"starting a command took longer than {START_DEADLINE_S:g} s")
        self._started.result()

    # Process

    def __aiter__(self) -> AgentProcess:
        return self

    async def __anext__(self) -> Chunk:
        while not self._chunks:
            if self._ended.done():
                # A box ruined by its own program is the end of the output; every other death is told.
                if isinstance(self._failure, RunFailure):
                    raise self._failure
                raise StopAsyncIteration
            if self._reader is not None:
                raise ValueError(f"the output of {self._program!r} is being read already; one reader at a time")
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        chunk = self._chunks.popleft()
        self._num_waiting -= len(chunk.data)
        self._took(len(chunk.data))
        return chunk

    async def write(self, data: bytes) -> None:
        async with self._writing:
            for start in range(0, len(data), INPUT_PIECE_BYTES):
                await self._input(data[start : start + INPUT_PIECE_BYTES])

    async def close_stdin(self) -> None:
        async with self._writing:
            await self._input(b"")

    async def kill(self, signal: int = 9) -> None:
        if not self._ended.done():
            self._link.signal(self._request, signal)

    async def resize(self, rows: int, columns: int) -> None:
        if not self._ended.done():
            self._link.resize(self._request, rows, columns)

    async def wait(self, *, timeout_s: float) -> ExecResult:
        if self._reader is None:
            self.drain()
        await asyncio.wait((self._ended,), timeout=timeout_s)
        if not self._ended.done():
            self._link.signal(self._request, 9, is_timeout=True)
            self.drain()  # its end is told behind its output
            await asyncio.wait((self._ended,), timeout=links.KILL_GRACE_S)
        if not self._ended.done():
            await self._link.end(f"it did not end a command within {links.KILL_GRACE_S:g} s of its time-out")
            wall_s = time.monotonic() - self._begun
            return ExecResult(exit_code=-9, stdout=self.kept(), num_output_bytes=0, timed_out=True, wall_s=wall_s)
        if isinstance(self._failure, RunFailure):
            raise self._failure
        if self._failure is not None:
            return ruined(self._failure, self._begun, KEPT_BYTES)
        assert self._result is not None
        if self._kept is None:
            return self._result
        stdout, stderr = self._kept
        return msgspec.structs.replace(self._result, stdout=stdout.render(), stderr=stderr.render())

    # The owner's side of a service

    @property
    def ended(self) -> asyncio.Future[None]:
        """Done when the command is; never fails."""
        return self._ended

    def drain(self) -> None:
        """From now on the output holds nothing up: head and tail are kept."""
        if self._kept is None:
            self._kept = (HeadTail(KEPT_BYTES), HeadTail(KEPT_BYTES))
            while self._chunks:
                self._keep(self._chunks.popleft())

    def kept(self) -> bytes:
        """What was kept of both streams, standard output first."""
        return b"".join(part.render() for part in self._kept or ())

    def move(self, link: Link) -> None:
        """Go on in another life of the box, to which the program itself was carried."""
        self._link = link
        self._request, _ = link.ask(wire.Ask.ADOPT, _TARGET.pack(self.pid), listener=self)

    # Listener

    def heard(self, kind: int, body: bytes) -> None:
        if kind == wire.Say.OUTPUT:
            chunk = Chunk(data=body[_TARGET.size :], is_stderr=_TARGET.unpack_from(body)[0] != 0)
            if self._kept is not None:
                self._keep(chunk)
            else:
                self._chunks.append(chunk)
                self._num_waiting += len(chunk.data)
                if self._num_waiting > MAX_WAITING_BYTES:
                    raise ValueError(f"{self._num_waiting} bytes of output that nobody asked for")
                self._wake()
        elif kind == wire.Say.STARTED:
            self.pid = wire.Body(body).u32()
            if not self._started.done():
                self._started.set_result(None)
        elif kind == wire.Say.DONE:
            self._result = result_of(body)
            self._end(None)
        elif kind == wire.Say.ERROR:
            number, message = links.error_of(body)
            self._end(OSError(number, message, self._program))

    def orphaned(self, failure: RunFailure | BoxRuined) -> None:
        self._failure = failure
        self._end(OSError(errno.EIO, str(failure), self._program) if isinstance(failure, BoxRuined) else failure)

    # Inside

    def _end(self, unstarted: Exception | None) -> None:
        if not self._started.done():
            if unstarted is None:
                self._started.set_result(None)
            else:
                self._started.set_exception(unstarted)
                self._started.exception()  # seen, should nobody wait for it any more
        if not self._ended.done():
            self._ended.set_result(None)
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _keep(self, chunk: Chunk) -> None:
        assert self._kept is not None
        self._kept[chunk.is_stderr].feed(chunk.data)
        self._took(len(chunk.data))

    def _took(self, num_bytes: int) -> None:
        self._untold += num_bytes
        if self._untold >= _ACKNOWLEDGE_BYTES:
            if not self._ended.done():
                self._link.taken(self._request, self._untold)
            self._untold = 0

    async def _input(self, data: bytes) -> None:
        if self._ended.done():
            raise BrokenPipeError(errno.EPIPE, "the command has ended", self._program)
        try:
            said, body = await self._link.answer(wire.Ask.INPUT, _TARGET.pack(self._request) + data, INPUT_DEADLINE_S)
        except Overdue:
            words = f"the command left its input unread for {INPUT_DEADLINE_S:g} s"
            raise TimeoutError(errno.ETIMEDOUT, words, self._program) from None
        except BoxRuined as ruin:
            raise OSError(errno.EIO, str(ruin), self._program) from None
        if said == wire.Say.ERROR:
            raise OSError(*links.error_of(body), self._program)


def result_of(body: bytes) -> ExecResult:
    """What a DONE tells."""
    fields = wire.Body(body)
    exit_code, flags, num_merged, num_apart, wall_s, user_s, system_s, max_rss_bytes = fields.take(wire.DONE)
    return ExecResult(
        exit_code=exit_code,
        stdout=fields.text(),
        stderr=fields.text(),
        num_output_bytes=num_merged + num_apart,
        timed_out=bool(flags & wire.DoneFlag.TIMED_OUT),
        wall_s=wall_s,
        usage=Usage(user_s=user_s, system_s=system_s, max_rss_bytes=max_rss_bytes),
    )


def ruined(ruin: BoxRuined, begun: float, max_output_bytes: int) -> ExecResult:
    """A command whose box its own program destroyed: killed, with the reason as its output."""
    words = f"{ruin}\n".encode()
    wall_s = time.monotonic() - begun
    return ExecResult(exit_code=-9, stdout=words[:max_output_bytes], num_output_bytes=len(words), timed_out=False, wall_s=wall_s)
