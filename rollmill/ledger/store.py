"""One process's handle on the ledger file: whole transactions, guarded moves and their events; knows no side's rules."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from rollmill.ledger.blobs import BlobStore
from rollmill.ledger.rows import EpisodeRow, GroupRow
from rollmill.ledger.schema import connect, sqlite_errors_in_words
from rollmill.ledger.transitions import IllegalTransition, check_episode_move, check_group_move
from rollmill.records import BlobRef, Boundary, CancelReason, DropReason, EpisodeState, Grade, GroupState, Role, StopReason

GROUP_COLUMNS = ", ".join(GroupRow.__struct_fields__)
EPISODE_COLUMNS = (
    "episode_id, group_id, slot, attempt, state, queued_at, started_at, ended_at, grade, stop, blob_digest, blob_bytes, "
    "min_version, max_version, num_tokens, num_sampled, boundary, cancel_reason, message"
)


class Store:
    """A connection with a role. Threads of a process may share it; each call is one transaction or one consistent read."""

    def __init__(self, run_dir: Path, role: Role, *, read_only: bool) -> None:
        self.run_dir = run_dir
        self.role = role
        self.path = run_dir / "ledger.db"
        self.blobs = BlobStore(run_dir / "blobs")
        self._lock = threading.RLock()
        self._conn = connect(self.path, read_only=read_only)
        self._num_commits = 0

    def close(self) -> None:
        with self._lock:
            self._conn.close()

    def data_version(self) -> int:
        """A number that changes whenever anyone, this handle included, has committed something; costs microseconds."""
        with self._lock:
            return int(self._one("PRAGMA data_version")[0]) + self._num_commits

    @contextmanager
    def _write(self, *, durable: bool = False) -> Iterator[None]:
        """One transaction: all of it or nothing. With `durable` it, and with it every earlier one, also survives a power cut."""
        with self._lock, sqlite_errors_in_words(self.path):
            assert not self._conn.in_transaction, "ledger calls do not nest"
            if durable:
                self._conn.execute("PRAGMA synchronous = FULL")
            try:
                self._conn.execute("BEGIN IMMEDIATE")
                yield
                self._conn.execute("COMMIT")
                self._num_commits += 1
            finally:
                # SQLite has already rolled back by itself after some errors, such as a full disk.
                if self._conn.in_transaction:
                    self._conn.execute("ROLLBACK")
                if durable:
                    self._conn.execute("PRAGMA synchronous = NORMAL")

    @contextmanager
    def _read(self) -> Iterator[None]:
        """Several reads of one and the same state."""
        with self._lock, sqlite_errors_in_words(self.path):
            assert not self._conn.in_transaction, "ledger calls do not nest"
            self._conn.execute("BEGIN")
            try:
                yield
            finally:
                self._conn.execute("ROLLBACK")

    def _all(self, sql: str, args: Sequence[Any] = ()) -> list[Any]:
        with self._lock, sqlite_errors_in_words(self.path):
            return self._conn.execute(sql, args).fetchall()

    def _one(self, sql: str, args: Sequence[Any] = ()) -> Any:
        with self._lock, sqlite_errors_in_words(self.path):
            return self._conn.execute(sql, args).fetchone()

    def _event(self, now: float, kind: str, subject: str, /, **detail: object) -> None:
        self._conn.execute(
            "INSERT INTO events (time, role, kind, subject, detail) VALUES (?, ?, ?, ?, ?)",
            (now, self.role, kind, subject, msgspec.json.encode(detail).decode()),
        )

    def _require_role(self, owner: Role, subject: str, current: str, wanted: str) -> None:
        if self.role is not owner:
            raise IllegalTransition(subject, current, wanted, self.role, f"only {owner} owns this step")

    def _move_episode(self, episode_id: str, wanted: EpisodeState, now: float, *, values: dict[str, Any], **detail: object) -> EpisodeRow:
        """Move an episode inside the running transaction; return the row as it was before."""
        before = self._episode(episode_id)
        if before is None:
            raise IllegalTransition(episode_id, "unknown", wanted, self.role, "no such episode")
        check_episode_move(episode_id, before.state, wanted, self.role)
        self._update("episodes", "episode_id", episode_id, before.state, {"state": wanted, **values})
        self._event(now, f"episode.{wanted}", episode_id, **detail)
        return before

    def _move_group(
        self, group_id: str, wanted: GroupState, now: float, *, values: dict[str, Any], reason: DropReason | None = None, **detail: object
    ) -> GroupRow:
        """Move a group inside the running transaction; return the row as it was before."""
        before = self._group(group_id)
        if before is None:
            raise IllegalTransition(group_id, "unknown", wanted, self.role, "no such group")
        check_group_move(group_id, before.state, wanted, self.role, reason)
        self._update("groups", "group_id", group_id, before.state, {"state": wanted, **values})
        self._event(now, f"group.{wanted}", group_id, **detail)
        return before

    def _update(self, table: str, key: str, subject: str, current: str, values: dict[str, Any]) -> None:
        assert self._conn.in_transaction
        sets = ", ".join(f"{column} = ?" for column in values)
        cursor = self._conn.execute(f"UPDATE {table} SET {sets} WHERE {key} = ? AND state = ?", (*values.values(), subject, current))
        assert cursor.rowcount == 1, f"{subject} changed under our own write lock"

    def _num_steps_cut(self) -> int:
        # Steps have no gaps, so two index look-ups count them; COUNT(*) would walk the table at every opening.
        return int(self._one("SELECT COALESCE((SELECT MAX(step) FROM batches) - (SELECT MIN(step) FROM batches) + 1, 0)")[0])

    def _group(self, group_id: str) -> GroupRow | None:
        row = self._one(f"SELECT {GROUP_COLUMNS} FROM groups WHERE group_id = ?", (group_id,))
        return None if row is None else group_row(row)

    def _episode(self, episode_id: str) -> EpisodeRow | None:
        row = self._one(f"SELECT {EPISODE_COLUMNS} FROM episodes WHERE episode_id = ?", (episode_id,))
        return None if row is None else episode_row(row)

    def _groups(self, rest: str, args: Sequence[Any] = ()) -> list[GroupRow]:
        return [group_row(row) for row in self._all(f"SELECT {GROUP_COLUMNS} FROM groups {rest}", args)]

    def _episodes(self, rest: str, args: Sequence[Any] = ()) -> list[EpisodeRow]:
        return [episode_row(row) for row in self._all(f"SELECT {EPISODE_COLUMNS} FROM episodes {rest}", args)]


def group_row(row: sqlite3.Row | tuple[Any, ...]) -> GroupRow:
    """The record of one row of GROUP_COLUMNS."""
    v = dict(zip(GroupRow.__struct_fields__, row, strict=True))
    v["state"] = GroupState(v["state"])
    v["drop_reason"] = None if v["drop_reason"] is None else DropReason(v["drop_reason"])
    v["stats"] = None if v["stats"] is None else msgspec.json.decode(v["stats"], type=dict[str, float])
    return GroupRow(**v)


def episode_row(row: sqlite3.Row | tuple[Any, ...]) -> EpisodeRow:
    """The record of one row of EPISODE_COLUMNS."""
    episode_id, group_id, slot, attempt, state, queued_at, started_at, ended_at, grade, stop, digest, num_bytes, *rest = row
    oldest, newest, num_tokens, num_sampled, boundary, cancel_reason, message = rest
    return EpisodeRow(
        episode_id=episode_id,
        group_id=group_id,
        slot=slot,
        attempt=attempt,
        state=EpisodeState(state),
        queued_at=queued_at,
        started_at=started_at,
        ended_at=ended_at,
        grade=None if grade is None else msgspec.msgpack.decode(grade, type=Grade),
        stop=None if stop is None else StopReason(stop),
        blob=None if digest is None else BlobRef(digest=digest, num_bytes=num_bytes),
        versions=None if oldest is None else (oldest, newest),
        num_tokens=num_tokens,
        num_sampled=num_sampled,
        boundary=None if boundary is None else Boundary(boundary),
        cancel_reason=None if cancel_reason is None else CancelReason(cancel_reason),
        message=message,
    )
