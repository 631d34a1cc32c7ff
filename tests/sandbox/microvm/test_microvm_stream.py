"""A machine may be saved in the middle of a frame: its parent and its forks still hear whole frames, each exactly once."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.sandbox.agent import wire
from rollmill.sandbox.microvm.stream import MachineStream

DEADLINE_S = 30.0
Frame = tuple[int, int, bytes]
FRAMES = st.lists(
    st.tuples(st.integers(0, 9), st.sampled_from([wire.Say.OK, wire.Say.DONE, wire.Say.OUTPUT]), st.binary(min_size=4, max_size=40)),
    max_size=6,
)


class Ear:
    """Hears a stream as its owner does."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.is_lost = asyncio.Event()
        self._splitter = wire.Splitter()

    def heard(self, data: bytes, fds: list[int]) -> None:
        self.frames += self._splitter.feed(data)

    def lost(self) -> None:
        self.is_lost.set()


def play(scene: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await scene()

    asyncio.run(whole())


async def hear(data: bytes, *, begun: bytes = b"", num_before: int = 0) -> tuple[Ear, MachineStream, socket.socket]:
    ours, theirs = socket.socketpair()
    ear, stream = Ear(), MachineStream(ours, begun=begun, num_before=num_before)
    stream.listen(ear.heard, ear.lost)
    theirs.sendall(data)
    await stream.drained()
    return ear, stream, theirs


@settings(max_examples=50, deadline=None, derandomize=True)
@given(FRAMES, st.integers(0, 400))
def test_fork_goes_on_in_the_frame_where_its_parent_stopped(frames: list[Frame], cut: int) -> None:
    said = b"".join(wire.frame(*frame) for frame in frames)
    cut = min(cut, len(said))

    async def scene() -> None:
        parent, stream, theirs = await hear(said[:cut])
        begun = stream.begun()
        child, fork, others = await hear(said[cut:], begun=begun)
        theirs.sendall(said[cut:])
        await stream.drained()
        assert parent.frames == frames
        assert child.frames == frames[len(frames) - len(child.frames) :]
        heard_before_cut = len(frames) - len(child.frames)
        assert sum(len(wire.frame(*frame)) for frame in frames[:heard_before_cut]) == cut - len(begun)
        for each in (stream, fork, theirs, others):
            each.close()

    play(scene)


def test_fork_takes_the_output_of_commands_it_did_not_start() -> None:
    async def scene() -> None:
        output = struct.pack("<I", 0) + b"x" * 100
        said = wire.frame(3, wire.Say.OUTPUT, output) + wire.frame(8, wire.Say.OUTPUT, output) + wire.frame(0, wire.Say.HELLO, b"")
        _, stream, theirs = await hear(said, num_before=7)
        theirs.setblocking(False)
        expected = wire.frame(0, wire.Ask.TAKEN, struct.pack("<II", 3, 100))
        assert theirs.recv(1000) == expected
        stream.close()
        theirs.close()

    play(scene)


def test_what_is_written_while_the_machine_is_saved_goes_out_afterwards_in_order() -> None:
    async def scene() -> None:
        _, stream, theirs = await hear(b"")
        theirs.setblocking(False)
        stream.write(b"1")
        stream.hold()
        stream.write(b"2")
        stream.write(b"3")
        assert theirs.recv(10) == b"1"
        stream.release()
        stream.write(b"4")
        assert theirs.recv(10) == b"234"
        stream.close()
        theirs.close()

    play(scene)


def test_end_of_the_machine_is_heard_behind_its_last_frame() -> None:
    async def scene() -> None:
        ear, stream, theirs = await hear(b"")
        theirs.sendall(wire.frame(1, wire.Say.OK))
        theirs.close()
        await ear.is_lost.wait()
        assert ear.frames == [(1, wire.Say.OK, b"")]
        stream.close()

    play(scene)
