"""One model call over HTTP: from its body to its answer, whole or as it comes, and to its record.

Every event leaves when it is there; several that wait share one write. A client that leaves frees its replica's row at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import msgspec

from rollmill.gateway.answering import Answering
from rollmill.gateway.call import ChatCall, TextCall
from rollmill.gateway.dialects.dialect import Dialect, Envelope, StreamWriter
from rollmill.gateway.front.crowd import Crowd
from rollmill.gateway.front.exchange import Exchange
from rollmill.gateway.front.keys import Grant
from rollmill.gateway.front.metrics import Metrics
from rollmill.gateway.front.replays import Kept, Replays, Scope
from rollmill.gateway.gateway import Gateway
from rollmill.gateway.recording.call_rows import CallRecord
from rollmill.gateway.sessions.episode import Episode
from rollmill.web import STATUS_CLIENT_GONE, ApiError, ClientGone

KEEP_ALIVE = b": keep-alive\n\n"
STATUS_TOO_LARGE = 413


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one client may cost."""

    max_body_bytes: int = 32 * 2**20
    body_s: float = 30.0
    """For the body to arrive."""
    max_running: int = 4096
    """Model calls at one time; further ones are told to come back."""
    max_running_per_episode: int = 64
    """Model calls of one episode at one time, and choices that they ask for; a call that is alone may ask for more."""
    call_s: float = 600.0
    """For one call, unless it asks for less or more with `x-request-timeout-s`."""
    max_call_s: float = 3600.0
    slow_s: float = 30.0
    """Beyond a call's deadline, for its client to read what is there."""
    keep_alive_s: float = 15.0
    """A stream that has nothing to say for so long sends a comment."""


class Host(Protocol):
    """What a call needs of the application it came to."""

    gateway: Gateway
    limits: Limits
    crowd: Crowd
    metrics: Metrics
    replays: Replays

    def episode(self, name: str, grant: Grant) -> Episode | None: ...

    def deadline(self, x: Exchange) -> float: ...

    def tell(self, episode: str, kind: str) -> None:
        """Count in the episode's tally, where there is one."""
        ...


class ModelCall:
    """One model call from its body to its record."""

    def __init__(self, app: Host, x: Exchange, dialect: Dialect, grant: Grant, episode_name: str) -> None:
        self._app, self._x, self._dialect, self._grant, self._name = app, x, dialect, grant, episode_name
        self._call: ChatCall | TextCall | None = None
        self._answering: Answering | None = None
        self._replay: Scope | None = None
        self._is_recorded = False
        self.num_choices = 0
        """Those that the crowd has let in."""
        self._sent: list[bytes] = []
        """A stream's bytes, kept when they may be asked for again."""

    @property
    def num_tokens(self) -> int:
        return self._answering.num_prompt + self._answering.num_sampled if self._answering is not None else 0

    async def run(self) -> None:
        x, limits = self._x, self._app.limits
        try:
            body = await self._read()
            if (kept := self._begin_replay(body)) is not None:
                await self._repeat(kept)
                return
            deadline = self._app.deadline(x)
            self._call = self._dialect.parse(body)
            episode = self._app.episode(self._name, self._grant)
            num_choices = self._call.num_choices * (len(self._call.prompts) if isinstance(self._call, TextCall) else 1)
            self._sample(num_choices)
            is_hurried, queue = deadline < x.at + limits.call_s, self._grant.name[:256]
            self._answering = self._app.gateway.answer(self._call, episode, deadline=deadline, is_hurried=is_hurried, queue=queue)
            await self._while_there(self._stream() if self._call.stream else self._whole(), deadline)
        except ApiError as error:
            self._record(error.status_code, str(error.detail))
            raise
        except ClientGone:
            self._app.metrics.abandoned.inc()
            self._record(STATUS_CLIENT_GONE, "")
            raise
        else:
            self._record(x.status, "")
        finally:
            if self._replay is not None:
                self._app.replays.drop(self._replay)

    def _sample(self, num_choices: int) -> None:
        try:
            self._app.crowd.sample(self._name, num_choices)
        except ApiError:
            self._app.tell(self._name, "flooded")
            raise
        self.num_choices = num_choices

    async def _read(self) -> bytes:
        limits = self._app.limits
        try:
            return await self._x.read(max_bytes=limits.max_body_bytes, within_s=limits.body_s)
        except ApiError as error:
            if error.status_code == STATUS_TOO_LARGE:
                self._app.tell(self._name, "oversized")
            raise

    async def _while_there(self, work: Coroutine[Any, Any, None], deadline: float) -> None:
        """Run it, but no longer than the client stays or than it may take to read."""
        x, task = self._x, asyncio.current_task()
        assert task is not None
        watcher = asyncio.create_task(x.wait_gone())
        watcher.add_done_callback(lambda w: None if w.cancelled() else task.cancel())
        try:
            async with asyncio.timeout(deadline - time.monotonic() + self._app.limits.slow_s):
                await work
        except asyncio.CancelledError:
            # Nothing above waits for this task: uvicorn starts one per request, and cancels it when its own patience ends.
            task.uncancel()
            if not x.is_gone:
                x.abort()
            raise ClientGone from None
        except TimeoutError:
            x.abort()
            raise ClientGone from None
        finally:
            watcher.cancel()

    def _begin_replay(self, body: bytes) -> Kept | None:
        key = self._x.headers.get(b"idempotency-key")
        if not key:
            return None
        scope = Scope(self._grant.name, self._name, self._x.path, key.decode("latin-1"))
        kept = self._app.replays.begin(scope, body)
        if kept is None:
            self._replay = scope
        return kept

    async def _repeat(self, kept: Kept) -> None:
        self._app.metrics.replayed.inc()
        self._x.version = kept.version
        if not kept.is_stream:
            await self._x.reply(200, kept.body, headers=[(b"x-replayed", b"true")])
            return
        await self._x.begin([(b"x-replayed", b"true")])
        await self._x.write(kept.body, is_last=True)

    def _keep(self, body: bytes, *, is_stream: bool) -> None:
        if self._replay is not None:
            self._app.replays.keep(self._replay, Kept(body, is_stream, self._x.version))
            self._replay = None

    def _envelope(self) -> Envelope:
        assert self._call is not None and self._answering is not None
        gateway = self._app.gateway
        return Envelope(
            id=self._x.id,
            created=int(time.time()),
            model=self._call.model or gateway.name,
            decode=gateway.chat.tokenizer.decode,
            prompts=self._answering.prompts,
        )

    async def _whole(self) -> None:
        x, answering = self._x, self._answering
        assert answering is not None and self._call is not None
        answers = await answering.whole()
        body = self._dialect.whole(self._call, self._envelope(), answers)
        x.version = answering.version
        self._keep(body, is_stream=False)
        overhead_s = (answering.sent_at - x.at) + (time.monotonic() - answering.back_at)
        self._app.metrics.overhead_s.observe(overhead_s)
        await x.reply(200, body, headers=[(b"x-gateway-overhead-ms", b"%.3f" % (overhead_s * 1e3))])

    async def _stream(self) -> None:
        x, answering = self._x, self._answering
        assert answering is not None and self._call is not None
        await answering.start()
        writer = self._dialect.writer(self._call, self._envelope())
        pulse = _Pulse(self._app.limits.keep_alive_s, x, lambda: self._beat(writer))
        try:
            async with contextlib.aclosing(answering.steps()) as steps:
                async for events in steps:
                    data = b"" if x.status else await self._begin(writer)
                    for event in events:
                        data += writer.write(event)
                    is_last = answering.is_done
                    if is_last:
                        data += writer.finish(answering.answers)
                    if data:
                        await self._write(data, is_last=is_last)
        except ApiError as error:
            if not x.status:
                raise
            await self._write(writer.fail(error.status_code, str(error.detail)), is_last=True)
            self._record(error.status_code, str(error.detail))
        else:
            self._keep(b"".join(self._sent), is_stream=True)
        finally:
            pulse.stop()

    async def _begin(self, writer: StreamWriter) -> bytes:
        """The head, and the bytes that come first."""
        x, answering = self._x, self._answering
        assert answering is not None
        x.version = answering.version
        now = time.monotonic()
        overhead_s = (answering.sent_at or now) - x.at
        self._app.metrics.overhead_s.observe(overhead_s)
        self._app.metrics.first_s.observe(now - x.at)
        await x.begin([(b"x-gateway-overhead-ms", b"%.3f" % (overhead_s * 1e3))])
        return writer.start(answering.num_prompt)

    async def _beat(self, writer: StreamWriter) -> None:
        """Nothing came for a while: something goes out, so that nobody on the way takes the connection for dead."""
        await self._write((b"" if self._x.status else await self._begin(writer)) + KEEP_ALIVE)

    async def _write(self, data: bytes, *, is_last: bool = False) -> None:
        if self._replay is not None:
            self._sent.append(data)
        await self._x.write(data, is_last=is_last)

    def _record(self, status: int, error: str) -> None:
        """Count the tokens and hand the call to whoever keeps a record; once."""
        metrics, answering, recorder = self._app.metrics, self._answering, self._app.gateway.recorder
        if self._is_recorded:
            return
        self._is_recorded = True
        if answering is not None:
            metrics.prompt_tokens.inc(answering.num_prompt)
            metrics.sampled_tokens.inc(answering.num_sampled)
        if recorder is None:
            return
        x, now = self._x, time.monotonic()
        overhead_s = 0.0
        if answering is not None and answering.back_at:
            overhead_s = (answering.sent_at - x.at) + (now - answering.back_at)
        recorder.put(
            CallRecord(
                id=x.id,
                episode=self._name,
                at=time.time() - (now - x.at),
                dialect=self._dialect.name,
                model=self._call.model if self._call is not None else "",
                key=self._grant.name,
                status=status,
                error=error,
                call=self._call,
                kinds=answering.kinds if answering is not None else [],
                prompts=answering.prompts if answering is not None else [],
                choices=answering.recorded if answering is not None else [],
                num_abandoned=answering.num_abandoned if answering is not None else 0,
                total_s=now - x.at,
                overhead_s=overhead_s,
            )
        )


class _Pulse:
    """Calls `beat` whenever an exchange has sent nothing for `every_s`."""

    def __init__(self, every_s: float, x: Exchange, beat: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._every_s, self._x, self._beat = every_s, x, beat
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self._handle = self._loop.call_later(every_s, self._look)

    def _look(self) -> None:
        silent_s = time.monotonic() - self._x.last_sent
        if silent_s >= self._every_s and (self._task is None or self._task.done()):
            self._task = self._loop.create_task(self._beat())
            silent_s = 0.0
        self._handle = self._loop.call_later(max(0.01, self._every_s - silent_s), self._look)

    def stop(self) -> None:
        self._handle.cancel()
        if self._task is not None:
            self._task.cancel()
