"""One life of a box, seen by its owner: requests out, answers in, and one reason for all that is pending when the life ends.

A box is gone when its backend says so, and buried when its stream has been read to the end as well: what its agent said last counts.
"""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import msgspec

from rollmill.records import Boundary, RunFailure
from rollmill.sandbox.agent import wire
from rollmill.sandbox.agent.streams import Stream

Answer = tuple[int, bytes]
"""Kind and body."""

KILL_GRACE_S = 5.0
"""How long the agent may take to end a command that ran out of time, before the whole box is killed."""
CLOSE_DEADLINE_S = 30.0
NEWS_GRACE_S = 5.0
"""The stream's end and the backend's word are two messages about one death: how long the second may take after the first."""
_MAX_FDS = 64
_MAX_REQUEST = (1 << 32) - 1
_INPUT = struct.Struct("<II")
_SIGNAL = struct.Struct("<III")
_ERRNO = struct.Struct("<i")
T = TypeVar("T")


class BoxRuined(Exception):
    """The agent's program destroyed its own box. Were that a failure, an agent could escape its grade by doing so: every
    call turns it into an observation."""


class Overdue(Exception):
    """No answer came in time."""


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent said of its box as soon as it stood."""

    slot: int
    facts: wire.Fact
    fds: tuple[int, ...] = ()
    """Descriptors that came with it, such as listening sockets inside the box's network; the receiver closes them."""


class Listener(Protocol):
    """Hears every frame about one streaming command."""

    def heard(self, kind: int, body: bytes) -> None: ...
    def orphaned(self, failure: RunFailure | BoxRuined) -> None: ...


class Link:
    """`kill` ends the box from outside, without waiting; the backend then says `gone`."""

    def __init__(self, name: str, stream: Stream, kill: Callable[[], None], on_hung_up: Callable[[], None]) -> None:
        self.name = name
        self.hello: Hello | None = None
        self.last_words: str | None = None
        self._stream = stream
        self._kill = kill
        self._on_hung_up = on_hung_up
        self._loop = asyncio.get_running_loop()
        self._splitter = wire.Splitter()
        self._answers: dict[int, asyncio.Future[Answer]] = {}
        self._listeners: dict[int, Listener] = {}
        self._standing: list[asyncio.Future[None]] = []
        self._next_request = 0
        self._freezing = 0
        self._fds: list[int] = []
        self._layer_fds: list[int] = []
        self._why: str | None = None
        self._ruined = False
        self._hung_up = False
        self._reaped: asyncio.Future[None] = self._loop.create_future()
        self._news: asyncio.TimerHandle | None = None
        stream.listen(self._hear, self._lost)

    # What happens to it

    def gone(self, why: str, *, ruined: bool = False) -> None:
        """The backend knows that the box ended; `ruined`: by the agent's own doing."""
        self._ruined = self._ruined or (ruined and self._why is None)
        self._why = self._why or self.last_words or why
        if not self._reaped.done():
            self._reaped.set_result(None)
        self._bury()

    def _lost(self) -> None:
        """The stream was read to its end."""
        self._hung_up = True
        self._bury()
        self._on_hung_up()

    def _bury(self) -> None:
        if self._hung_up and self._why is not None:
            self._mourn()
        elif self._news is None:
            self._news = self._loop.call_later(NEWS_GRACE_S, self._stop_waiting_for_news)

    def _mourn(self) -> None:
        if self._news is not None:
            self._news.cancel()
            self._news = None
        _close(self._fds)
        answers, self._answers = self._answers, {}
        listeners, self._listeners = self._listeners, {}
        standing, self._standing = self._standing, []
        futures: list[asyncio.Future[Any]] = [*answers.values(), *standing]
        for waiting in futures:
            if not waiting.done():
                waiting.set_exception(self.failure())
        for listener in listeners.values():
            listener.orphaned(self.failure())

    def _stop_waiting_for_news(self) -> None:
        self._news = None
        self._break(self.last_words or "its agent hung up")

    def _break(self, why: str) -> None:
        """Give the box up at once; whoever waits for its end still hears of it from the backend."""
        if self._why is None:
            self._why = why
        if not self._reaped.done():
            self._kill()
        self._stream.close()
        self._hung_up = True
        self._mourn()

    def _hear(self, data: bytes, fds: list[int]) -> None:
        self._fds += fds
        try:
            if len(self._fds) > _MAX_FDS:
                raise ValueError(f"{len(self._fds)} descriptors nobody asked for")
            for request, kind, body in self._splitter.feed(data):
                self._dispatch(request, kind, body)
        except (ValueError, struct.error) as error:
            self._break(f"its agent sent what is no frame: {error}")

    def _dispatch(self, request: int, kind: int, body: bytes) -> None:
        waiting = self._answers.pop(request, None)
        if waiting is not None:
            if request == self._freezing:
                self._layer_fds, self._fds = self._fds, []
            if not waiting.done():
                waiting.set_result((kind, body))
        elif (listener := self._listeners.get(request)) is not None:
            if kind in (wire.Say.DONE, wire.Say.ERROR):
                del self._listeners[request]
            listener.heard(kind, body)
        elif kind == wire.Say.HELLO:
            version, slot, facts = wire.HELLO.unpack_from(body)
            if version != wire.VERSION:
                raise ValueError(f"it speaks version {version} and its owner {wire.VERSION}")
            self.hello = Hello(slot=slot, facts=wire.Fact(facts), fds=tuple(self._fds))
            self._fds = []
            for standing in self._standing:
                if not standing.done():
                    standing.set_result(None)
            self._standing = []
        elif kind == wire.Say.LAST_WORDS:
            self.last_words = error_of(body)[1]

    # What its owner does

    @property
    def alive(self) -> bool:
        return self._why is None and not self._hung_up

    @property
    def busy(self) -> bool:
        """Whether somebody waits for an answer."""
        return bool(self._answers)

    def release(self) -> list[Listener]:
        """Whoever heard of a streaming command, and from now on hears nothing more of it here."""
        listeners, self._listeners = self._listeners, {}
        return list(listeners.values())

    def failure(self) -> RunFailure | BoxRuined:
        message = f"box {self.name} is gone: {self._why or self.last_words or 'its first process ended'}"
        return BoxRuined(message) if self._ruined else RunFailure(Boundary.SANDBOX, message)

    async def ready(self, deadline_s: float) -> Hello:
        if self.hello is None:
            if self._why is not None:
                raise self.failure()
            standing: asyncio.Future[None] = self._loop.create_future()
            self._standing.append(standing)
            timer = self._loop.call_later(deadline_s, expire, standing)
            try:
                await standing
            except Overdue:
                await self.end(f"creating it took longer than {deadline_s:g} s")
                raise self.failure() from None
            finally:
                timer.cancel()
        assert self.hello is not None
        return self.hello

    def ask(self, kind: wire.Ask, body: bytes = b"", *, listener: Listener | None = None) -> tuple[int, asyncio.Future[Answer]]:
        """Send a request; its answer comes to the future, or all its frames to the listener."""
        # A box that hung up is not refused before its backend says why: a ruin must not be taken for a failure.
        if self._why is not None:
            raise self.failure()
        self._next_request = request = self._next_request % _MAX_REQUEST + 1
        answer: asyncio.Future[Answer] = self._loop.create_future()
        if listener is None:
            self._answers[request] = answer
        else:
            self._listeners[request] = listener
        self._stream.write(wire.frame(request, kind, body))
        return request, answer

    def tell(self, kind: wire.Ask, body: bytes) -> None:
        """Send what is not answered; to a box that is gone: nothing."""
        if self.alive:
            self._stream.write(wire.frame(0, kind, body))

    def signal(self, target: int, signal: int, *, is_timeout: bool = False) -> None:
        self.tell(wire.Ask.SIGNAL, _SIGNAL.pack(target, signal, is_timeout))

    def taken(self, target: int, num_bytes: int) -> None:
        self.tell(wire.Ask.TAKEN, _INPUT.pack(target, num_bytes))

    def resize(self, target: int, rows: int, columns: int) -> None:
        self.tell(wire.Ask.RESIZE, _SIGNAL.pack(target, rows, columns))

    async def answer(self, kind: wire.Ask, body: bytes, deadline_s: float) -> Answer:
        """Ask and wait; Overdue when nothing came in time."""
        request, answer = self.ask(kind, body)
        timer = self._loop.call_later(deadline_s, expire, answer)
        try:
            return await answer
        finally:
            timer.cancel()
            self._answers.pop(request, None)

    async def call(self, kind: wire.Ask, body: bytes = b"", *, deadline_s: float) -> bytes:
        """Ask and wait: the body of the answer, or the OSError it tells. A box that does not answer in time is killed."""
        try:
            said, body = await self.answer(kind, body, deadline_s)
        except Overdue:
            await self.end(f"{kind.name.lower().replace('_', ' ')} took longer than {deadline_s:g} s")
            raise self.failure() from None
        if said == wire.Say.ERROR:
            raise OSError(*error_of(body))
        return body

    async def finish(self, request: int, answer: asyncio.Future[Answer], timeout_s: float) -> Answer:
        """Wait for a command's end; signals it at its time-out. Overdue: not even that ended it."""
        fuse = Fuse(self, request, answer, timeout_s)
        try:
            return await answer
        except asyncio.CancelledError:
            self.signal(request, 9)
            raise
        finally:
            fuse.timer.cancel()
            self._answers.pop(request, None)

    async def end(self, why: str) -> None:
        """Have the box killed and wait until it is gone; again is harmless."""
        if self._why is None:
            self._why = why
            if not self._reaped.done():
                self._kill()
        self._stream.close()
        self._hung_up = True
        self._mourn()
        try:
            async with asyncio.timeout(CLOSE_DEADLINE_S):
                await asyncio.shield(self._reaped)
        except TimeoutError:
            raise RunFailure(Boundary.SANDBOX, f"box {self.name} was still there {CLOSE_DEADLINE_S:g} s after it was killed") from None

    async def freeze(self, deadline_s: float) -> int:
        """The writable layer, as a descriptor that the caller closes. The agent ends, and this life with it."""
        self._freezing = self._next_request % _MAX_REQUEST + 1
        try:
            await self.call(wire.Ask.FREEZE, deadline_s=deadline_s)
            if len(self._layer_fds) != 1:
                raise RunFailure(Boundary.SANDBOX, f"box {self.name} froze with {len(self._layer_fds)} layers instead of one")
            return self._layer_fds.pop()
        finally:
            _close(self._layer_fds)

    def leave(self) -> None:
        """This life is over as planned, its state handed over; a later `gone` says nothing new."""
        self._why = self._why or "its state was handed over"
        self._stream.close()
        self._hung_up = True
        self._mourn()


class Fuse:
    """Signals a command at its time-out, and calls it overdue when that has not ended it."""

    __slots__ = ("_answer", "_link", "_request", "timer")

    def __init__(self, link: Link, request: int, answer: asyncio.Future[Answer], timeout_s: float) -> None:
        self._link, self._request, self._answer = link, request, answer
        self.timer = answer.get_loop().call_later(timeout_s, self._burn)

    def _burn(self) -> None:
        self._link.signal(self._request, 9, is_timeout=True)
        self.timer = self._answer.get_loop().call_later(KILL_GRACE_S, expire, self._answer)


def expire(answer: asyncio.Future[T]) -> None:
    if not answer.done():
        answer.set_exception(Overdue())


def error_of(body: bytes) -> tuple[int, str]:
    """Number and words of an ERROR or of LAST_WORDS."""
    return _ERRNO.unpack_from(body)[0], wire.Body(body[_ERRNO.size :]).text().decode(errors="replace")


def _close(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())
