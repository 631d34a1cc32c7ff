"""The client of QEMU's protocol keeps answers apart, passes events on, and never waits without end."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rollmill.sandbox.microvm.qmp import Qmp, QmpError

DEADLINE_S = 30.0


class FakeQemu:
    """The other end of the socket: greets, then does what its script says for each request."""

    def __init__(self, sock: socket.socket, script: Callable[[FakeQemu, dict[str, Any]], Awaitable[None]]) -> None:
        self.sock = sock
        self.fds: list[int] = []
        self._script = script
        sock.setblocking(False)

    async def say(self, message: dict[str, Any] | bytes) -> None:
        data = message if isinstance(message, bytes) else json.dumps(message).encode() + b"\r\n"
        await asyncio.get_running_loop().sock_sendall(self.sock, data)

    async def run(self) -> None:
        await self.say({"QMP": {"version": {}, "capabilities": []}})
        loop, buffer = asyncio.get_running_loop(), b""
        while True:
            readable: asyncio.Future[None] = loop.create_future()
            loop.add_reader(self.sock, lambda to=readable: to.done() or to.set_result(None))
            await readable
            loop.remove_reader(self.sock)
            data, fds, _, _ = socket.recv_fds(self.sock, 1 << 16, 4)
            self.fds += fds
            if not data:
                return
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                request = json.loads(line)
                if request["execute"] == "qmp_capabilities":
                    await self.say({"return": {}, "id": request["id"]})
                else:
                    await self._script(self, request)


async def answer_plainly(fake: FakeQemu, request: dict[str, Any]) -> None:
    await fake.say({"return": request.get("arguments", {}), "id": request["id"]})


def play(
    script: Callable[[FakeQemu, dict[str, Any]], Awaitable[None]], scene: Callable[[Qmp, FakeQemu, list[Any]], Awaitable[None]]
) -> None:
    async def whole() -> None:
        ours, theirs = socket.socketpair()
        fake, events = FakeQemu(theirs, script), []
        running = asyncio.create_task(fake.run())
        qmp = await Qmp.open(ours, lambda name, data: events.append((name, data)), deadline_s=DEADLINE_S)
        try:
            async with asyncio.timeout(DEADLINE_S):
                await scene(qmp, fake, events)
        finally:
            qmp.close()
            running.cancel()
            theirs.close()

    asyncio.run(whole())


def test_answers_reach_the_calls_they_belong_to_in_any_order() -> None:
    held: list[dict[str, Any]] = []

    async def reversed_pairs(fake: FakeQemu, request: dict[str, Any]) -> None:
        held.append(request)
        if len(held) == 2:
            for each in reversed(held):
                await answer_plainly(fake, each)

    async def scene(qmp: Qmp, fake: FakeQemu, events: list[Any]) -> None:
        first, second = await asyncio.gather(*(qmp.call("move", {"n": n}, deadline_s=DEADLINE_S) for n in (1, 2)))
        assert (first, second) == ({"n": 1}, {"n": 2})

    play(reversed_pairs, scene)


def test_events_between_answers_go_to_the_listener() -> None:
    async def noisy(fake: FakeQemu, request: dict[str, Any]) -> None:
        await fake.say({"event": "STOP", "timestamp": {}})
        await fake.say({"event": "MIGRATION", "data": {"status": "completed"}})
        await answer_plainly(fake, request)

    async def scene(qmp: Qmp, fake: FakeQemu, events: list[Any]) -> None:
        await qmp.call("stop", deadline_s=DEADLINE_S)
        assert events == [("STOP", {}), ("MIGRATION", {"status": "completed"})]

    play(noisy, scene)


def test_refusal_carries_the_words_of_qemu() -> None:
    async def refuse(fake: FakeQemu, request: dict[str, Any]) -> None:
        await fake.say({"error": {"class": "GenericError", "desc": "no such file"}, "id": request["id"]})

    async def scene(qmp: Qmp, fake: FakeQemu, events: list[Any]) -> None:
        with pytest.raises(QmpError, match="no such file"):
            await qmp.call("migrate", {"uri": "x"}, deadline_s=DEADLINE_S)

    play(refuse, scene)


def test_descriptor_travels_beside_its_request() -> None:
    async def scene(qmp: Qmp, fake: FakeQemu, events: list[Any]) -> None:
        reading, writing = os.pipe()
        await qmp.call("getfd", {"fdname": "saved"}, deadline_s=DEADLINE_S, fd=writing)
        os.close(writing)
        os.write(fake.fds[0], b"through")
        os.close(fake.fds[0])
        assert os.read(reading, 100) == b"through"
        os.close(reading)

    play(answer_plainly, scene)


def test_silence_ends_with_an_error_that_names_the_command() -> None:
    async def ignore(fake: FakeQemu, request: dict[str, Any]) -> None: ...

    async def scene(qmp: Qmp, fake: FakeQemu, events: list[Any]) -> None:
        with pytest.raises(QmpError, match="stop: QEMU did not answer"):
            await qmp.call("stop", deadline_s=0.01)

    play(ignore, scene)


def test_hang_up_fails_what_is_pending_and_what_comes_later() -> None:
    async def hang_up(fake: FakeQemu, request: dict[str, Any]) -> None:
        fake.sock.shutdown(socket.SHUT_RDWR)

    async def scene(qmp: Qmp, fake: FakeQemu, events: list[Any]) -> None:
        for _ in range(2):
            with pytest.raises(QmpError):
                await qmp.call("stop", deadline_s=DEADLINE_S)

    play(hang_up, scene)


def test_garbage_is_told_and_not_followed() -> None:
    async def garble(fake: FakeQemu, request: dict[str, Any]) -> None:
        await fake.say(b"not json\n")

    async def scene(qmp: Qmp, fake: FakeQemu, events: list[Any]) -> None:
        with pytest.raises(QmpError, match="no message"):
            await qmp.call("stop", deadline_s=DEADLINE_S)

    play(garble, scene)


def test_qemu_that_does_not_greet_is_given_up() -> None:
    async def whole() -> None:
        ours, theirs = socket.socketpair()
        with theirs, pytest.raises(QmpError, match="greet"):
            await Qmp.open(ours, lambda name, data: None, deadline_s=0.01)

    asyncio.run(whole())
