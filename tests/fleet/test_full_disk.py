"""A disk that really fills up: the run stops with one clear sentence, loses nothing, and goes on when there is room again."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from rollmill.fleet.disk import is_full
from rollmill.ledger import Ledger
from tests.fleet.live_run import LiveRun, run_file

DISK_MB, ROOMY_MB = 24, 400


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "run"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(disk)], capture_output=True, text=True)
    if os.geteuid() != 0 or mounted.returncode != 0:
        pytest.skip(f"needs the right to mount a small disk: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def resize(disk: Path, size_mb: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size_mb}m", str(disk)], check=True)


def test_what_safetensors_says_on_a_full_disk_is_recognised(small_disk: Path) -> None:
    with pytest.raises(SafetensorError) as refused:
        save_file({"master": torch.zeros(DISK_MB << 18)}, small_disk / "state.safetensors")
    assert is_full(refused.value)


# Room for the first weights, but not for two checkpoints of masters and moments: the trainer meets it. Room for the first weights
# and hardly more: whoever writes a trace, a ledger row or a checkpoint first, and there may be none for its last words.
@pytest.mark.parametrize("size_mb", [DISK_MB, 3])
def test_full_disk_stops_the_run_loudly_and_it_resumes_when_there_is_room(tmp_path: Path, small_disk: Path, size_mb: int) -> None:
    resize(small_disk, size_mb)
    run = LiveRun(run_file(tmp_path, run={"steps": 3}, trainer={"checkpoint_every": 1}))
    run.start()
    output = run.finish(120)
    assert run.process is not None and run.process.returncode == 2, output
    assert "started again" not in output, output
    assert f"MB left in {small_disk}" in output and "free some space" in output, output

    resize(small_disk, ROOMY_MB)
    run.start("--resume")
    output = run.finish(120)
    assert run.process.returncode == 0, output
    with Ledger.open_reader(run.run_dir) as ledger:
        assert ledger.audit() == []
        assert ledger.progress().num_trained == 6
