"""A disk that really fills up: the run stops with one clear sentence, loses nothing, and goes on when there is room again."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollmill.ledger import Ledger
from tests.fleet.live_run import LiveRun, run_file


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "run"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(disk)], capture_output=True, text=True)
    if os.geteuid() != 0 or mounted.returncode != 0:
        pytest.skip(f"needs the right to mount a small disk: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_full_disk_stops_the_run_loudly_and_it_resumes_when_there_is_room(tmp_path: Path, small_disk: Path) -> None:
    # Room for the first weights, but not for two checkpoints of masters and moments.
    run = LiveRun(run_file(tmp_path, run={"steps": 3}, trainer={"checkpoint_every": 1}))
    run.start()
    output = run.finish(120)
    assert run.process is not None and run.process.returncode == 2, output
    assert "No space left" in output or "full" in output, output

    subprocess.run(["mount", "-o", "remount,size=400m", str(small_disk)], check=True)
    run.start("--resume")
    output = run.finish(120)
    assert run.process.returncode == 0, output
    with Ledger.open_reader(run.run_dir) as ledger:
        assert ledger.audit() == []
        assert ledger.progress().num_trained == 6
