"""`rollmill train` as a person meets it: a whole run, stopping, resuming, and every kind of wrong input."""

from __future__ import annotations

import contextlib
import io
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollmill.cli import main
from rollmill.ledger import Ledger
from tests.fleet.live_run import REPO, ROLES, LiveRun, await_until, is_alive, run_file


def rollmill(*args: str) -> subprocess.CompletedProcess[str]:
    """The command line, called in this process: importing torch once is enough."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with mock_argv("rollmill", *args), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 0
    return subprocess.CompletedProcess(args, code, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def mock_argv(*argv: str) -> Iterator[None]:
    before, sys.argv = sys.argv, list(argv)
    try:
        yield
    finally:
        sys.argv = before


def test_run_stops_cleanly_on_ctrl_c_and_resumes_to_its_end(tmp_path: Path) -> None:
    run = LiveRun(run_file(tmp_path, run={"steps": 4}, tasks={"num_heldout": 8}))
    run.start()
    await_until("every role runs", lambda: len(run.role_pids()) == len(ROLES))
    pids = run.role_pids()
    assert run.process is not None
    run.process.send_signal(signal.SIGINT)
    output = run.finish(60)
    assert run.process.returncode == 130 and "--resume" in output, output
    assert not any(is_alive(pid) for pid in pids)

    run.start("--resume")
    output = run.finish(120)
    assert run.process.returncode == 0, output
    path = Path(output.strip().splitlines()[-1])
    assert path.name == "summary.json"
    summary = json.loads(path.read_text())
    for key in (
        "heldout_success_before heldout_success_after num_steps num_episodes trainer_idle_frac rollout_idle_frac staleness_max "
        "delta_bytes_mean full_bytes wall_s seed"
    ).split():
        assert summary[key] is not None, key
    assert summary["num_steps"] == 4 and summary["num_episodes"] >= 32
    with Ledger.open_reader(run.run_dir) as ledger:
        assert ledger.audit() == []
    for verb in ("summary", "audit", "show"):
        shown = rollmill(verb, str(run.run_dir))
        assert shown.returncode == 0 and shown.stdout.strip(), shown
    for verb in ("log", "verify"):
        assert rollmill("weights", verb, str(run.run_dir)).returncode == 0

    assert (run.run_dir / "metrics" / "engine-0.jsonl").read_text().count("engine/tokens_per_s") >= 1
    record = run.run_dir / "model.json"
    kept = record.read_text()
    record.write_text(kept.replace('"tokenizer.json": "', '"tokenizer.json": "0'))
    foreign = rollmill("train", str(run.path), "--resume")
    assert foreign.returncode == 2 and "tokenizer.json is not the file" in foreign.stderr
    record.write_text(kept)

    again = rollmill("train", str(run.path))
    assert again.returncode == 2 and "already holds a run" in again.stderr
    other = rollmill("train", str(run.path), "--resume", "--set", "run.seed=5")
    assert other.returncode == 2 and "run.seed was 0" in other.stderr


def test_sync_mode_trains_only_on_the_newest_version(tmp_path: Path) -> None:
    run = LiveRun(run_file(tmp_path, run={"steps": 3, "mode": "sync"}))
    run.start()
    output = run.finish(120)
    assert run.process is not None and run.process.returncode == 0, output
    with Ledger.open_reader(run.run_dir) as ledger:
        rows = [row for step in range(3) for row in ledger.batch(step)]
    assert len(rows) == 6 and {row.staleness for row in rows} == {0}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainer.max_stale=1", "nearest known key is 'trainer.max_staleness'"),
        ("trainer.lr=fast", "trainer.lr = 'fast'"),
        ("model.path=/nowhere", "no model at /nowhere"),
        ("tasks.kinds=['fly']", "has no kind 'fly'"),
        ("tasks.levels=[9]", "level 9 is outside"),
        ("engine.max_len=100000", "engine.max_len is 100000"),
        ("rollout.sandbox=docker", "docker"),
        ("trainer.max_staleness=0", "run.mode"),
        ("run.steps", "has no '='"),
    ],
)
def test_wrong_input_is_one_clear_sentence_before_anything_starts(tmp_path: Path, override: str, said: str) -> None:
    path = run_file(tmp_path)
    result = rollmill("train", str(path), "--set", override)
    assert result.returncode == 2
    assert said in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "run").exists()


def test_malformed_and_missing_run_files_are_named(tmp_path: Path) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text("[run\n")
    assert f"{bad} is not valid TOML" in rollmill("train", str(bad)).stderr
    assert "there is no run file" in rollmill("train", str(tmp_path / "none.toml")).stderr


def test_dry_run_prints_a_file_that_feeds_back(tmp_path: Path) -> None:
    first = rollmill("train", str(run_file(tmp_path)), "--dry-run", "--set", "trainer.lr=3e-5")
    assert first.returncode == 0 and "would start: trainer" in first.stdout
    again_file = tmp_path / "again.toml"
    again_file.write_text(first.stdout)
    assert rollmill("train", str(again_file), "--dry-run").stdout == first.stdout
    assert "lr = 3e-05" in first.stdout
    assert not (tmp_path / "run").exists()


def test_run_directory_in_use_by_another_run_is_refused(tmp_path: Path) -> None:
    run = LiveRun(run_file(tmp_path))
    run.start()
    assert run.process is not None
    try:
        await_until("the run holds its lock", lambda: (run.run_dir / "run.toml").is_file())
        second = rollmill("train", str(run.path), "--resume")
        assert second.returncode == 2 and "is in use" in second.stderr and str(run.process.pid) in second.stderr
    finally:
        run.process.send_signal(signal.SIGINT)
        run.finish(60)


def test_port_in_use_stops_the_run_and_says_which(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        run = LiveRun(run_file(tmp_path, engine={"port": port}))
        run.start()
        output = run.finish(60)
    assert run.process is not None and run.process.returncode == 2
    assert f"port {port}" in output and "in use" in output


def test_foreign_or_damaged_model_is_refused_before_anything_starts(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in (REPO / "models/demo").iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    weights = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    result = rollmill("train", str(run_file(tmp_path)), "--set", f"model.path={model}")
    assert result.returncode == 2 and "model.safetensors is damaged" in result.stderr
    (model / "config.json").write_text('{"model_type": "mamba"}')
    result = rollmill("train", str(run_file(tmp_path)), "--set", f"model.path={model}")
    assert result.returncode == 2 and "mamba" in result.stderr
