"""From groups to token lessons: what one optimiser step learns from, and how it is cut into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np

from rollmill.records import Trace, Window
from rollmill.trainer.advantage import has_signal, leave_one_out


class GradedEpisode(msgspec.Struct, frozen=True, kw_only=True):
    """A graded episode of a group."""

    episode_id: str
    reward: float
    load: Callable[[], Trace]
    """Reads the trace; only called when the group teaches something."""


class Lesson(msgspec.Struct, frozen=True, kw_only=True):
    """One context window with its episode's advantage."""

    window: Window
    advantage: float


class StepBatch(msgspec.Struct, frozen=True, kw_only=True):
    lessons: list[Lesson]
    num_episodes: int
    """All graded episodes, those without signal included: the loss divides by this."""
    rewards: list[float]
    num_groups: int
    num_groups_without_signal: int
    num_tokens: int


def make_batch(groups: Sequence[Sequence[GradedEpisode]]) -> StepBatch:
    """Advantages per group; groups whose rewards are all equal are counted and never loaded."""
    lessons: list[Lesson] = []
    num_flat = 0
    for attempts in groups:
        rewards = np.array([a.reward for a in attempts])
        if not has_signal(rewards):
            num_flat += 1
            continue
        for attempt, advantage in zip(attempts, leave_one_out(rewards), strict=True):
            if advantage != 0.0:
                lessons += [Lesson(window=w, advantage=float(advantage)) for w in attempt.load().windows if w.sampled_T.any()]
    return StepBatch(
        lessons=lessons,
        num_episodes=sum(len(g) for g in groups),
        rewards=[a.reward for g in groups for a in g],
        num_groups=len(groups),
        num_groups_without_signal=num_flat,
        num_tokens=sum(s.window.num_tokens for s in lessons),
    )


def micro_batches(lessons: Sequence[Lesson], max_tokens: int) -> Iterator[list[Lesson]]:
    """Sequences of similar length together, at most `max_tokens` padded tokens each (one sequence may exceed it alone)."""
    chunk: list[Lesson] = []
    for sequence in sorted(lessons, key=lambda s: -s.window.num_tokens):
        longest = chunk[0].window.num_tokens if chunk else sequence.window.num_tokens
        if chunk and longest * (len(chunk) + 1) > max_tokens:
            yield chunk
            chunk = []
        chunk.append(sequence)
    if chunk:
        yield chunk
