"""What one choice of a call has become so far, from the tokens that a replica samples; no I/O.

Of a request that is ended early (a stop string, a second call where one was asked for) the reply is made from its pieces.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Protocol

import msgspec

from rollmill.chat.messages import ChatMessage
from rollmill.chat.reader import AnswerReader, Bit, BitKind
from rollmill.engine.protocol import FinishReason, GenerateReply, GenerateRequest, Piece, Timing, VersionSpan
from rollmill.gateway.call import Answer, ChatCall, Event, EventKind, Finish, TextCall, TopLogprob
from rollmill.gateway.recording.call_rows import RecordedChoice
from rollmill.gateway.routing.continuing import Gathered
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

    def reader(self, call: ChatCall | TextCall, request: GenerateRequest) -> AnswerReader: ...


class Choice:
    """What one choice has become so far."""

    def __init__(self, index: int, slot: Slot, call: ChatCall | TextCall, source: Readers) -> None:
        self.index, self.slot, self.call, self._source = index, slot, call, source
        self.reader = source.reader(call, slot.request)
        self._got = Gathered()
        self.answer: Answer | None = None
        self.ended: RecordedChoice | None = None
        """All of it, once nothing more is to be sampled."""
        self.is_delivered = False
        """It is about to leave, and the episode has it."""
        self.may_be_cut = isinstance(call, ChatCall) and not call.parallel_calls
        """It may make one call only, and is ended where it begins a second."""
        self._num_calls = 0
        self._num_told = 0
        """Tokens that events have told of."""
        self._first_end: int | None = None
        """Tokens through the end of the first call, where a second may be cut off: those behind it wait for what they turn out to be."""
        self.is_cut = False

    @property
    def ids(self) -> list[int]:
        return self._got.token_ids

    @property
    def version(self) -> int:
        """What sampled the newest token; -1 before there is one."""
        return self._got.spans[-1].version if self._got.spans else -1

    @property
    def has_enough(self) -> bool:
        return self.is_cut or self.reader.stopped

    def take(self, piece: Piece) -> list[Event]:
        """Tokens came: the events that they release."""
        if self.has_enough:
            return []
        self._got.add(piece)
        return self._events(self.reader.feed(piece.token_ids))

    def take_whole(self, reply: GenerateReply) -> None:
        """All of it came at once, and nobody waits for events."""
        self._got.add_reply(reply)
        self.reader.feed(reply.token_ids, last=True)

    def end(self, reply: GenerateReply) -> list[Event]:
        """The replica is done, or was told to be: the last events but END. Tokens that came in no piece are taken in here."""
        if self.has_enough:
            return []
        before = len(self.ids)
        if before < len(reply.token_ids):
            self._got = Gathered()
            self._got.add_reply(reply)
        return self._events(self.reader.feed(reply.token_ids[before:], last=True), is_last=True)

    def _events(self, bits: list[Bit], *, is_last: bool = False) -> list[Event]:
        if self.may_be_cut:
            bits = self._allowed(bits)
        start, end = self._num_told, self._num_tellable(is_last)
        self._num_told = end
        if not bits:
            return [self._told(EventKind.TOKENS, start, end)] if start < end else []
        first = bits[0]
        events = [self._told(_KINDS[first.kind], start, end, first.text, first.call_id, first.name)]
        for bit in bits[1:]:
            events.append(Event(index=self.index, kind=_KINDS[bit.kind], text=bit.text, call_id=bit.call_id, name=bit.name))
        return events

    def _told(self, kind: EventKind, start: int, end: int, text: str = "", call_id: str = "", name: str = "") -> Event:
        got = self._got
        return Event(
            index=self.index,
            kind=kind,
            text=text,
            call_id=call_id,
            name=name,
            token_ids=got.token_ids[start:end],
            logprobs=got.logprobs[start:end],
            tops=_tops(got.tops[start:end]) if got.tops else [],
        )

    def _allowed(self, bits: list[Bit]) -> list[Bit]:
        if self._first_end is None and self.reader.num_ended:
            self._first_end = self._find_first_end()
        for i, bit in enumerate(bits):
            self._num_calls += bit.kind is BitKind.CALL
            if self._num_calls > 1:
                self.is_cut = True
                return bits[:i]
        return bits

    def _num_tellable(self, is_last: bool) -> int:
        if self._first_end is not None and (self.is_cut or not is_last):
            return max(self._num_told, self._first_end)
        return self.reader.num_used if self.reader.stopped else len(self.ids)

    def reply_so_far(self) -> GenerateReply:
        """What the replica would have said, had it ended here, but for routes: for a request that is ended by a stop string."""
        return self._got.reply(FinishReason.STOP, seed=self.slot.request.seed or 0, timing=_NO_TIMING)

    def conclude(self, reply: GenerateReply) -> None:
        """Nothing more is sampled: the whole answer, the message that it is, and how many of the sampled tokens count."""
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
        self.ended = RecordedChoice(
            prompt=self.index // self.call.num_choices,
            message=message,
            finish=self.answer.finish,
            stop_string=reader.stop_string,
            num_used=num_used,
            reply=reply,
        )

    def _first_call(self, ids: list[int]) -> tuple[ChatMessage, int]:
        """What the answer says up to the end of its first call, and how many tokens that takes."""
        num = self._first_end if self._first_end is not None else len(ids)
        reader = self._source.reader(self.call, self.slot.request)
        reader.feed(ids[:num], last=True)
        # The client was told of the call under the id that the first reading gave it.
        return msgspec.structs.replace(reader.message(), calls=self.reader.message().calls[:1]), num

    def _find_first_end(self) -> int:
        """The fewest tokens that hold a call whole."""

        def is_whole(num: int) -> bool:
            reader = self._source.reader(self.call, self.slot.request)
            reader.feed(self.ids[:num], last=num == len(self.ids))
            return reader.num_ended > 0

        return bisect_left(range(len(self.ids)), True, lo=1, key=is_whole)


def _tops(rows: list[list[tuple[int, float]]]) -> list[list[TopLogprob]]:
    return [[TopLogprob(token_id, logprob) for token_id, logprob in row] for row in rows]


def _finish(is_stopped: bool, has_calls: bool, is_cut: bool, reason: FinishReason) -> Finish:
    if reason in (FinishReason.LENGTH, FinishReason.CONTEXT) and not (is_stopped or is_cut):
        return Finish.LENGTH
    return Finish.CALLS if has_calls else Finish.STOP
