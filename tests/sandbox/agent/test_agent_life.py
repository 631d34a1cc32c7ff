"""Everything of a box at once, and its death: nothing hangs, everyone who waits hears one reason."""

from __future__ import annotations

import asyncio
import errno
import os
import signal

import pytest

from rollmill.records import Boundary, RunFailure
from rollmill.sandbox.agent import link, wire
from rollmill.sandbox.agent.link import Link


@pytest.fixture(params=["native", "plain", "plain-beside"])
def kind(request) -> str:
    """One more than elsewhere: an agent that is not the first process of its box finds the others in another way."""
    return request.param


async def names(box) -> list[str]:
    return [command for _, command in await box.processes()]


def test_processes_are_listed_without_the_agent(play):
    async def scene(box):
        assert await names(box) == []
        process = await box.start(["cat", "-", "a b"])
        await process.write(b"runs")
        assert (await anext(process)).data == b"runs"
        assert await box.processes() == [(process.pid, "cat - a b")]
        await process.kill()
        await process.wait(timeout_s=30)
        assert await names(box) == []

    play(scene)


def test_end_all_asks_first_then_kills_and_the_box_goes_on(play):
    async def scene(box):
        polite = await box.start("trap 'echo bye; exit 0' TERM; echo up; while :; do sleep 0.02; done")
        stubborn = await box.start("trap '' TERM; echo up; while :; do sleep 0.02; done")
        for process in (polite, stubborn):
            assert (await anext(process)).data == b"up\n"
        running = asyncio.create_task(box.exec(["sleep", "1000"], timeout_s=1000))
        await box.exec(["sh", "-c", "setsid sleep 1000 & setsid sleep 1000 &"], timeout_s=30)
        assert await box.end_all(0.3) >= 5
        assert (await running).exit_code == -15
        assert ((await polite.wait(timeout_s=30)).exit_code, (await stubborn.wait(timeout_s=30)).exit_code) == (0, -9)
        assert [name for name in await names(box) if "sleep" in name] == []
        assert await box.end_all(0.0) == 0
        assert (await box.exec(["echo", "fine"], timeout_s=30)).stdout == b"fine\n"

    play(scene)


def test_suspended_processes_stand_still_until_they_are_resumed(play):
    async def scene(box):
        line = "n=0; while :; do n=$((n+1)); echo $n > count.new; mv count.new count; sleep 0.01; done"
        process = await box.start(line)
        await box.exec("until [ -s count ]; do sleep 0.01; done", timeout_s=30)
        await box.suspend()
        until_stopped = f"until grep -q '^State:.T' /proc/{process.pid}/status; do sleep 0.01; done"
        assert (await box.exec(until_stopped, timeout_s=30)).exit_code == 0
        count = await box.read("count")
        assert await box.read("count") == count
        await box.resume()
        goes_on = await box.exec(f"until [ $(cat count) -gt {int(count)} ]; do sleep 0.01; done", timeout_s=30)
        assert goes_on.exit_code == 0
        await box.suspend()
        await process.kill(signal.SIGTERM)
        assert (await process.wait(timeout_s=30)).exit_code == -15
        await box.suspend()
        await box.end_all(0.0)

    play(scene)


def test_what_an_agent_without_a_layer_lacks_is_named(play):
    async def scene(box):
        with pytest.raises(ValueError, match="does not offer diff"):
            await box.diff()
        with pytest.raises(ValueError, match="layer"):
            await box.freeze()
        assert (await box.exec(["echo", "fine"], timeout_s=30)).stdout == b"fine\n"

    play(scene)


def test_death_of_the_agent_fails_every_call_with_one_reason(play):
    async def scene(box):
        calls = [asyncio.create_task(box.exec(["sleep", "1000"], timeout_s=1000)) for _ in range(5)]
        process = await box.start(["sleep", "1000"])
        waiting = asyncio.create_task(process.wait(timeout_s=1000))
        await box.exec(["true"], timeout_s=30)
        box.process.kill()
        for call in (*calls, waiting):
            with pytest.raises(RunFailure, match="box local is gone: its process ended") as failure:
                await call
            assert failure.value.boundary is Boundary.SANDBOX
        for late in (box.exec(["true"], timeout_s=30), box.read("a"), box.start(["true"]), box.suspend()):
            with pytest.raises(RunFailure, match="box local is gone: its process ended"):
                await late
        assert not box.alive

    play(scene)


def test_box_ruined_by_its_own_program_is_an_observation(play):
    async def scene(box):
        box.ruin, box.why_gone = True, "its memory ran out"
        call = asyncio.create_task(box.exec(["sleep", "1000"], timeout_s=1000))
        process = await box.start(["sleep", "1000"])
        box.process.kill()
        result = await call
        assert result.exit_code == -9 and b"its memory ran out" in result.stdout and not result.timed_out
        assert (await process.wait(timeout_s=30)).exit_code == -9
        assert [chunk async for chunk in process] == []
        assert (await box.exec(["true"], timeout_s=30)).exit_code == -9
        for late in (box.read("a"), box.write("a", b""), box.list(), box.stat("a"), box.start(["true"])):
            with pytest.raises(OSError) as error:
                await late
            assert error.value.errno == errno.EIO

    play(scene)


def test_stopped_agent_is_killed_from_outside_after_the_grace(play, monkeypatch):
    monkeypatch.setattr(link, "KILL_GRACE_S", 0.2)

    async def scene(box):
        (agent,) = [pid for pid in _tree(box.process.pid) if not _children(pid)]
        os.kill(agent, signal.SIGSTOP)
        result = await box.exec(["true"], timeout_s=0.1)
        assert result.timed_out and result.exit_code == -9
        with pytest.raises(RunFailure, match="did not end a command"):
            await box.exec(["true"], timeout_s=30)

    play(scene)


def test_owner_that_hangs_up_ends_the_agent_and_its_commands(play):
    async def scene(box):
        process = await box.start(["sleep", "1000"])
        assert process.pid
        tree = [os.pidfd_open(pid) for pid in _tree(box.process.pid)]
        assert len(tree) >= 2
        box._life()._stream.close()
        for fd in tree:
            await _readable(fd)
            os.close(fd)

    play(scene)


BAD_FRAMES = [
    wire.frame(7, 99, b"unknown"),
    wire.frame(7, wire.Ask.EXEC, b""),
    wire.frame(7, wire.Ask.EXEC, wire.EXEC.pack(0, 100, 0, 0) + wire.text(b"") * 2),
    wire.frame(7, wire.Ask.EXEC, wire.EXEC.pack(0, 100, 60_000, 0) + wire.text(b"a")),
    wire.frame(7, wire.Ask.EXEC, wire.EXEC.pack(0, 100, 1, 0) + b"\xff\xff\xff\xff" + b"abc"),
    wire.frame(7, wire.Ask.READ, b"\1"),
    wire.frame(7, wire.Ask.READ, b"\xff" * 8 + wire.text(b"a\0b")),
    wire.frame(7, wire.Ask.WRITE, b"\0" * 7),
    wire.frame(7, wire.Ask.LIST, b"\1\0\0\0" + b"\xff\xff\xff\xff"),
    wire.frame(7, wire.Ask.STAT, b""),
    wire.frame(7, wire.Ask.WORLD, b"\xff\xff\xff\xff"),
    wire.frame(7, wire.Ask.INPUT, b""),
    wire.frame(7, wire.Ask.INPUT, b"\x09\0\0\0data"),
    wire.frame(7, wire.Ask.END_ALL, b"\1"),
    wire.frame(7, wire.Ask.FREEZE, b"?"),
]
UNANSWERED = [
    wire.frame(0, wire.Ask.SIGNAL, b"\1"),
    wire.frame(0, wire.Ask.SIGNAL, b"\x09\0\0\0" + b"\xff\xff\xff\x7f" + b"\0\0\0\0"),
    wire.frame(0, wire.Ask.TAKEN, b""),
    wire.frame(0, wire.Ask.TAKEN, b"\x09\0\0\0\x09\0\0\0"),
    wire.frame(0, wire.Ask.RESIZE, b"\x09\0\0\0"),
]


def test_malformed_requests_are_answered_with_an_error_and_the_agent_goes_on(play):
    async def scene(box):
        life: Link = box._life()
        for bad in BAD_FRAMES:
            answer = asyncio.get_running_loop().create_future()
            life._answers[7] = answer
            life._stream.write(bad)
            async with asyncio.timeout(30):
                kind, body = await answer
            assert kind == wire.Say.ERROR and link.error_of(body)[0] > 0, bad
        for bad in UNANSWERED:
            life._stream.write(bad)
        assert (await box.exec(["echo", "fine"], timeout_s=30)).stdout == b"fine\n"

    play(scene)


def test_stream_out_of_step_ends_the_agent(play):
    async def scene(box):
        box._life()._stream.write(b"\xff" * 64)
        with pytest.raises(RunFailure, match="gone"):
            await box.exec(["sleep", "1000"], timeout_s=1000)

    play(scene)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/children") as file:
            found += [int(child) for child in file.read().split()]
    return found


def _tree(pid: int) -> list[int]:
    return [pid, *(below for child in _children(pid) for below in _tree(child))]


async def _readable(fd: int) -> None:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(fd, ended.set)
    try:
        async with asyncio.timeout(30):
            await ended.wait()
    finally:
        loop.remove_reader(fd)
