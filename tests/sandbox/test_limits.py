"""What a box may use up, and that using it up is an observation and never the end of the box."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from rollmill.records import RunFailure
from rollmill.sandbox import SandboxSpec
from rollmill.sandbox.agent import link
from tests.sandbox.conftest import first_process


async def _still_works(box) -> None:
    result = await box.exec(["echo", "fine"], timeout_s=60)
    assert result.exit_code == 0 and result.stdout == b"fine\n"


def test_memory_bomb_kills_the_command_and_not_the_box(play):
    async def scene(backend):
        box = await backend.create(SandboxSpec(memory_bytes=64 << 20, disk_bytes=1 << 20))
        result = await box.exec(["python3", "-c", "x = b'x' * (1 << 28)"], timeout_s=60)
        assert result.exit_code in (-9, 1) and not result.timed_out
        await _still_works(box)

    play(scene)


def test_memory_of_many_processes_counts_together_under_a_control_group(play):
    async def scene(backend):
        if not (await backend.capabilities()).facts["memory"].startswith("cgroup"):
            pytest.skip("without control groups memory is bounded per process")
        box = await backend.create(SandboxSpec(memory_bytes=64 << 20, disk_bytes=1 << 20))
        line = "for i in 1 2 3 4 5 6; do python3 -c \"x = b'x' * (20 << 20); input()\" < <(sleep 1000) & done; wait -n; exit $?"
        result = await box.exec(["bash", "-c", line], timeout_s=60)
        assert result.exit_code in (137, -9)
        await _still_works(box)

    play(scene)


def test_box_that_the_agent_destroys_by_memory_stays_an_observation(play):
    """PID 1 is so small that the kernel takes nearly anything before it: the last blow is struck here, after memory did run out."""

    async def scene(backend):
        if not (await backend.capabilities()).facts["memory"].startswith("cgroup"):
            pytest.skip("without control groups memory is bounded per process")
        box = await backend.create(SandboxSpec(memory_bytes=64 << 20, disk_bytes=1 << 20))
        first = await first_process(box)
        assert (await box.exec(["python3", "-c", "x = b'x' * (1 << 28)"], timeout_s=60)).exit_code == -9
        waiting = asyncio.create_task(box.exec(["sleep", "1000"], timeout_s=1000))
        await box.stat(".")
        os.kill(first, signal.SIGKILL)
        result = await waiting
        assert result.exit_code == -9 and not result.timed_out and b"used up its memory" in result.stdout
        assert (await box.exec(["true"], timeout_s=60)).exit_code == -9
        for call in (box.read("hog"), box.write("hog", b""), box.list()):
            with pytest.raises(OSError, match="used up its memory"):
                await call
        await box.close()

    play(scene)


def test_fork_bomb_is_bounded_and_ended_by_the_time_out(play):
    async def scene(backend):
        box = await backend.create(SandboxSpec(num_processes=32))
        result = await box.exec(["bash", "-c", ":(){ :|:& };:; while :; do :; done"], timeout_s=1.0)
        assert result.timed_out
        await _still_works(box)
        count = "\n".join((
            "import os, time",
            "num = 0",
            "try:",
            "    while True:",
            "        if os.fork() == 0: time.sleep(1000)",
            "        num += 1",
            "except BlockingIOError: print(num, flush=True)",
            "os.killpg(0, 9)",
        ))  # fmt: skip
        result = await box.exec(["python3", "-c", count], timeout_s=60)
        assert 20 <= int(result.stdout) <= 32
        assert result.exit_code == -9

    play(scene)


def test_full_process_table_still_lets_one_kill_run(play):
    async def scene(backend):
        box = await backend.create(SandboxSpec(num_processes=8))
        await box.exec(["bash", "-c", "for i in {1..20}; do setsid sleep 1000 & done 2>/dev/null"], timeout_s=2.0)
        assert (await box.exec(["pkill", "-9", "sleep"], timeout_s=60)).exit_code == 0
        await _still_works(box)

    play(scene)


def test_full_disk_is_an_error_of_the_writer(play):
    async def scene(backend):
        box = await backend.create(SandboxSpec(disk_bytes=4 << 20))
        for place in (".", "/tmp", "/dev/shm"):
            line = f"for i in 1 2 3 4 5 6; do head -c 1M /dev/zero > {place}/f$i || exit 9; done"
            result = await box.exec(["bash", "-c", line], timeout_s=60)
            assert result.exit_code == 9 and b"No space left" in result.stdout
            await box.exec(["bash", "-c", f"rm {place}/f*"], timeout_s=60)
        with pytest.raises(OSError, match="do not fit"):
            await box.write("big", b"x" * (5 << 20))
        await box.exec(["bash", "-c", "head -c 3M /dev/zero > most"], timeout_s=60)
        with pytest.raises(OSError, match="No space"):
            await box.write("rest", b"x" * (2 << 20))
        result = await box.exec(["python3", "-c", "for i in range(10**6): open(f'/tmp/{i}', 'x')"], timeout_s=60)
        assert b"No space left" in result.stdout
        await _still_works(box)

    play(scene)


def test_huge_output_keeps_head_tail_and_count(play):
    async def scene(backend):
        box = await backend.create(SandboxSpec())
        line = "echo begin; head -c 100000000 /dev/zero | tr '\\0' x; echo; echo end"
        result = await box.exec(["bash", "-c", line], timeout_s=100, max_output_bytes=10_000)
        assert result.exit_code == 0 and result.num_output_bytes == 100_000_000 + 11
        assert len(result.stdout) <= 10_000 and result.stdout.startswith(b"begin\nx") and result.stdout.endswith(b"x\nend\n")
        assert b"bytes left out" in result.stdout
        endless = await box.exec(["yes"], timeout_s=0.5)
        assert endless.timed_out and endless.exit_code == -9 and endless.num_output_bytes > len(endless.stdout)
        await _still_works(box)

    play(scene)


def test_never_ending_command_is_ended_from_outside(play):
    async def scene(backend):
        box = await backend.create(SandboxSpec())
        result = await box.exec(["bash", "-c", "trap '' TERM INT HUP; echo up; while :; do :; done"], timeout_s=1.0)
        assert result.timed_out and result.exit_code == -9 and result.stdout == b"up\n"
        await _still_works(box)

    play(scene)


def test_box_whose_first_process_does_not_answer_is_killed_whole(play, monkeypatch):
    monkeypatch.setattr(link, "KILL_GRACE_S", 0.2)

    async def scene(backend):
        box = await backend.create(SandboxSpec())
        first = await first_process(box)
        os.kill(first, signal.SIGSTOP)
        result = await box.exec(["true"], timeout_s=0.2)
        assert result.timed_out and result.exit_code == -9
        assert str(first) not in os.listdir("/proc")
        with pytest.raises(RunFailure, match="time-out"):
            await box.exec(["true"], timeout_s=60)

    play(scene)


def test_many_commands_that_leave_something_behind_do_not_use_up_the_first_process(play):
    async def scene(backend):
        box = await backend.create(SandboxSpec(num_processes=400))
        for _ in range(280):
            assert (await box.exec(["sh", "-c", "sleep 1000 &"], timeout_s=60)).exit_code == 0
        assert len(os.listdir(f"/proc/{await first_process(box)}/fd")) < 270
        await _still_works(box)

    play(scene)


@pytest.mark.parametrize("line", ["sleep 1000 &", "setsid sleep 1000 & disown", "yes &", "(trap '' HUP; while :; do sleep 1; done) & echo"])
def test_what_a_command_leaves_behind_does_not_hold_it(play, line):
    async def scene(backend):
        box = await backend.create(SandboxSpec())
        result = await box.exec(["bash", "-c", line], timeout_s=60)
        assert result.exit_code == 0 and not result.timed_out
        await _still_works(box)

    play(scene)


def test_background_server_outlives_the_command_that_started_it(play):
    async def scene(backend):
        box = await backend.create(SandboxSpec())
        await box.exec(["bash", "-c", "(until [ -e stop ]; do echo tick; sleep 0.01; done; touch stopped) &"], timeout_s=60)
        await box.write("stop", b"")
        result = await box.exec(["bash", "-c", "until [ -e stopped ]; do sleep 0.01; done; ps -o stat= -e | grep -c Z"], timeout_s=60)
        assert result.stdout == b"0\n"

    play(scene)


def test_cancelled_exec_ends_the_command(play):
    async def scene(backend):
        box = await backend.create(SandboxSpec())
        running = asyncio.create_task(box.exec(["bash", "-c", "touch up; exec sleep 1000"], timeout_s=1000))
        await box.exec(["bash", "-c", "until [ -e up ]; do sleep 0.01; done"], timeout_s=60)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert (await box.exec(["bash", "-c", "while pgrep -x sleep; do :; done"], timeout_s=60)).exit_code == 0

    play(scene)


def test_lifetime_ends_the_box_and_its_waiters_hear_why(play):
    async def scene(backend):
        box = await backend.create(SandboxSpec(lifetime_s=0.5))
        with pytest.raises(RunFailure, match="lifetime"):
            await box.exec(["sleep", "1000"], timeout_s=1000)
        with pytest.raises(RunFailure, match="lifetime"):
            await box.read("x")
        await box.close()

    play(scene)


def test_bounds_of_an_earlier_box_do_not_hold_for_a_later_one(play):
    """Control groups of ended boxes are used again."""

    async def scene(backend):
        for memory_mib in (48, 256, 64, 1024, 48):
            for _ in range(6):
                box = await backend.create(SandboxSpec(memory_bytes=memory_mib << 20, disk_bytes=1 << 20))
                taking = await box.exec(["python3", "-c", f"x = b'x' * ({memory_mib * 3 // 4 - 12} << 20)"], timeout_s=60)
                assert taking.exit_code == 0, (memory_mib, taking)
                too_much = await box.exec(["python3", "-c", f"x = b'x' * ({memory_mib + 32} << 20)"], timeout_s=60)
                assert too_much.exit_code != 0, memory_mib
                await box.close()

    play(scene)
