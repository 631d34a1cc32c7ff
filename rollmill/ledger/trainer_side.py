"""The trainer role's half of the ledger: batches, the one commit that consumes them, and published versions; knows no episode."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rollmill.ledger.rows import CheckpointRow, GroupRow, VersionRow
from rollmill.ledger.store import Store
from rollmill.ledger.transitions import IllegalTransition
from rollmill.records import GroupState, Role


class TrainerSide(Store):
    def window(self, size: int) -> list[GroupRow]:
        """The oldest `size` live groups (OPEN or READY), oldest first."""
        return self._groups("WHERE state IN ('open', 'ready') ORDER BY seq LIMIT ?", (size,))

    def admit(self, step: int, group_ids: Sequence[str], *, version: int, now: float) -> None:
        """READY -> ADMITTED for all of `group_ids` or for none: batch `step`, cut while the trainer holds `version`.

        Steps follow each other without gaps; the first one is free, or follows the initial checkpoint.
        """
        self._require_role(Role.TRAINER, f"batch {step}", "absent", "cut")
        if not group_ids:
            raise ValueError(f"batch {step} has no groups")
        with self._write():
            last, steps_cut = self._one("SELECT MAX(step) FROM batches")[0], self._num_steps_cut()
            head = self._head()
            expected = last + 1 if last is not None else (head.step + 1 if head is not None else step)
            if step != expected:
                raise IllegalTransition(f"batch {step}", "absent", "cut", self.role, f"the next batch is {expected}")
            self._conn.execute("INSERT INTO batches VALUES (?, ?, ?, ?)", (step, version, len(group_ids), now))
            for group_id in group_ids:
                self._admit(group_id, step, steps_cut, version, now)
            self._conn.execute(
                "UPDATE groups SET num_overtaken = num_overtaken + (SELECT COUNT(*) FROM groups b WHERE b.step = ? AND b.seq > groups.seq)"
                " WHERE state IN ('open', 'ready')",
                (step,),
            )
            self._event(now, "batch.cut", str(step), version=version, groups=list(group_ids))

    def _admit(self, group_id: str, step: int, steps_cut: int, version: int, now: float) -> None:
        group = self._group(group_id)
        staleness = None if group is None or group.min_version is None else version - group.min_version
        if staleness is not None and staleness < 0:
            raise ValueError(f"group {group_id} has tokens newer than version {version}; pass the version the trainer holds now")
        age = None if group is None else steps_cut - group.opened_steps_cut
        values = {"step": step, "version": version, "staleness": staleness, "age": age}
        self._move_group(group_id, GroupState.ADMITTED, now, values=values, step=step, staleness=staleness)

    def batch(self, step: int) -> list[GroupRow]:
        """The groups of one batch, oldest first, whatever became of them."""
        return self._groups("WHERE step = ? ORDER BY seq", (step,))

    def pending_batches(self) -> dict[int, list[GroupRow]]:
        """Batches cut but not yet committed, by step: what to train again, in this order, after a crash."""
        batches: dict[int, list[GroupRow]] = {}
        for group in self._groups("WHERE state = 'admitted' ORDER BY step, seq"):
            assert group.step is not None
            batches.setdefault(group.step, []).append(group)
        return batches

    def commit_step(self, checkpoint: CheckpointRow, now: float, stats_by_group: dict[str, dict[str, float]] | None = None) -> None:
        """Record `checkpoint` and consume every batch inside it, in one transaction that survives a power cut."""
        subject = f"checkpoint {checkpoint.step}"
        self._require_role(Role.TRAINER, subject, "absent", "committed")
        with self._write(durable=True):
            head = self._head()
            if head is not None and checkpoint.step <= head.step:
                raise IllegalTransition(subject, "absent", "committed", self.role, f"step {head.step} is committed already")
            last = self._one("SELECT MAX(step) FROM batches")[0]
            if last is not None and checkpoint.step > last:
                raise IllegalTransition(subject, "absent", "committed", self.role, f"the last batch cut is {last}")
            self._conn.execute(
                "INSERT INTO checkpoints VALUES (?, ?, ?, ?, ?, ?)",
                (checkpoint.step, checkpoint.version, checkpoint.path, checkpoint.digest, checkpoint.wall_s, now),
            )
            consumed = self._all("SELECT group_id FROM groups WHERE state = 'admitted' AND step <= ?", (checkpoint.step,))
            for (group_id,) in consumed:
                stats = (stats_by_group or {}).get(group_id)
                values = {"ended_at": now, "stats": None if stats is None else msgspec.json.encode(stats).decode()}
                self._move_group(group_id, GroupState.TRAINED, now, values=values, checkpoint=checkpoint.step)
            self._event(now, "checkpoint.committed", str(checkpoint.step), version=checkpoint.version, num_groups=len(consumed))

    def head_checkpoint(self) -> CheckpointRow | None:
        """The newest committed checkpoint: where a restarted trainer goes on."""
        return self._head()

    def publish_version(self, version: int, step: int, kind: str, num_bytes: int, now: float) -> None:
        """Record a published snapshot. A number is never used twice, not even for a step trained again after a crash."""
        self._require_role(Role.TRAINER, f"version {version}", "absent", "published")
        # Durable, because replicas may hold the snapshot already: a power cut must not free its number.
        with self._write(durable=True):
            last = self._one("SELECT MAX(version) FROM versions")[0]
            if version < 0 or (last is not None and version <= last):
                why = f"the next version must be above {-1 if last is None else last}"
                raise IllegalTransition(f"version {version}", "absent", "published", self.role, why)
            self._conn.execute("INSERT INTO versions VALUES (?, ?, ?, ?, ?)", (version, step, kind, num_bytes, now))
            self._event(now, "version.published", str(version), step=step, kind=kind, num_bytes=num_bytes)

    def versions(self) -> list[VersionRow]:
        rows = self._all("SELECT version, step, kind, num_bytes, published_at FROM versions ORDER BY version")
        return [VersionRow(**dict(zip(VersionRow.__struct_fields__, row, strict=True))) for row in rows]

    def _head(self) -> CheckpointRow | None:
        row = self._one("SELECT step, version, path, digest, wall_s, committed_at FROM checkpoints ORDER BY step DESC LIMIT 1")
        return None if row is None else CheckpointRow(**dict(zip(CheckpointRow.__struct_fields__, row, strict=True)))
