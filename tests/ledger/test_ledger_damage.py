"""A damaged, foreign or full ledger says so in words, and the audit finds each broken invariant."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from ledger_walk import checkpoint, finish, ready_group, task

from rollmill.ledger import Ledger, schema
from rollmill.records import Role


def played_run(run_dir: Path) -> Path:
    """g0 trained, g1 admitted, g2 ready, g3 open with one graded and two retried slots; returns the database's path."""
    with Ledger.create_or_open(run_dir, Role.ROLLOUT) as rollout, Ledger.create_or_open(run_dir, Role.TRAINER) as trainer:
        trainer.publish_version(0, 0, "full", 10, now=0.0)
        for number in range(3):
            ready_group(rollout, number)
        rollout.open_group(task(3), 3, now=0.0)
        for slot in range(3):
            rollout.start_episode(f"g000003.{slot}.0", now=0.0)
        finish(rollout, "g000003.0.0")
        rollout.recover_rollout(now=0.0)
        trainer.admit(0, ["g000000"], version=0, now=0.0)
        trainer.commit_step(checkpoint(0), now=0.0)
        trainer.publish_version(1, 1, "delta", 1, now=0.0)
        trainer.admit(1, ["g000001"], version=1, now=0.0)
        assert trainer.audit() == []
    return run_dir / "ledger.db"


def tampered(path: Path, *statements: str) -> list[str]:
    """What the audit says after `statements` were run behind the ledger's back, guards off."""
    with closing(sqlite3.connect(path, isolation_level=None)) as conn:
        conn.execute("PRAGMA foreign_keys = OFF")
        conn.execute("PRAGMA ignore_check_constraints = ON")
        for (name,) in conn.execute("SELECT name FROM sqlite_master WHERE type = 'trigger' AND name LIKE 'events_%'").fetchall():
            conn.execute(f"DROP TRIGGER {name}")
        for statement in statements:
            conn.execute(statement)
    with Ledger.open_reader(path.parent) as ledger:
        return ledger.audit()


@pytest.mark.parametrize(
    ("statements", "words"),
    [
        (["DELETE FROM episodes WHERE seq = 1", "DELETE FROM groups WHERE seq = 1"], "group numbers have gaps"),
        (["UPDATE groups SET group_id = 'g7' WHERE seq = 2"], "does not belong to seq 2"),
        (["UPDATE episodes SET slot = 7 WHERE episode_id = 'g000002.0.0'"], "does not belong to group g000002, slot 7"),
        (["UPDATE groups SET group_size = 5 WHERE seq = 3"], "g000003 has 3 slots, not 5"),
        (["UPDATE episodes SET attempt = 4 WHERE episode_id = 'g000003.1.1'"], "slot 1 of group g000003 has 2 attempts, numbered 0 to 4"),
        (["DELETE FROM events WHERE kind = 'episode.graded' AND subject = 'g000002.0.0'"], "g000002.0.0 is graded but ended 0 times"),
        (["UPDATE episodes SET state = 'running' WHERE episode_id = 'g000003.0.0'"], "g000003.0.0 is running but ended 1 times"),
        (
            ["UPDATE episodes SET state = 'failed', boundary = 'model' WHERE episode_id = 'g000003.0.0'"],
            "g000003.0.0 is failed but its history says episode.graded",
        ),
        (["UPDATE episodes SET stop = NULL WHERE episode_id = 'g000002.0.0'"], "g000002.0.0 has lost"),
        (["UPDATE episodes SET state = 'queued' WHERE episode_id = 'g000002.0.0'"], "ready group g000002 still has 1 live"),
        (["UPDATE groups SET reward_sum = 7 WHERE seq = 2"], "reward sums 7.0 and 1.0"),
        (["UPDATE groups SET min_version = 9 WHERE seq = 2"], "oldest version 9"),
        (["UPDATE groups SET state = 'ready' WHERE seq = 3"], "only 1 graded of 3"),
        (["UPDATE groups SET state = 'ready' WHERE seq = 0"], "g000000 is ready but was trained 1 times"),
        (["UPDATE groups SET state = 'trained' WHERE seq = 1"], "g000001 was trained in batch 1 but no checkpoint"),
        (["DELETE FROM checkpoints"], "g000000 was trained in batch 0 but no checkpoint"),
        (["UPDATE groups SET state = 'admitted' WHERE seq = 0"], "g000000 is still admitted to batch 0 although checkpoint 0"),
        (["UPDATE batches SET step = 9 WHERE step = 1"], "batches have gaps"),
        (["UPDATE groups SET step = 0 WHERE seq = 1"], "batch 0 was cut with 1 groups but 2"),
        (["UPDATE groups SET staleness = 3 WHERE seq = 1"], "g000001 was admitted at version 1"),
        (["UPDATE groups SET num_overtaken = 3 WHERE seq = 3"], "g000003 was overtaken 0 times but says 3"),
        (["INSERT INTO checkpoints VALUES (1, 0, '', '', 0, 0)"], "checkpoint 1 holds version 0, older"),
        (["INSERT INTO versions VALUES (5, 1, 'full', 1, 0)"], "version 5 was published 0 times"),
        (["INSERT INTO events VALUES (999, 0, 'trainer', 'version.published', '0', '{}')"], "version 0 was published 2"),
        (["INSERT INTO events VALUES (999, 0, 'trainer', 'version.published', '0', '{}')"], "version 0 was published after version 1"),
        (["UPDATE counters SET value = 9 WHERE name = 'group.open'"], "counter group.open is 9 but the rows say 1"),
        (["INSERT INTO counters VALUES ('fail.model', 2)"], "counter fail.model is 2 but the rows say 0"),
        (["DELETE FROM batches WHERE step = 0"], "points at a missing row of batches"),
        (
            ["DROP INDEX one_graded_per_slot", "UPDATE episodes SET state = 'graded' WHERE seq = 3 AND slot = 1"],
            "slot 1 of group g000003 has 2 graded",
        ),
        (["UPDATE episodes SET state = 'graded' WHERE episode_id = 'g000003.1.0'"], "is graded although a later attempt exists"),
    ],
)
def test_audit_names_the_broken_invariant(tmp_path: Path, statements: list[str], words: str) -> None:
    found = tampered(played_run(tmp_path), *statements)
    assert any(words in line for line in found), found


def test_audit_finds_missing_and_flipped_blobs_of_unconsumed_groups_only(tmp_path: Path) -> None:
    played_run(tmp_path)
    with Ledger.open_reader(tmp_path) as ledger:
        by_id = {e.episode_id: e for number in range(4) for e in ledger.episodes_of(f"g00000{number}") if e.blob is not None}
        for episode_id in ("g000000.0.0", "g000001.0.0"):
            ledger.blobs.path(by_id[episode_id].blob).unlink()  # type: ignore[arg-type]
        ledger.blobs.path(by_id["g000003.0.0"].blob).write_bytes(b"rubbish")  # type: ignore[arg-type]
        found = ledger.audit()
        assert len(found) == 2
        assert found[0].startswith("episode g000001.0.0: blob") and "no file" in found[0]
        assert found[1].startswith("episode g000003.0.0: blob")


def _cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5000])


def _overwrite(path: Path) -> None:
    path.write_bytes(b"this is no database, whatever its name says. " * 100)


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _foreign(path: Path) -> None:
    path.unlink()
    with closing(sqlite3.connect(path)) as conn:
        conn.execute("CREATE TABLE meta (key TEXT, value TEXT)")
        conn.commit()


def _newer(path: Path) -> None:
    with closing(sqlite3.connect(path)) as conn:
        conn.execute("UPDATE meta SET value = '999'")
        conn.commit()


def _older(path: Path) -> None:
    with closing(sqlite3.connect(path)) as conn:
        conn.execute("UPDATE meta SET value = '0'")
        conn.commit()


def _nameless(path: Path) -> None:
    with closing(sqlite3.connect(path)) as conn:
        conn.execute("DELETE FROM meta")
        conn.commit()


def _not_wal(path: Path) -> None:
    with closing(sqlite3.connect(path)) as conn:
        conn.execute("PRAGMA journal_mode = DELETE")


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (_cut_short, "is damaged"),
        (_overwrite, "is damaged"),
        (_empty, "another program"),
        (_foreign, "another program"),
        (_newer, "has schema 999, this program knows up to 1"),
        (_older, "has schema 0, this program needs 1"),
        (_nameless, "names no schema"),
        (_not_wal, "not in WAL mode"),
    ],
)
def test_file_that_is_no_sound_ledger_is_refused_in_words(tmp_path: Path, harm: Callable[[Path], None], words: str) -> None:
    path = played_run(tmp_path)
    harm(path)
    with pytest.raises(ValueError, match=words) as error:
        Ledger.create_or_open(tmp_path, Role.ROLLOUT)
    assert str(path) in str(error.value)


def test_damage_found_later_is_a_value_error_too(tmp_path: Path) -> None:
    path = played_run(tmp_path)
    with closing(sqlite3.connect(path)) as conn:
        page = conn.execute("SELECT rootpage FROM sqlite_master WHERE name = 'groups'").fetchone()[0]
    with path.open("r+b") as file:
        file.seek(4096 * (page - 1))
        file.write(b"\xff" * 4096)
    with Ledger.create_or_open(tmp_path, Role.ROLLOUT) as ledger:
        with pytest.raises(ValueError, match="is damaged"):
            ledger.open_group(task(), 1, now=0.0)
        assert any("the file itself is damaged" in line for line in ledger.audit())


def test_reader_refuses_a_folder_without_ledger_and_makes_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is this a run directory"):
        Ledger.open_reader(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_full_disk_is_enospc_and_rolls_back(tmp_path: Path) -> None:
    with Ledger.create_or_open(tmp_path, Role.ROLLOUT) as ledger:
        num_pages = ledger._conn.execute("PRAGMA page_count").fetchone()[0]
        ledger._conn.execute(f"PRAGMA max_page_count = {num_pages + 2}")
        num_opened = 0
        with pytest.raises(OSError, match="no space left for the ledger") as error:
            for number in range(1000):
                ledger.open_group(task(number), 8, now=0.0)
                num_opened += 1
        assert error.value.errno == errno.ENOSPC and error.value.filename == str(tmp_path / "ledger.db")
        assert ledger.progress().num_opened == num_opened
        assert ledger.audit() == []
        ledger._conn.execute("PRAGMA max_page_count = 100000")
        assert ledger.open_group(task(), 8, now=0.0).seq == num_opened


def test_waiting_for_a_stopped_writer_ends_with_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "BUSY_TIMEOUT_S", 0.05)
    with Ledger.create_or_open(tmp_path, Role.ROLLOUT) as ledger, closing(sqlite3.connect(ledger.path, isolation_level=None)) as stopped:
        stopped.execute("BEGIN IMMEDIATE")
        with pytest.raises(TimeoutError, match="held the write lock"):
            ledger.open_group(task(), 1, now=0.0)
        stopped.execute("ROLLBACK")
        assert ledger.open_group(task(), 1, now=0.0).seq == 0
