"""The learning rate of every step as a pure function."""

from __future__ import annotations

import math

from rollmill.trainer.stages.settings import Schedule


def lr_scale(step: int, *, num_steps: int, warmup_steps: int, schedule: Schedule, final_frac: float) -> float:
    """Share of the peak at `step` (from 0): rises evenly over the warm-up, falls towards `final_frac` at the end of all steps.

    >>> [lr_scale(s, num_steps=4, warmup_steps=2, schedule=Schedule.CONSTANT, final_frac=0.0) for s in range(4)]
    [0.5, 1.0, 1.0, 1.0]
    """
    warm = min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0
    done = step / num_steps
    if schedule is Schedule.LINEAR:
        return warm * (1.0 - (1.0 - final_frac) * done)
    if schedule is Schedule.COSINE:
        return warm * (final_frac + (1.0 - final_frac) * 0.5 * (1.0 + math.cos(math.pi * done)))
    return warm
