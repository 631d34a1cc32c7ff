"""The ledger's SQLite file: its tables, and opening it so that only a whole ledger of this schema is ever used."""

from __future__ import annotations

import errno
import os
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

SCHEMA = 1
APPLICATION_ID = 0x524D4C47
"""Stored in the file's header, so that another program's database is told apart before any table is read."""
BUSY_TIMEOUT_S = 30.0
"""The longest a writer waits for another; transactions here take milliseconds, so this is a stopped process, not load."""

DDL = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);

CREATE TABLE groups (
    seq INTEGER PRIMARY KEY,
    group_id TEXT NOT NULL UNIQUE,
    task_id TEXT NOT NULL,
    group_size INTEGER NOT NULL CHECK (group_size > 0),
    state TEXT NOT NULL CHECK (state IN ('open', 'ready', 'admitted', 'trained', 'dropped')),
    num_graded INTEGER NOT NULL DEFAULT 0,
    reward_sum REAL NOT NULL DEFAULT 0,
    num_success INTEGER NOT NULL DEFAULT 0,
    min_version INTEGER,
    opened_at REAL NOT NULL,
    opened_steps_cut INTEGER NOT NULL,
    num_overtaken INTEGER NOT NULL DEFAULT 0,
    ready_at REAL,
    step INTEGER REFERENCES batches (step),
    version INTEGER,
    staleness INTEGER,
    age INTEGER,
    drop_reason TEXT,
    ended_at REAL,
    stats TEXT,
    task BLOB NOT NULL,
    CHECK ((state = 'dropped') = (drop_reason IS NOT NULL)),
    CHECK (state NOT IN ('open', 'ready') OR step IS NULL),
    CHECK (state NOT IN ('admitted', 'trained') OR step IS NOT NULL)
);
CREATE INDEX groups_live ON groups (seq) WHERE state IN ('open', 'ready');
CREATE INDEX groups_open ON groups (seq) WHERE state = 'open';
CREATE INDEX groups_admitted ON groups (step, seq) WHERE state = 'admitted';
CREATE INDEX groups_step ON groups (step, seq) WHERE step IS NOT NULL;

CREATE TABLE episodes (
    episode_id TEXT PRIMARY KEY,
    group_id TEXT NOT NULL REFERENCES groups (group_id),
    seq INTEGER NOT NULL,
    slot INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('queued', 'running', 'graded', 'failed', 'cancelled')),
    queued_at REAL NOT NULL,
    started_at REAL,
    ended_at REAL,
    grade BLOB,
    reward REAL,
    success INTEGER,
    stop TEXT,
    blob_digest TEXT,
    blob_bytes INTEGER,
    min_version INTEGER,
    max_version INTEGER,
    num_tokens INTEGER NOT NULL DEFAULT 0,
    num_sampled INTEGER NOT NULL DEFAULT 0,
    boundary TEXT,
    cancel_reason TEXT,
    message TEXT NOT NULL DEFAULT '',
    UNIQUE (seq, slot, attempt),
    CHECK ((state = 'graded') = (grade IS NOT NULL AND blob_digest IS NOT NULL)),
    CHECK ((state = 'failed') = (boundary IS NOT NULL)),
    CHECK ((state = 'cancelled') = (cancel_reason IS NOT NULL)),
    CHECK ((state IN ('queued', 'running')) = (ended_at IS NULL))
);
CREATE UNIQUE INDEX one_graded_per_slot ON episodes (seq, slot) WHERE state = 'graded';
CREATE UNIQUE INDEX one_live_per_slot ON episodes (seq, slot) WHERE state IN ('queued', 'running');
CREATE INDEX episodes_queued ON episodes (seq, slot) WHERE state = 'queued';
CREATE INDEX episodes_running ON episodes (seq, slot) WHERE state = 'running';

CREATE TABLE batches (step INTEGER PRIMARY KEY, version INTEGER NOT NULL, num_groups INTEGER NOT NULL, cut_at REAL NOT NULL);
CREATE TABLE checkpoints (
    step INTEGER PRIMARY KEY, version INTEGER NOT NULL, path TEXT NOT NULL, digest TEXT NOT NULL,
    wall_s REAL NOT NULL, committed_at REAL NOT NULL
);
CREATE TABLE versions (
    version INTEGER PRIMARY KEY, step INTEGER NOT NULL, kind TEXT NOT NULL, num_bytes INTEGER NOT NULL, published_at REAL NOT NULL
);
CREATE TABLE evals (
    eval_id INTEGER PRIMARY KEY, label TEXT NOT NULL, version INTEGER NOT NULL, task_id TEXT NOT NULL,
    success INTEGER NOT NULL, reward REAL NOT NULL, blob_digest TEXT, blob_bytes INTEGER, time REAL NOT NULL
);
CREATE INDEX evals_label ON evals (label, version);

CREATE TABLE events (
    event_id INTEGER PRIMARY KEY AUTOINCREMENT, time REAL NOT NULL, role TEXT NOT NULL,
    kind TEXT NOT NULL, subject TEXT NOT NULL, detail TEXT NOT NULL
);
CREATE INDEX events_subject ON events (subject, kind);
CREATE TRIGGER events_are_never_changed BEFORE UPDATE ON events BEGIN SELECT RAISE (ABORT, 'events are append-only'); END;
CREATE TRIGGER events_are_never_removed BEFORE DELETE ON events BEGIN SELECT RAISE (ABORT, 'events are append-only'); END;

CREATE TABLE counters (name TEXT PRIMARY KEY, value NUMERIC NOT NULL) WITHOUT ROWID;
"""


def _count(name_sql: str, by_sql: str = "1") -> str:
    return f"INSERT INTO counters VALUES ({name_sql}, {by_sql}) ON CONFLICT (name) DO UPDATE SET value = value + excluded.value;"


def _count_outcome(prefix_sql: str) -> str:
    return "\n".join(_count(f"{prefix_sql} || '.{column}'", f"NEW.{column}") for column in ("num_graded", "reward_sum", "num_success"))


# Counting in triggers ties each count to the very transaction that changed the row, whoever wrote it.
COUNTING = f"""
CREATE TRIGGER count_new_group AFTER INSERT ON groups BEGIN {_count("'group.' || NEW.state")} END;
CREATE TRIGGER count_group AFTER UPDATE OF state ON groups WHEN OLD.state <> NEW.state BEGIN
    {_count("'group.' || OLD.state", "-1")} {_count("'group.' || NEW.state")}
END;
CREATE TRIGGER count_dropped AFTER UPDATE OF state ON groups WHEN NEW.state = 'dropped' AND OLD.state <> 'dropped' BEGIN
    {_count("'drop.' || NEW.drop_reason")} {_count("'dropped_from.' || OLD.state")}
    {_count_outcome("'outcome.dropped.' || NEW.drop_reason")}
END;
CREATE TRIGGER count_trained AFTER UPDATE OF state ON groups WHEN NEW.state = 'trained' AND OLD.state <> 'trained' BEGIN
    {_count_outcome("'outcome.trained'")}
END;
CREATE TRIGGER count_new_episode AFTER INSERT ON episodes BEGIN {_count("'episode.' || NEW.state")} END;
CREATE TRIGGER count_episode AFTER UPDATE OF state ON episodes WHEN OLD.state <> NEW.state BEGIN
    {_count("'episode.' || OLD.state", "-1")} {_count("'episode.' || NEW.state")}
END;
CREATE TRIGGER count_failed AFTER UPDATE OF state ON episodes WHEN NEW.state = 'failed' BEGIN
    {_count("'fail.' || NEW.boundary")}
END;
CREATE TRIGGER count_cancelled AFTER UPDATE OF state ON episodes WHEN NEW.state = 'cancelled' BEGIN
    {_count("'cancel.' || NEW.cancel_reason")}
END;
"""


@contextmanager
def sqlite_errors_in_words(path: Path) -> Iterator[None]:
    """Turn SQLite's errors into ones that say what is wrong with the ledger and what to do."""
    try:
        yield
    except sqlite3.IntegrityError:
        raise
    except sqlite3.DatabaseError as error:
        code = (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF
        if code == sqlite3.SQLITE_FULL:
            raise OSError(errno.ENOSPC, "no space left for the ledger; nothing was written, free some space", str(path)) from error
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise TimeoutError(
                f"ledger {path}: another process held the write lock for {BUSY_TIMEOUT_S:.0f} s; is one of the run's processes stopped?"
            ) from error
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            raise ValueError(
                f"ledger {path} is damaged ({error}); restore it from a copy, or start a new run directory (docs/ledger.md)"
            ) from error
        raise


def create(path: Path) -> None:
    """Make an empty ledger at `path` unless there is one: either whole or not there, however many processes try at once."""
    fd, name = tempfile.mkstemp(prefix=".ledger-", suffix=".new", dir=path.parent)
    os.close(fd)
    try:
        with sqlite_errors_in_words(path), closing(sqlite3.connect(name, isolation_level=None)) as conn:
            conn.execute("PRAGMA journal_mode = WAL")
            conn.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            conn.executescript(f"BEGIN; {DDL} {COUNTING} INSERT INTO meta VALUES ('schema', '{SCHEMA}'); COMMIT;")
        # link, unlike rename, refuses to replace: of several creators one wins and the others open its file.
        try:
            os.link(name, path)
        except FileExistsError:
            return
    finally:
        for suffix in ("", "-wal", "-shm"):
            Path(name + suffix).unlink(missing_ok=True)


def connect(path: Path, *, read_only: bool) -> sqlite3.Connection:
    """Open an existing ledger after checking that it is one, of this schema; ValueError otherwise."""
    with sqlite_errors_in_words(path):
        uri = path.absolute().as_uri() + "?mode=rw"
        conn = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=BUSY_TIMEOUT_S, check_same_thread=False)
        try:
            _check(conn, path)
            conn.execute("PRAGMA synchronous = NORMAL")
            conn.execute("PRAGMA foreign_keys = ON")
            if read_only:
                conn.execute("PRAGMA query_only = ON")
        except BaseException:
            conn.close()
            raise
    return conn


def _check(conn: sqlite3.Connection, path: Path) -> None:
    if conn.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
        raise ValueError(f"{path} is a database of another program, not a ledger; choose another run directory")
    row = conn.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()
    if row is None or not row[0].isdigit():
        raise ValueError(f"ledger {path} is damaged (it names no schema); restore it from a copy, or start a new run directory")
    found = int(row[0])
    if found > SCHEMA:
        raise ValueError(f"ledger {path} has schema {found}, this program knows up to {SCHEMA}; use a newer rollmill")
    if found < SCHEMA:
        raise ValueError(f"ledger {path} has schema {found}, this program needs {SCHEMA}; go on with the rollmill that started the run")
    if conn.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
        raise ValueError(f"ledger {path} is not in WAL mode, so its processes would block each other; was it rewritten by another tool?")
