"""The staleness bound that batches are cut under: the run file's, or one that follows what each step measured; the ledger keeps it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from rollmill.config import RunConfig
from rollmill.ledger import Ledger, Pacing
from rollmill.ledger.staleness import Limits, Reading, update
from rollmill.ledger.staleness_row import BoundRow

log = logging.getLogger("rollmill.trainer")


class Bound:
    """Read `pacing` for every cut, call `look` once after every step. A fixed bound never changes."""

    def __init__(self, config: RunConfig, ledger: Ledger) -> None:
        self._ledger = ledger
        self._num_groups, self._mode = config.trainer.groups_per_batch, config.run.mode
        self._limits = Limits.up_to(config.max_staleness) if config.is_staleness_auto else None
        self._state = None if self._limits is None else ledger.controller_state(self._limits)
        self._idle = ledger.idle_reported()
        self._idle_frac = 0.0
        self.versions = config.max_staleness if self._state is None else self._state.bound
        self.pacing = self._pacing()

    def look(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Decide what the next cut is made under, from the metrics of `step`."""
        if self._limits is None or self._state is None:
            return
        if (idle := self._ledger.idle_reported()) is not None:
            frac = idle.since(self._idle)
            # Rollouts report every few seconds; until they do, what they said last is the best that is known.
            self._idle, self._idle_frac = idle, self._idle_frac if frac is None else frac
        reading = Reading.from_metrics(metrics, rollout_idle_frac=self._idle_frac)
        if reading is None:
            return
        state = update(self._state, reading, self._limits)
        if not self._ledger.decide_bound(BoundRow(step=step, state=state), time.time()):
            # Trained again after a crash: its reading is in the state that the ledger holds.
            return
        self._state = state
        if state.bound != self.versions:
            log.info("step %d: the staleness bound goes from %d to %d (%s)", step, self.versions, state.bound, state.verdict)
            self.versions = state.bound
            self.pacing = self._pacing()

    def _pacing(self) -> Pacing:
        return Pacing.from_staleness(self.versions, self._num_groups, self._mode)
