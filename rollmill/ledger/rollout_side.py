"""The rollout role's half of the ledger: opening groups and ending each episode exactly once; knows nothing of batches."""

from __future__ import annotations

import math

from rollmill.ledger.rows import EpisodeRow, GroupRow
from rollmill.ledger.store import Store
from rollmill.ledger.transitions import IllegalTransition
from rollmill.records import (
    BlobRef,
    Boundary,
    CancelReason,
    DropReason,
    EpisodeState,
    Grade,
    GroupState,
    Role,
    StopReason,
    Task,
    encode,
)


def group_id_of(seq: int) -> str:
    return f"g{seq:06d}"


def episode_id_of(group_id: str, slot: int, attempt: int) -> str:
    return f"{group_id}.{slot}.{attempt}"


class RolloutSide(Store):
    def open_group(self, task: Task, group_size: int, now: float) -> GroupRow:
        """Add a group with the next seq and queue the first attempt of each of its slots."""
        if group_size < 1:
            raise ValueError(f"group_size is {group_size}; a group needs at least 1 slot")
        self._require_role(Role.ROLLOUT, "a new group", "absent", GroupState.OPEN)
        with self._write():
            seq = self._one("SELECT COALESCE(MAX(seq) + 1, 0) FROM groups")[0]
            group_id = group_id_of(seq)
            self._conn.execute(
                "INSERT INTO groups (seq, group_id, task_id, group_size, state, opened_at, opened_steps_cut, task) VALUES (?,"
                " ?, ?, ?, ?, ?, ?, ?)",
                (seq, group_id, task.task_id, group_size, GroupState.OPEN, now, self._num_steps_cut(), encode(task)),
            )
            self._event(now, "group.open", group_id, task_id=task.task_id, group_size=group_size)
            for slot in range(group_size):
                self._queue(group_id, seq, slot, 0, now)
            row = self._group(group_id)
        assert row is not None
        return row

    def start_episode(self, episode_id: str, now: float) -> None:
        """QUEUED -> RUNNING."""
        with self._write():
            self._move_episode(episode_id, EpisodeState.RUNNING, now, values={"started_at": now})

    def finish_episode(
        self,
        episode_id: str,
        *,
        grade: Grade,
        stop: StopReason,
        blob: BlobRef,
        versions: tuple[int, int],
        num_tokens: int,
        num_sampled: int,
        now: float,
    ) -> None:
        """RUNNING -> GRADED. The blob must have been put before: from here on the episode is promised to the trainer."""
        oldest, newest = versions
        if not math.isfinite(grade.reward):
            raise ValueError(f"{episode_id}: reward is {grade.reward}; a reward must be finite, record a grader failure instead")
        if oldest > newest:
            raise ValueError(f"{episode_id}: versions are {versions}; the oldest comes first")
        if not self.blobs.has(blob):
            raise ValueError(f"{episode_id}: no blob {blob.digest} in {self.blobs.root}; put the trace before finishing the episode")
        with self._write():
            before = self._move_episode(
                episode_id,
                EpisodeState.GRADED,
                now,
                values={
                    "ended_at": now,
                    "grade": encode(grade),
                    "reward": grade.reward,
                    "success": int(grade.success),
                    "stop": stop,
                    "blob_digest": blob.digest,
                    "blob_bytes": blob.num_bytes,
                    "min_version": oldest,
                    "max_version": newest,
                    "num_tokens": num_tokens,
                    "num_sampled": num_sampled,
                },
                reward=grade.reward,
                success=grade.success,
                versions=versions,
            )
            # An episode that sampled nothing (-1) has no version and cannot make its group older.
            self._conn.execute(
                "UPDATE groups SET num_graded = num_graded + 1, reward_sum = reward_sum + ?, num_success = num_success + ?,"
                " min_version = CASE WHEN ? < 0 THEN min_version ELSE MIN(COALESCE(min_version, ?), ?) END WHERE group_id = ?",
                (grade.reward, int(grade.success), oldest, oldest, oldest, before.group_id),
            )

    def fail_episode(self, episode_id: str, boundary: Boundary, message: str, now: float) -> None:
        """RUNNING -> FAILED: our own machinery broke at `boundary`; never a reward."""
        values = {"ended_at": now, "boundary": boundary, "message": message}
        with self._write():
            self._move_episode(episode_id, EpisodeState.FAILED, now, values=values, boundary=boundary, message=message)

    def cancel_episode(self, episode_id: str, reason: CancelReason, now: float) -> None:
        """QUEUED or RUNNING -> CANCELLED."""
        with self._write():
            self._cancel(episode_id, reason, now)

    def retry_episode(self, episode_id: str, now: float) -> EpisodeRow:
        """Queue the next attempt of a slot whose latest attempt failed or was cancelled."""
        self._require_role(Role.ROLLOUT, episode_id, "ended", EpisodeState.QUEUED)
        with self._write():
            row = self._retry(episode_id, now)
        return row

    def settle_group(self, group_id: str, now: float) -> GroupState:
        """OPEN -> READY when more than half of the slots are graded, else DROPPED(too_few_valid); refuses while a slot is live."""
        with self._write():
            group = self._group(group_id)
            if group is not None and group.state is GroupState.OPEN and (live := self._live_of(group_id)):
                why = f"episode {live[0].episode_id} is still {live[0].state}"
                raise IllegalTransition(group_id, group.state, "settled", self.role, why)
            if group is None or group.num_graded * 2 > group.group_size:
                self._move_group(group_id, GroupState.READY, now, values={"ready_at": now})
                return GroupState.READY
            self._drop(group_id, DropReason.TOO_FEW_VALID, now)
            return GroupState.DROPPED

    def drop_group(self, group_id: str, reason: DropReason, now: float) -> None:
        """Give a group up and cancel what still runs in it.

        An OPEN group is the rollout role's to drop; a READY one the trainer's, or, when stale, also rollout's; an ADMITTED one
        the trainer's, and only for a corrupt blob.
        """
        with self._write():
            self._drop(group_id, reason, now)

    def recover_rollout(self, now: float) -> list[GroupRow]:
        """After a crash: what was running is cancelled and queued again, in one transaction; returns every open group."""
        self._require_role(Role.ROLLOUT, "the running episodes", EpisodeState.RUNNING, EpisodeState.CANCELLED)
        with self._write():
            for episode in self._episodes("WHERE state = 'running' ORDER BY seq, slot"):
                self._cancel(episode.episode_id, CancelReason.PROCESS_DIED, now)
                self._retry(episode.episode_id, now)
        return self._groups("WHERE state = 'open' ORDER BY seq")

    def _queue(self, group_id: str, seq: int, slot: int, attempt: int, now: float) -> None:
        self._conn.execute(
            "INSERT INTO episodes (episode_id, group_id, seq, slot, attempt, state, queued_at) VALUES (?, ?, ?, ?, ?, ?, ?)",
            (episode_id_of(group_id, slot, attempt), group_id, seq, slot, attempt, EpisodeState.QUEUED, now),
        )

    def _cancel(self, episode_id: str, reason: CancelReason, now: float) -> None:
        self._move_episode(episode_id, EpisodeState.CANCELLED, now, values={"ended_at": now, "cancel_reason": reason}, reason=reason)

    def _retry(self, episode_id: str, now: float) -> EpisodeRow:
        episode = self._episode(episode_id)
        if episode is None:
            raise IllegalTransition(episode_id, "unknown", "retried", self.role, "no such episode")
        if episode.state not in (EpisodeState.FAILED, EpisodeState.CANCELLED):
            raise IllegalTransition(episode_id, episode.state, "retried", self.role, "only a failed or cancelled attempt is retried")
        group = self._group(episode.group_id)
        assert group is not None
        if group.state is not GroupState.OPEN:
            raise IllegalTransition(episode_id, episode.state, "retried", self.role, f"group {group.group_id} is {group.state}")
        last = self._episodes("WHERE seq = ? AND slot = ? ORDER BY attempt DESC LIMIT 1", (group.seq, episode.slot))[0]
        if last.attempt != episode.attempt:
            why = f"the slot's latest attempt is {last.episode_id} ({last.state})"
            raise IllegalTransition(episode_id, episode.state, "retried", self.role, why)
        self._queue(group.group_id, group.seq, episode.slot, episode.attempt + 1, now)
        retry_id = episode_id_of(group.group_id, episode.slot, episode.attempt + 1)
        self._event(now, "episode.queued", retry_id, after=episode_id)
        row = self._episode(retry_id)
        assert row is not None
        return row

    def _drop(self, group_id: str, reason: DropReason, now: float) -> None:
        values = {"drop_reason": reason, "ended_at": now}
        self._move_group(group_id, GroupState.DROPPED, now, values=values, reason=reason, drop_reason=reason)
        for episode in self._live_of(group_id):
            self._cancel(episode.episode_id, CancelReason.STALE if reason is DropReason.STALE else CancelReason.GROUP_DROPPED, now)

    def _live_of(self, group_id: str) -> list[EpisodeRow]:
        return self._episodes(
            "WHERE seq = (SELECT seq FROM groups WHERE group_id = ?) AND state IN ('queued', 'running') ORDER BY slot", (group_id,)
        )
