"""Who waits, who runs and what the next step computes, first come first served; knows no clock, no tensor and no thread.

WAITING -> RUNNING -> FINISHED(reason)
   |________________________^        (cancelled, deadline, version: also straight from the queue)
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable
from enum import StrEnum

import msgspec

from rollmill.engine.kv import Chunk
from rollmill.engine.protocol import FinishReason, GenerateRequest, VersionSpan
from rollmill.engine.slots import Slots

# A step that is full of decoding rows still moves the first waiting prompt on by this much, so nobody starves.
MIN_PREFILL_TOKENS = 16


class QueueFull(RuntimeError):
    """The waiting queue is at its bound; try again later or elsewhere."""


class SequenceState(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """What a step added to one sequence; the last update carries the finish reason."""

    token_ids: list[int]
    logprobs: list[float]
    finished: FinishReason | None = None


class Sequence:
    """One request's life in the engine. Only the engine's thread changes it once it is submitted."""

    def __init__(
        self,
        *,
        key: int,
        request: GenerateRequest,
        seed: int,
        arrived_at: float,
        on_update: Callable[[Sequence, Update], None],
        streams: bool,
    ) -> None:
        self.key, self.request, self.seed, self.arrived_at = key, request, seed, arrived_at
        self.on_update, self.streams = on_update, streams
        self.deadline_at = arrived_at + request.deadline_s if request.deadline_s is not None else None
        self.stop_ids = frozenset(request.stop_ids)
        self.tokens = list(request.prompt_ids)
        self.num_prompt = len(self.tokens)
        self.num_computed = 0
        self.num_reused = 0
        self.num_sent = 0
        self.row = -1
        self.logprobs: list[float] = []
        self.spans: list[VersionSpan] = []
        self.is_clean = True
        """Whether every key and value of its row came from the served weights."""
        self.state = SequenceState.WAITING
        self.finish_reason: FinishReason | None = None
        self.admitted_at = self.first_token_at = self.finished_at = 0.0

    @property
    def session(self) -> str | None:
        return self.request.session

    @property
    def num_sampled(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def is_decoding(self) -> bool:
        return self.num_computed >= self.num_prompt

    def stamp(self, version: int) -> None:
        """Attribute the tokens sampled since the last stamp to `version`."""
        start = self.spans[-1].end if self.spans else 0
        if self.num_sampled > start:
            self.spans.append(VersionSpan(start, self.num_sampled, version))

    def end(self, reason: FinishReason, *, version: int, now: float) -> None:
        assert self.state is not SequenceState.FINISHED, f"request {self.key} ended twice"
        self.stamp(version)
        self.state, self.finish_reason, self.finished_at = SequenceState.FINISHED, reason, now


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """What to compute next: one token for each of the first `num_decode` rows, then the chunks."""

    num_decode: int
    chunks: list[Chunk]
    admitted: list[Sequence]


class Scheduler:
    """Bounded queue, rows and deadlines."""

    def __init__(self, slots: Slots[Sequence], *, max_waiting: int, step_tokens: int) -> None:
        self.slots, self.max_waiting, self.step_tokens = slots, max_waiting, step_tokens
        self.waiting: OrderedDict[int, Sequence] = OrderedDict()
        self._deadlines: list[tuple[float, int, Sequence]] = []

    @property
    def running(self) -> list[Sequence]:
        return self.slots.active

    @property
    def num_room(self) -> int:
        """How many more requests may arrive: the queue's bound plus the rows that stand empty. Only `submit` makes it smaller."""
        return self.max_waiting + self.slots.num_free - len(self.waiting)

    def submit(self, seq: Sequence) -> None:
        assert seq.state is SequenceState.WAITING
        if self.num_room <= 0:
            raise QueueFull(f"{len(self.waiting)} requests wait already, the bound is {self.max_waiting}; try again later")
        self.waiting[seq.key] = seq
        if seq.deadline_at is not None:
            heapq.heappush(self._deadlines, (seq.deadline_at, seq.key, seq))

    def overdue(self, now: float) -> list[Sequence]:
        """Sequences whose deadline has passed, each reported once."""
        out = []
        while self._deadlines and self._deadlines[0][0] <= now:
            seq = heapq.heappop(self._deadlines)[2]
            if seq.state is not SequenceState.FINISHED:
                out.append(seq)
        return out

    def plan(self, now: float) -> Step:
        """Admit what fits and share out the step's tokens: decoding rows first, then prompts in order of arrival."""
        running = self.running
        num_decode = 0
        while num_decode < len(running) and running[num_decode].is_decoding:
            num_decode += 1
        budget = max(self.step_tokens - num_decode, MIN_PREFILL_TOKENS)
        chunks: list[Chunk] = []
        admitted: list[Sequence] = []
        for seq in running[num_decode:]:
            budget -= self._chunk(seq, budget, chunks)
        while budget > 0 and self.waiting and self.slots.num_free:
            _, seq = self.waiting.popitem(last=False)
            seq.state, seq.admitted_at = SequenceState.RUNNING, now
            seq.num_reused = self.slots.place(seq)
            admitted.append(seq)
            budget -= self._chunk(seq, budget, chunks)
        return Step(num_decode=num_decode, chunks=chunks, admitted=admitted)

    @staticmethod
    def _chunk(seq: Sequence, budget: int, chunks: list[Chunk]) -> int:
        end = min(seq.num_prompt, seq.num_computed + budget)
        if end > seq.num_computed:
            chunks.append(Chunk(row=seq.row, start=seq.num_computed, end=end))
        return end - seq.num_computed

    def finish(self, seq: Sequence, reason: FinishReason, *, version: int, now: float, retain: bool) -> None:
        """End a sequence, wherever it is, exactly once."""
        if seq.state is SequenceState.WAITING:
            del self.waiting[seq.key]
        elif seq.state is SequenceState.RUNNING:
            self.slots.release(seq, retain=retain and seq.is_clean)
        seq.end(reason, version=version, now=now)
