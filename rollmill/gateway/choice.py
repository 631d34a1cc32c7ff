"""What one choice of a call has become so far, from the tokens that a replica samples; no I/O.

Of a request that is ended early (a stop string, a second call where one was asked for) the reply is made from its pieces.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
import numpy as np

from rollmill.chat.messages import ChatMessage
from rollmill.chat.reader import AnswerReader, Bit, BitKind
from rollmill.engine.protocol import FinishReason, GenerateReply, GenerateRequest, Piece, Timing, VersionSpan
from rollmill.gateway.call import Answer, ChatCall, Event, EventKind, Finish, TextCall, TopLogprob
from rollmill.gateway.recording.call_rows import RecordedChoice
from rollmill.gateway.sessions.placement import Placement

_KINDS = {kind: EventKind(str(kind)) for kind in BitKind}
_NO_TIMING = Timing(queue_s=0.0, first_token_s=0.0, total_s=0.0)


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """One choice to be sampled."""

    request: GenerateRequest
    placement: Placement | None
    """None: outside any episode."""


class Readers(Protocol):
    """Who knows how answers are read: the gateway."""

    def reader(self, call: ChatCall | TextCall, prompt_ids: list[int]) -> AnswerReader: ...


class Choice:
    """What one choice has become so far."""

    def __init__(self, index: int, slot: Slot, call: ChatCall | TextCall, source: Readers) -> None:
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

    def take_whole(self, reply: GenerateReply) -> None:
        """All of it came at once, and nobody waits for events."""
        self.ids, self.runs = reply.token_ids, [(s.start, s.version) for s in reply.spans]
        self.reader.feed(reply.token_ids, last=True)

    def end(self, reply: GenerateReply) -> list[Event]:
        """The replica is done, or was told to be: the last events but END. Tokens that came in no piece are taken in here."""
        if self.has_enough:
            return []
        before = len(self.ids)
        if before < len(reply.token_ids):
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
