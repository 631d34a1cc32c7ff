"""The scripts a model learns from tell the truth: run by the real tools, their results are exact and experts always succeed."""

from __future__ import annotations

import pytest
from tasks_boxes import in_boxes, play_script

from rollmill.records import Grade, Task
from rollmill.sandbox import SandboxBackend
from rollmill.tasks.repo import MAX_LEVEL, RepoFamily
from rollmill.tasks.repo.kinds import KINDS

NUM_SEEDS = 30
# The novice has three ways to botch each kind; ten seeds meet them all with near certainty.
NUM_NOVICE_SEEDS = 10


def tasks_of(kind: str, num: int) -> list[Task]:
    family = RepoFamily()
    return [family.make(kind=kind, level=level, seed=seed, split="train") for level in range(1, MAX_LEVEL + 1) for seed in range(num)]


async def expert(backend: SandboxBackend, task: Task) -> tuple[Grade, list[str]]:
    return await play_script(backend, task, expert=True)


async def novice(backend: SandboxBackend, task: Task) -> tuple[Grade, list[str]]:
    return await play_script(backend, task, expert=False)


@pytest.mark.parametrize("kind", KINDS)
def test_expert_script_is_exact_and_earns_the_reward(kind: str) -> None:
    tasks = tasks_of(kind, NUM_SEEDS)
    for task, (grade, wrong) in zip(tasks, in_boxes(expert, tasks), strict=True):
        assert wrong == []
        assert (grade.reward, grade.success) == (1.0, True), f"{task.task_id}: {grade.note}"


@pytest.mark.parametrize("kind", KINDS)
def test_novice_script_is_exact_and_mostly_fails(kind: str) -> None:
    tasks = tasks_of(kind, NUM_NOVICE_SEEDS)
    results = in_boxes(novice, tasks)
    assert [w for _, wrong in results for w in wrong] == []
    assert sum(grade.reward for grade, _ in results) <= 0.3 * len(results)
