"""The byte stream to the agent of a machine that can be saved in mid-sentence: knows at which byte of a frame the machine stopped."""

from __future__ import annotations

import array
import asyncio
import fcntl
import socket
import struct
import termios

from rollmill.sandbox.agent import wire
from rollmill.sandbox.agent.streams import OnData, OnLost, SocketStream

_TAKEN = struct.Struct("<II")
_DRAIN_DEADLINE_S = 30.0


class MachineStream:
    """Holds back what is written while a machine is saved. A restored machine goes on with the frame in which the saved one stopped
    (`begun`), and with commands that its new owner did not start (`num_before`): their output is taken, so that they never wait."""

    def __init__(self, sock: socket.socket, *, begun: bytes = b"", num_before: int = 0) -> None:
        self._sock = sock
        self._inner = SocketStream(sock)
        self._begun = begun
        self._tail = bytearray()
        self._num_before = num_before
        self._held: list[bytes] | None = None
        self._closed = False
        self._on_data: OnData | None = None

    def listen(self, on_data: OnData, on_lost: OnLost) -> None:
        self._on_data = on_data
        if self._begun:
            self._hear(self._begun, [])
        self._inner.listen(self._hear, on_lost)

    def write(self, data: bytes) -> None:
        if self._held is None:
            self._inner.write(data)
        else:
            self._held.append(data)

    def close(self) -> None:
        self._closed = True
        self._inner.close()

    def hold(self) -> None:
        """From now on nothing goes out: the agent stays at the end of a request."""
        self._held = self._held or []

    def release(self) -> None:
        held, self._held = self._held or [], None
        for data in held:
            self._inner.write(data)

    async def drained(self) -> None:
        """Until everything has been read that a stopped machine said."""
        left = array.array("i", [0])
        async with asyncio.timeout(_DRAIN_DEADLINE_S):
            while not self._closed:
                fcntl.ioctl(self._sock, termios.FIONREAD, left)
                if not left[0]:
                    return
                await asyncio.sleep(0)

    def begun(self) -> bytes:
        """The part of a frame that has come."""
        return bytes(self._tail)

    def _hear(self, data: bytes, fds: list[int]) -> None:
        assert self._on_data is not None
        tail = self._tail
        tail += data
        at = 0
        while len(tail) - at >= wire.HEAD.size:
            size, request, kind = wire.HEAD.unpack_from(tail, at)
            if len(tail) - at < wire.HEAD.size + size:
                break
            if kind == wire.Say.OUTPUT and 0 < request <= self._num_before:
                self.write(wire.frame(0, wire.Ask.TAKEN, _TAKEN.pack(request, size - 4)))
            at += wire.HEAD.size + size
        del tail[:at]
        self._on_data(data, fds)
