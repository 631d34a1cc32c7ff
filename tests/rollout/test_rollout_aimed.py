"""A run whose tasks and bound are chosen by measurement, on a real ledger: a restart changes neither, speed does not matter."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rollout_fakes import Behaviour, FakeSession, World, finished

from rollmill.config import RunConfig, parse_config
from rollmill.ledger import GroupResult, Pacing
from rollmill.ledger.staleness import ControllerState
from rollmill.ledger.staleness_row import BoundRow
from rollmill.records import Boundary, RunFailure, Task
from rollmill.rollout import dispatcher as dispatcher_module
from rollmill.rollout.curriculum_source import CurriculumSource
from rollmill.rollout.dispatcher import Dispatcher
from rollmill.rollout.episode import Finished
from rollmill.rollout.role import train_source
from rollmill.tasks import TaskSource, open_family
from rollmill.telemetry import Metrics, Waits, read_metrics

KINDS = ("count", "fix", "move")
STEPS = 24


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher_module, "OBSERVE_S", 0.01)
    monkeypatch.setattr(dispatcher_module, "TICK_S", 0.01)
    monkeypatch.setattr(dispatcher_module, "REPORT_S", 0.01)


def config_of(run_dir: Path, *, steps: int = STEPS, max_staleness: int | str = "auto", curriculum: str = "target") -> RunConfig:
    return parse_config(
        {
            "run": {"dir": str(run_dir), "steps": steps},
            "model": {"path": "models/demo"},
            "tasks": {"kinds": KINDS, "curriculum": curriculum},
            "rollout": {"group_size": 2, "max_running": 8},
            "trainer": {"groups_per_batch": 2, "max_staleness": max_staleness}
            | ({"staleness_limit": 4} if max_staleness == "auto" else {}),
        },
        "test",
    )


class AimedWorld(World):
    """`World` with the tasks and the bound that its run file asks for; `count` is always solved, the others every second time."""

    def __init__(self, config: RunConfig, behave: Behaviour | None = None) -> None:
        super().__init__(config, behave or self.solve)
        self.source = train_source(config, open_family("repo"))
        self.gateway.served = self.ledger.progress().version

    async def solve(self, task: Task, episode_id: str, session: FakeSession) -> Finished:
        slot = int(episode_id.split(".")[1])
        return finished(episode_id, float(task.kind == "count" or slot % 2), self.gateway.served)

    def dispatcher(self) -> Dispatcher:
        metrics = Metrics(self.config.run.dir, "rollout")
        return Dispatcher(self.config, self.ledger, self.source, self.runner, self.gateway, metrics, Waits(), lambda: self.stop)  # type: ignore[arg-type]

    def decide(self, step: int, bound: int) -> None:
        assert self.trainer.ledger.decide_bound(BoundRow(step=step, state=ControllerState(bound=bound)), time.time())

    def tasks(self) -> list[str]:
        return [task.task_id for task in self.ledger.tasks_opened()]


def undisturbed(run_dir: Path) -> list[str]:
    world = AimedWorld(config_of(run_dir))
    asyncio.run(world.play())
    found = world.tasks()
    world.close()
    return found


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10.0):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def test_tasks_are_the_same_after_a_crash_with_both_on(tmp_path: Path) -> None:
    expected = undisturbed(tmp_path / "whole")
    assert len(expected) == STEPS * 2
    config = config_of(tmp_path / "broken")

    async def hang_late(task: Task, episode_id: str, session: FakeSession) -> Finished:
        if episode_id >= "g000019":
            await asyncio.Event().wait()
        return await first.solve(task, episode_id, session)

    async def stop(world: World) -> None:
        await until(lambda: world.ledger.progress().num_steps_committed == 9 and world.ledger.progress().num_open == 3)
        world.stop = True

    first = AimedWorld(config, hang_late)
    first.trainer._config = config_of(tmp_path / "broken", steps=9)
    first.decide(0, 3)
    asyncio.run(first.play(stop))
    assert first.tasks() == expected[:22]
    first.close()
    second = AimedWorld(config)
    asyncio.run(second.play())
    assert second.tasks() == expected
    row = second.ledger.bound_in_force()
    assert row is not None and row.bound == 3
    second.close()


def test_how_long_a_task_takes_does_not_change_what_comes_next(tmp_path: Path) -> None:
    expected = undisturbed(tmp_path / "even_speed")

    async def slow_fixes(task: Task, episode_id: str, session: FakeSession) -> Finished:
        await asyncio.sleep(0.05 if task.kind == "fix" else 0.0)
        return await world.solve(task, episode_id, session)

    world = AimedWorld(config_of(tmp_path / "slow"), slow_fixes)
    asyncio.run(world.play())
    assert world.tasks() == expected
    world.close()


def test_solved_kind_is_drawn_less_and_the_account_is_written(tmp_path: Path) -> None:
    world = AimedWorld(config_of(tmp_path, steps=40))
    asyncio.run(world.play())
    last = [r for r in read_metrics(tmp_path, "rollout") if "curriculum/fix/share" in r][-1]
    assert last["curriculum/count/share"] < last["curriculum/fix/share"]
    assert last["curriculum/count/zero_std_frac"] == 1.0 and last["curriculum/fix/zero_std_frac"] == 0.0
    assert last["curriculum/count/solve_rate"] > 0.7
    world.close()


def test_even_curriculum_is_the_plain_sequence(tmp_path: Path) -> None:
    config = config_of(tmp_path, steps=3, max_staleness=4, curriculum="even")
    world = AimedWorld(config)
    assert isinstance(world.source, TaskSource)
    asyncio.run(world.play())
    plain = TaskSource(open_family("repo"), split="train", seed=0, kinds=KINDS)
    assert world.tasks() == [plain.task(i).task_id for i in range(6)]
    assert world.ledger.bound_in_force() is None and world.ledger.idle_reported() is None
    assert not any(name.startswith("curriculum/") for r in read_metrics(tmp_path, "rollout") for name in r)
    world.close()


def test_lag_of_the_curriculum_is_that_of_the_hard_limit(tmp_path: Path) -> None:
    source = train_source(config_of(tmp_path), open_family("repo"))
    assert isinstance(source, CurriculumSource)
    widest = Pacing.from_staleness(4, 2, "async")
    assert source.curriculum._lag == widest.lead * 2 + widest.window - 1


def test_ledger_tells_how_groups_ended_and_a_failed_one_says_nothing(tmp_path: Path) -> None:
    async def behave(task: Task, episode_id: str, session: FakeSession) -> Finished:
        if episode_id.startswith("g000001"):
            raise RunFailure(Boundary.SANDBOX, "the box is gone")
        return finished(episode_id, float(episode_id.startswith("g000002") or episode_id.endswith(".1.0")), 0)

    config = config_of(tmp_path, steps=2, max_staleness=4, curriculum="even")
    world = AimedWorld(config, behave)
    assert world.ledger.group_results(0) == []
    asyncio.run(world.play())
    found = world.ledger.group_results(0)
    assert found[:3] == [
        GroupResult(seq=0, num_graded=2, num_success=1, is_flat=False),
        GroupResult(seq=1),
        GroupResult(seq=2, num_graded=2, num_success=2, is_flat=True),
    ]
    assert world.ledger.group_results(2) == found[2:]
    world.close()


def test_gate_follows_the_bound_in_force_and_idle_slots_are_reported(tmp_path: Path) -> None:
    """With the trainer away, rollouts open (1 + lead) batches and not a group more, whatever the hard limit is."""
    world = AimedWorld(config_of(tmp_path))
    world.decide(0, 1)

    async def look() -> None:
        running = asyncio.create_task(world.dispatcher().run())
        try:
            for step, (bound, num_groups) in enumerate([(1, 2), (2, 4), (4, 6)]):
                if step:
                    world.decide(step, bound)
                await until(lambda num=num_groups: world.ledger.progress().num_ready == num)  # type: ignore[misc]
                # What was decided has been read once more, and the gate held.
                idle = world.trainer.ledger.idle_reported()
                await until(lambda seen=idle: world.trainer.ledger.idle_reported() != seen)  # type: ignore[misc]
                assert world.ledger.progress().num_opened == num_groups
            world.decide(3, 1)
            idle = world.trainer.ledger.idle_reported()
            await until(lambda: world.trainer.ledger.idle_reported() != idle)
            # A smaller bound closes the gate; nothing that was opened is thrown away.
            assert (world.ledger.progress().num_opened, world.ledger.progress().num_dropped) == (6, 0)
        finally:
            world.stop = True
            await running

    asyncio.run(look())
    row = world.trainer.ledger.idle_reported()
    assert row is not None and 0 < row.idle_s <= row.clock_s
    world.close()
