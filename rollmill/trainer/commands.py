"""`rollmill midtrain`, `sft` and `dpo`: verbs only; what they need is imported inside, so `--help` is instant.

An option is named after the setting it sets; defaults are those of the settings, which a test compares.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

Model = Annotated[Path, typer.Argument(help="the model directory to start from")]
Data = Annotated[list[str], typer.Option(help="JSONL, Parquet or Arrow: a file, a folder or a glob; hf:org/name:split; may be repeated")]
Out = Annotated[Path, typer.Option(help="the model directory to make")]
EvalData = Annotated[list[str] | None, typer.Option(help="rows to evaluate on")]
Resume = Annotated[bool, typer.Option("--resume", help="go on with the unfinished stage in OUT")]
Cache = Annotated[Path | None, typer.Option(help="where prepared data is kept; default: ~/.cache/rollmill/stages")]
Lr = Annotated[float, typer.Option(help="peak learning rate")]
Steps = Annotated[int, typer.Option(help="optimiser steps")]
Epochs = Annotated[float, typer.Option(help="passes over the data instead of steps")]
Warmup = Annotated[int, typer.Option(help="steps over which the learning rate rises")]
ScheduleName = Annotated[str, typer.Option("--schedule", help="linear, cosine or constant")]
FinalFrac = Annotated[float, typer.Option(help="share of the learning rate at the end")]
Decay = Annotated[float, typer.Option(help="weight decay")]
Clip = Annotated[float, typer.Option(help="cut of the gradient's norm")]
AdamEps = Annotated[float, typer.Option(help="AdamW's floor")]
BatchTokens = Annotated[int, typer.Option(help="tokens per optimiser step")]
MicroTokens = Annotated[int, typer.Option(help="most tokens computed at once; gradients add up over micro-batches")]
Length = Annotated[int, typer.Option(help="longest sequence in tokens; 0: the model's context")]
Seed = Annotated[int, typer.Option(help="decides the order of the data")]
EvalFrac = Annotated[float, typer.Option(help="share of the rows put aside for evaluation")]
EvalEvery = Annotated[int, typer.Option(help="steps between evaluations")]
EvalTokens = Annotated[int, typer.Option(help="most tokens of one evaluation")]
CheckpointEvery = Annotated[int, typer.Option(help="steps between checkpoints")]
Device = Annotated[str, typer.Option(help="cpu or cuda")]
Precision = Annotated[str, typer.Option(help="float32, or bfloat16 on a GPU")]
Numerics = Annotated[str, typer.Option(help="fast or exact")]
Recompute = Annotated[bool, typer.Option("--recompute-layers", help="less memory for a third more work")]
Threads = Annotated[int, typer.Option(help="CPU threads; 0: as torch chooses")]
Workers = Annotated[int, typer.Option(help="processes that tokenise; 0: one per core")]
Phases = Annotated[list[str] | None, typer.Option("--phase", help='a further phase: "steps=200,length=4096,rope=yarn"; may be repeated')]

_NOT_SETTINGS = ("model", "data", "out", "eval_data", "resume", "cache", "phase")


def midtrain_command(
    model: Model, data: Data, out: Out, eval_data: EvalData = None, resume: Resume = False, cache: Cache = None, phase: Phases = None,
    lr: Lr = 2e-3, steps: Steps = 1000, epochs: Epochs = 0.0, warmup_steps: Warmup = 50, schedule: ScheduleName = "linear",
    lr_final_frac: FinalFrac = 0.02, weight_decay: Decay = 0.01, clip_norm: Clip = 1.0, adam_eps: AdamEps = 1e-8,
    tokens_per_batch: BatchTokens = 32768, tokens_per_microbatch: MicroTokens = 32768, length: Length = 0, seed: Seed = 0,
    eval_frac: EvalFrac = 0.0, eval_every: EvalEvery = 100, eval_tokens: EvalTokens = 262144, checkpoint_every: CheckpointEvery = 200,
    device: Device = "cpu", precision: Precision = "float32", numerics: Numerics = "fast", recompute_layers: Recompute = False,
    num_threads: Threads = 0, num_workers: Workers = 0,
) -> None:  # fmt: skip
    """Continue pre-training a model on documents (rows with `text`)."""
    options = locals()
    from rollmill.trainer.stages.midtrain import midtrain
    from rollmill.trainer.stages.settings import MidtrainSettings, parse_phase, parse_settings

    raw = _settings(options) | {"phases": [parse_phase(p) for p in phase or ()]}
    midtrain(_job(options), parse_settings(MidtrainSettings, raw, "midtrain"), typer.echo)


def sft_command(
    model: Model, data: Data, out: Out, eval_data: EvalData = None, resume: Resume = False, cache: Cache = None,
    lr: Lr = 2e-3, steps: Steps = 1000, epochs: Epochs = 0.0, warmup_steps: Warmup = 50, schedule: ScheduleName = "linear",
    lr_final_frac: FinalFrac = 0.02, weight_decay: Decay = 0.01, clip_norm: Clip = 1.0, adam_eps: AdamEps = 1e-8,
    tokens_per_batch: BatchTokens = 32768, tokens_per_microbatch: MicroTokens = 32768, length: Length = 0, seed: Seed = 0,
    eval_frac: EvalFrac = 0.0, eval_every: EvalEvery = 100, eval_tokens: EvalTokens = 262144, checkpoint_every: CheckpointEvery = 200,
    device: Device = "cpu", precision: Precision = "float32", numerics: Numerics = "fast", recompute_layers: Recompute = False,
    num_threads: Threads = 0, num_workers: Workers = 0,
) -> None:  # fmt: skip
    """Fine-tune a model on conversations (rows with `messages`, `prompt` and `completion`, or `text`)."""
    options = locals()
    from rollmill.trainer.stages.settings import SftSettings, parse_settings
    from rollmill.trainer.stages.sft import sft

    sft(_job(options), parse_settings(SftSettings, _settings(options), "sft"), typer.echo)


def dpo_command(
    model: Model, data: Data, out: Out, eval_data: EvalData = None, resume: Resume = False, cache: Cache = None,
    loss: Annotated[str, typer.Option(help="sigmoid, ipo or simpo")] = "sigmoid",
    beta: Annotated[float, typer.Option(help="how strongly the policy is held to the reference")] = 0.1,
    label_smoothing: Annotated[float, typer.Option(help="share of pairs taken to be the wrong way round")] = 0.0,
    gamma: Annotated[float, typer.Option(help="simpo: the margin")] = 0.5,
    nll_weight: Annotated[float, typer.Option(help="weight of the chosen answer's own loss")] = 0.0,
    lr: Lr = 1e-6, steps: Steps = 1000, epochs: Epochs = 0.0, warmup_steps: Warmup = 50, schedule: ScheduleName = "linear",
    lr_final_frac: FinalFrac = 0.02, weight_decay: Decay = 0.01, clip_norm: Clip = 1.0, adam_eps: AdamEps = 1e-8,
    tokens_per_batch: BatchTokens = 32768, tokens_per_microbatch: MicroTokens = 32768, length: Length = 0, seed: Seed = 0,
    eval_frac: EvalFrac = 0.0, eval_every: EvalEvery = 100, eval_tokens: EvalTokens = 262144, checkpoint_every: CheckpointEvery = 200,
    device: Device = "cpu", precision: Precision = "float32", numerics: Numerics = "fast", recompute_layers: Recompute = False,
    num_threads: Threads = 0, num_workers: Workers = 0,
) -> None:  # fmt: skip
    """Teach a model preferences (rows with `prompt`, `chosen` and `rejected`)."""
    options = locals()
    from rollmill.trainer.stages.dpo import dpo
    from rollmill.trainer.stages.settings import DpoSettings, parse_settings

    dpo(_job(options), parse_settings(DpoSettings, _settings(options), "dpo"), typer.echo)


def _settings(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in _NOT_SETTINGS}


def _job(options: dict[str, Any]) -> Any:
    from rollmill.trainer.stages.stage import StageJob

    return StageJob(
        model=options["model"],
        data=tuple(options["data"]),
        out=options["out"],
        eval_data=tuple(options["eval_data"] or ()),
        resume=options["resume"],
        cache=options["cache"],
    )
