"""A pipeline of tiny stages runs end to end, goes on where it was, repeats only what changed, and refuses a wrong file before it starts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "trainer"))
from stage_worlds import CHATS, DEMO, DOCUMENTS, PAIRS, quiet, tiny_model, weight_bits, write_rows

from rollmill.config import RunConfig
from rollmill.fleet.pipeline import Pipeline, describe_plan, load_pipeline, run_pipeline
from rollmill.fleet.train import train_run
from rollmill.trainer.stages.book import read_record
from rollmill.weights.interop.hf import read_directory
from rollmill.weights.interop.intake import take_in
from rollmill.weights.store import find_store

COMMON = "tokens_per_batch = 256\nwarmup_steps = 1\nnum_threads = 1\nnum_workers = 1\n"


def write_pipeline(folder: Path, *, sft_lr: float = 1e-3, rl: str = "", model: Path | None = None) -> Path:
    text = f"""
[pipeline]
model = "{model or folder / "model"}"
dir = "{folder / "pipe"}"
cache = "{folder / "cache"}"

[[stage]]
kind = "midtrain"
data = "{folder / "d.jsonl"}"
steps = 3
length = 32
phases = [{{ steps = 2, length = 128, rope = "yarn" }}]
{COMMON}
[[stage]]
kind = "sft"
name = "chat"
data = ["{folder / "c.jsonl"}"]
epochs = 1
lr = {sft_lr}
{COMMON}
[[stage]]
kind = "dpo"
data = "{folder / "p.jsonl"}"
steps = 2
beta = 0.2
{COMMON}
{rl}
"""
    path = folder / "pipe.toml"
    path.write_text(text)
    return path


RL = """
[[stage]]
kind = "rl"
[stage.run]
steps = 2
[stage.trainer]
lr = 1e-4
[stage.engine]
max_len = 64
"""


@pytest.fixture
def world(tmp_path: Path) -> Path:
    tiny_model(tmp_path / "model")
    for name, rows in (("d", DOCUMENTS), ("c", CHATS), ("p", PAIRS)):
        write_rows(tmp_path / f"{name}.jsonl", rows)
    return tmp_path


class DryTrainer:
    """Publishes the model it was given, as a run that learnt nothing would."""

    def __init__(self, *, is_stopped: bool = False) -> None:
        self.calls: list[tuple[RunConfig, bool]] = []
        self.is_stopped = is_stopped

    def __call__(self, config: RunConfig, *, resume: bool) -> bool:
        self.calls.append((config, resume))
        config.run.dir.mkdir(parents=True, exist_ok=True)
        (config.run.dir / "run.toml").write_text("")
        if self.is_stopped:
            return False
        take_in(find_store(config.weight_store, may_be_new=True), read_directory(config.model.path), run_id="dry")
        return True


def times(pipeline: Pipeline) -> list[int]:
    return [next(s.out.glob("*.safetensors")).stat().st_mtime_ns for s in pipeline.stages]


def test_stages_run_in_a_row_and_are_not_repeated(world: Path) -> None:
    pipeline, trainer = load_pipeline(write_pipeline(world, rl=RL)), DryTrainer()
    assert [line.partition("[")[2] for line in describe_plan(pipeline)] == ["to run]"] * 4
    assert run_pipeline(pipeline, train=trainer, report=quiet)
    names = ["01-midtrain", "chat", "03-dpo", "04-rl"]
    assert [s.out for s in pipeline.stages] == [world / "pipe" / n for n in names]
    assert [s.model for s in pipeline.stages] == [world / "model", *(world / "pipe" / n for n in names[:3])]
    assert weight_bits(world / "pipe" / "04-rl") == weight_bits(world / "pipe" / "03-dpo") != weight_bits(world / "model")
    [(config, resume)] = trainer.calls
    assert (config.run.steps, config.trainer.lr, config.model.path, resume) == (2, 1e-4, world / "pipe" / "03-dpo", False)
    before = times(pipeline)
    assert [line.partition("[")[2] for line in describe_plan(pipeline)] == ["finished]"] * 4
    assert run_pipeline(pipeline, train=trainer, report=quiet)
    assert times(pipeline) == before and len(trainer.calls) == 1


def test_a_changed_stage_and_those_behind_it_are_run_again(world: Path) -> None:
    trainer = DryTrainer()
    run_pipeline(load_pipeline(write_pipeline(world, rl=RL)), train=trainer, report=quiet)
    changed = load_pipeline(write_pipeline(world, rl=RL, sft_lr=5e-3))
    before, plan = times(changed), describe_plan(changed)
    assert "[finished]" in plan[0] and "to run again: lr is 0.005 and was 0.001 when it ran last" in plan[1]
    assert all("if the stage before it changes" in line for line in plan[2:])
    run_pipeline(changed, train=trainer, report=quiet)
    after = times(changed)
    assert after[0] == before[0] and all(a != b for a, b in zip(after[1:], before[1:], strict=True))
    assert [resume for _, resume in trainer.calls] == [False, False], "a run of other weights is not gone on with"
    assert weight_bits(world / "pipe" / "04-rl") == weight_bits(world / "pipe" / "03-dpo")


def test_a_stopped_rl_stage_is_gone_on_with(world: Path) -> None:
    pipeline, trainer = load_pipeline(write_pipeline(world, rl=RL)), DryTrainer(is_stopped=True)
    assert not run_pipeline(pipeline, train=trainer, report=quiet)
    assert "to go on" in describe_plan(pipeline)[-1]
    trainer.is_stopped = False
    assert run_pipeline(pipeline, train=trainer, report=quiet)
    assert [resume for _, resume in trainer.calls] == [False, True]


def test_a_stage_that_was_interrupted_is_gone_on_with(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rollmill.fleet import pipeline as module

    pipeline = load_pipeline(write_pipeline(world))

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setitem(module.RUN, "dpo", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_pipeline(pipeline, train=DryTrainer(), report=quiet)
    assert read_record(world / "pipe" / "chat") is not None and read_record(world / "pipe" / "03-dpo") is None
    said: list[str] = []
    assert run_pipeline(pipeline, train=DryTrainer(), report=said.append)
    assert sum("is finished already" in line for line in said) == 2


def test_a_run_file_with_changes_is_an_rl_stage(world: Path) -> None:
    (world / "run.toml").write_text('[run]\nsteps = 9\n[model]\npath = "elsewhere"\n[engine]\nmax_len = 64\n')
    rl = f'[[stage]]\nkind = "rl"\nrun_file = "{world / "run.toml"}"\nset = ["trainer.lr=2e-5"]\n[stage.tasks]\nlevels = [2]\n'
    config = load_pipeline(write_pipeline(world, rl=rl)).stages[-1].run
    assert config is not None
    assert (config.run.steps, config.trainer.lr, config.engine.max_len, config.tasks.levels) == (9, 2e-5, 64, (2,))
    assert config.model.path == world / "pipe" / "03-dpo" and config.run.dir == world / "pipe" / "04-rl" / "run"


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("beta = 0.2", "betta = 0.2", "stage 3: unknown key 'betta'; the nearest known key is 'beta'"),
        ('kind = "dpo"', 'kind = "ppo"', "kind 'ppo'; known are midtrain, sft, dpo, rl"),
        ("epochs = 1", "epochs = -1", "epochs = -1"),
        ("[pipeline]", "[pipelines]", "unknown key 'pipelines'"),
        ("p.jsonl", "q.jsonl", "no data at"),
        ('name = "chat"', 'name = "../chat"', "without slashes"),
        ('name = "chat"', 'name = "03-dpo"', "the same name"),
        ("steps = 2\nbeta", "steps = 2\nset = []\nbeta", "unknown key 'set'"),
        ("[stage.trainer]\nlr", "[stage.trainer]\nlrr", "unknown key 'trainer.lrr'"),
        ("[[stage]]", "[[stage]", "not valid TOML"),
        ("/model", "/no-model", "no model at"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_before_anything_starts(world: Path, old: str, new: str, told: str) -> None:
    path = write_pipeline(world, rl=RL)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError, match=told.replace("[", r"\[")):
        load_pipeline(path)
    assert not (world / "pipe").exists()


@pytest.mark.slow
def test_a_real_rl_stage_learns_from_the_model_that_sft_made(world: Path) -> None:
    text = f"""
[pipeline]
model = "{DEMO}"
dir = "{world / "pipe"}"
cache = "{world / "cache"}"
[[stage]]
kind = "sft"
data = "{world / "c.jsonl"}"
steps = 1
lr = 1e-6
[[stage]]
kind = "rl"
run_file = "examples/demo.toml"
set = ["run.steps=2", "tasks.num_heldout=0"]
"""
    (world / "real.toml").write_text(text)
    pipeline = load_pipeline(world / "real.toml")
    assert run_pipeline(pipeline, train=train_run, report=quiet)
    assert weight_bits(world / "pipe" / "02-rl") != weight_bits(world / "pipe" / "01-sft")
