"""A stage that is killed anywhere and resumed ends with the bits of one that was left alone; what does not fit is refused."""

from __future__ import annotations

import fcntl
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from stage_worlds import CHATS, DOCUMENTS, PAIRS, job_of, quiet, tiny_model, weight_bits, write_rows

from rollmill.telemetry import read_metrics
from rollmill.trainer.checkpoint import CheckpointDamaged
from rollmill.trainer.stages.book import StageState, read_record
from rollmill.trainer.stages.dpo import dpo
from rollmill.trainer.stages.midtrain import midtrain
from rollmill.trainer.stages.settings import DpoSettings, MidtrainSettings, Phase, SftSettings, StageSettings
from rollmill.trainer.stages.sft import sft

FEW: dict[str, Any] = {
    "steps": 12, "tokens_per_batch": 256, "tokens_per_microbatch": 128, "warmup_steps": 2, "num_threads": 1, "num_workers": 1,
    "checkpoint_every": 5, "lr": 1e-2, "eval_frac": 0.1, "eval_every": 3,
}  # fmt: skip
STAGES: dict[str, tuple[Any, StageSettings, list[Any]]] = {
    "midtrain": (midtrain, MidtrainSettings(**FEW, length=32, phases=(Phase(steps=6, length=128, rope="yarn"),)), DOCUMENTS),
    "sft": (sft, SftSettings(**FEW), CHATS),
    "dpo": (dpo, DpoSettings(**FEW), PAIRS),
}
KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_stage_resume as world
from rollmill.trainer.stages import {module} as victim
real, left = victim.{name}, [int(sys.argv[4])]
def dies(*args, **options):
    left[0] -= 1
    found = real(*args, **options)
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    return found
victim.{name} = dies
world.run(sys.argv[2], Path(sys.argv[3]))
"""


def run(kind: str, folder: Path, *, resume: bool = False, out: str = "out") -> None:
    stage, settings, _ = STAGES[kind]
    stage(job_of(folder / "model", folder / "rows.jsonl", folder / out, resume=resume), settings, quiet)


@pytest.fixture
def world(tmp_path: Path) -> Path:
    tiny_model(tmp_path / "model")
    return tmp_path


def rows_for(world: Path, kind: str) -> None:
    write_rows(world / "rows.jsonl", STAGES[kind][2])


@pytest.mark.parametrize(
    ("kind", "module", "name", "at", "committed"),
    [
        # In the second phase, with a checkpoint on disk that the record does not name yet.
        ("midtrain", "loop", "save_checkpoint", 3, 10),
        # Between two checkpoints.
        ("sft", "loop", "lr_scale", 9, 5),
        # With the model half in place.
        ("dpo", "stage", "save_model", 1, 10),
    ],
)
def test_killed_and_resumed_stage_ends_with_the_bits_of_an_undisturbed_one(
    world: Path, kind: str, module: str, name: str, at: int, committed: int
) -> None:
    rows_for(world, kind)
    code = KILLED.format(module=module, name=name)
    done = subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parent), kind, str(world), str(at)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    record = read_record(world / "out")
    assert record is not None and (record.state, record.step) == (StageState.RUNNING, committed)
    run(kind, world, resume=True)
    run(kind, world, out="undisturbed")
    assert weight_bits(world / "out") == weight_bits(world / "undisturbed")
    values = [{r["step"]: r for r in read_metrics(world / o / "stage", kind)} for o in ("out", "undisturbed")]
    same = ("loss/nll", "loss/preference", "loss/eval", "grad/norm", "optim/lr", "perf/num_tokens")
    assert [{k: r[k] for k in same if k in r} for r in values[0].values()] == [
        {k: r[k] for k in same if k in r} for r in values[1].values()
    ]


def stopped(world: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage that ends by an exception behind its first checkpoint."""
    from rollmill.trainer.stages import loop

    real, left = loop.lr_scale, [7]

    def tires(*args: Any, **options: Any) -> float:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return real(*args, **options)

    rows_for(world, kind)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "lr_scale", tires)
        with pytest.raises(KeyboardInterrupt):
            run(kind, world)


def test_an_unfinished_stage_is_neither_overwritten_nor_resumed_with_other_inputs(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped(world, "sft", monkeypatch)
    with pytest.raises(ValueError, match="unfinished sft stage at step 5; add --resume"):
        run("sft", world)
    job = job_of(world / "model", world / "rows.jsonl", world / "out", resume=True)
    with pytest.raises(ValueError, match=r"lr is 0\.5 and was 0\.01 when"):
        sft(job, SftSettings(**FEW | {"lr": 0.5}), quiet)
    with pytest.raises(ValueError, match="kind is 'dpo' and was 'sft' when"):
        write_rows(world / "pairs.jsonl", PAIRS)
        dpo(job_of(world / "model", world / "pairs.jsonl", world / "out", resume=True), DpoSettings(**FEW), quiet)
    write_rows(world / "rows.jsonl", CHATS[1:])
    with pytest.raises(ValueError, match="data is"):
        run("sft", world, resume=True)
    rows_for(world, "sft")
    sft(job, SftSettings(**FEW | {"num_workers": 2, "checkpoint_every": 3}), quiet)
    run("sft", world, out="undisturbed")
    assert weight_bits(world / "out") == weight_bits(world / "undisturbed"), "where and how often do not matter"


def test_a_damaged_checkpoint_is_refused(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped(world, "sft", monkeypatch)
    [state] = (world / "out" / "stage" / "checkpoints").glob("*/state.safetensors")
    body = bytearray(state.read_bytes())
    body[-1] ^= 1
    state.write_bytes(body)
    with pytest.raises(CheckpointDamaged, match="altered or torn"):
        run("sft", world, resume=True)


def test_a_finished_stage_is_found_finished_and_one_at_work_is_left_alone(world: Path) -> None:
    rows_for(world, "sft")
    run("sft", world, resume=True)
    before, said = (world / "out" / "model.safetensors").stat().st_mtime_ns, list[str]()
    sft(job_of(world / "model", world / "rows.jsonl", world / "out", resume=True), STAGES["sft"][1], said.append)
    assert said[-1].endswith("is finished already") and (world / "out" / "model.safetensors").stat().st_mtime_ns == before
    with (world / "out" / "stage" / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another process is at work"):
            run("sft", world, resume=True)
    run("sft", world)
    assert (world / "out" / "model.safetensors").stat().st_mtime_ns != before, "without --resume a finished stage is run again"
