"""Tasks in the order that a curriculum chooses: turns its choices into tasks and, after a restart, the ledger's tasks into choices.

Pure: the caller reads the ledger. What `TaskSource` is to an even draw, this is to an aimed one.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from rollmill.ledger import GroupResult, Pacing
from rollmill.records import Task
from rollmill.rollout.curriculum import Aim, Choice, Curriculum, arms_of, lag_of
from rollmill.tasks.family import TaskFamily


class CurriculumSource:
    """`pacing` is the widest that the run may use; `num_groups` how many it plans to open."""

    def __init__(
        self,
        family: TaskFamily,
        *,
        split: str,
        seed: int,
        kinds: Sequence[str],
        levels: Sequence[int],
        aim: Aim,
        pacing: Pacing,
        group_size: int,
        num_groups: int,
    ) -> None:
        self._family, self._split, self._seed = family, split, seed
        list_all = getattr(family, "listed", None)
        listed: list[tuple[str, int, int]] | None = None if list_all is None else list(list_all(split))
        arms = arms_of(tuple(kinds) or family.kinds, levels, listed)
        self._arm_at = {(arm.kind, arm.level): i for i, arm in enumerate(arms)}
        self._seeds: list[list[int]] = [[] for _ in arms]
        for kind, level, row_seed in listed or ():
            if (arm := self._arm_at.get((kind, level))) is not None:
                self._seeds[arm].append(row_seed)
        self._row_at = [{row_seed: row for row, row_seed in enumerate(seeds)} for seeds in self._seeds]
        self.curriculum = Curriculum(arms, aim, seed=seed, group_size=group_size, num_groups=num_groups, lag=lag_of(pacing))

    def restore(self, tasks: Iterable[Task], results: Iterable[GroupResult]) -> None:
        """Take up a run: every task opened so far, in that order, and every result."""
        for result in results:
            self.curriculum.note(result)
        for task in tasks:
            arm = self._arm_at.get((task.kind, task.level))
            row = None if arm is None else self._row_at[arm].get(task.seed)
            if arm is None or (row is None and self._seeds[arm]):
                raise ValueError(
                    f"{task.task_id} was opened by this run and is no longer among the tasks of {self._family.name!r}; put it back, "
                    "or start a new run directory"
                )
            self.curriculum.adopt(Choice(seq=self.curriculum.num_chosen, arm=arm, row=row))

    def task(self, index: int, results: Iterable[GroupResult]) -> Task:
        """The task of group `index`, the next one, knowing `results`: those from `curriculum.num_folded` on are enough."""
        for result in results:
            self.curriculum.note(result)
        choice = self.curriculum.choose(index)
        arm = self.curriculum.arms[choice.arm]
        if choice.row is None:
            seed = random.Random(f"{self._family.name}/{self._split}/{self._seed}/{index}").getrandbits(40)
        else:
            seed = self._seeds[choice.arm][choice.row]
        return self._family.make(kind=arm.kind, level=arm.level, seed=seed, split=self._split)
