"""Who waits, who runs and what the next step computes; knows no clock, no tensor and no thread.

WAITING -> RUNNING -> FINISHED(reason)
   |  \\<- preempted -/       ^        (its tokens are kept; the exact profile computes the same bits again)
   |__________________________|        (cancelled, deadline, version: also straight from the queue)

Every line of clients (`queue`) is first come first served, and the lines take turns.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from enum import StrEnum

import msgspec
import numpy as np

from rollmill.engine.book import Holding, OutOfPages, PageBook
from rollmill.engine.constrain import Guide
from rollmill.engine.protocol import FinishReason, GenerateRequest, VersionSpan
from rollmill.ops.base import PAGE

# A step that is full of decoding requests still moves the first unfinished prompt on by this much, so nobody starves.
MIN_PREFILL_TOKENS = 16


class SequenceState(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence got on; the last update carries the finish reason. The tokens themselves stand in the sequence, which only grows."""

    num_sampled: int
    """Tokens it has by now."""
    version: int
    """Of the weights that sampled those since the last update."""
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
        score_from: int | None = None,
        guide: Guide | None = None,
    ) -> None:
        """With `score_from` nothing is sampled: `logprobs` are those of the prompt's own tokens from that position on."""
        self.key, self.request, self.seed, self.arrived_at = key, request, seed, arrived_at
        self.on_update, self.streams, self.score_from, self.guide = on_update, streams, score_from, guide
        self.deadline_at = arrived_at + request.deadline_s if request.deadline_s is not None else None
        self.stop_ids = frozenset(request.stop_ids)
        self.tokens = list(request.prompt_ids)
        self.num_prompt = len(self.tokens)
        self.num_computed = 0
        """Tokens whose keys and values are in its pages."""
        self.num_reused = 0
        self.told_at = -math.inf
        """When whoever reads its stream last heard of it."""
        self.holding: Holding | None = None
        self.logprobs: list[float] = []
        self.tops: list[list[tuple[int, float]]] = []
        self.forced: list[tuple[int, int]] = []
        """Sampled tokens [start, end) that were the only ones allowed."""
        self.spans: list[VersionSpan] = []
        self.is_clean = True
        """Whether every key and value of its pages came from the served weights."""
        self.stale_from: int | None = None
        """First sampled token whose context older weights had computed."""
        self.early_routes: list[np.ndarray] = []
        """Experts of tokens that were computed before it was put back: those that sampling followed, whatever is computed later."""
        self.version = -1
        """Of the weights when it ended."""
        self.routes = b""
        """Record of the experts its tokens took, made when it ends."""
        self.state = SequenceState.WAITING
        self.finish_reason: FinishReason | None = None
        self.admitted_at = self.first_token_at = self.finished_at = 0.0

    @property
    def num_sampled(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def max_shared(self) -> int:
        """Leading tokens whose hidden states nobody asks for. The last token is always computed: it is what is sampled from."""
        return len(self.tokens) - 1 if self.score_from is None else max(self.score_from - 1, 0)

    def add(self, token: int, logprob: float, top: list[tuple[int, float]] | None) -> None:
        """One more sampled token."""
        if self.guide is not None and self.guide.is_forced:
            at = self.num_sampled
            if self.forced and self.forced[-1][1] == at:
                # Never without it: whoever makes a piece reads it on another thread.
                self.forced[-1] = (self.forced[-1][0], at + 1)
            else:
                self.forced.append((at, at + 1))
        if not self.is_clean and self.stale_from is None:
            self.stale_from = self.num_sampled
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if top is not None:
            self.tops.append(top)

    def stamp(self, version: int) -> None:
        """Attribute the tokens sampled since the last stamp to `version`."""
        start = self.spans[-1].end if self.spans else 0
        if self.num_sampled > start:
            self.spans.append(VersionSpan(start, self.num_sampled, version))

    def end(self, reason: FinishReason, *, version: int, now: float) -> None:
        assert self.state is not SequenceState.FINISHED, f"request {self.key} ended twice"
        self.stamp(version)
        self.state, self.finish_reason, self.finished_at, self.version = SequenceState.FINISHED, reason, now, version


class Chunk(msgspec.Struct, frozen=True):
    """Tokens [start, end) of a request, to be computed in this step; at the end of its tokens the next one is sampled."""

    seq: Sequence
    start: int
    end: int


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """What to compute next: requests with one token to go first, then longer pieces."""

    chunks: list[Chunk]
    num_decode: int
    """How many of the chunks, from the first on, have one token."""
    admitted: list[Sequence]
    preempted: list[Sequence]


class WaitingLines:
    """Lines of waiting requests that take turns; within one, first come first served."""

    def __init__(self) -> None:
        self._lines: OrderedDict[str, OrderedDict[int, Sequence]] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Sequence]:
        return (seq for line in self._lines.values() for seq in line.values())

    def add(self, seq: Sequence, *, first: bool = False) -> None:
        line = self._lines.setdefault(seq.request.queue, OrderedDict())
        line[seq.key] = seq
        if first:
            line.move_to_end(seq.key, last=False)
            self._lines.move_to_end(seq.request.queue, last=False)
        self._size += 1

    def remove(self, seq: Sequence) -> None:
        line = self._lines[seq.request.queue]
        del line[seq.key]
        if not line:
            del self._lines[seq.request.queue]
        self._size -= 1

    def heads(self) -> list[Sequence]:
        """The first of each line, in the order of their turns."""
        return [next(iter(line.values())) for line in self._lines.values()]

    def took_turn(self, queue: str) -> None:
        if queue in self._lines:
            self._lines.move_to_end(queue)


class Scheduler:
    """Lines, pages and deadlines. How many requests may wait is the engine's to say."""

    def __init__(
        self, book: PageBook, *, num_slots: int, step_tokens: int, on_preempt: Callable[[Sequence], None] = lambda seq: None
    ) -> None:
        """`on_preempt` is told before a running request loses its pages."""
        self.book, self.num_slots, self.step_tokens, self._on_preempt = book, num_slots, step_tokens, on_preempt
        self.waiting = WaitingLines()
        self.running: list[Sequence] = []
        """In order of admission."""
        self._deadlines: list[tuple[float, int, Sequence]] = []

    def submit(self, seq: Sequence) -> None:
        assert seq.state is SequenceState.WAITING
        self.waiting.add(seq)
        if seq.deadline_at is not None:
            if len(self._deadlines) > 2 * (len(self.waiting) + len(self.running)) + 64:
                # Most of them have ended: a deadline of hours must not hold on to their prompts.
                self._deadlines = [entry for entry in self._deadlines if entry[2].state is not SequenceState.FINISHED]
                heapq.heapify(self._deadlines)
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
        """Share out the step's tokens: one for each decoding request, then prompts in order of admission, then newcomers."""
        ready: list[Sequence] = []
        preempted: list[Sequence] = []
        decoding = [seq for seq in self.running if len(seq.tokens) - seq.num_computed == 1]
        for seq in decoding:
            if seq.state is SequenceState.RUNNING and self._grow(seq, len(seq.tokens), preempted):
                ready.append(seq)
        chunks = [Chunk(seq, seq.num_computed, len(seq.tokens)) for seq in ready if seq.state is SequenceState.RUNNING]
        num_decode, budget = len(chunks), max(self.step_tokens - len(chunks), MIN_PREFILL_TOKENS)
        for seq in list(self.running):
            if budget <= 0:
                break
            if len(seq.tokens) - seq.num_computed > 1 and seq.state is SequenceState.RUNNING:
                end = min(len(seq.tokens), seq.num_computed + budget)
                if self._grow(seq, end, preempted, may_preempt=False):
                    chunks.append(Chunk(seq, seq.num_computed, end))
                    budget -= end - seq.num_computed
        if preempted:
            # Also those whose turn had been planned before an elder one needed their pages.
            num_decode = sum(c.seq.state is SequenceState.RUNNING for c in chunks[:num_decode])
            chunks = [c for c in chunks if c.seq.state is SequenceState.RUNNING]
        admitted = self._admit(chunks, budget, now) if not preempted else []
        return Step(chunks=chunks, num_decode=num_decode, admitted=admitted, preempted=preempted)

    def _grow(self, seq: Sequence, num_tokens: int, preempted: list[Sequence], *, may_preempt: bool = True) -> bool:
        """Make room for the first `num_tokens` tokens of a running request; the youngest others give way to a decoding one."""
        assert seq.holding is not None
        while True:
            try:
                self.book.grow(seq.holding, num_tokens)
                return True
            except OutOfPages:
                youngest = self.running[-1]
                # A prompt waits for pages unless it is the eldest, who must always get on.
                if youngest is seq or not (may_preempt or self.running[0] is seq):
                    return False
                self._preempt(youngest)
                preempted.append(youngest)

    def _preempt(self, seq: Sequence) -> None:
        """Back to the head of its line, with its tokens; what it computed is computed again."""
        self._on_preempt(seq)
        self._release(seq)
        self.running.remove(seq)
        seq.state, seq.num_computed, seq.is_clean = SequenceState.WAITING, 0, True
        if seq.score_from is not None:
            seq.logprobs.clear()
        self.waiting.add(seq, first=True)

    def _admit(self, chunks: list[Chunk], budget: int, now: float) -> list[Sequence]:
        admitted: list[Sequence] = []
        skipped: set[str] = set()
        while budget > 0 and len(self.running) < self.num_slots:
            seq = next((s for s in self.waiting.heads() if s.request.queue not in skipped), None)
            if seq is None:
                break
            holding = self.book.open(seq.tokens, max_shared=seq.max_shared)
            if holding is None:
                # Its next page is being computed by another: the whole line waits, so that order is kept.
                skipped.add(seq.request.queue)
                continue
            start = len(holding.pages) * PAGE
            end = min(len(seq.tokens), start + budget)
            # A newcomer may not take the last pages from those who run: each of them may need one soon.
            needed = -(-end // PAGE) - len(holding.pages)
            if self.running and needed + len(self.running) > self.book.num_available:
                self.book.close(holding)
                break
            self.book.grow(holding, end)
            self.waiting.remove(seq)
            self.waiting.took_turn(seq.request.queue)
            seq.state, seq.holding = SequenceState.RUNNING, holding
            seq.num_computed = start
            if not seq.admitted_at:
                seq.admitted_at, seq.num_reused = now, min(start, seq.num_prompt)
            self.running.append(seq)
            admitted.append(seq)
            chunks.append(Chunk(seq, start, end))
            budget -= end - start
        return admitted

    def computed(self, chunk: Chunk) -> None:
        """The step has run: its tokens are in the pages."""
        chunk.seq.num_computed = chunk.end
        if chunk.seq.is_clean and chunk.seq.holding is not None:
            self.book.learn(chunk.seq.holding, chunk.seq.tokens, chunk.end)

    def restart(self, *, only_scores: bool) -> list[Sequence]:
        """Running requests compute all their tokens again, sampled ones included, and keep their order. Returns them."""
        restarted = [seq for seq in self.running if seq.score_from is not None or not only_scores]
        for seq in reversed(restarted):
            self._preempt(seq)
        return restarted

    def finish(self, seq: Sequence, reason: FinishReason, *, version: int, now: float) -> None:
        if seq.state is SequenceState.RUNNING:
            self.running.remove(seq)
            if reason is FinishReason.ERROR and seq.holding is not None:
                self.book.forget_own(seq.holding)
            self._release(seq)
        else:
            self.waiting.remove(seq)
        seq.end(reason, version=version, now=now)

    def _release(self, seq: Sequence) -> None:
        if seq.holding is not None:
            self.book.close(seq.holding)
            seq.holding = None
