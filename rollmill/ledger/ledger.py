"""The ledger as its users see it: one handle per process, opened with the role that decides what it may change."""

from __future__ import annotations

import math
from pathlib import Path

from rollmill.ledger import schema
from rollmill.ledger.audit import audit
from rollmill.ledger.reading import Reading
from rollmill.ledger.rollout_side import RolloutSide
from rollmill.ledger.staleness_row import StalenessSide
from rollmill.ledger.trainer_side import TrainerSide
from rollmill.records import BlobRef, Role


class Ledger(RolloutSide, TrainerSide, StalenessSide, Reading):
    """The durable state of every episode, group and snapshot of one run.

    with Ledger.create_or_open(run_dir, Role.ROLLOUT) as ledger:
        group = ledger.open_group(task, 8, now=clock())
    """

    @classmethod
    def create_or_open(cls, run_dir: Path | str, role: Role) -> Ledger:
        """Open `<run_dir>/ledger.db`, making it first when there is none. Several processes may do this at once."""
        run_dir = Path(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        if not (run_dir / "ledger.db").exists():
            schema.create(run_dir / "ledger.db")
        return cls(run_dir, Role(role), read_only=False)

    @classmethod
    def open_reader(cls, run_dir: Path | str) -> Ledger:
        """Open an existing ledger without the right to write; ValueError when there is none."""
        run_dir = Path(run_dir)
        if not (run_dir / "ledger.db").exists():
            raise ValueError(f"no ledger in {run_dir}; is this a run directory?")
        return cls(run_dir, Role.SUPERVISOR, read_only=True)

    def add_eval(self, label: str, version: int, task_id: str, success: bool, reward: float, blob: BlobRef | None, now: float) -> None:
        """Record one held-out episode. It never enters a group, so it can never be trained on; any role may add one."""
        if not math.isfinite(reward):
            raise ValueError(f"eval {label} of {task_id}: reward is {reward}; a reward must be finite")
        with self._write():
            self._conn.execute(
                "INSERT INTO evals (label, version, task_id, success, reward, blob_digest, blob_bytes, time) VALUES (?, ?, ?,"
                " ?, ?, ?, ?, ?)",
                (label, version, task_id, int(success), reward, blob and blob.digest, blob and blob.num_bytes, now),
            )

    def audit(self) -> list[str]:
        """Every violated invariant in plain words; empty when the ledger is sound. Reads everything: for tools and tests."""
        with self._read():
            return audit(self._conn, self.blobs)

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
