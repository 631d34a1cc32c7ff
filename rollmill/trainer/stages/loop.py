"""The loop of every stage: gradients of a course's micro-batches, an optimiser step, now and then an evaluation and a checkpoint.

What a step learns from is the course's business; it is a function of the step alone, so a resumed stage repeats nothing and skips nothing.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from rollmill.model import Model
from rollmill.telemetry import Metrics
from rollmill.trainer.checkpoint import load_checkpoint, prune_checkpoints, save_checkpoint
from rollmill.trainer.optimizer import MasterAdamW
from rollmill.trainer.stages.book import StageBook
from rollmill.trainer.stages.packed import Addends
from rollmill.trainer.stages.schedule import lr_scale
from rollmill.trainer.stages.settings import StageSettings


class Course(Protocol):
    """What a stage teaches."""

    num_steps: int

    def begin(self, model: Model, step: int) -> float:
        """Called before each step; brings the model into the shape of the step's phase and returns its peak learning rate."""

    def losses(self, model: Model, step: int) -> Iterator[tuple[torch.Tensor, Addends]]:
        """Per micro-batch: a loss to take the gradient of, and parts of metrics; both add up to the step's."""

    def evaluate(self, model: Model) -> dict[str, float]:
        """On what was put aside; empty when nothing was."""


def run_course(
    course: Course, model: Model, settings: StageSettings, book: StageBook, metrics: Metrics, report: Callable[[str], None]
) -> None:
    """All steps from the last checkpoint on; the model then holds the result."""
    # The live weights follow the fp32 masters unrounded while learning is fast, and are rounded once when saved.
    optimizer = MasterAdamW(
        model,
        lr=settings.lr,
        eps=settings.adam_eps,
        weight_decay=settings.weight_decay,
        clip_norm=settings.clip_norm,
        round_live=False,
    )
    record = book.record
    if record.checkpoint:
        load_checkpoint(book.folder, record.checkpoint, record.digest, optimizer)
        report(f"going on behind step {record.step}")
    prune_checkpoints(book.folder, record.step)
    said = _Said(course.num_steps, report)
    for step in range(record.step, course.num_steps):
        started = time.monotonic()
        peak = course.begin(model, step)
        adding: defaultdict[str, torch.Tensor | float] = defaultdict(float)
        for loss, parts in course.losses(model, step):
            loss.backward()
            for name, value in parts.items():
                adding[name] = adding[name] + value
        scale = peak / settings.lr * lr_scale(
            step,
            num_steps=course.num_steps,
            warmup_steps=settings.warmup_steps,
            schedule=settings.schedule,
            final_frac=settings.lr_final_frac,
        )  # fmt: skip
        stats = optimizer.step(scale)
        sums = {name: float(value) for name, value in adding.items()}
        took_s = time.monotonic() - started
        values = {**sums, "optim/lr": settings.lr * scale, "grad/norm": stats.grad_norm, "grad/is_dropped": float(not stats.is_applied)}
        values |= {"timing_s/step": took_s, "perf/tokens_per_s": sums.get("perf/num_tokens", 0.0) / max(took_s, 1e-9)}
        done = step + 1
        if done % settings.eval_every == 0 or done == course.num_steps:
            values |= course.evaluate(model)
        metrics.write(values, step=done)
        said.step(done, values)
        if done % settings.checkpoint_every == 0 and done < course.num_steps:
            path, digest = save_checkpoint(book.folder, step=done, optimizer=optimizer)
            book.commit(step=done, checkpoint=path, digest=digest)
            prune_checkpoints(book.folder, done)


class _Said:
    """A progress line every so many steps, and at every evaluation."""

    def __init__(self, num_steps: int, report: Callable[[str], None]) -> None:
        self._num_steps, self._report, self._every = num_steps, report, max(1, min(100, num_steps // 10))
        self._tokens, self._seconds = 0.0, 0.0

    def step(self, done: int, values: dict[str, float]) -> None:
        self._tokens += values.get("perf/num_tokens", 0.0)
        self._seconds += values["timing_s/step"]
        if done % self._every and done != self._num_steps and "loss/eval" not in values:
            return
        shown = [f"{name.removeprefix('loss/')} {values[name]:.4f}" for name in SHOWN if name in values]
        self._report(f"step {done}/{self._num_steps}  {'  '.join(shown)}  {self._tokens / max(self._seconds, 1e-9):,.0f} tokens/s")
        self._tokens = self._seconds = 0.0


SHOWN = ("loss/nll", "loss/preference", "rewards/accuracies", "rewards/margins", "loss/eval", "eval/accuracies")
