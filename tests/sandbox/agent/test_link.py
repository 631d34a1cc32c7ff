"""The owner's end by itself: the order of news about a death, descriptors, agents that lie or say nothing. No process runs."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct
import sys

import pytest
from agent_boxes import BOOT

from rollmill.records import RunFailure
from rollmill.sandbox.agent import link, process, wire
from rollmill.sandbox.agent.client import AgentBox
from rollmill.sandbox.agent.streams import SocketStream
from rollmill.sandbox.records import SandboxSpec

HELLO = wire.frame(0, wire.Say.HELLO, wire.HELLO.pack(wire.VERSION, 3, wire.Fact.PROC))


def words(number: int, text: bytes) -> bytes:
    return struct.pack("<i", number) + wire.text(text)


class ScriptedStream:
    """An agent's end that says what the test says."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, int, bytes]] = []
        self.is_open = True
        self._splitter = wire.Splitter()

    def listen(self, on_data, on_lost) -> None:
        self.say, self.lose = on_data, on_lost

    def write(self, data: bytes) -> None:
        if self.is_open:
            self.sent += self._splitter.feed(data)

    def close(self) -> None:
        self.is_open = False


class Scene:
    def __init__(self) -> None:
        self.stream = ScriptedStream()
        self.num_kills = 0
        self.box = AgentBox("b", SandboxSpec(), kill=self.kill)
        self.box.attach(self.stream)

    def kill(self) -> None:
        self.num_kills += 1
        self.box.gone("it was killed")

    def answer(self, kind: int, body: bytes, fds: list[int] | None = None) -> None:
        self.stream.say(wire.frame(self.stream.sent[-1][0], kind, body), fds or [])


def run(scene) -> None:
    async def whole() -> None:
        async with asyncio.timeout(30):
            await scene(Scene())

    asyncio.run(whole())


async def begin(call) -> asyncio.Task:
    task = asyncio.create_task(call)
    for _ in range(3):
        await asyncio.sleep(0)
    return task


def test_hello_brings_slot_facts_and_descriptors():
    async def scene(s):
        fd = os.open(os.devnull, os.O_RDONLY)
        ready = await begin(s.box.ready(30))
        s.stream.say(HELLO[:5], [fd])
        s.stream.say(HELLO[5:], [])
        hello = await ready
        assert (hello.slot, hello.facts, hello.fds) == (3, wire.Fact.PROC, (fd,))
        assert await s.box.ready(30) == hello
        os.close(fd)

    run(scene)


def test_last_words_say_why_a_box_could_not_be_made():
    async def scene(s):
        ready = await begin(s.box.ready(30))
        s.stream.say(wire.frame(0, wire.Say.LAST_WORDS, words(1, b"mount: not permitted")), [])
        s.stream.lose()
        s.box.gone("it exited")
        with pytest.raises(RunFailure, match=r"box b could not be made: mount: not permitted"):
            await ready
        with pytest.raises(RunFailure, match=r"box b is gone: mount: not permitted"):
            await s.box.exec(["true"], timeout_s=30)

    run(scene)


def test_silent_agent_is_killed_at_the_deadline():
    async def scene(s):
        with pytest.raises(RunFailure, match=r"creating it took longer than 0.05 s"):
            await s.box.ready(0.05)
        assert s.num_kills == 1 and not s.stream.is_open

    run(scene)


def test_agent_of_another_version_is_refused():
    async def scene(s):
        ready = await begin(s.box.ready(30))
        s.stream.say(wire.frame(0, wire.Say.HELLO, wire.HELLO.pack(99, 0, 0)), [])
        with pytest.raises(RunFailure, match="version 99"):
            await ready
        assert s.num_kills == 1

    run(scene)


@pytest.mark.parametrize("hangs_up_first", [True, False])
def test_ruin_is_an_observation_whichever_news_comes_first(hangs_up_first):
    async def scene(s):
        pending = await begin(s.box.exec(["a"], timeout_s=30))
        if hangs_up_first:
            s.stream.lose()
            between = await begin(s.box.exec(["b"], timeout_s=30))
            reading = await begin(s.box.read("b"))
            s.box.gone("its memory ran out", ruined=True)
            assert (await between).exit_code == -9
            with pytest.raises(OSError) as error:
                await reading
            assert error.value.errno == errno.EIO
        else:
            s.box.gone("its memory ran out", ruined=True)
            await asyncio.sleep(0)
            assert not pending.done()
            s.stream.lose()
        assert (await pending).exit_code == -9

    run(scene)


def test_what_the_agent_said_last_counts_though_its_death_is_known():
    async def scene(s):
        call = await begin(s.box.exec(["true"], timeout_s=30))
        s.box.gone("its lifetime ended")
        s.answer(wire.Say.DONE, wire.DONE.pack(4, 0, 0, 0, 0.0, 0.0, 0.0, 0) + wire.text(b"") * 2)
        s.stream.lose()
        assert (await call).exit_code == 4

    run(scene)


@pytest.mark.parametrize("hangs_up", [True, False])
def test_second_news_that_never_comes_is_not_waited_for_for_ever(hangs_up, monkeypatch):
    monkeypatch.setattr(link, "NEWS_GRACE_S", 0.05)

    async def scene(s):
        call = await begin(s.box.exec(["true"], timeout_s=1000))
        if hangs_up:
            s.stream.lose()
        else:
            s.box.gone("it was reaped")
        with pytest.raises(RunFailure, match="hung up" if hangs_up else "reaped"):
            await call
        assert s.num_kills == int(hangs_up)

    run(scene)


@pytest.mark.parametrize("data", [b"\xff" * 12, wire.frame(0, wire.Say.HELLO, b""), wire.frame(1, wire.Say.OUTPUT, b"")])
def test_agent_that_sends_nonsense_is_killed(data):
    async def scene(s):
        starting = await begin(s.box.start(["true"]))
        s.stream.say(data, [])
        with pytest.raises(RunFailure, match="no frame"):
            await starting
        assert s.num_kills == 1 and not s.stream.is_open

    run(scene)


def test_answer_that_cannot_be_read_is_a_failure_of_ours():
    async def scene(s):
        for call in (s.box.exec(["true"], timeout_s=30), s.box.stat("a"), s.box.list(), s.box.end_all(0.0)):
            asked = await begin(call)
            s.answer(wire.Say.OK, b"\1\2\3")
            with pytest.raises(RunFailure, match="cannot be read"):
                await asked

    run(scene)


def test_agent_that_sends_output_beyond_its_window_is_killed():
    async def scene(s):
        starting = await begin(s.box.start(["yes"]))
        s.answer(wire.Say.STARTED, struct.pack("<I", 5))
        running = await starting
        for _ in range(process.MAX_WAITING_BYTES // (1 << 20) + 1):
            s.answer(wire.Say.OUTPUT, bytes(4 + (1 << 20)))
        assert s.num_kills == 1
        with pytest.raises(RunFailure, match="nobody asked for"):
            await running.wait(timeout_s=30)

    run(scene)


def test_descriptors_nobody_asked_for_are_closed():
    async def scene(s):
        fds = [os.open(os.devnull, os.O_RDONLY) for _ in range(70)]
        s.stream.say(b"", fds)
        for fd in fds:
            with pytest.raises(OSError):
                os.fstat(fd)
        assert not s.box.alive

    run(scene)


def test_freeze_hands_over_the_layer_and_the_box_lives_on_with_its_successor():
    async def scene(s):
        fd = os.open(os.devnull, os.O_RDONLY)
        freezing = await begin(s.box.freeze())
        assert s.stream.sent[-1][1] == wire.Ask.FREEZE
        s.answer(wire.Say.OK, b"", [fd])
        s.stream.lose()
        s.box.gone("its first process ended")
        assert await freezing == fd
        os.close(fd)
        with pytest.raises(RunFailure, match="gone"):
            await s.box.exec(["true"], timeout_s=30)
        successor = ScriptedStream()
        s.box.attach(successor)
        successor.say(HELLO, [])
        assert (await s.box.ready(30)).slot == 3 and s.box.alive
        call = await begin(s.box.exec(["true"], timeout_s=30))
        assert successor.sent[-1][1] == wire.Ask.EXEC
        call.cancel()

    run(scene)


def test_freeze_without_a_layer_is_a_failure_of_ours():
    async def scene(s):
        freezing = await begin(s.box.freeze())
        s.answer(wire.Say.OK, b"")
        with pytest.raises(RunFailure, match="0 layers"):
            await freezing

    run(scene)


def test_answers_nobody_waits_for_are_dropped():
    async def scene(s):
        call = await begin(s.box.read("a"))
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        s.answer(wire.Say.OK, b"late")
        s.stream.say(wire.frame(12345, wire.Say.DONE, b"?"), [])
        assert s.box.alive

    run(scene)


def test_agent_that_cannot_start_commands_is_a_failure_of_ours():
    async def scene(s):
        call = await begin(s.box.exec(["true"], timeout_s=30))
        s.answer(wire.Say.ERROR, words(errno.EMFILE, b"too many open files"))
        with pytest.raises(RunFailure, match="could not start a command: too many open files"):
            await call

    run(scene)


@pytest.mark.parametrize(
    ("argv", "wrong", "match"),
    [
        ([], {}, "argv"),
        (["echo", "a\0b"], {}, "NUL"),
        (["env"], {"env": {"a=b": "c"}}, "environment"),
        (["env"], {"env": {"": "c"}}, "environment"),
        (["env"], {"cwd": "a\0"}, "cwd"),
        (["cat"], {"stdin": bytes(17 << 20)}, "standard input"),
        (["cat"], {"max_output_bytes": 17 << 20}, "max_output_bytes"),
        (["echo"] * 70_000, {}, "at most"),
    ],
)
def test_nonsense_is_refused_before_it_is_sent(argv, wrong, match):
    async def scene(s):
        with pytest.raises(ValueError, match=match):
            await s.box.exec(argv, timeout_s=30, **wrong)
        assert s.stream.sent == []

    run(scene)


def test_command_that_ignores_its_input_is_not_waited_for_for_ever(monkeypatch):
    monkeypatch.setattr(process, "INPUT_DEADLINE_S", 0.05)

    async def scene(s):
        starting = await begin(s.box.start(["sleep"]))
        s.answer(wire.Say.STARTED, struct.pack("<I", 5))
        with pytest.raises(TimeoutError, match="unread"):
            await (await starting).write(b"x")
        assert s.box.alive

    run(scene)


def test_cancelled_start_kills_what_it_started():
    async def scene(s):
        starting = await begin(s.box.start(["sleep"]))
        request = s.stream.sent[-1][0]
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        assert s.stream.sent[-1][1:] == (wire.Ask.SIGNAL, struct.pack("<III", request, 9, 0))

    run(scene)


def test_box_that_does_not_go_away_is_reported(monkeypatch):
    monkeypatch.setattr(link, "CLOSE_DEADLINE_S", 0.05)

    async def scene(s):
        box = AgentBox("stuck", SandboxSpec(), kill=lambda: None)
        box.attach(ScriptedStream())
        with pytest.raises(RunFailure, match="still there"):
            await box.close()

    run(scene)


def test_socket_takes_more_than_it_holds_and_loses_nothing():
    async def whole() -> None:
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        stream, lost = SocketStream(ours), asyncio.Event()
        got: list[tuple[bytes, list[int]]] = []
        stream.listen(lambda data, fds: got.append((data, fds)), lost.set)
        data = [bytes([n]) * 700_000 for n in range(8)]
        for piece in data:
            stream.write(piece)
        loop, seen = asyncio.get_running_loop(), b""
        async with asyncio.timeout(30):
            while len(seen) < 8 * 700_000:
                seen += await loop.sock_recv(theirs, 1 << 20)
        assert seen == b"".join(data)
        given = os.open(os.devnull, os.O_RDONLY)
        socket.send_fds(theirs, [b"take this"], [given])
        os.close(given)
        theirs.close()
        async with asyncio.timeout(30):
            await lost.wait()
        stream.write(b"nobody hears it")
        stream.close()
        (((said, (fd,))),) = got
        assert said == b"take this" and not os.get_inheritable(fd)
        os.close(fd)

    asyncio.run(whole())


def test_plain_agent_needs_no_package_but_the_standard_library():
    code = f"{BOOT.rpartition(';')[0]}; print(*sorted(m for m in sys.modules if 'rollmill' in m or 'msgspec' in m))"

    async def whole() -> None:
        program = await asyncio.create_subprocess_exec(sys.executable, "-I", "-S", "-B", "-c", code, stdout=asyncio.subprocess.PIPE)
        async with asyncio.timeout(30):
            assert (await program.communicate())[0] == b"\n" and program.returncode == 0

    asyncio.run(whole())
