"""One call on its way: the replica requests it takes, the events they become, and what the episode learns of them.

The episode has every answer before its last event leaves, since the client's next request may arrive at once, and none that does not
leave. Whatever ends early (the client leaves, the deadline passes, a replica gives up) frees its row and is told to the episode as
abandoned.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncGenerator, Coroutine, Iterator
from typing import Any, Protocol

from rollmill.engine.client import EngineRejected
from rollmill.engine.protocol import FinishReason, GenerateReply
from rollmill.gateway.call import Answer, ChatCall, Event, EventKind, TextCall
from rollmill.gateway.choice import Choice, Readers, Slot
from rollmill.gateway.recording.call_rows import RecordedChoice
from rollmill.gateway.routing.replicas import NoAnswer, Replicas
from rollmill.gateway.sessions.episode import Episode
from rollmill.records import RunFailure
from rollmill.web import ApiError

RETRY_AFTER_S = 1
# An agent that samples more at one time than this shares what a replica has among its own calls: that they are late is its own doing.
CROWD = 8
_REPLICA_SAYS = re.compile(r"^\S+ answered \d+: ")


class Source(Readers, Protocol):
    """Where calls are made ready: the gateway."""

    replicas: Replicas

    async def slots(self, call: ChatCall | TextCall, episode: Episode | None, *, queue: str) -> list[Slot]: ...

    def watch(self, answering: Answering) -> None:
        """It runs now, and its episode may end before it does."""
        ...

    def unwatch(self, answering: Answering) -> None: ...

    def num_sampling(self, episode: Episode) -> int:
        """Choices of this episode that are sampled now."""
        ...


class Answering:
    """The answer to one call. Iterate for events, or await `whole`; then `answers` has every choice."""

    def __init__(
        self,
        source: Source,
        call: ChatCall | TextCall,
        episode: Episode | None,
        *,
        deadline: float,
        is_hurried: bool = False,
        queue: str = "",
    ) -> None:
        self.call, self.episode = call, episode
        self._source, self._deadline, self._is_hurried, self._queue = source, deadline, is_hurried, queue
        self._choices: list[Choice] = []
        self._open: set[Choice] = set()
        self._owner: asyncio.Task[Any] | None = None
        self._ended_by: ApiError | None = None
        self._num_beside = 0
        """Choices of its episode that were sampled when it began, its own among them."""
        self.sent_at = 0.0
        """time.monotonic() when the first request went out to a replica; 0 before."""
        self.back_at = 0.0
        """When the last one had come back."""

    async def start(self) -> None:
        """Place it and make its requests ready; ApiError for what cannot be answered. Done on the way where it was not asked for."""
        if self._choices:
            return
        slots = await self._source.slots(self.call, self.episode, queue=self._queue)
        self._choices = [Choice(i, slot, self.call, self._source) for i, slot in enumerate(slots)]
        self._open = set(self._choices)

    @property
    def prompts(self) -> list[list[int]]:
        return [c.slot.request.prompt_ids for c in self._choices[:: self.call.num_choices]]

    @property
    def num_prompt(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_sampled(self) -> int:
        """Tokens so far, of finished and unfinished choices."""
        return sum(len(c.ids) for c in self._choices)

    @property
    def num_open(self) -> int:
        """Choices that are not delivered yet."""
        return len(self._open)

    @property
    def version(self) -> int:
        """The newest weight version that has sampled; -1 before any has."""
        return max((c.version for c in self._choices), default=-1)

    @property
    def is_done(self) -> bool:
        """Every choice is delivered."""
        return bool(self._choices) and not self._open

    @property
    def answers(self) -> list[Answer]:
        done = [c.answer for c in self._choices if c.answer is not None]
        assert len(done) == len(self._choices), "the answers are asked for before the call has ended"
        return done

    @property
    def kinds(self) -> list[str]:
        """Per prompt: where the episode placed it."""
        slots = [c.slot for c in self._choices[:: self.call.num_choices]]
        return [str(s.placement.kind) for s in slots if s.placement is not None]

    @property
    def recorded(self) -> list[RecordedChoice]:
        """The choices that were delivered, for whoever keeps a record."""
        return [c.ended for c in self._choices if c.ended is not None and c.is_delivered]

    @property
    def num_abandoned(self) -> int:
        """Tokens of choices that were not delivered."""
        return sum(len(c.ids) for c in self._choices if not c.is_delivered)

    async def whole(self) -> list[Answer]:
        """Every choice, sampled to its end. All are delivered or none: a reply that is whole leaves with all of them."""
        with self._watched():
            await self._begin()
            await self._all([self._finish_choice(c) for c in self._choices])
            for choice in self._choices:
                self._deliver(choice)
        return self.answers

    async def __aiter__(self) -> AsyncGenerator[Event, None]:
        async with contextlib.aclosing(self.steps()) as steps:
            async for events in steps:
                for event in events:
                    yield event

    async def steps(self) -> AsyncGenerator[list[Event], None]:
        """Events as they come, those of one step together. A choice is delivered with its END."""
        with self._watched():
            await self._begin()
            source = self._sample(self._choices[0]) if len(self._choices) == 1 else self._merged()
            # A generator within a generator is not closed with it, and the replica's row would wait for the collector.
            async with contextlib.aclosing(source):
                async for events in source:
                    for event in events:
                        if event.kind is EventKind.END:
                            self._deliver(self._choices[event.index])
                    yield events

    async def _begin(self) -> None:
        await self.start()
        if self.episode is not None:
            self._num_beside = self._source.num_sampling(self.episode)

    async def _merged(self) -> AsyncGenerator[list[Event], None]:
        """All choices at once; what waits goes out together."""
        queue: asyncio.Queue[list[Event] | None] = asyncio.Queue()

        async def pump(choice: Choice) -> None:
            async with contextlib.aclosing(self._sample(choice)) as steps:
                async for events in steps:
                    queue.put_nowait(events)

        work = asyncio.create_task(self._all([pump(c) for c in self._choices]))
        work.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            while (events := await queue.get()) is not None:
                while not queue.empty() and (more := queue.get_nowait()) is not None:
                    events = [*events, *more]
                yield events
                if work.done() and queue.empty():
                    break
            await work
        finally:
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError, ApiError):
                await work

    async def _all(self, works: list[Coroutine[Any, Any, None]]) -> None:
        """Run together; the first failure ends the rest."""
        if len(works) == 1:
            await works[0]
            return
        tasks = [asyncio.create_task(work) for work in works]
        try:
            for task in asyncio.as_completed(tasks):
                await task
        finally:
            for one in tasks:
                one.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _finish_choice(self, choice: Choice) -> None:
        if self.call.stops or choice.may_be_cut:
            # Heard as it comes, since the row is to be freed at the stop string.
            async with contextlib.aclosing(self._sample(choice)) as steps:
                async for _ in steps:
                    pass
            return
        self.sent_at = self.sent_at or time.monotonic()
        with self._refusals():
            reply = await self._source.replicas.generate(choice.slot.request, deadline=self._deadline)
        self.back_at = time.monotonic()
        choice.take_whole(reply)
        self._check(reply)
        choice.conclude(reply)

    async def _sample(self, choice: Choice) -> AsyncGenerator[list[Event], None]:
        reply: GenerateReply | None = None
        self.sent_at = self.sent_at or time.monotonic()
        stream = self._source.replicas.stream(choice.slot.request, deadline=self._deadline)
        try:
            with self._refusals():
                async for item in stream:
                    if isinstance(item, GenerateReply):
                        reply = item
                    elif events := choice.take(item):
                        yield events
                    if reply is not None or choice.has_enough:
                        break
        finally:
            await stream.aclose()
        self.back_at = time.monotonic()
        if reply is None:
            assert choice.has_enough, "a replica's stream ended without its reply"
            reply = choice.reply_so_far()
        self._check(reply)
        events = choice.end(reply)
        choice.conclude(reply)
        yield [*events, Event(index=choice.index, kind=EventKind.END, answer=choice.answer)]

    def _check(self, reply: GenerateReply) -> None:
        reason = reply.finish_reason
        if reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.CONTEXT):
            return
        if reason is FinishReason.DEADLINE:
            text = f"the answer was not whole before the deadline; {len(reply.token_ids)} tokens were sampled"
            raise self._late(ApiError(504, text), is_slow=True)
        if reason is FinishReason.VERSION:
            raise self._failed(_unmet("the weights were swapped while the request ran"))
        raise self._failed(_unavailable(f"the replica ended the request with {reason}"))

    def _deliver(self, choice: Choice) -> None:
        """It is about to leave: from here on the client may go on from it."""
        ended, placement = choice.ended, choice.slot.placement
        assert ended is not None, "a choice is delivered before it has ended"
        self._open.discard(choice)
        choice.is_delivered = True
        if self.episode is not None and placement is not None:
            try:
                self.episode.add(placement, ended.reply, ended.message, num_used=ended.num_used)
            except RunFailure as error:
                raise self._failed(_unavailable(str(error))) from error

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        """What a replica or the routing refuses, as the client hears it."""
        try:
            yield
        except EngineRejected as error:
            text = _REPLICA_SAYS.sub("", str(error))
            is_full = "the prompt has" in text
            if is_full and self.episode is not None:
                self.episode.tally["context_full"] += 1
            raise ApiError(400, text, extra={"code": "context_length_exceeded"} if is_full else {}) from error
        except NoAnswer as error:
            if error.is_version:
                refusal = _unmet(error.reason)
            elif error.is_slow:
                refusal = ApiError(504, f"no answer before the deadline: {error.reason}")
            else:
                refusal = _unavailable(f"no replica answered: {error.reason}")
            raise (self._late(refusal, is_slow=error.is_slow) if error.is_late else self._failed(refusal)) from error

    def _late(self, error: ApiError, *, is_slow: bool) -> ApiError:
        """The deadline passed: ours, or one that the client set itself. `is_slow`: while a replica was at work."""
        episode = self.episode
        if episode is None:
            return error
        # Of a crowd the first come finds nobody yet, the last to give up nobody any more.
        is_crowd = is_slow and max(self._num_beside, self._source.num_sampling(episode)) > CROWD
        episode.tally["impatient" if self._is_hurried else "crowded" if is_crowd else "failed"] += 1
        return error

    def _failed(self, error: ApiError) -> ApiError:
        """Our fault, not the agent's: whoever owns the episode must know."""
        if self.episode is not None:
            self.episode.tally["failed"] += 1
        return error

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Remembers who waits here, so that `end` can stop it; tells the episode what was left unfinished."""
        self._owner = asyncio.current_task()
        self._source.watch(self)
        try:
            if self._ended_by is not None:
                raise self._ended_by
            yield
        except asyncio.CancelledError:
            if self._ended_by is None or self._owner is None:
                raise
            self._owner.uncancel()
            raise self._ended_by from None
        finally:
            self._owner = None
            self._source.unwatch(self)
            self._abandon()

    def _abandon(self) -> None:
        for choice in self._open:
            if self.episode is not None and choice.slot.placement is not None:
                self.episode.abandon(choice.slot.placement, len(choice.ids))
        self._open.clear()

    def end(self, error: ApiError) -> None:
        """Stop it now: whoever waits for it hears `error`."""
        self._ended_by = error
        if self._owner is not None:
            self._owner.cancel()


def _unmet(message: str) -> ApiError:
    return ApiError(409, message, headers={"retry-after": str(RETRY_AFTER_S)}, extra={"retryable": True})


def _unavailable(message: str) -> ApiError:
    return ApiError(503, message, headers={"retry-after": str(RETRY_AFTER_S)}, extra={"retryable": True})
