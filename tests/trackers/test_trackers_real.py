"""The real trackers, offline: what arrives, that it arrives once through kill -9, and that clocks stay apart."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tracker_readers import ROWS, append, expected, from_tensorboard, from_trackio, from_wandb, make_run, wandb_rows

from rollmill.trackers.track import track

ROOT = Path(__file__).parents[2]
KINDS = ("tensorboard", "trackio", "wandb")
KILLER = """
import os, signal, sys
from pathlib import Path
from rollmill.trackers import track as module

save, run_dir, kind, num_saves = module._save, Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
def save_then_die(file, cursor):
    global num_saves
    if num_saves == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    num_saves -= 1
    save(file, cursor)
module._save = save_then_die
module.CHUNK_BYTES = 200
module.track(run_dir, kind)
"""


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))


def held(kind: str, run_dir: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ROWS:
    if kind == "tensorboard":
        return from_tensorboard(run_dir / "tensorboard")
    if kind == "wandb":
        return from_wandb(run_dir / "trackers")
    use_folder(folder / "trackio", monkeypatch)
    return from_trackio("rollmill", run_dir.name)


def use_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """trackio reads its folder once, when it is imported; another test may have been first."""
    import trackio.sqlite_storage
    import trackio.utils

    for module in (trackio.utils, trackio.sqlite_storage):
        monkeypatch.setattr(module, "TRACKIO_DIR", folder)


@pytest.mark.parametrize("kind", KINDS)
def test_every_number_arrives_once_and_later_ones_follow(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_folder(tmp_path / "trackio", monkeypatch)
    run_dir = make_run(tmp_path / "run")
    first = track(run_dir, kind)
    assert (first.num_rows, first.num_bad) == (15, 0)
    append(run_dir, "trainer", 5, 3)
    again = track(run_dir, kind)
    assert (again.num_rows, again.run_id) == (3, first.run_id)
    assert track(run_dir, kind).num_rows == 0
    assert held(kind, run_dir, tmp_path, monkeypatch) == expected(8, 10)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_saves", [1, 2])
def test_killed_tracker_goes_on_without_losing_or_doubling_a_row(
    kind: str, num_saves: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 1 save it dies after writing and before acknowledging; with 2 after a whole round, before the next plan is on disk."""
    use_folder(tmp_path / "trackio", monkeypatch)
    run_dir = make_run(tmp_path / "run")
    command = [sys.executable, "-c", KILLER, str(run_dir), kind, str(num_saves)]
    # Of its own: the W&B service of this process would outlive the kill.
    env = {key: value for key, value in os.environ.items() if key != "WANDB_SERVICE"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False, env=env)
    assert done.returncode == -signal.SIGKILL, done.stderr
    cursor = json.loads((run_dir / "trackers" / f"{kind}.json").read_text())
    assert bool(cursor["plan"]) == (num_saves == 1)
    append(run_dir, "trainer", 5, 4)
    track(run_dir, kind)
    assert held(kind, run_dir, tmp_path, monkeypatch) == expected(9, 10)


def test_tensorboard_shows_each_clock_on_its_own_chart_with_the_time_of_the_run(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_dir = make_run(tmp_path / "run")
    track(run_dir, "tensorboard", aliases="trl", out=tmp_path / "logs")
    board = EventAccumulator(str(tmp_path / "logs"))
    board.Reload()
    assert [(e.step, e.wall_time) for e in board.Scalars("train/reward")] == [(i, 1000.0 + i) for i in range(5)]
    assert [e.step for e in board.Scalars("rollout/inflight")] == [8 * i for i in range(10)]
    text = board.Tensors("run file")[0].tensor_proto.string_val[0].decode()
    assert '"seed": 7' in text
    assert "hidden" not in text


def test_other_peoples_event_files_are_left_alone(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    theirs = run_dir / "tensorboard" / "events.out.tfevents.1.host.theirs.0"
    theirs.parent.mkdir()
    theirs.write_bytes(b"")
    track(run_dir, "tensorboard")
    assert theirs.exists()


def test_wandb_gets_a_step_axis_per_role_the_config_and_the_time_of_the_run(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", num_steps=2)
    track(run_dir, "wandb", aliases="verl")
    rows = wandb_rows(run_dir / "trackers")
    assert rows[4] == {"training/global_step": 0, "critic/rewards/mean": 0.0, "_timestamp": 1000.0}
    assert rows[1] == {"rollout/step": 8, "rollout/num_running": 0.25, "_timestamp": 1001.0}
    (path,) = (run_dir / "trackers" / "wandb").glob("offline-run-*/run-*.wandb")
    assert b"hidden" not in path.read_bytes()
    assert b"API_KEY" in path.read_bytes()


def test_trackio_gets_a_run_per_role_with_the_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trackio.sqlite_storage import SQLiteStorage

    use_folder(tmp_path / "trackio", monkeypatch)
    track(make_run(tmp_path / "run"), "trackio", project="mine")
    assert sorted(SQLiteStorage.get_runs("mine")) == ["run-rollout", "run-trainer"]
    config = SQLiteStorage.get_run_config("mine", "run-trainer")
    assert config is not None
    assert config["run"] == {"seed": 7}


def test_follower_sends_lines_as_they_come_and_a_torn_one_only_when_whole(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    file = run_dir / "metrics" / "trainer.jsonl"
    seen: list[int] = []
    whole = '{"t": 1005.0, "step": 5, "reward/mean": 1.25}\n'

    def write(text: str) -> Callable[[], None]:
        def now() -> None:
            with file.open("a") as out:
                out.write(text)

        return now

    script = [write(whole[:20]), write(whole[20:]), lambda: append(run_dir, "trainer", 6, 1)]

    def wait() -> bool:
        seen.append(len(from_tensorboard(run_dir / "tensorboard")))
        if script:
            script.pop(0)()
            return True
        return False

    track(run_dir, "tensorboard", wait=wait)
    assert seen == [15, 15, 16, 17]
    assert from_tensorboard(run_dir / "tensorboard") == expected(7, 10)
