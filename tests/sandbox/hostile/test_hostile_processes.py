"""Floods of processes, signals, zombies, timers and descriptors: bounded, ended from outside, and the box can be used afterwards."""

from __future__ import annotations

import asyncio

import pytest

from rollmill.records import RunFailure
from rollmill.sandbox.agent import link
from tests.sandbox.conftest import descendants, first_process
from tests.sandbox.hostile.conftest import attack, nothing_left, works

NUM_PROCESSES = 48


@pytest.mark.parametrize("how", ["plain", "setsid", "double", "vfork"])
def test_fork_bomb_stays_below_the_bound_and_dies_with_the_box(perform, how):
    async def act(stage):
        box = await stage.box(num_processes=NUM_PROCESSES)
        first = await first_process(box)
        result = await attack(box, "forks", how, timeout_s=0.7)
        assert result.timed_out and result.exit_code == -9
        # Beyond the bound the agent itself may start a few.
        assert len(descendants(first)) <= NUM_PROCESSES + 4
        await stage.sibling_works()
        # What left its process group goes on, and still a command can be run to end it.
        assert (await box.exec(["pkill", "-9", "attacks"], timeout_s=60)).exit_code in (0, 1)
        await works(box)
        await nothing_left(stage, box)

    perform(act)


def test_fork_bomb_that_left_its_group_is_ended_by_a_snapshot(perform):
    async def act(stage):
        box = await stage.box(num_processes=NUM_PROCESSES)
        assert (await attack(box, "forks", "double", timeout_s=0.5)).timed_out
        snapshot = await box.snapshot()
        assert [name for _, name in await box.processes()] == []
        await works(box)
        (child,) = await snapshot.fork(1)
        await works(child)
        await snapshot.close()
        await nothing_left(stage, box, child)

    perform(act)


def test_zombies_are_reaped_as_fast_as_they_come(perform):
    async def act(stage):
        box = await stage.box(num_processes=NUM_PROCESSES)
        assert (await attack(box, "zombies", "4000")).stdout == b"4000\n"
        result = await box.exec("until [ $(ps -o stat= -e | grep -c Z) -eq 0 ]; do :; done; echo none", timeout_s=60)
        assert result.stdout == b"none\n"

    perform(act)


@pytest.mark.slow
def test_a_hundred_thousand_zombies_are_reaped(perform):
    async def act(stage):
        box = await stage.box(num_processes=NUM_PROCESSES, lifetime_s=3600.0)
        assert (await attack(box, "zombies", "100000", timeout_s=110)).stdout == b"100000\n"
        assert await box.processes() == []

    perform(act)


def test_signal_storm_at_everyone_ends_neither_the_box_nor_its_neighbour(perform):
    async def act(stage):
        box = await stage.box()
        storms = [asyncio.create_task(attack(box, "signals", timeout_s=0.7)) for _ in range(3)]
        await stage.sibling_works()
        for storm in storms:
            assert (await storm).exit_code < 0
        await works(box)

    perform(act)


def test_program_cannot_change_how_the_first_process_runs(perform):
    """Same user, so that only the filter stands between: without it one call ends the box, which would then count as a failure of ours."""
    lines = [
        "import resource as r; r.prlimit(1, r.RLIMIT_NOFILE, (0, 0))",
        "import resource as r; r.prlimit(1, r.RLIMIT_CPU, (0, 0))",
        "import os; os.setpriority(os.PRIO_PROCESS, 1, 19)",
        "import os; os.setpriority(os.PRIO_USER, os.getuid(), 19)",
        "import os; os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0))",
        "import os; os.sched_setaffinity(1, {0})",
    ]

    async def act(stage):
        for root in (False, True):
            box = await stage.box(root=root)
            tried = "\n".join(f"try:\n    {line}\n    print('DONE', {line!r})\nexcept PermissionError: pass" for line in lines)
            result = await box.exec(["python3", "-c", tried], timeout_s=60)
            assert (result.exit_code, result.stdout) == (0, b"")
            await works(box)

    perform(act)


def test_descriptors_run_out_for_the_program_alone(perform):
    async def act(stage):
        box = await stage.box(num_processes=NUM_PROCESSES)
        num, why = (await attack(box, "descriptors")).stdout.split()
        assert int(num) < 1024 and why == b"24"
        await box.write("note", b"x")
        assert await box.read("note") == b"x"
        await works(box)
        await nothing_left(stage, box)

    perform(act)


def test_timer_flood_is_ended_like_any_command(perform):
    async def act(stage):
        box = await stage.box()
        result = await attack(box, "timers", timeout_s=0.7)
        assert result.timed_out and result.exit_code == -9
        await works(box)

    perform(act)


def test_box_of_stopped_processes_can_be_used_suspended_and_closed(perform):
    async def act(stage):
        box = await stage.box()
        await box.exec("for i in 1 2 3 4; do (sh -c 'kill -STOP $$') & done; sleep 0.1", timeout_s=60)
        result = await box.exec("kill -STOP $$", timeout_s=0.3)
        assert result.timed_out and result.exit_code == -9
        await box.suspend()
        await box.resume()
        await works(box)
        await nothing_left(stage, box)

    perform(act)


def test_terminals_opened_and_dropped_leave_none_behind(perform):
    async def act(stage):
        box = await stage.box()
        for _ in range(30):
            process = await box.start(["sh", "-c", "exec <&- >&- 2>&-; sleep 1000"], pty=True)
            await process.kill()
            await process.wait(timeout_s=60)
        assert (await box.exec("ls /dev/pts", timeout_s=60)).stdout == b"ptmx\n"
        await works(box)

    perform(act)


def test_storm_of_stops_does_not_stop_the_agent(perform, monkeypatch):
    monkeypatch.setattr(link, "KILL_GRACE_S", 1.0)

    async def act(stage):
        box = await stage.box()
        await attack(box, "stops")
        try:
            for _ in range(12):
                await box.exec(["true"], timeout_s=0.2)
            await box.close()
        except RunFailure as failure:
            raise AssertionError("a program ended its own box and it counts as a failure of ours") from failure

    perform(act)


def test_lease_on_a_program_does_not_stop_the_agent(perform, monkeypatch):
    monkeypatch.setattr(link, "KILL_GRACE_S", 1.0)

    async def act(stage):
        box = await stage.box()
        await box.write("tool", b"#!/bin/sh\necho ran\n", mode=0o755)
        assert (await attack(box, "lease", "tool")).stdout == b"lease OK\n"
        await box.exec(["./tool"], timeout_s=0.3)
        try:
            await works(box)
        except RunFailure as failure:
            raise AssertionError("a program ended its own box and it counts as a failure of ours") from failure

    perform(act)
