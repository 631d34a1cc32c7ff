"""What other threads ask of the engine's thread, which takes it in between two steps: requests, cancellations, new weights, the end.

A request that is let in is open until the engine's thread says that it has ended: neither the bound nor the end of everything misses
one. Once shut, it lets nothing in. Knows no model, no version and no phase.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

from rollmill.engine.scheduler import Sequence
from rollmill.weights import Fingerprint


class QueueFull(RuntimeError):
    """As many requests are open as may be; try again later or elsewhere."""


class Offer:
    """New weights, staged. `swap` changes the live ones and proves them, or puts the old ones back and raises."""

    def __init__(self, version: int, swap: Callable[[], Fingerprint]) -> None:
        self.version, self.swap, self.offered_at = version, swap, time.monotonic()
        self.outcome: Future[bool] = Future()
        """Whether they are served."""


class Asked(NamedTuple):
    """What came since the last time."""

    requests: list[Sequence]
    cancelled: list[Sequence]
    """Some may have ended by themselves."""


class Inbox:
    """At most `max_open` requests are open at a time, however many of them run."""

    def __init__(self, max_open: int) -> None:
        self._max_open = max_open
        self._news = threading.Condition()
        self._open: dict[int, Sequence] = {}
        self._requests: list[Sequence] = []
        self._cancelled: list[Sequence] = []
        self._offer: Offer | None = None
        self._is_shut = False

    # Any thread.

    def put(self, seq: Sequence) -> bool:
        """Let a request in. False when the inbox is shut; QueueFull when there are too many."""
        with self._news:
            if self._is_shut:
                return False
            if len(self._open) >= self._max_open:
                raise QueueFull(f"{len(self._open)} requests run or wait already, {self._max_open} at most; try again later")
            self._open[seq.key] = seq
            self._requests.append(seq)
            self._news.notify()
        return True

    def cancel(self, seq: Sequence) -> None:
        with self._news:
            self._cancelled.append(seq)
            self._news.notify()

    def offer(self, offer: Offer) -> None:
        with self._news:
            assert self._offer is None, "one swap at a time"
            if self._is_shut:
                offer.outcome.set_result(False)
            else:
                self._offer = offer
                self._news.notify()

    def shut(self) -> None:
        with self._news:
            self._is_shut = True
            self._news.notify()

    @property
    def is_shut(self) -> bool:
        return self._is_shut

    @property
    def has_offer(self) -> bool:
        return self._offer is not None

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_untaken(self) -> int:
        """Open requests that the engine's thread has not seen."""
        return len(self._requests)

    # The engine's thread.

    def take(self, *, is_idle: bool) -> Asked | None:
        """What was asked; sleeps until there is something when `is_idle`. None: it is time to stop."""
        with self._news:
            while is_idle and not (self._is_shut or self._requests or self._cancelled or self._offer):
                self._news.wait()
            if self._is_shut:
                return None
            asked = Asked(self._requests, self._cancelled)
            self._requests, self._cancelled = [], []
        return asked

    def take_offer(self, may_swap: Callable[[Offer], bool]) -> Offer | None:
        """The offer, if there is one whose time has come; otherwise it stays."""
        # Nobody else takes it, and nobody replaces one that is there.
        offer = self._offer
        if offer is None or not may_swap(offer):
            return None
        self._offer = None
        return offer

    def ended(self, seq: Sequence) -> None:
        with self._news:
            del self._open[seq.key]

    def drain(self) -> list[Sequence]:
        """Shut it; whoever is still open is the caller's to end, and an offer is refused."""
        with self._news:
            self._is_shut = True
            left, self._open = list(self._open.values()), {}
            self._requests, self._cancelled = [], []
            offer, self._offer = self._offer, None
        if offer:
            offer.outcome.set_result(False)
        return left
