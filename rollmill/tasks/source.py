"""An endless, reproducible stream of tasks: task number i is a pure function of (family, kinds, levels, split, seed, i)."""

from __future__ import annotations

import random
from collections.abc import Sequence

from rollmill.records import Task
from rollmill.tasks.family import SPLITS, TaskFamily


class TaskSource:
    """Numbered tasks of one split. Kinds and levels are drawn evenly and independently of how fast or slow they are."""

    def __init__(self, family: TaskFamily, *, split: str, seed: int, kinds: Sequence[str] = (), levels: Sequence[int] = (1,)) -> None:
        if split not in SPLITS:
            raise ValueError(f"there is no split {split!r}; known: {', '.join(SPLITS)}")
        unknown = [k for k in kinds if k not in family.kinds]
        if unknown:
            raise ValueError(f"task family {family.name!r} has no kind {unknown[0]!r}; known: {', '.join(family.kinds)}")
        self.family, self.split, self.seed = family, split, seed
        self.kinds, self.levels = tuple(kinds) or family.kinds, tuple(levels)

    def task(self, index: int) -> Task:
        rng = random.Random(f"{self.family.name}/{self.split}/{self.seed}/{index}")
        return self.family.make(kind=rng.choice(self.kinds), level=rng.choice(self.levels), seed=rng.getrandbits(40), split=self.split)
