"""One stage from end to end: data to shards, a model from a directory, a course over it, and the result as a model directory again."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from rollmill.model import Model, load_model, read_model_config, save_model
from rollmill.telemetry import Metrics
from rollmill.trainer.datasets.prepare import TOKENIZER_FILES, Prepared, Recipe, cache_folder, prepare
from rollmill.trainer.datasets.rows import Layout
from rollmill.trainer.datasets.shards import TokenShards
from rollmill.trainer.stages.book import StageState, model_digest, open_stage
from rollmill.trainer.stages.loop import Course, run_course
from rollmill.trainer.stages.settings import WITHOUT_EFFECT, StageSettings


class StageJob(msgspec.Struct, frozen=True, kw_only=True):
    """Where a stage takes from and puts to."""

    model: Path
    """A model directory: where it starts."""
    data: tuple[str, ...]
    """Files, folders, globs, or `hf:org/name:split`."""
    out: Path
    """The model directory to make; the stage's own files lie in `stage/` in it."""
    eval_data: tuple[str, ...] = ()
    """Rows to evaluate on, instead of a share of `data`."""
    resume: bool = False
    """Go on with the unfinished stage in `out`; begins it when there is none."""
    redo_changed: bool = False
    """With `resume`: a stage in `out` that had other inputs is begun again instead of refused."""
    cache: Path | None = None
    """Where prepared data lies; None: `$ROLLMILL_HOME/stages`."""


class Taught(msgspec.Struct, frozen=True, kw_only=True):
    """What a course is made from."""

    train: TokenShards
    eval: TokenShards
    """May be empty."""
    train_key: str
    model_digest: str
    cache: Path


def run_stage(
    kind: str,
    layout: Layout,
    job: StageJob,
    settings: StageSettings,
    make_course: Callable[[Model, Taught], Course],
    report: Callable[[str], None],
) -> None:
    """Everything a person can get wrong about the data is found before `out` is touched."""
    if job.out.resolve() == job.model.resolve():
        raise ValueError(f"--out is the model itself, {job.out}; a stage that is resumed needs its beginning, choose another folder")
    if job.eval_data and settings.eval_frac:
        raise ValueError("eval_data and eval_frac do not go together; leave one out")
    config, cache = read_model_config(job.model), job.cache or cache_folder()
    length = 0 if layout is Layout.TEXT else settings.length or config.max_position
    if length > config.max_position:
        raise ValueError(f"length = {length} exceeds the model's context of {config.max_position} tokens")
    recipe = Recipe(layout=layout, max_length=length, eval_frac=settings.eval_frac, vocab_size=config.vocab_size)
    data = prepare(job.data, job.model, recipe, cache=cache, num_workers=settings.num_workers, report=report)
    _tell(data, job.data, length, report)
    aside = data
    if job.eval_data:
        aside = prepare(job.eval_data, job.model, recipe, cache=cache, num_workers=settings.num_workers, report=report)
    facts = stage_facts(job.model, settings) | {"data": data.key, "eval_data": aside.key if job.eval_data else ""}
    with open_stage(job.out, kind, facts, resume=job.resume, redo_changed=job.redo_changed) as book:
        if book.record.state is StageState.FINISHED:
            report(f"{job.out} is finished already")
            return
        if settings.num_threads:
            torch.set_num_threads(settings.num_threads)
        model, _ = load_model(
            job.model, device=settings.device, compute_dtype=getattr(torch, settings.precision), numerics=settings.numerics
        )
        model.recompute_layers = settings.recompute_layers
        taught = Taught(
            train=TokenShards(data.folder),
            eval=TokenShards(aside.folder, "train" if job.eval_data else "eval"),
            train_key=data.key,
            model_digest=facts["model"],
            cache=cache,
        )
        course = make_course(model, taught)
        run_course(course, model, settings, book, Metrics(book.folder, kind), report)
        save_model(model, job.out)
        for name in TOKENIZER_FILES:
            if (job.model / name).is_file():
                shutil.copy(job.model / name, job.out / name)
        book.commit(state=StageState.FINISHED, step=course.num_steps, checkpoint="", digest="")
        shutil.rmtree(book.folder / "checkpoints", ignore_errors=True)
    report(f"wrote {job.out}")


def stage_facts(model: Path, settings: StageSettings) -> dict[str, Any]:
    """What the result is a function of, the data aside."""
    told = msgspec.to_builtins(settings)
    return {"model": model_digest(model), **{k: v for k, v in told.items() if k not in WITHOUT_EFFECT}}


def _tell(data: Prepared, specs: Sequence[str], length: int, report: Callable[[str], None]) -> None:
    long = f"; {data.num_long} sequences were longer than {length} tokens" if length else ""
    if not data.num_tokens["train"]:
        raise ValueError(f"{', '.join(specs)} holds no usable row: {data.num_rows} rows, {data.num_skipped} with nothing to learn{long}")
    aside = f", {data.num_tokens['eval']:,} of them put aside" if data.num_tokens["eval"] else ""
    report(f"{data.num_rows:,} rows, {sum(data.num_tokens.values()):,} tokens{aside}; {data.num_skipped} rows had nothing to learn{long}")
