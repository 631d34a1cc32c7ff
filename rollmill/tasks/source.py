"""An endless, reproducible stream of tasks: task number i is a pure function of (family, kinds, levels, split, seed, i)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache

from rollmill.records import Task
from rollmill.tasks.family import SPLITS, TaskFamily


class TaskSource:
    """Numbered tasks of one split. Kinds and levels are drawn evenly and independently of how fast or slow they are.

    A family that lists its tasks (`listed`) is passed over again and again, each time in another order.
    """

    def __init__(self, family: TaskFamily, *, split: str, seed: int, kinds: Sequence[str] = (), levels: Sequence[int] = (1,)) -> None:
        if split not in SPLITS:
            raise ValueError(f"there is no split {split!r}; known: {', '.join(SPLITS)}")
        unknown = [k for k in kinds if k not in family.kinds]
        if unknown:
            raise ValueError(f"task family {family.name!r} has no kind {unknown[0]!r}; known: {', '.join(family.kinds)}")
        self.family, self.split, self.seed = family, split, seed
        self.kinds, self.levels = tuple(kinds) or family.kinds, tuple(levels)
        self._listed: list[tuple[str, int, int]] | None = None
        if (listed := getattr(family, "listed", None)) is not None:
            everything = listed(split)
            self._listed = [row for row in everything if row[0] in self.kinds and row[1] in self.levels]
            if not self._listed:
                raise ValueError(
                    f"task family {family.name!r} has no {split} task of the kinds {', '.join(self.kinds)} and the levels {self.levels}; "
                    f"it has {len(everything)} {split} tasks in all. Change `tasks.kinds` or `tasks.levels`"
                )
        self._order = lru_cache(maxsize=4)(self._shuffled)

    def task(self, index: int) -> Task:
        if self._listed is not None:
            num_passes, place = divmod(index, len(self._listed))
            kind, level, seed = self._listed[self._order(num_passes)[place]]
            return self.family.make(kind=kind, level=level, seed=seed, split=self.split)
        rng = random.Random(f"{self.family.name}/{self.split}/{self.seed}/{index}")
        return self.family.make(kind=rng.choice(self.kinds), level=rng.choice(self.levels), seed=rng.getrandbits(40), split=self.split)

    def _shuffled(self, num_passes: int) -> list[int]:
        assert self._listed is not None
        order = list(range(len(self._listed)))
        random.Random(f"{self.family.name}/{self.split}/{self.seed}/pass {num_passes}").shuffle(order)
        return order
