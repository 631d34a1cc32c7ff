"""Keeps every model call in `calls.db` without the caller ever waiting: a bounded queue, and one thread that commits in batches.

What does not fit is dropped and counted, never waited for. A killed process leaves a file that opens, with every batch that was committed.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from pathlib import Path
from typing import Protocol

import msgspec

from rollmill.gateway.recording.call_rows import CALLS_SCHEMA, CallRecord, EpisodeRecord, Row, RowEncoder

CALLS_NAME = "calls.db"
MAX_QUEUE = 4096
MAX_QUEUE_TOKENS = 2**25
BATCH = 256
BATCH_S = 0.1
BUSY_S = 30.0
_INSERT = f"INSERT INTO calls VALUES ({', '.join('?' * len(Row._fields))})"
_CREATE = """
CREATE TABLE IF NOT EXISTS calls (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL, episode TEXT NOT NULL, at REAL NOT NULL, dialect TEXT NOT NULL, model TEXT NOT NULL,
    key TEXT NOT NULL, status INTEGER NOT NULL, error TEXT NOT NULL, kinds TEXT NOT NULL, num_prompt INTEGER NOT NULL,
    num_sampled INTEGER NOT NULL, num_abandoned INTEGER NOT NULL, min_version INTEGER, max_version INTEGER, total_s REAL NOT NULL,
    overhead_s REAL NOT NULL, base INTEGER, request BLOB NOT NULL, response BLOB NOT NULL, tokens BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS calls_of_episode ON calls (episode, number);
CREATE TABLE IF NOT EXISTS episodes (key TEXT PRIMARY KEY, opened REAL NOT NULL, closed REAL, options BLOB NOT NULL);
"""


class Recorder(Protocol):
    """Where ended calls go."""

    def put(self, record: CallRecord | EpisodeRecord) -> None:
        """Never blocks."""
        ...

    async def close(self) -> None:
        """Everything that was put is kept when this returns."""
        ...


class SqliteRecorder:
    """`calls.db` in `folder`. One recorder per file at a time."""

    def __init__(self, folder: Path, *, max_queue: int = MAX_QUEUE) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / CALLS_NAME
        self._max_queue = max_queue
        self._queue: list[CallRecord | EpisodeRecord] = []
        self._num_tokens = 0
        self._closing = False
        # Held for as long as it takes to append one record or to take the list: nobody waits for the disk.
        self._turn = threading.Condition()
        self.num_written = 0
        self.num_dropped = 0
        """Records that found the queue full or could not be written."""
        self.problem = ""
        """The last thing that went wrong with the file; empty when nothing has."""
        connect_calls(self.path).close()
        self._thread = threading.Thread(target=self._run, name="call-recorder", daemon=True)
        self._thread.start()

    def put(self, record: CallRecord | EpisodeRecord) -> None:
        num = sum(map(len, record.prompts)) if isinstance(record, CallRecord) else 0
        with self._turn:
            if len(self._queue) >= self._max_queue or self._num_tokens + num > MAX_QUEUE_TOKENS or self._closing:
                self.num_dropped += 1
                return
            self._queue.append(record)
            self._num_tokens += num
            if len(self._queue) in (1, BATCH):
                self._turn.notify()

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    async def close(self) -> None:
        with self._turn:
            self._closing = True
            self._turn.notify()
        await asyncio.to_thread(self._thread.join)

    def _take(self) -> list[CallRecord | EpisodeRecord]:
        """Waits for records, then a moment longer for those that can share their commit; empty at the end."""
        with self._turn:
            self._turn.wait_for(lambda: self._queue or self._closing)
            self._turn.wait_for(lambda: len(self._queue) >= BATCH or self._closing, BATCH_S)
            taken, self._queue, self._num_tokens = self._queue, [], 0
            return taken

    def _run(self) -> None:
        writer: _Writer | None = None
        while taken := self._take():
            for start in range(0, len(taken), BATCH):
                batch = taken[start : start + BATCH]
                try:
                    if writer is None:
                        writer = _Writer(self.path)
                    writer.write(batch)
                    self.num_written += len(batch)
                except sqlite3.Error as error:
                    # A full disk must not stop the calls, and rows that were rolled back must not be leaned on.
                    with self._turn:
                        self.num_dropped += len(batch)
                    self.problem = f"{self.path}: {error}"
                    if writer is not None:
                        writer.close()
                    writer = None
        if writer is not None:
            writer.close()


class _Writer:
    """The writing thread's connection, and what it knows of the rows before."""

    def __init__(self, path: Path) -> None:
        self._db = connect_calls(path)
        self._encoder = RowEncoder()

    def write(self, batch: list[CallRecord | EpisodeRecord]) -> None:
        with self._db:
            # Takes the file at once: rows that this batch leans on cannot be pruned on the way.
            self._db.execute("BEGIN IMMEDIATE")
            (number,) = self._db.execute("SELECT coalesce(max(number), 0) FROM calls").fetchone()
            for record in batch:
                if isinstance(record, EpisodeRecord):
                    self._write_episode(record)
                else:
                    number += 1
                    self._db.execute(_INSERT, self._encoder.encode(number, record, is_there=self._is_there))

    def _is_there(self, number: int) -> bool:
        return self._db.execute("SELECT 1 FROM calls WHERE number = ?", (number,)).fetchone() is not None

    def _write_episode(self, record: EpisodeRecord) -> None:
        if record.is_open:
            row = (record.key, record.at, msgspec.json.encode(record.options))
            self._db.execute("INSERT OR REPLACE INTO episodes (key, opened, options) VALUES (?, ?, ?)", row)
        else:
            self._db.execute("UPDATE episodes SET closed = ? WHERE key = ?", (record.at, record.key))

    def close(self) -> None:
        self._db.close()


def connect_calls(path: Path) -> sqlite3.Connection:
    """Opens or makes the file; ValueError when it is of another schema."""
    db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        (schema,) = db.execute("PRAGMA user_version").fetchone()
        if schema == 0:
            db.execute("PRAGMA auto_vacuum = INCREMENTAL")
        elif schema != CALLS_SCHEMA:
            raise ValueError(
                f"{path} has schema {schema}, this version reads {CALLS_SCHEMA}; move it away, or use the version that wrote it"
            )
        db.execute("PRAGMA journal_mode = WAL")
        # A commit then survives the process, though not a power cut: it is a record, not a ledger.
        db.execute("PRAGMA synchronous = NORMAL")
        if schema == 0:
            db.executescript(f"BEGIN; {_CREATE} PRAGMA user_version = {CALLS_SCHEMA}; COMMIT;")
    except sqlite3.DatabaseError as error:
        db.close()
        raise ValueError(f"{path} is not a file of calls: {error}") from error
    except ValueError:
        db.close()
        raise
    return db
