"""How many episodes may run at once: additive increase, multiplicative decrease. A pure state machine, fed by `observe`."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rollmill.engine.protocol import Pressure

GROW = 4
"""Slots added per observation while the limit binds and nothing is queued at the replicas."""
SHRINK = 0.8
"""Factor on the limit when requests queue or the cache is nearly full."""
KV_SOFT, KV_HARD = 0.90, 0.97


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    limit: int
    num_to_cancel: int
    """Youngest episodes to cancel now, because the cache is about to overflow."""


class Concurrency:
    """Grows only while the limit is what holds us back, so an idle run does not inflate it."""

    def __init__(self, *, most: int, start: int | None = None) -> None:
        assert most >= 1
        self._most = most
        self.limit = min(most, start if start is not None else max(1, most // 2))

    def observe(self, pressures: Sequence[Pressure], num_running: int) -> Verdict:
        """One look at the replicas. Without any answer nothing changes: no news is no reason to grow."""
        num_to_cancel = 0
        if pressures:
            worst_kv = max(p.kv_used_frac for p in pressures)
            num_queued = sum(p.waiting for p in pressures)
            num_slots = sum(p.slots for p in pressures)
            if num_queued > max(1, num_slots // 8) or worst_kv > KV_SOFT:
                self.limit = max(1, int(self.limit * SHRINK))
                if worst_kv > KV_HARD:
                    num_to_cancel = max(0, num_running - self.limit)
            elif num_running >= self.limit - 1:
                self.limit = min(self._most, self.limit + GROW)
        return Verdict(limit=self.limit, num_to_cancel=num_to_cancel)
