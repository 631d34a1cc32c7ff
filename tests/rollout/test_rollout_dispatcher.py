"""The dispatcher on a real ledger: every episode ends once, failures are never rewards, and no group is ever left hanging."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from rollout_fakes import FakeSession, World, config_of

from rollmill.ledger import EpisodeRow, GroupRow
from rollmill.records import Boundary, CancelReason, DropReason, EpisodeState, GroupState, RunFailure, Task
from rollmill.rollout import dispatcher as dispatcher_module
from rollmill.rollout.episode import Finished

BROKEN = RunFailure(Boundary.SANDBOX, "the box is gone")


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher_module, "OBSERVE_S", 0.01)
    monkeypatch.setattr(dispatcher_module, "TICK_S", 0.01)
    monkeypatch.setattr(dispatcher_module, "GRACE_S", 0.05)


def groups(world: World) -> list[GroupRow]:
    return [world.ledger.group(f"g{i:06d}") for i in range(world.ledger.progress().num_opened)]


def episodes(world: World) -> list[EpisodeRow]:
    return [e for g in groups(world) for e in world.ledger.episodes_of(g.group_id)]


def check_sound(world: World) -> None:
    """What every undisturbed end must look like."""
    progress = world.ledger.progress()
    assert world.ledger.audit() == [] or all("blob" in line or "checkpoint" in line for line in world.ledger.audit())
    assert progress.num_steps_committed == world.config.run.steps
    assert {g.state for g in groups(world)} <= {GroupState.TRAINED, GroupState.DROPPED}
    assert progress.num_trained == world.config.run.steps * world.config.trainer.groups_per_batch
    assert not any(e.is_live for e in episodes(world))
    assert all((e.grade is not None) == (e.state is EpisodeState.GRADED) for e in episodes(world))


def slot_of(episode_id: str) -> tuple[str, int, int]:
    group, slot, attempt = episode_id.split(".")
    return group, int(slot), int(attempt)


def test_all_groups_end_trained(tmp_path: Path) -> None:
    world = World(config_of(tmp_path, steps=4))
    asyncio.run(world.play())
    check_sound(world)
    assert len(world.runner.played) == len(set(world.runner.played)) == 4 * 2 * 4
    assert world.ledger.progress().num_dropped == 0
    world.close()


def test_failed_attempts_are_repeated_and_never_rewarded(tmp_path: Path) -> None:
    async def behave(task: Task, episode_id: str, session: FakeSession) -> Finished:
        _, slot, attempt = slot_of(episode_id)
        if slot < 2 and attempt < 2:
            raise BROKEN
        return world.runner.succeed(episode_id)

    world = World(config_of(tmp_path), behave)
    asyncio.run(world.play())
    check_sound(world)
    failed = [e for e in episodes(world) if e.state is EpisodeState.FAILED]
    assert len(failed) == 6 * 2 * 2 and {(e.boundary, e.message) for e in failed} == {(Boundary.SANDBOX, "the box is gone")}
    assert all(g.num_graded == 4 and g.reward_sum == 2.0 for g in groups(world))
    world.close()


def test_group_survives_a_slot_that_always_fails_while_more_than_half_is_valid(tmp_path: Path) -> None:
    async def behave(task: Task, episode_id: str, session: FakeSession) -> Finished:
        if slot_of(episode_id)[1] == 0:
            raise BROKEN
        return world.runner.succeed(episode_id)

    world = World(config_of(tmp_path, max_retries=1), behave)
    asyncio.run(world.play())
    check_sound(world)
    assert all(g.num_graded == 3 for g in groups(world)) and world.ledger.progress().num_dropped == 0
    assert sum(e.slot == 0 for e in world.ledger.episodes_of("g000000")) == 2
    world.close()


def test_group_with_half_of_its_slots_failing_is_dropped_and_replaced(tmp_path: Path) -> None:
    async def behave(task: Task, episode_id: str, session: FakeSession) -> Finished:
        group, slot, _ = slot_of(episode_id)
        if group in ("g000001", "g000002") and slot < 2:
            raise BROKEN
        return world.runner.succeed(episode_id)

    world = World(config_of(tmp_path, max_retries=1), behave)
    asyncio.run(world.play())
    check_sound(world)
    dropped = [g for g in groups(world) if g.state is GroupState.DROPPED]
    assert [(g.group_id, g.drop_reason) for g in dropped] == [(f"g00000{i}", DropReason.TOO_FEW_VALID) for i in (1, 2)]
    world.close()


def test_hanging_episode_is_cancelled_at_its_deadline_and_repeated(tmp_path: Path) -> None:
    async def behave(task: Task, episode_id: str, session: FakeSession) -> Finished:
        if slot_of(episode_id) == ("g000000", 1, 0):
            await asyncio.Event().wait()
        return world.runner.succeed(episode_id)

    world = World(config_of(tmp_path, episode_s=0.05), behave)
    asyncio.run(world.play())
    check_sound(world)
    first = world.ledger.episode("g000000.1.0")
    assert (first.state, first.cancel_reason) == (EpisodeState.CANCELLED, CancelReason.DEADLINE)
    assert world.ledger.episode("g000000.1.1").state is EpisodeState.GRADED
    world.close()


def test_sync_mode_samples_nothing_before_the_step_is_committed_and_served(tmp_path: Path) -> None:
    world = World(config_of(tmp_path, steps=4, mode="sync"))
    asyncio.run(world.play())
    check_sound(world)
    for episode_id, served in world.runner.served_at.items():
        assert served == int(episode_id[1:7]) // 2, f"{episode_id} was sampled from version {served}"
    order = [(e.kind, e.subject) for e in world.ledger.events(limit=100_000)]
    for seq in range(2, 8):
        assert order.index(("checkpoint.committed", str(seq // 2 - 1))) < order.index(("group.open", f"g{seq:06d}"))
    assert all(g.staleness == 0 for g in groups(world))
    world.close()


def test_open_group_that_can_no_longer_be_trained_is_swept(tmp_path: Path) -> None:
    stuck = asyncio.Event()

    async def behave(task: Task, episode_id: str, session: FakeSession) -> Finished:
        if slot_of(episode_id)[0] == "g000000" and slot_of(episode_id)[1] == 3:
            session.oldest_version = 0
            stuck.set()
            await asyncio.Event().wait()
        return world.runner.succeed(episode_id)

    async def leap(world: World) -> None:
        await stuck.wait()
        world.gateway.served = world.trainer.publish(0, by=5)

    world = World(config_of(tmp_path), behave)
    asyncio.run(world.play(leap))
    check_sound(world)
    swept = world.ledger.group("g000000")
    assert (swept.state, swept.drop_reason) == (GroupState.DROPPED, DropReason.STALE)
    ended = world.ledger.episode("g000000.3.0")
    assert (ended.state, ended.cancel_reason) == (EpisodeState.CANCELLED, CancelReason.STALE)
    world.close()


def test_repeated_overload_cancels_leave_no_group_hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancellation may hit an episode while its end is being recorded; the record must be finished all the same."""
    monkeypatch.setattr(dispatcher_module, "OBSERVE_S", 0.0)

    is_squeezed = asyncio.Event()

    async def behave(task: Task, episode_id: str, session: FakeSession) -> Finished:
        await is_squeezed.wait()
        await asyncio.sleep(0.002)
        if slot_of(episode_id)[1] == 0 and slot_of(episode_id)[2] == 0:
            raise BROKEN
        return world.runner.succeed(episode_id)

    async def squeeze(world: World) -> None:
        """Full, then empty again, each for two looks of the observer; it stops looking when the run is over."""
        while world.runner.num_playing < 8:  # noqa: ASYNC110 - the first limit; nobody ends before it is reached
            await asyncio.sleep(0.001)
        for kv_used_frac in (0.99, 0.0) * 15:
            world.gateway.kv_used_frac, seen = kv_used_frac, world.gateway.num_looks + 2
            for _ in range(200):
                await asyncio.sleep(0.001)
                if world.gateway.num_looks >= seen:
                    break
            is_squeezed.set()

    world = World(config_of(tmp_path, steps=6, max_running=16), behave)
    asyncio.run(world.play(squeeze))
    check_sound(world)
    assert world.ledger.progress().num_cancelled_by_reason[CancelReason.OVERLOAD] > 0
    assert all(g.num_graded == 4 for g in groups(world))
    world.close()


def test_stopped_run_goes_on_where_it_was_with_whole_groups(tmp_path: Path) -> None:
    """A polite stop costs no more than a crash: the slots it interrupted are played again."""
    begun = asyncio.Event()

    async def behave(task: Task, episode_id: str, session: FakeSession) -> Finished:
        if not world.stop and slot_of(episode_id)[1] >= 1:
            begun.set()
            await asyncio.Event().wait()
        return world.runner.succeed(episode_id)

    async def halt(world: World) -> None:
        await begun.wait()
        world.stop = True

    world = World(config_of(tmp_path), behave)
    asyncio.run(world.play(halt))
    assert world.ledger.progress().num_cancelled_by_reason[CancelReason.SHUTDOWN] > 0
    assert not any(e.state is EpisodeState.RUNNING for e in episodes(world))
    world.close()
    again = World(config_of(tmp_path))
    asyncio.run(again.play())
    check_sound(again)
    assert all(g.num_graded == 4 for g in groups(again)) and again.ledger.progress().num_dropped == 0
    again.close()


def test_killed_process_is_picked_up_by_the_next(tmp_path: Path) -> None:
    first = World(config_of(tmp_path))
    task = first.dispatcher()._source.task(0)
    group = first.ledger.open_group(task, 4, 1.0)
    for episode in first.ledger.episodes_of(group.group_id)[:3]:
        first.ledger.start_episode(episode.episode_id, 2.0)
    first.close()
    world = World(config_of(tmp_path))
    asyncio.run(world.play())
    check_sound(world)
    assert world.ledger.episode("g000000.0.0").cancel_reason is CancelReason.PROCESS_DIED
    assert world.ledger.group("g000000").num_graded == 4
    world.close()


def test_mistake_of_our_own_ends_the_run_loudly(tmp_path: Path) -> None:
    async def behave(task: Task, episode_id: str, session: FakeSession) -> Finished:
        raise ZeroDivisionError("our own mistake")

    world = World(config_of(tmp_path), behave)
    with pytest.raises(ZeroDivisionError, match="our own mistake"):
        asyncio.run(world.play())
    world.close()


def test_broken_observer_ends_the_run_loudly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken() -> None:
        raise KeyError("pressure")

    world = World(config_of(tmp_path))
    monkeypatch.setattr(world.gateway, "pressures", broken)
    with pytest.raises(KeyError, match="pressure"):
        asyncio.run(world.play())
    world.close()


def test_settled_groups_leave_nothing_in_memory(tmp_path: Path) -> None:
    async def behave(task: Task, episode_id: str, session: FakeSession) -> Finished:
        if slot_of(episode_id)[2] == 0:
            raise BROKEN
        return world.runner.succeed(episode_id)

    world = World(config_of(tmp_path), behave)

    async def scene() -> dispatcher_module.Dispatcher:
        trainer = asyncio.create_task(world.trainer.work())
        dispatcher = world.dispatcher()
        async with asyncio.timeout(60):
            await dispatcher.run()
            await trainer
        return dispatcher

    dispatcher = asyncio.run(scene())
    assert (dispatcher._tasks, dispatcher._num_failures, dispatcher._running, list(dispatcher._queue)) == ({}, {}, {}, [])
    world.close()


def test_run_stops_loudly_when_every_group_fails(tmp_path: Path) -> None:
    async def behave(task: Task, episode_id: str, session: FakeSession) -> Finished:
        raise BROKEN

    world = World(config_of(tmp_path, steps=50, max_retries=0), behave)
    with pytest.raises(dispatcher_module.EverythingFails, match="the box is gone"):
        asyncio.run(world.play())
    assert world.ledger.progress().num_trained == 0
    world.close()
