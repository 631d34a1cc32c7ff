"""A whole run with a foreign agent: real engine, real weights, real optimiser steps; the ledger is clean and the agent's tokens trained."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from agent_stage import EXAMPLES

from rollmill.ledger import Ledger
from rollmill.records import EpisodeState, StopReason, Trace
from rollmill.telemetry import read_metrics

RUN_FILE = """
[run]
dir = "{folder}/run"
steps = 2

[model]
path = "models/demo"

[tasks]
kinds = ["count", "configure"]
num_heldout = 2

[rollout]
group_size = 4

[agent]
kind = "program"
where = "beside"
command = ["{python}", "{examples}/openai_loop.py", "{{instruction}}"]
graded_exit_codes = []

[trainer]
groups_per_batch = 1
lr = 1e-4
"""


@pytest.mark.slow
def test_run_with_a_foreign_agent_trains_what_the_agent_sampled(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(RUN_FILE.format(folder=tmp_path, python=sys.executable, examples=EXAMPLES))
    argv = [sys.executable, "-m", "rollmill.cli", "train", str(file)]
    done = subprocess.run(argv, cwd=EXAMPLES.parents[1], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    with Ledger.open_reader(tmp_path / "run") as ledger:
        assert ledger.audit() == [] and ledger.progress().num_trained == 2
        graded = [e for i in range(2) for e in ledger.episodes_of(f"g{i:06d}") if e.state is EpisodeState.GRADED]
        traces = [msgspec.msgpack.decode(ledger.blobs.get(e.blob), type=Trace) for e in graded if e.blob is not None]
    assert traces and all(t.num_sampled > 0 and t.stop in (StopReason.EXITED, StopReason.MAX_TOKENS) for t in traces)
    assert read_metrics(tmp_path / "run", "rollout")[-1]["rollout/num_calls_overridden"] == 0
