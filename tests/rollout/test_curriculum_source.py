"""From choices to tasks and back: a restart goes on with the same tasks, rows are given once, and a lost row is told."""

from __future__ import annotations

import pytest

from rollmill.ledger import GroupResult, Pacing
from rollmill.records import Grade, Task
from rollmill.rollout.curriculum import Aim
from rollmill.rollout.curriculum_source import CurriculumSource
from rollmill.tasks.family import Attempt, Family

PACING = Pacing.from_staleness(2, 2, "async")


class Endless(Family):
    kinds = ("a", "b")

    def make(self, *, kind: str, level: int, seed: int, split: str) -> Task:
        return self.task(f"{kind} {level} {seed}", kind=kind, level=level, seed=seed, split=split)

    async def grade(self, task: Task, attempt: Attempt) -> Grade:
        return Grade(reward=0.0, success=False)


class Shelf(Endless):
    """Twelve tasks and no more."""

    def listed(self, split: str) -> list[tuple[str, int, int]]:
        return [(kind, level, 100 * level + i) for kind in self.kinds for level in (1, 2) for i in range(3)]


def source(family: Family, **aim: float) -> CurriculumSource:
    return CurriculumSource(
        family, split="train", seed=0, kinds=(), levels=(1, 2), aim=Aim(**aim), pacing=PACING, group_size=4, num_groups=60
    )  # type: ignore[arg-type]  # fmt: skip


def result(seq: int, task: Task) -> GroupResult:
    num_success = (len(task.kind) + seq) % 5
    return GroupResult(seq=seq, num_graded=4, num_success=num_success, is_flat=num_success in (0, 4))


def play(src: CurriculumSource, num: int, start: int = 0) -> list[Task]:
    tasks: list[Task] = []
    for index in range(start, num):
        tasks.append(src.task(index, [result(start + i, t) for i, t in enumerate(tasks)]))
    return tasks


@pytest.mark.parametrize("stop", [1, 7, 25])
@pytest.mark.parametrize(("family", "num"), [(Endless(), 40), (Shelf(), 30)])
def test_restart_from_the_opened_tasks_goes_on_with_the_same_ones(family: Family, num: int, stop: int) -> None:
    undisturbed = play(source(family, max_passes=3, retire_at=2.0), num)
    again = source(family, max_passes=3, retire_at=2.0)
    again.restore(undisturbed[:stop], [result(i, task) for i, task in enumerate(undisturbed[:stop])])
    assert play(again, num, start=stop) == undisturbed[stop:]


def test_single_epoch_gives_every_listed_task_once_and_then_says_so() -> None:
    src = source(Shelf())
    assert len({task.task_id for task in play(src, 12)}) == 12
    with pytest.raises(ValueError, match="curriculum_passes"):
        src.task(12, [])


def test_task_that_is_gone_is_told() -> None:
    gone = Endless().make(kind="a", level=1, seed=999, split="train")
    with pytest.raises(ValueError, match="no longer among the tasks"):
        source(Shelf()).restore([gone], [])


def test_generated_tasks_are_never_the_same() -> None:
    assert len({task.task_id for task in play(source(Endless()), 50)}) == 50
