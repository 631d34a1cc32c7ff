"""What trainer and rollouts tell each other about staleness, a row each: the bound in force, decided by the trainer alone once per
step, and how much slot time stood empty at the gate, which only rollouts know."""

from __future__ import annotations

import msgspec

from rollmill.ledger.staleness import ControllerState, Limits, start
from rollmill.ledger.store import Store
from rollmill.ledger.transitions import IllegalTransition
from rollmill.records import Role

KEY = "staleness"
"""Of the bound's row in `meta`, and the subject of the events that tell each change."""
IDLE_KEY = "rollout_idle"


class BoundRow(msgspec.Struct, frozen=True, kw_only=True):
    """The bound in force and what the next decision needs."""

    step: int
    """The last optimiser step whose reading is in `state`."""
    state: ControllerState

    @property
    def bound(self) -> int:
        return self.state.bound


class IdleRow(msgspec.Struct, frozen=True, kw_only=True):
    """Slot time of one rollout process since it started, in shares of its limit times seconds.

    >>> IdleRow(started_at=5.0, idle_s=3.0, clock_s=10.0).since(IdleRow(started_at=5.0, idle_s=2.0, clock_s=8.0))
    0.5
    """

    started_at: float
    """Unix seconds: tells a restarted process, whose counts begin again, from one that went on."""
    idle_s: float
    """Empty because the gate was closed."""
    clock_s: float

    def since(self, before: IdleRow | None) -> float | None:
        """The idle share of what passed since `before`; None when nothing did."""
        idle_s, clock_s = self.idle_s, self.clock_s
        if before is not None and before.started_at == self.started_at:
            idle_s, clock_s = idle_s - before.idle_s, clock_s - before.clock_s
        return min(1.0, max(0.0, idle_s / clock_s)) if clock_s > 0 else None


class StalenessSide(Store):
    def report_idle(self, row: IdleRow) -> None:
        """Every few seconds, by the rollout role; not an event: the metrics files keep the history."""
        self._require_role(Role.ROLLOUT, "the idle slots", "absent", "reported")
        with self._write():
            self._conn.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (IDLE_KEY, msgspec.json.encode(row).decode()))

    def idle_reported(self) -> IdleRow | None:
        row = self._one("SELECT value FROM meta WHERE key = ?", (IDLE_KEY,))
        return None if row is None else msgspec.json.decode(row[0], type=IdleRow)

    def bound_in_force(self) -> BoundRow | None:
        """One look-up by key; None before the first decision, and in runs with a fixed bound."""
        row = self._one("SELECT value FROM meta WHERE key = ?", (KEY,))
        return None if row is None else msgspec.json.decode(row[0], type=BoundRow)

    def controller_state(self, limits: Limits) -> ControllerState:
        """What the last decision left, cut to today's hard maximum, or the start: the same for whoever asks with the same limits."""
        row = self.bound_in_force()
        if row is None:
            return start(limits)
        return msgspec.structs.replace(row.state, bound=min(row.bound, limits.hard_max))

    def decide_bound(self, row: BoundRow, now: float) -> bool:
        """Put `row` in force; False, and nothing changes, for a step decided before: one trained again after a crash."""
        self._require_role(Role.TRAINER, f"the bound of step {row.step}", "absent", "decided")
        if row.bound < 1:
            raise IllegalTransition(f"the bound of step {row.step}", "absent", "decided", self.role, f"{row.bound} is below 1")
        with self._write():
            found = self._one("SELECT value FROM meta WHERE key = ?", (KEY,))
            before = None if found is None else msgspec.json.decode(found[0], type=BoundRow)
            if before is not None and row.step <= before.step:
                return False
            self._conn.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (KEY, msgspec.json.encode(row).decode()))
            if before is None or before.bound != row.bound:
                detail = {"step": row.step, "before": before and before.bound, "why": row.state.verdict}
                self._event(now, "staleness.bound", KEY, bound=row.bound, **detail)
        return True
