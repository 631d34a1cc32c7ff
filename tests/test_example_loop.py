"""The example loop: short enough to read, clean in its ledger, and able to go on after a kill -9."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

from rollmill.ledger import Ledger
from rollmill.weights import open_store, verify

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "loop.py"
DEADLINE_S = 300.0


def start(run_dir: Path, num_steps: int) -> subprocess.Popen[str]:
    command = [sys.executable, str(SCRIPT), "--steps", str(num_steps), "--run-dir", str(run_dir)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_example_loop_fits_in_300_lines() -> None:
    assert len(SCRIPT.read_text().splitlines()) < 300


def test_example_loop_killed_after_a_step_goes_on_and_trains_every_group_once(tmp_path: Path) -> None:
    first = start(tmp_path, 2)
    assert first.stdout is not None
    said, watchdog = "", threading.Timer(DEADLINE_S, first.kill)
    watchdog.start()
    for line in first.stdout:
        said += line
        if line.startswith("step 1/2"):
            break
    first.send_signal(signal.SIGKILL)
    watchdog.cancel()
    first.wait(DEADLINE_S)
    first.stdout.close()
    assert "step 1/2" in said, said

    said, _ = (second := start(tmp_path, 2)).communicate(timeout=DEADLINE_S)
    assert second.returncode == 0, said
    assert "step 1/2" not in said, said
    with Ledger.open_reader(tmp_path) as ledger:
        assert ledger.audit() == []
        progress = ledger.progress()
    assert (progress.num_trained, progress.num_steps_committed) == (8, 2)
    assert progress.num_open == progress.num_ready == progress.num_admitted == 0
    assert verify(open_store(tmp_path / "weights")) == []
