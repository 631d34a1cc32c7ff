"""Moving metrics into a tracker: names, damaged lines, refusals, the end of a run, and the verb."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from tracker_readers import append, expected, from_tensorboard, make_run
from typer.testing import CliRunner

from rollmill.trackers import track as module
from rollmill.trackers.commands import track_command
from rollmill.trackers.names import ALIASES, Names
from rollmill.trackers.sink import KINDS, Row
from rollmill.trackers.stream import Span, ahead, points
from rollmill.trackers.track import Cursor, is_over, track
from rollmill.trainer.learn import METRICS

ROOT = Path(__file__).parents[2]


class Stubborn:
    """A tracker that remembers rows by their key, and dies when it is told to."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}
        self.dies_before = self.dies_after = False
        self.num_there: int | None = None

    def write(self, rows: Sequence[Row]) -> dict[str, int]:
        if self.dies_before:
            raise InterruptedError
        for row in rows:
            assert self.rows.setdefault(row.key, row) == row, "the same line came back under another number"
        if self.dies_after:
            raise InterruptedError
        return {}

    def close(self) -> None: ...


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.sampled_from(["", "dies_before", "dies_after"])), max_size=8))
def test_every_line_keeps_its_number_through_any_deaths(
    tmp_path_factory: pytest.TempPathFactory, script: list[tuple[int, int, str]]
) -> None:
    run_dir, sink = make_run(tmp_path_factory.mktemp("x") / "run", 1), Stubborn()
    num_trainer, num_rollout = 1, 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "open_sink", lambda *_: sink)
        patch.setattr(module, "CHUNK_BYTES", 150)
        for more_trainer, more_rollout, death in [*script, (0, 0, "")]:
            append(run_dir, "trainer", num_trainer, more_trainer)
            append(run_dir, "rollout", num_rollout, more_rollout)
            num_trainer, num_rollout = num_trainer + more_trainer, num_rollout + more_rollout
            sink.dies_before, sink.dies_after = death == "dies_before", death == "dies_after"
            try:
                track(run_dir, "trackio")
            except InterruptedError:
                assert death
    assert sorted(row.number for row in sink.rows.values()) == list(range(num_trainer + num_rollout))
    for role, num in (("trainer", num_trainer), ("rollout", num_rollout)):
        mine = sorted((row for row in sink.rows.values() if row.role == role), key=lambda row: row.number)
        assert [row.t for row in mine] == [1000.0 + i for i in range(num)]


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 40)), max_size=8))
def test_rows_that_a_tracker_lost_are_sent_again_under_the_same_numbers(
    tmp_path_factory: pytest.TempPathFactory, script: list[tuple[int, int, int]]
) -> None:
    run_dir, sink = make_run(tmp_path_factory.mktemp("x") / "run", 1), Stubborn()
    num_trainer, num_rollout = 1, 2
    everything: dict[str, Row] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "open_sink", lambda *_: sink)
        patch.setattr(module, "CHUNK_BYTES", 150)
        for more_trainer, more_rollout, num_kept in [*script, (0, 0, 1000)]:
            append(run_dir, "trainer", num_trainer, more_trainer)
            append(run_dir, "rollout", num_rollout, more_rollout)
            num_trainer, num_rollout = num_trainer + more_trainer, num_rollout + more_rollout
            sink.num_there = len(sink.rows)
            track(run_dir, "wandb")
            for key, row in sink.rows.items():
                assert everything.setdefault(key, row) == row
            sink.rows = {key: row for key, row in sink.rows.items() if row.number < num_kept}
    assert sorted(row.number for row in sink.rows.values()) == list(range(num_trainer + num_rollout))


def test_line_torn_by_a_crash_of_its_writer_is_skipped_and_counted(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    with (run_dir / "metrics" / "trainer.jsonl").open("a") as file:
        file.write('{"t": 1.0, "st{"t": 1.0}\n[1, 2]\n{"t": 1.0}\n')
    append(run_dir, "trainer", 5, 1)
    done = track(run_dir, "tensorboard")
    assert (done.num_rows, done.num_bad) == (16, 3)
    assert from_tensorboard(run_dir / "tensorboard") == expected(6, 10)


def test_one_line_longer_than_a_chunk_is_read_whole(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", 1)
    spans = ahead(run_dir, {}, 5)
    assert spans == {role: Span(0, (run_dir / "metrics" / f"{role}.jsonl").stat().st_size) for role in ("trainer", "rollout")}
    assert len(points(run_dir, spans)[0]) == 3


def test_file_that_shrank_is_another_run(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    track(run_dir, "tensorboard")
    (run_dir / "metrics" / "trainer.jsonl").write_text("")
    with pytest.raises(ValueError, match="only grow"):
        track(run_dir, "tensorboard")


def test_tracker_that_was_begun_otherwise_is_refused(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    track(run_dir, "tensorboard")
    with pytest.raises(ValueError, match=r"aliases was ''.*'trl' now"):
        track(run_dir, "tensorboard", aliases="trl")


def test_damaged_cursor_is_refused_with_what_to_do(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    track(run_dir, "tensorboard")
    (run_dir / "trackers" / "tensorboard.json").write_text("{")
    with pytest.raises(ValueError, match="remove it"):
        track(run_dir, "tensorboard")


def test_second_follower_of_the_same_run_is_refused(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    (run_dir / "trackers").mkdir()
    with (run_dir / "trackers" / "tensorboard.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another process"):
            track(run_dir, "tensorboard")


def test_folder_without_metrics_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is it a run directory"):
        track(tmp_path, "tensorboard")


@pytest.mark.parametrize("kind", KINDS)
def test_missing_package_is_told_with_the_command_that_installs_it(kind: str, tmp_path: Path) -> None:
    code = (
        f"import sys; sys.modules[{kind!r}] = None\n"
        "from pathlib import Path\nfrom rollmill.trackers.track import track\n"
        f"try:\n    track(Path({str(make_run(tmp_path / 'run'))!r}), {kind!r})\nexcept ValueError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert f"pip install 'rollmill[{kind}]'" in done.stdout, done.stderr


def test_aliases_name_metrics_that_exist_and_no_name_is_given_twice() -> None:
    known = (ROOT / "docs" / "metrics.md").read_text()
    for aliases in ALIASES.values():
        assert len(set(aliases.values())) == len(aliases)
        for full in aliases:
            role, _, name = full.partition("/")
            assert f"`{full if role == 'rollout' and f'`{full}`' in known else name}`" in known, full
    assert {"mm/k3", "mm/ess"} <= set(METRICS)


@pytest.mark.parametrize("aliases", ["", *ALIASES])
def test_roles_never_share_a_step_axis(aliases: str) -> None:
    names = Names(aliases)
    assert len({names.axis(role) for role in ("trainer", "rollout", "compactor", "engine-0")}) == 4


def test_unknown_names_and_trackers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="choose trl or verl"):
        Names("tinker")
    with pytest.raises(ValueError, match="choose one of wandb, tensorboard, trackio"):
        track(make_run(tmp_path / "run"), "mlflow")


def test_run_is_over_when_its_summary_is_the_newest_word_and_nobody_lives(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    assert not is_over(run_dir)
    (run_dir / "summary.json").write_text("{}")
    newest = max(p.stat().st_mtime_ns for p in (run_dir / "metrics").iterdir())
    os.utime(run_dir / "summary.json", ns=(newest, newest))
    assert is_over(run_dir)
    (run_dir / "roles").mkdir()
    (run_dir / "roles" / "trainer.json").write_text(f'{{"pid": {os.getpid()}}}')
    assert not is_over(run_dir)
    (run_dir / "roles" / "trainer.json").unlink()
    os.utime(run_dir / "summary.json", ns=(newest - 1, newest - 1))
    assert not is_over(run_dir)


def test_verb_follows_to_the_end_of_the_run_and_says_what_it_sent(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(track_command)
    run_dir = make_run(tmp_path / "run")
    (run_dir / "summary.json").write_text("{}")
    done = CliRunner().invoke(app, [str(run_dir), "--to", "tensorboard", "--follow"])
    assert done.exit_code == 0, done.output
    assert "sent 15 rows to tensorboard" in done.output


def test_cursor_of_a_new_run_is_empty() -> None:
    fresh = Cursor(run_id="a", project="p", name="n", aliases="", out="o")
    assert (fresh.offsets, fresh.plan, fresh.num_rows) == ({}, {}, 0)
