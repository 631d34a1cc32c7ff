"""Held-out evaluation: tasks never trained on, each tried once by the newest weights. Failures of ours are tried again."""

from __future__ import annotations

import asyncio
import time

from rollmill.ledger import Ledger
from rollmill.records import Boundary, RunFailure
from rollmill.rollout.episode import EpisodeRunner
from rollmill.tasks import TaskSource

MAX_TRIES = 4
GRACE_S = 5.0
LASTING = (Boundary.TASK, Boundary.HARNESS, Boundary.GRADER)
"""What a restart of ours does not mend."""


class EvaluationFails(ValueError):
    """A held-out task cannot be tried at all: a person must change something."""


async def evaluate(
    label: str,
    *,
    ledger: Ledger,
    source: TaskSource,
    runner: EpisodeRunner,
    num_tasks: int,
    num_at_once: int,
    seed: int,
    temperature: float,
    min_version: int,
    episode_s: float,
) -> None:
    """Try every held-out task that has no result yet under this label and version, and record each in the ledger."""
    done = await asyncio.to_thread(ledger.num_evals_by_task, label, min_version)
    slots = asyncio.Semaphore(num_at_once)

    async def one(index: int) -> None:
        task = source.task(index)
        if task.task_id in done:
            return
        async with slots:
            for attempt in range(MAX_TRIES):
                key = f"eval/{label}/{index}/{attempt}"
                session = runner.open_session(key, seed=seed, temperature=temperature, min_version=min_version)
                try:
                    async with asyncio.timeout(episode_s + GRACE_S):
                        result = await runner.run(task, key, session, seed=seed, deadline=time.monotonic() + episode_s)
                    break
                except (RunFailure, TimeoutError) as failure:
                    if attempt < MAX_TRIES - 1:
                        continue
                    if isinstance(failure, RunFailure) and failure.boundary in LASTING:
                        raise EvaluationFails(
                            f"held-out task {task.task_id} failed {MAX_TRIES} times, at last at {failure.boundary}: {failure.message}. "
                            "Nothing was scored. Mend the cause and go on with --resume"
                        ) from failure
                    raise
        grade = result.grade
        await asyncio.to_thread(ledger.add_eval, label, min_version, task.task_id, grade.success, grade.reward, None, time.time())

    try:
        async with asyncio.TaskGroup() as tasks:
            for index in range(num_tasks):
                tasks.create_task(one(index))
    except ExceptionGroup as failures:
        # The group has ended the other episodes already, so none of them outlives the replicas and boxes it uses.
        raise failures.exceptions[0] from failures
