"""Everything that only reads the ledger, for any role: rows by id, counts, held-out results and history."""

from __future__ import annotations

from typing import Any

import msgspec

from rollmill.ledger.rows import EpisodeRow, EvalSummary, EventRow, GroupResult, GroupRow, Outcome, Progress
from rollmill.ledger.store import Store
from rollmill.records import Boundary, CancelReason, DropReason, EpisodeState, GroupState, Role, Task


class Reading(Store):
    def group(self, group_id: str) -> GroupRow:
        row = self._group(group_id)
        if row is None:
            raise ValueError(f"no group {group_id!r} in {self.path}")
        return row

    def episode(self, episode_id: str) -> EpisodeRow:
        row = self._episode(episode_id)
        if row is None:
            raise ValueError(f"no episode {episode_id!r} in {self.path}")
        return row

    def task_of(self, group_id: str) -> Task:
        row = self._one("SELECT task FROM groups WHERE group_id = ?", (group_id,))
        if row is None:
            raise ValueError(f"no group {group_id!r} in {self.path}")
        return msgspec.msgpack.decode(row[0], type=Task)

    def tasks_opened(self) -> list[Task]:
        """The task of every group, in the order of opening. Reads them all: for a restart."""
        return [msgspec.msgpack.decode(task, type=Task) for (task,) in self._all("SELECT task FROM groups ORDER BY seq")]

    def group_results(self, first_seq: int) -> list[GroupResult]:
        """How the groups from `first_seq` on ended that are ready, or were dropped before they were; later moves change nothing here."""
        rows = self._all(
            "SELECT g.seq, CASE WHEN g.ready_at IS NULL THEN 0 ELSE g.num_graded END, g.num_success, COALESCE((SELECT MIN(e.reward) ="
            " MAX(e.reward) FROM episodes e WHERE e.seq = g.seq AND e.state = 'graded'), 0) FROM groups g WHERE g.seq >= ? AND"
            " (g.ready_at IS NOT NULL OR g.state = 'dropped') ORDER BY g.seq",
            (first_seq,),
        )
        return [GroupResult(seq=seq, num_graded=graded, num_success=success, is_flat=bool(flat)) for seq, graded, success, flat in rows]

    def open_groups(self) -> list[GroupRow]:
        return self._groups("WHERE state = 'open' ORDER BY seq")

    def episodes_of(self, group_id: str) -> list[EpisodeRow]:
        """All attempts of a group, by slot and attempt."""
        return self._episodes("WHERE seq = (SELECT seq FROM groups WHERE group_id = ?) ORDER BY slot, attempt", (group_id,))

    def queued_episodes(self, limit: int) -> list[EpisodeRow]:
        """The oldest groups' queued episodes first."""
        return self._episodes("WHERE state = 'queued' ORDER BY seq, slot LIMIT ?", (limit,))

    def progress(self) -> Progress:
        with self._read():
            count: dict[str, Any] = dict(self._all("SELECT name, value FROM counters"))
            num_steps_cut = self._num_steps_cut()
            committed = self._one("SELECT (SELECT MAX(step) FROM checkpoints) - (SELECT MIN(step) FROM batches) + 1")[0]
            version = self._one("SELECT MAX(version) FROM versions")[0]
        return Progress(
            num_opened=sum(count.get(f"group.{state}", 0) for state in GroupState),
            num_open=count.get("group.open", 0),
            num_ready=count.get("group.ready", 0),
            num_admitted=count.get("group.admitted", 0),
            num_trained=count.get("group.trained", 0),
            num_dropped_by_reason={reason: count.get(f"drop.{reason}", 0) for reason in DropReason},
            num_dropped_admitted=count.get("dropped_from.admitted", 0),
            num_steps_cut=num_steps_cut,
            num_steps_committed=max(0, committed or 0),
            version=-1 if version is None else version,
            num_episodes_by_state={state: count.get(f"episode.{state}", 0) for state in EpisodeState},
            num_failed_by_boundary={boundary: count.get(f"fail.{boundary}", 0) for boundary in Boundary},
            num_cancelled_by_reason={reason: count.get(f"cancel.{reason}", 0) for reason in CancelReason},
            trained_outcome=_outcome(count, "outcome.trained"),
            dropped_outcome_by_reason={reason: _outcome(count, f"outcome.dropped.{reason}") for reason in DropReason},
        )

    def eval_summary(self, label: str) -> list[EvalSummary]:
        """One line per evaluated version, oldest first."""
        rows = self._all(
            "SELECT label, version, COUNT(*), SUM(success), AVG(reward), MAX(time) FROM evals WHERE label = ? GROUP BY"
            " version ORDER BY version",
            (label,),
        )
        return [EvalSummary(**dict(zip(EvalSummary.__struct_fields__, row, strict=True))) for row in rows]

    def num_evals_by_task(self, label: str, version: int) -> dict[str, int]:
        """How many results each task has already, so that an interrupted evaluation goes on where it stopped."""
        return dict(self._all("SELECT task_id, COUNT(*) FROM evals WHERE label = ? AND version = ? GROUP BY task_id", (label, version)))

    def newest_graded(self) -> str | None:
        """The id of the episode that was graded last."""
        found = self._events("WHERE kind = 'episode.graded' ORDER BY event_id DESC LIMIT ?", (1,))
        return found[0].subject if found else None

    def events(self, after: int = 0, limit: int = 1000) -> list[EventRow]:
        """The next `limit` events after event id `after`."""
        return self._events("WHERE event_id > ? ORDER BY event_id LIMIT ?", (after, limit))

    def history(self, subject: str) -> list[EventRow]:
        """All events about one id, oldest first."""
        return self._events("WHERE subject = ? ORDER BY event_id", (subject,))

    def referenced_blobs(self) -> set[str]:
        """The digest of every blob an episode or evaluation refers to, for `BlobStore.collect`."""
        sql = "SELECT blob_digest FROM episodes WHERE state = 'graded' UNION SELECT blob_digest FROM evals WHERE blob_digest IS NOT NULL"
        return {row[0] for row in self._all(sql)}

    def _events(self, rest: str, args: tuple[object, ...]) -> list[EventRow]:
        return [_event_row(row) for row in self._all(f"SELECT event_id, time, role, kind, subject, detail FROM events {rest}", args)]


def _outcome(count: dict[str, Any], prefix: str) -> Outcome:
    return Outcome(
        num_graded=count.get(f"{prefix}.num_graded", 0),
        reward_sum=float(count.get(f"{prefix}.reward_sum", 0.0)),
        num_success=count.get(f"{prefix}.num_success", 0),
    )


def _event_row(row: tuple[Any, ...]) -> EventRow:
    event_id, time, role, kind, subject, detail = row
    return EventRow(event_id=event_id, time=time, role=Role(role), kind=kind, subject=subject, detail=msgspec.json.decode(detail))
