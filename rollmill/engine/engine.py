"""The loop that computes: one thread steps all running sequences together and swaps weights between two steps.

Every token is stamped with the version whose weights computed it. Knows no HTTP and no weight store.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from enum import StrEnum

import numpy as np
import torch

from rollmill.engine.book import PageBook
from rollmill.engine.constrain import Guide
from rollmill.engine.forward import Forward, Sampled
from rollmill.engine.inbox import Inbox, Offer
from rollmill.engine.metrics import Metrics
from rollmill.engine.protocol import (
    FinishReason,
    GenerateReply,
    GenerateRequest,
    Health,
    Pressure,
    ScoreReply,
    ScoreRequest,
    SwapMode,
)
from rollmill.engine.replies import Posted, deliver, due, news, reply_of, score_of
from rollmill.engine.room import pages_that_fit
from rollmill.engine.scheduler import Scheduler, Sequence, SequenceState, Update
from rollmill.model import Model, ModelConfig
from rollmill.ops import PAGE
from rollmill.weights import Fingerprint, WrongBase, WrongWeights, fingerprint

log = logging.getLogger(__name__)
SWAP_PATIENCE_S = 5.0
"""Longest that a staged version waits for requests that the last one made start again."""


class EnginePhase(StrEnum):
    """STARTING -> SERVING -> STOPPED, or FAILED from anywhere; only SERVING takes requests."""

    STARTING = "starting"
    SERVING = "serving"
    FAILED = "failed"
    STOPPED = "stopped"


class NotServing(RuntimeError):
    """The engine holds no verified weights, or has ended."""


class VersionMismatch(RuntimeError):
    """The served version does not meet the request's constraint."""


class Engine:
    """A model, its pages and its queue. `start` it, `submit` from any thread, `close` it."""

    def __init__(
        self,
        model: Model,
        config: ModelConfig,
        *,
        version: int | None = None,
        num_slots: int = 32,
        max_len: int | None = None,
        max_waiting: int = 256,
        step_tokens: int = 1024,
        num_pages: int | None = None,
        swap_mode: SwapMode = SwapMode.KEEP_KV,
        replica: str = "",
        num_threads: int | None = None,
        post: Callable[[Posted], None] | None = None,
        on_failed: Callable[[], None] | None = None,
    ) -> None:
        """`version` names the weights the model holds now; None waits for the first `offer`.

        `num_pages` bounds the keys and values, in pages of 64 tokens; None takes room for every slot at full length, or what memory
        allows. `post` carries updates to the thread that waits for them; `on_failed` is told when the loop has ended by a failure.
        """
        self.max_len = min(max_len or config.max_position, config.max_position)
        for name, value, least in (
            ("num_slots", num_slots, 1),
            ("max_len", self.max_len, 2),
            ("max_waiting", max_waiting, 1),
            ("step_tokens", step_tokens, 1),
        ):
            if value < least:
                raise ValueError(f"{name} is {value}, it must be at least {least}")
        self.model, self.config, self.metrics = model, config, Metrics()
        self._num_threads, self._post, self._on_failed = num_threads, post or deliver, on_failed
        self.swap_mode, self.replica = SwapMode(swap_mode), replica
        longest = -(-self.max_len // PAGE)
        num_pages = pages_that_fit(model, most=num_slots * longest) if num_pages is None else num_pages
        if num_pages < longest:
            raise ValueError(f"{num_pages} pages of {PAGE} tokens cannot hold one context of {self.max_len}; give more, or lower max_len")
        self._forward = Forward(model, num_pages=num_pages, max_len=self.max_len)
        self.scheduler = Scheduler(PageBook(num_pages), num_slots=num_slots, step_tokens=step_tokens, on_preempt=self._before_preempt)
        self._inbox = Inbox(max_open=num_slots + max_waiting)
        self._restarted: dict[Sequence, int] = {}
        """Requests that a swap made start again, and how many tokens each had: the next swap waits until they have got on."""
        self._keys = itertools.count()
        self.version, self.fingerprint, self.note = -1, "", ""
        self.follow_problem = ""
        """Set by whoever follows the weight store: why newer weights do not arrive."""
        self.phase = EnginePhase.STARTING
        if version is not None:
            self.version, self.fingerprint, self.phase = version, fingerprint(model.serving_tensors()).total, EnginePhase.SERVING
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # Any thread.

    def start(self) -> None:
        self._thread.start()

    def submit(
        self,
        request: GenerateRequest,
        on_update: Callable[[Sequence, Update], None],
        *,
        streams: bool = False,
        score_from: int | None = None,
        guide: Guide | None = None,
    ) -> Sequence:
        """Queue a request. `on_update` hears of every step's tokens when `streams`, and always the end. A request with a constraint
        comes with its `guide`, see `Constraints`.
        """
        # Nothing is sampled behind what is only scored.
        request.check(vocab_size=self.config.vocab_size, max_len=self.max_len + (score_from is not None))
        if request.routes_from is not None and self.config.moe is None:
            raise ValueError("routes_from is set, but this model has no experts; leave it out")
        if (request.constraint is None) != (guide is None):
            raise ValueError("a request with a constraint needs the guide that was compiled from it, and only such a request has one")
        self._check_served(request)
        seq = Sequence(
            key=next(self._keys),
            request=request,
            seed=request.seed if request.seed is not None else secrets.randbits(63),
            arrived_at=time.monotonic(),
            on_update=on_update,
            streams=streams,
            score_from=score_from,
            guide=guide,
        )
        if not self._inbox.put(seq):
            raise self._not_serving()
        return seq

    def generate(self, request: GenerateRequest, *, guide: Guide | None = None) -> Future[GenerateReply]:
        """Queue a request and get its reply later."""
        future: Future[GenerateReply] = Future()
        # A future that can be cancelled could not be given its result; `cancel` is for requests.
        future.set_running_or_notify_cancel()
        self.submit(request, lambda seq, update: future.set_result(reply_of(seq, self.replica)), guide=guide)
        return future

    def score(self, request: ScoreRequest) -> Future[ScoreReply]:
        """Queue tokens to be scored; the future fails when they could not be."""
        future: Future[ScoreReply] = Future()
        future.set_running_or_notify_cancel()

        def ended(seq: Sequence, update: Update) -> None:
            if update.finished is FinishReason.LENGTH:
                future.set_result(score_of(seq))
            else:
                future.set_exception(RuntimeError(f"the tokens were not scored: {update.finished}"))

        self.submit(request.as_generate(), ended, score_from=request.start)
        return future

    def cancel(self, seq: Sequence) -> None:
        """End a request early; one that has ended already is left alone."""
        self._inbox.cancel(seq)

    def offer(self, version: int, swap: Callable[[], Fingerprint]) -> Future[bool]:
        """Ask for a swap at the next step boundary. `swap` changes the live weights and proves them, or puts the old ones back and
        raises; the result says which.
        """
        offer = Offer(version, swap)
        self._inbox.offer(offer)
        return offer.outcome

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop stepping; what has not ended is cancelled."""
        self._inbox.shut()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def pressure(self) -> Pressure:
        return Pressure(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting) + self._inbox.num_untaken,
            slots=self.scheduler.num_slots,
            kv_used_frac=1 - self.scheduler.book.num_available / self.scheduler.book.num_pages,
            version=self.version,
            tokens_per_s=self.metrics.tokens_per_s(time.monotonic()),
            max_len=self.max_len,
        )

    def health(self) -> Health:
        p = self.pressure()
        note = self.note or self.follow_problem
        return Health(phase=self.phase, version=self.version, fingerprint=self.fingerprint, running=p.running, waiting=p.waiting, note=note)

    def _not_serving(self) -> NotServing:
        return NotServing(f"the engine is {self.phase}{': ' + self.note if self.note else ''}; try again later")

    def _check_served(self, request: GenerateRequest) -> None:
        if self.phase is not EnginePhase.SERVING:
            raise self._not_serving()
        if request.min_version is not None and self.version < request.min_version:
            raise VersionMismatch(f"version {self.version} is served, the request needs at least {request.min_version}")
        if request.exact_version is not None and self.version != request.exact_version:
            raise VersionMismatch(f"version {self.version} is served, the request needs exactly {request.exact_version}")

    # The engine's thread.

    def _run(self) -> None:
        # OpenMP keeps the thread count per calling thread, so it is set here.
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
        try:
            self._forward.warm()
            while self._take_in():
                self._expire()
                self._step()
            if self.phase is not EnginePhase.FAILED:
                self.phase = EnginePhase.STOPPED
        finally:
            # An exception goes on to threading.excepthook, which prints it; nobody is left waiting for it.
            if self.phase not in (EnginePhase.STOPPED, EnginePhase.FAILED):
                self._fail("the engine's loop crashed; see its log")
            self._end_all()
            if self.phase is EnginePhase.FAILED and self._on_failed:
                self._on_failed()

    def _take_in(self) -> bool:
        """Do what other threads ask; sleep when there is nothing to compute. False when it is time to stop."""
        asked = self._inbox.take(is_idle=not (self.scheduler.waiting or self.scheduler.running))
        if asked is None:
            return False
        for seq in asked.requests:
            self.scheduler.submit(seq)
        for seq in asked.cancelled:
            if seq.state is not SequenceState.FINISHED:
                self._finish([(seq, FinishReason.CANCELLED)])
        for seq in asked.requests:
            # The weights may have moved on between the caller's check and now.
            if seq.request.exact_version not in (None, self.version) and seq.state is SequenceState.WAITING:
                self._finish([(seq, FinishReason.VERSION)])
        if offer := self._inbox.take_offer(self._may_swap):
            self._swap(offer)
        return True

    def _may_swap(self, offer: Offer) -> bool:
        """Versions that come faster than a context is computed again must not stop everybody: each gets a token first, or its score."""
        if time.monotonic() - offer.offered_at > SWAP_PATIENCE_S:
            return True
        waiting_for = self._restarted.items()
        self._restarted = {s: num for s, num in waiting_for if s.state is not SequenceState.FINISHED and s.num_sampled <= num}
        return not self._restarted

    def _expire(self) -> None:
        if overdue := self.scheduler.overdue(time.monotonic()):
            self._finish([(seq, FinishReason.DEADLINE) for seq in overdue])

    def _step(self) -> None:
        began = time.monotonic()
        step = self.scheduler.plan(began)
        if not step.chunks:
            return
        sampled = self._forward.compute(step)
        for chunk in step.chunks:
            self.scheduler.computed(chunk)
        now = time.monotonic()
        ended = self._append(sampled, now)
        ended += [(c.seq, self._scored(c.seq)) for c in step.chunks if c.seq.score_from is not None and c.end == len(c.seq.tokens)]
        updates: Posted = []
        if ended:
            self._finish(ended, updates)
        updates += due(sampled.seqs, version=self.version, now=now)
        self.metrics.count_tokens(len(sampled.ids), now)
        self.metrics.observe(step, now - began, num_kept=self.scheduler.book.num_kept)
        self._show_lines()
        if updates:
            self._post(updates)

    @staticmethod
    def _scored(seq: Sequence) -> FinishReason:
        return FinishReason.LENGTH if np.isfinite(seq.logprobs).all() else FinishReason.ERROR

    def _append(self, sampled: Sampled, now: float) -> list[tuple[Sequence, FinishReason]]:
        """Give every sequence its token. Returns who ends by it, and why."""
        ended = []
        for row, (seq, token, logprob) in enumerate(zip(sampled.seqs, sampled.ids, sampled.logprobs, strict=True)):
            if logprob != logprob:
                ended.append((seq, FinishReason.ERROR))
                continue
            if seq.guide is not None and not seq.guide.take(token):
                ended.append((seq, FinishReason.CONSTRAINT))
                continue
            seq.add(token, logprob, sampled.tops.get(row))
            num_sampled = len(seq.logprobs)
            if num_sampled == 1:
                seq.first_token_at = now
            if token in seq.stop_ids:
                ended.append((seq, FinishReason.STOP))
            elif num_sampled >= seq.request.max_tokens:
                ended.append((seq, FinishReason.LENGTH))
            elif len(seq.tokens) >= self.max_len:
                ended.append((seq, FinishReason.CONTEXT))
        return ended

    def _before_preempt(self, seq: Sequence) -> None:
        # No token was sampled, no routes followed: those that count are yet to be taken, maybe by newer weights.
        if seq.num_sampled:
            self._forward.keep_routes(seq)
        if seq.streams:
            self._post([(seq, news(seq, version=self.version))])

    def _finish(self, ended: list[tuple[Sequence, FinishReason]], updates: Posted | None = None) -> None:
        """End sequences; their last updates join `updates`, or are posted at once when none is given."""
        batch: Posted = [] if updates is None else updates
        now = time.monotonic()
        for seq, reason in ended:
            if reason is FinishReason.ERROR and seq.state is SequenceState.RUNNING:
                log.error("request %d: the model's logits are not numbers (version %d)", seq.key, self.version)
                if seq.holding is not None:
                    self._forward.wipe(seq, self.scheduler.book.first_own(seq.holding))
            else:
                self._forward.record_routes(seq)
            self.scheduler.finish(seq, reason, version=self.version, now=now)
            self._inbox.ended(seq)
            self.metrics.finished.labels(reason).inc()
            batch.append((seq, news(seq, version=self.version)))
        self._show_lines()
        if updates is None and batch:
            self._post(batch)

    def _show_lines(self) -> None:
        self.metrics.running.set(len(self.scheduler.running))
        self.metrics.waiting.set(len(self.scheduler.waiting))

    def _swap(self, offer: Offer) -> None:
        """Let the offered version in, or hear why the old one serves on."""
        began = time.monotonic()
        try:
            live = offer.swap()
        except (WrongWeights, WrongBase) as error:
            self._refuse(offer.version, error)
            accepted = False
        else:
            accepted = self._adopted(offer.version, live)
        pause_s = time.monotonic() - began
        self.metrics.swap_pause_s.observe(pause_s)
        self.metrics.swaps.labels("confirmed" if accepted else "refused").inc()
        log.info("swap to version %d: %s, pause %.1f ms", offer.version, "confirmed" if accepted else "refused", 1e3 * pause_s)
        offer.outcome.set_result(accepted)

    def _adopted(self, version: int, live: Fingerprint) -> bool:
        try:
            self._forward.weights_changed()
        except ValueError as error:
            # What a profile derives from the weights cannot be made, and what it made of the old ones is gone.
            self._fail(f"version {version} is in place but the profile {self.model.numerics!r} cannot serve it: {error}")
            self._inbox.shut()
            return False
        self._adopt(version, live)
        return True

    def _adopt(self, version: int, live: Fingerprint) -> None:
        for seq in [*self.scheduler.running, *self.scheduler.waiting]:
            seq.stamp(self.version)
            seq.is_clean = seq.state is SequenceState.WAITING
        if untold := [(seq, news(seq, version=self.version)) for seq in self.scheduler.running if seq.streams]:
            self._post(untold)
        self.scheduler.book.forget()
        restarted = self.scheduler.restart(only_scores=self.swap_mode is SwapMode.KEEP_KV)
        self._restarted |= {seq: seq.num_sampled for seq in restarted}
        self.version, self.fingerprint, self.note = version, live.total, ""
        self.metrics.version.set(version)
        if self.phase is EnginePhase.STARTING:
            self.phase = EnginePhase.SERVING
        everyone = [*self.scheduler.waiting, *self.scheduler.running]
        if unmet := [(seq, FinishReason.VERSION) for seq in everyone if seq.request.exact_version not in (None, version)]:
            self._finish(unmet)

    def _refuse(self, version: int, error: Exception) -> None:
        now = f"version {self.version} serves on" if self.version >= 0 else "nothing is served yet"
        self.note = f"version {version} was refused and {now}: {error}"
        log.error("%s", self.note)
        if isinstance(error, WrongWeights) and error.is_lost:
            self._fail(f"the weights of version {self.version} could not be put back after a refused swap")
            self._inbox.shut()

    def _fail(self, note: str) -> None:
        self.phase, self.note = EnginePhase.FAILED, note
        log.error("engine failed: %s", note)

    def _end_all(self) -> None:
        """Nobody waits for an engine that has ended. Does not touch rows: after a crash they may be in any state."""
        orphans = self._inbox.drain()
        reason = FinishReason.ERROR if self.phase is EnginePhase.FAILED else FinishReason.CANCELLED
        for seq in orphans:
            seq.end(reason, version=self.version, now=time.monotonic())
            self.metrics.finished.labels(reason).inc()
        if orphans:
            self._post([(seq, news(seq, version=self.version)) for seq in orphans])
