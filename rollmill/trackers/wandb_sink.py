"""Weights & Biases: a row's number is its W&B step, which W&B takes only in rising order, so that no row counts twice.

Every role has its own step metric; W&B's own step only counts rows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

import wandb

from rollmill.trackers.sink import Row, Target
from rollmill.trackers.wandb_log import newest_step

log = logging.getLogger("rollmill.trackers")
FLUSH_S = 30.0


class WandbSink:
    """Online, or offline with WANDB_MODE=offline; then `wandb sync` sends the folders, of which each process leaves one.

    W&B gathers rows in a process of its own for some seconds. When that dies with us they are gone, hence `num_there`.
    """

    def __init__(self, target: Target, mark: dict[str, int]) -> None:
        self._names = target.names
        self._roles: set[str] = set()
        target.out.mkdir(parents=True, exist_ok=True)
        logs = _logs(target)
        # Numbers of this process and this machine would be those of the copier, not of the run.
        quiet = wandb.Settings(
            x_disable_stats=True, x_disable_machine_info=True, disable_git=True, save_code=False, console="off", silent=True
        )
        self._run = wandb.init(
            project=target.project, id=target.run_id, name=target.name, dir=target.out, config=target.config, resume="allow", settings=quiet
        )
        self._is_offline = self._run.offline
        self.num_there: int | None = 1 + max(map(newest_step, logs), default=-1) if self._is_offline else self._run.step
        self._next = self.num_there or 0
        self._num_written = 0

    def write(self, rows: Sequence[Row]) -> dict[str, int]:
        for row in rows:
            if row.number < self._next:
                continue
            self._next = row.number + 1
            self._num_written += 1
            self._define(row.role)
            values = {self._names.of(row.role, name): value for name, value in row.values.items()}
            self._run.log({**values, self._names.axis(row.role): row.step, "_timestamp": row.t}, step=row.number, commit=True)
        return {"num_rows": self._next}

    def close(self) -> None:
        log_file = Path(self._run.dir).parent / f"run-{self._run.id}.wandb"
        self._run.finish()
        if self._num_written and self._is_offline:
            _wait_for(log_file, self._next - 1)

    def _define(self, role: str) -> None:
        if role in self._roles:
            return
        self._roles.add(role)
        axis = self._names.axis(role)
        self._run.define_metric(axis, hidden=True)
        for name in (f"{role}/*", *self._names.aliases_of(role)):
            self._run.define_metric(name, step_metric=axis)


def _wait_for(path: Path, step: int) -> None:
    """W&B's `finish` returns before its process has written the file, and the next start reads from it which rows are there."""
    until = time.monotonic() + FLUSH_S
    while newest_step(path) < step:
        if time.monotonic() > until:
            log.warning("W&B has not written row %d to %s within %.0f s; what is missing is sent again next time", step, path, FLUSH_S)
            return
        time.sleep(0.02)


def _logs(target: Target) -> list[Path]:
    """What earlier processes wrote offline; taken before W&B opens one more."""
    return list((target.out / "wandb").glob(f"offline-run-*/run-{target.run_id}.wandb"))
