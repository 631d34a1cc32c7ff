"""The engine's counters, each with a unit; names follow the house form `engine/...` with `_` for `/` in Prometheus text."""

from __future__ import annotations

from collections import deque

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from rollmill.engine.protocol import FinishReason
from rollmill.engine.scheduler import Step

RATE_WINDOW_S = 5.0


class Metrics:
    """One registry per engine, so that several engines may live in one process."""

    def __init__(self) -> None:
        self.registry = r = CollectorRegistry()
        self.tokens = Counter("engine_sampled_tokens", "Tokens sampled", registry=r)
        self.prefill_tokens = Counter("engine_prefill_tokens", "Prompt tokens computed", registry=r)
        self.reused_tokens = Counter("engine_reused_tokens", "Prompt tokens taken from pages that an earlier request computed", registry=r)
        self.preemptions = Counter("engine_preemptions", "Running requests put back because pages ran out", registry=r)
        self.finished = Counter("engine_finished_requests", "Requests ended, by reason", ["reason"], registry=r)
        self.refused = Counter("engine_refused_requests", "Requests refused, by status", ["status"], registry=r)
        self.swaps = Counter("engine_swaps", "Weight swaps, by outcome", ["outcome"], registry=r)
        self.follow_errors = Counter("engine_follow_errors", "Failed attempts to read the weight store", registry=r)
        self.swap_pause_s = Histogram("engine_swap_pause_s", "Seconds without a decode step during a weight swap", registry=r)
        self.step_s = Histogram("engine_step_s", "Seconds of one step", registry=r, buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3))
        self.queue_s = Histogram("engine_queue_s", "Seconds from arrival to admission", registry=r)
        self.running = Gauge("engine_running", "Requests that hold pages", registry=r)
        self.waiting = Gauge("engine_waiting", "Requests that wait", registry=r)
        self.kept_pages = Gauge("engine_kept_pages", "Pages of ended requests kept for others with the same beginning", registry=r)
        self.version = Gauge("engine_version", "Served weight version", registry=r)
        for reason in FinishReason:
            self.finished.labels(reason)
        for outcome in ("confirmed", "refused"):
            self.swaps.labels(outcome)
        self._marks: deque[tuple[float, int]] = deque()
        self.num_tokens = 0

    def observe(self, step: Step, took_s: float, *, num_kept: int) -> None:
        """A step has run, and so many pages of ended requests are kept."""
        self.step_s.observe(took_s)
        for seq in step.admitted:
            self.queue_s.observe(seq.admitted_at - seq.arrived_at)
            self.reused_tokens.inc(seq.num_reused)
        self.preemptions.inc(len(step.preempted))
        self.kept_pages.set(num_kept)
        self.prefill_tokens.inc(sum(c.end - c.start for c in step.chunks[step.num_decode :]))

    def count_tokens(self, num_tokens: int, now: float) -> None:
        self.tokens.inc(num_tokens)
        self.num_tokens += num_tokens
        self._marks.append((now, num_tokens))
        while self._marks and self._marks[0][0] < now - RATE_WINDOW_S:
            self._marks.popleft()

    def tokens_per_s(self, now: float) -> float:
        """Sampled tokens per second over the last `RATE_WINDOW_S` seconds."""
        return sum(n for at, n in self._marks.copy() if at >= now - RATE_WINDOW_S) / RATE_WINDOW_S

    def text(self) -> bytes:
        return generate_latest(self.registry)
