"""One call on its way: the replica requests it takes, the events they become, and what the episode learns of them.

The episode has every answer before its last event leaves, since the client's next request may arrive at once. Whatever ends early
(the client leaves, the deadline passes, a replica gives up) frees its row and is told to the episode as abandoned.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator
from typing import Any, Protocol

import msgspec
import numpy as np

from rollmill.chat.messages import ChatMessage
from rollmill.chat.reader import AnswerReader, Bit, BitKind
from rollmill.engine.client import EngineRejected
from rollmill.engine.protocol import FinishReason, GenerateReply, GenerateRequest, Piece, Timing, VersionSpan
from rollmill.gateway.call import Answer, ChatCall, Event, EventKind, Finish, TextCall, TopLogprob
from rollmill.gateway.call_rows import RecordedChoice
from rollmill.gateway.episode import Episode
from rollmill.gateway.placement import Placement
from rollmill.gateway.replicas import NoAnswer, Replicas
from rollmill.records import RunFailure
from rollmill.web import ApiError

RETRY_AFTER_S = 1
_KINDS = {kind: EventKind(str(kind)) for kind in BitKind}
_NO_TIMING = Timing(queue_s=0.0, first_token_s=0.0, total_s=0.0)
_REPLICA_SAYS = re.compile(r"^\S+ answered \d+: ")


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """One choice to be sampled."""

    request: GenerateRequest
    placement: Placement | None
    """None: outside any episode."""


class Source(Protocol):
    """Where calls are made ready: the gateway."""

    replicas: Replicas

    async def slots(self, call: ChatCall | TextCall, episode: Episode | None, *, queue: str) -> list[Slot]: ...

    def reader(self, call: ChatCall | TextCall, prompt_ids: list[int]) -> AnswerReader: ...

    def watch(self, answering: Answering) -> None:
        """It runs now, and its episode may end before it does."""
        ...

    def unwatch(self, answering: Answering) -> None: ...


class Choice:
    """What one choice has become so far."""

    def __init__(self, index: int, slot: Slot, call: ChatCall | TextCall, source: Source) -> None:
        self.index, self.slot, self.call, self._source = index, slot, call, source
        self.reader = source.reader(call, slot.request.prompt_ids)
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.tops: list[list[tuple[int, float]]] = []
        self.runs: list[tuple[int, int]] = []
        """(first token, version) of every run of one version."""
        self.answer: Answer | None = None
        self.recorded: RecordedChoice | None = None
        self._max_calls = 1 if isinstance(call, ChatCall) and not call.parallel_calls else None
        self._num_calls = 0
        self.is_cut = False
        """It began a second call and may make one only."""

    @property
    def may_be_cut(self) -> bool:
        return self._max_calls is not None

    @property
    def has_enough(self) -> bool:
        return self.reader.stopped or self.is_cut

    def take(self, piece: Piece) -> list[Event]:
        """Tokens came: the events that they release."""
        if self.has_enough:
            return []
        if not self.runs or self.runs[-1][1] != piece.version:
            self.runs.append((len(self.ids), piece.version))
        before = len(self.ids)
        self.ids += piece.token_ids
        self.logprobs += piece.logprobs
        self.tops += piece.tops
        bits = self._allowed(self.reader.feed(piece.token_ids))
        return self._events(bits, before, self.reader.num_used if self.reader.stopped else len(self.ids))

    def end(self, reply: GenerateReply) -> list[Event]:
        """The replica is done, or was told to be: the last events but END. Tokens that came in no piece are taken in here."""
        if self.has_enough:
            return []
        before = len(self.ids)
        self.ids, self.logprobs, self.tops = reply.token_ids, reply.logprobs_T.tolist(), reply.tops
        bits = self._allowed(self.reader.feed(reply.token_ids[before:], last=True))
        return self._events(bits, before, self.reader.num_used if self.reader.stopped else len(self.ids))

    def _allowed(self, bits: list[Bit]) -> list[Bit]:
        if self._max_calls is None:
            return bits
        for i, bit in enumerate(bits):
            self._num_calls += bit.kind is BitKind.CALL
            if self._num_calls > self._max_calls:
                self.is_cut = True
                return bits[:i]
        return bits

    def _events(self, bits: list[Bit], start: int, end: int) -> list[Event]:
        if start >= end and not bits:
            return []
        events = []
        for i, bit in enumerate(bits):
            first = i == 0
            events.append(
                Event(
                    index=self.index,
                    kind=_KINDS[bit.kind],
                    text=bit.text,
                    call_id=bit.call_id,
                    name=bit.name,
                    token_ids=self.ids[start:end] if first else [],
                    logprobs=self.logprobs[start:end] if first else [],
                    tops=_tops(self.tops[start:end]) if first else [],
                )
            )
        if not bits:
            tokens, logprobs = self.ids[start:end], self.logprobs[start:end]
            events.append(
                Event(index=self.index, kind=EventKind.TOKENS, token_ids=tokens, logprobs=logprobs, tops=_tops(self.tops[start:end]))
            )
        return events

    def reply_so_far(self) -> GenerateReply:
        """What the replica would have said, had it ended here: for a request that is ended by a stop string.

        Whether a swap kept older keys and values is not in the pieces, so tokens of later versions count as sampled on a stale context.
        """
        ends = [start for start, _ in self.runs[1:]] + [len(self.ids)]
        return GenerateReply(
            token_ids=self.ids,
            logprobs=np.asarray(self.logprobs, "<f4").tobytes(),
            spans=[VersionSpan(start, end, version) for (start, version), end in zip(self.runs, ends, strict=True)],
            finish_reason=FinishReason.STOP,
            seed=self.slot.request.seed or 0,
            num_reused=0,
            stale_from=self.runs[1][0] if len(self.runs) > 1 else None,
            tops=self.tops,
            timing=_NO_TIMING,
        )

    def conclude(self, reply: GenerateReply) -> tuple[Answer, ChatMessage, int]:
        """The whole answer, the message that it is, and how many of the sampled tokens count."""
        reader, num_used = self.reader, len(reply.token_ids)
        if self.is_cut:
            message, num_used = self._first_call(reply.token_ids)
        else:
            message = reader.message()
            num_used = reader.num_used if reader.stopped else num_used
        logprobs = reply.logprobs_T[:num_used]
        self.answer = Answer(
            text=message.text,
            reasoning=message.reasoning,
            calls=message.calls,
            finish=_finish(reader.stopped, bool(message.calls), self.is_cut, reply.finish_reason),
            stop_string=reader.stop_string,
            token_ids=reply.token_ids[:num_used],
            logprobs=logprobs,
            tops=_tops(reply.tops[:num_used]),
            spans=[VersionSpan(s.start, min(s.end, num_used), s.version) for s in reply.spans if s.start < num_used],
            num_prompt=len(self.slot.request.prompt_ids),
            num_reused=reply.num_reused,
            prompt_ids=self.slot.request.prompt_ids if self.call.wants_token_ids else [],
            replica=reply.replica,
        )
        self.recorded = RecordedChoice(
            message=message, finish=self.answer.finish, stop_string=reader.stop_string, num_used=num_used, reply=reply
        )
        return self.answer, message, num_used

    def _first_call(self, ids: list[int]) -> tuple[ChatMessage, int]:
        """The shortest beginning that holds the first call whole, and what it says: a second was begun although one was asked for."""

        def read(num: int) -> ChatMessage:
            reader = self._source.reader(self.call, self.slot.request.prompt_ids)
            reader.feed(ids[:num], last=True)
            return reader.message()

        low, high = 1, len(ids)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if read(middle).calls else (middle + 1, high)
        # The client was told of the call under the id that the first reading gave it.
        return msgspec.structs.replace(read(low), calls=self.reader.message().calls[:1]), low


def _tops(rows: list[list[tuple[int, float]]]) -> list[list[TopLogprob]]:
    return [[TopLogprob(token_id, logprob) for token_id, logprob in row] for row in rows]


def _finish(is_stopped: bool, has_calls: bool, is_cut: bool, reason: FinishReason) -> Finish:
    if reason in (FinishReason.LENGTH, FinishReason.CONTEXT) and not (is_stopped or is_cut):
        return Finish.LENGTH
    return Finish.CALLS if has_calls else Finish.STOP


class Answering:
    """The answer to one call. Iterate for events, or await `whole`; then `answers` has every choice."""

    def __init__(self, source: Source, call: ChatCall | TextCall, episode: Episode | None, *, deadline: float, queue: str = "") -> None:
        self.call, self.episode = call, episode
        self._source, self._deadline, self._queue = source, deadline, queue
        self._choices: list[Choice] = []
        self._open: set[Choice] = set()
        self._owner: asyncio.Task[Any] | None = None
        self._ended_by: ApiError | None = None
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
    def version(self) -> int:
        """The newest weight version that has sampled; -1 before any has."""
        return max((v for c in self._choices for _, v in c.runs[-1:]), default=-1)

    @property
    def is_done(self) -> bool:
        """Every choice has ended and the episode has it."""
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
        """The choices that ended, for whoever keeps a record; none when one did not, since those of a prompt belong together."""
        done = [c.recorded for c in self._choices if c.recorded is not None]
        return done if len(done) == len(self._choices) else []

    async def whole(self) -> list[Answer]:
        """Every choice, sampled to its end."""
        with self._watched():
            await self.start()
            await self._all([self._finish_choice(c) for c in self._choices])
        return self.answers

    async def __aiter__(self) -> AsyncIterator[Event]:
        async for events in self.steps():
            for event in events:
                yield event

    async def steps(self) -> AsyncGenerator[list[Event], None]:
        """Events as they come, those of one step together."""
        with self._watched():
            await self.start()
            if len(self._choices) == 1:
                async for events in self._sample(self._choices[0]):
                    yield events
                return
            async for events in self._merged():
                yield events

    async def _merged(self) -> AsyncIterator[list[Event]]:
        """All choices at once; what waits goes out together."""
        queue: asyncio.Queue[list[Event] | None] = asyncio.Queue()

        async def pump(choice: Choice) -> None:
            async for events in self._sample(choice):
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
            async for _ in self._sample(choice):
                pass
            return
        self.sent_at = self.sent_at or time.monotonic()
        with self._refusals():
            reply = await self._source.replicas.generate(choice.slot.request, deadline=self._deadline)
        self.back_at = time.monotonic()
        choice.runs = [(s.start, s.version) for s in reply.spans]
        self._check(reply)
        choice.end(reply)
        self._conclude(choice, reply)

    async def _sample(self, choice: Choice) -> AsyncIterator[list[Event]]:
        request, reply = choice.slot.request, None
        self.sent_at = self.sent_at or time.monotonic()
        stream = self._source.replicas.stream(request, deadline=self._deadline)
        try:
            with self._refusals():
                async for item in stream:
                    if isinstance(item, GenerateReply):
                        reply = item
                    elif events := choice.take(item):
                        yield events
                    # What a constraint forced is told at the end only, so a constrained request is heard out.
                    if reply is not None or (choice.has_enough and request.constraint is None):
                        break
        finally:
            await stream.aclose()
        self.back_at = time.monotonic()
        if reply is None:
            assert choice.has_enough, "a replica's stream ended without its reply"
            reply = choice.reply_so_far()
        self._check(reply)
        events = choice.end(reply)
        answer = self._conclude(choice, reply)
        yield [*events, Event(index=choice.index, kind=EventKind.END, answer=answer)]

    def _check(self, reply: GenerateReply) -> None:
        reason = reply.finish_reason
        if reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.CONTEXT):
            return
        if reason is FinishReason.DEADLINE:
            raise self._failed(ApiError(504, f"the answer was not whole before the deadline; {len(reply.token_ids)} tokens were sampled"))
        if reason is FinishReason.VERSION:
            raise _unmet("the weights were swapped while the request ran")
        raise self._failed(_unavailable(f"the replica ended the request with {reason}"))

    def _conclude(self, choice: Choice, reply: GenerateReply) -> Answer:
        answer, message, num_used = choice.conclude(reply)
        self._open.discard(choice)
        if self.episode is not None and choice.slot.placement is not None:
            try:
                self.episode.add(choice.slot.placement, reply, message, num_used=num_used)
            except RunFailure as error:
                raise self._failed(_unavailable(str(error))) from error
        return answer

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        """What a replica or the routing refuses, as the client hears it."""
        try:
            yield
        except EngineRejected as error:
            text = _REPLICA_SAYS.sub("", str(error))
            extra = {"code": "context_length_exceeded"} if "the prompt has" in text else {}
            raise ApiError(400, text, extra=extra) from error
        except NoAnswer as error:
            if error.is_version:
                raise _unmet(error.reason) from error
            if "in time" in error.reason:
                raise self._failed(ApiError(504, f"no answer before the deadline: {error.reason}")) from error
            raise self._failed(_unavailable(f"no replica answered: {error.reason}")) from error

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
