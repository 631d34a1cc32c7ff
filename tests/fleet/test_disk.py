"""A full disk ends a run at once and in words, whichever role or library meets it first and even when the log has no room for it."""

from __future__ import annotations

import errno
import os
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import SafetensorError

from rollmill.config import RunConfig, load_config
from rollmill.fleet import disk, local, role
from rollmill.fleet.disk import DiskFull, is_full
from rollmill.fleet.display import Display
from rollmill.fleet.local import MAX_RESTARTS, RESTART_WINDOW_S, UNRESPONSIVE_S, RoleFailed, RoleProcess
from rollmill.fleet.role import EXIT_FIX, run_role
from rollmill.fleet.rundir import announce, hold, prepare
from rollmill.records import Role
from tests.fleet.live_run import run_file

NO_SPACE = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return load_config(run_file(tmp_path))


def raised(body: Callable[[], object]) -> BaseException:
    try:
        body()
    except Exception as error:  # noqa: BLE001 - handed to who judges it
        return error
    raise AssertionError("nothing was raised")


def publish_in_a_thread() -> None:
    try:
        raise NO_SPACE
    except OSError as error:
        raise RuntimeError("publishing stopped") from error


def close_while_failing() -> None:
    try:
        raise NO_SPACE
    finally:
        raise TimeoutError("and the publisher did not finish either")


def fill_a_database() -> None:
    with sqlite3.connect(":memory:") as database:
        database.execute("PRAGMA max_page_count = 2")
        database.execute("CREATE TABLE t (x)")
        database.execute("INSERT INTO t VALUES (zeroblob(100000))")


def save_a_checkpoint() -> None:
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


FULL = (publish_in_a_thread, close_while_failing, fill_a_database, save_a_checkpoint)


@pytest.mark.parametrize("body", FULL)
def test_a_full_disk_is_told_from_other_failures_under_whatever_name_it_comes(body: Callable[[], None]) -> None:
    assert is_full(raised(body))


@pytest.mark.parametrize("error", [OSError(errno.EIO, "broken"), ValueError("(os error 2)"), sqlite3.OperationalError("locked")])
def test_other_failures_are_no_full_disk(error: Exception) -> None:
    assert not is_full(error)


@pytest.mark.parametrize("body", FULL)
def test_a_role_on_a_full_disk_asks_for_a_person_and_says_where_how_much_is_left(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, body: Callable[[], None]
) -> None:
    monkeypatch.setitem(role._BODIES, Role.TRAINER, lambda config, index, should_stop: body())
    assert run_role(Role.TRAINER, config) == EXIT_FIX
    said = caplog.records[-1].getMessage()
    assert said.startswith("the disk is full: ") and f"MB left in {config.run.dir}" in said and "--resume" in said


def test_a_role_that_fails_otherwise_still_crashes(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(config: RunConfig, index: int, should_stop: Callable[[], bool]) -> None:
        raise SafetensorError("header too large")

    monkeypatch.setitem(role._BODIES, Role.TRAINER, body)
    with pytest.raises(SafetensorError):
        run_role(Role.TRAINER, config)


def ended(config: RunConfig, monkeypatch: pytest.MonkeyPatch, program: str) -> RoleProcess:
    """A role whose process has run this program to its end."""
    run_file = prepare(config, resume=False)
    monkeypatch.setattr(local, "role_command", lambda *_: [sys.executable, "-c", program])
    process = RoleProcess(Role.TRAINER, 0, run_file, config)
    process.start()
    assert process.process is not None
    process.process.wait(60)
    return process


@pytest.mark.parametrize("status", [1, 120])
def test_a_role_that_dies_on_a_full_disk_is_not_started_again(config: RunConfig, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    process = ended(config, monkeypatch, f"raise SystemExit({status})")
    monkeypatch.setattr(disk, "MIN_FREE_BYTES", 1 << 62)
    with pytest.raises(RoleFailed, match=rf"trainer died \(status {status}\)(.|\n)*the disk is full: .* MB left in .*--resume"):
        process.watch(0.0)


def test_a_role_that_could_not_write_its_log_is_not_started_again_although_there_is_room_by_now(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It asked for a person with status 2, and Python put its own in the place of that.
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    process = ended(config, monkeypatch, "import sys; sys.stderr = open('/dev/full', 'w'); sys.stderr.write('why'); sys.exit(2)")
    with pytest.raises(RoleFailed, match=r"trainer died \(status 120\)(.|\n)*trainer.log could not be written \(.* MB left in"):
        process.watch(0.0)


def test_a_role_that_asked_for_a_person_without_room_for_its_reason_is_explained(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = ended(config, monkeypatch, "raise SystemExit(2)")
    monkeypatch.setattr(disk, "MIN_FREE_BYTES", 1 << 62)
    with pytest.raises(RoleFailed, match=r"trainer cannot go on:(.|\n)*the disk is full: "):
        process.watch(0.0)


def test_a_role_that_never_answers_is_not_started_for_ever(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    process, now = ended(config, monkeypatch, "raise SystemExit(1)"), 0.0
    with pytest.raises(RoleFailed, match=f"died {MAX_RESTARTS + 1} times in {RESTART_WINDOW_S:.0f} s"):
        for _ in range(MAX_RESTARTS + 1):
            # Each life ends by being killed for its silence; the process itself need not be the next one.
            dead = process.process
            assert process.watch(now) == "trainer died (status 1); starting it again"
            process.process, now = dead, now + UNRESPONSIVE_S + 30.0


@pytest.mark.parametrize("write", [lambda run_dir: announce(run_dir, "trainer", {}), lambda run_dir: hold(run_dir, "trainer").__enter__()])
def test_what_a_role_says_of_itself_names_its_file_when_there_is_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], object]
) -> None:
    def refuse(*_: object) -> int:
        raise NO_SPACE

    monkeypatch.setattr(os, "write", refuse)
    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(DiskFull, match=rf"no space left for {tmp_path}/(roles|locks)/trainer.*MB left in {tmp_path}.*--resume"):
        write(tmp_path)
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_torn_line_of_metrics_does_not_stop_the_display(config: RunConfig) -> None:
    prepare(config, resume=False)
    stream = config.run.dir / "metrics" / "trainer.jsonl"
    stream.write_text('{"t": 1, "reward/me{"t": 2, "step": 0}\n{"t": 3, "step": 1, "reward/mean": 0.5}\n')
    display = Display(config)
    display._trainer.read()
    assert display._trainer.rewards == [0.5]


def test_a_ledger_that_cannot_be_read_now_does_not_stop_the_run(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(config, resume=False)

    def refuse(_: Display, now: float) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(Display, "_look", refuse)
    display = Display(config)
    display.tick()
    assert display.num_missed == 1
