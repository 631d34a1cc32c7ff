"""Which weights the engines hold, and whose turn it is: every sample comes from one snapshot's weights, proved before the first token.

An engine serves one snapshot at a time. Requests start in the order they came; one whose snapshot is nowhere takes over the engine that
has been without work longest, and until that has run dry nobody else starts there. Lives on one event loop; knows no HTTP.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import msgspec
import numpy as np
import torch

from rollmill.engine.engine import Engine
from rollmill.engine.protocol import FinishReason, GenerateReply, GenerateRequest, ScoreRequest
from rollmill.engine.replies import reply_of, score_of
from rollmill.engine.scheduler import Sequence, Update
from rollmill.model import Model
from rollmill.tinker.stopping import StopTexts
from rollmill.tinker.training import Snapshot, live_fingerprint
from rollmill.weights import Fingerprint, WrongWeights

Merge = Callable[[Snapshot], Awaitable[Mapping[str, torch.Tensor]]]
Work = GenerateRequest | ScoreRequest


class SampleFailed(RuntimeError):
    """The engine could not finish a request; the message says why."""


class _Job(msgspec.Struct, kw_only=True, eq=False):
    """One request to an engine, waiting or running."""

    snapshot: Snapshot
    work: Work
    stops: StopTexts | None
    outcome: asyncio.Future[GenerateReply | np.ndarray]
    seat: _Seat | None = None
    sequence: Sequence | None = None


class _Seat:
    """An engine with what it holds."""

    def __init__(self, engine: Engine, holds: Snapshot) -> None:
        self.engine, self.holds = engine, holds
        self.changed: frozenset[str] = frozenset()
        """Stored tensors that are not the base model's."""
        self.num_running = 0
        self.is_swapping = False
        self.wanted_by: Snapshot | None = None
        """Who takes over once it has run dry."""
        self.idle_since = 0
        """Grows; the smallest has been without work longest."""

    def is_open_to(self, snapshot: Snapshot) -> bool:
        return self.holds is snapshot and self.wanted_by is None and not self.is_swapping


class Samplers:
    """`generate` and `score` with a snapshot's weights. `merge` gives a snapshot's tensors that differ from the base model's."""

    def __init__(self, engines: list[Engine], *, base: Snapshot, base_tensors: Mapping[str, torch.Tensor], merge: Merge) -> None:
        """The engines hold `base`, and deliver their updates on the event loop."""
        self._seats = [_Seat(engine, base) for engine in engines]
        self._base, self._merge = base_tensors, merge
        self._waiting: dict[Snapshot, deque[_Job]] = {}
        """By snapshot, that of the longest wait first."""
        self._swaps: set[asyncio.Task[None]] = set()
        self._clock = 0
        self.num_swaps = 0

    async def generate(self, snapshot: Snapshot, request: GenerateRequest, stops: StopTexts | None = None) -> GenerateReply:
        """Cancelling this cancels the request."""
        reply = await self._run(snapshot, request, stops)
        assert isinstance(reply, GenerateReply)
        return reply

    async def score(self, snapshot: Snapshot, request: ScoreRequest) -> np.ndarray:
        """float32 logprobs of the tokens from `start` on."""
        found = await self._run(snapshot, request, None)
        assert isinstance(found, np.ndarray)
        return found

    async def _run(self, snapshot: Snapshot, work: Work, stops: StopTexts | None) -> GenerateReply | np.ndarray:
        job = _Job(snapshot=snapshot, work=work, stops=stops, outcome=asyncio.get_running_loop().create_future())
        self._waiting.setdefault(snapshot, deque()).append(job)
        self._pump()
        try:
            return await job.outcome
        finally:
            if job.seat is not None and job.sequence is not None:
                job.seat.engine.cancel(job.sequence)
            # One that waits is passed over when its turn comes: its outcome is cancelled.

    def _pump(self) -> None:
        """Start whatever may start now, and find a seat for who has none."""
        for snapshot in list(self._waiting):
            seat = next((s for s in self._seats if s.is_open_to(snapshot)), None)
            if seat is not None:
                for job in self._waiting.pop(snapshot):
                    self._start(job, seat)
            elif all(job.outcome.done() for job in self._waiting[snapshot]):
                del self._waiting[snapshot]
            elif not any(s.wanted_by is snapshot for s in self._seats):
                free = [s for s in self._seats if s.wanted_by is None]
                if free:
                    min(free, key=lambda s: (s.num_running > 0, s.idle_since)).wanted_by = snapshot
        for seat in self._seats:
            if seat.wanted_by is not None and seat.num_running == 0 and not seat.is_swapping:
                seat.is_swapping = True
                task = asyncio.create_task(self._swap(seat, seat.wanted_by))
                self._swaps.add(task)
                task.add_done_callback(self._swaps.discard)

    def _start(self, job: _Job, seat: _Seat) -> None:
        def on_update(seq: Sequence, update: Update) -> None:
            if update.finished is not None:
                self._ended(job, seat, seq, update.finished)
            elif job.stops is not None and job.stops.cut(seq.tokens[seq.num_prompt :]) is not None:
                seat.engine.cancel(seq)

        if job.outcome.done():
            return
        try:
            if isinstance(job.work, ScoreRequest):
                job.sequence = seat.engine.submit(job.work.as_generate(), on_update, score_from=job.work.start)
            else:
                job.sequence = seat.engine.submit(job.work, on_update, streams=job.stops is not None)
        except (ValueError, RuntimeError) as error:
            job.outcome.set_exception(error)
            return
        job.seat = seat
        seat.num_running += 1

    def _ended(self, job: _Job, seat: _Seat, seq: Sequence, reason: FinishReason) -> None:
        seat.num_running -= 1
        if seat.num_running == 0:
            self._clock += 1
            seat.idle_since = self._clock
        if not job.outcome.done():
            is_stopped = job.stops is not None and job.stops.cut(seq.tokens[seq.num_prompt :]) is not None
            if reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.CONTEXT) or is_stopped:
                job.outcome.set_result(np.asarray(score_of(seq).logprobs_T) if seq.score_from is not None else reply_of(seq))
            else:
                job.outcome.set_exception(SampleFailed(f"the engine ended the request: {reason}"))
        self._pump()

    async def _swap(self, seat: _Seat, snapshot: Snapshot) -> None:
        """Give an engine without work another snapshot's weights; if that cannot be, those who wait for them are told."""
        is_held, problem = False, "the engine refused the weights"
        try:
            tensors = await self._merge(snapshot)
            back = {name: self._base[name] for name in seat.changed - tensors.keys()}
            self.num_swaps += 1
            offer = seat.engine.offer(self.num_swaps, partial(_proved_swap, seat.engine.model, {**back, **tensors}, snapshot.fingerprint))
            is_held = await asyncio.wrap_future(offer)
            seat.changed = frozenset(tensors)
        except (ValueError, RuntimeError) as error:
            problem = str(error)
        seat.is_swapping, seat.wanted_by = False, None
        if is_held:
            seat.holds = snapshot
        for job in () if is_held else self._waiting.pop(snapshot, ()):
            if not job.outcome.done():
                job.outcome.set_exception(SampleFailed(problem))
        self._pump()


def _proved_swap(model: Model, tensors: Mapping[str, torch.Tensor], expected: str) -> Fingerprint:
    """On the engine's thread: write the weights and prove that the model now has those of the snapshot, bit for bit."""
    model.load_serving(tensors)
    found = live_fingerprint(model)
    if found.total != expected:
        # What was there is written over; an engine with unknown weights must not serve.
        raise WrongWeights(f"the live weights have fingerprint {found.total}, the snapshot {expected}", is_lost=True)
    return found
