"""Byte streams between an owner and an agent: moves bytes and descriptors as they come, never waits, knows no frames."""

from __future__ import annotations

import array
import asyncio
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import Protocol

OnData = Callable[[bytes, list[int]], None]
OnLost = Callable[[], None]

READ_BYTES = 1 << 16
"""Below the size from which the allocator maps fresh pages for each read."""
_MAX_FDS = 16
_INT_BYTES = array.array("i").itemsize
_CREDENTIALS = struct.Struct("3i")
_CONTROL_BYTES = socket.CMSG_SPACE(_MAX_FDS * _INT_BYTES) + socket.CMSG_SPACE(_CREDENTIALS.size)


class Stream(Protocol):
    """Both directions to one agent."""

    def listen(self, on_data: OnData, on_lost: OnLost) -> None:
        """From now on `on_data(bytes, descriptors)` for what comes; `on_lost()` once, after the last of it."""
        ...

    def write(self, data: bytes) -> None:
        """Send, now or as soon as the other side takes it. What a lost stream is given is dropped."""
        ...

    def close(self) -> None:
        """Hang up without a call of `on_lost`; again is harmless."""
        ...


class SocketStream:
    """A connected AF_UNIX stream socket, watched by the loop itself: thousands of boxes have no transport objects."""

    def __init__(self, sock: socket.socket, *, identify: bool = False) -> None:
        """`identify`: learn who is at the other end, by the kernel's word."""
        sock.setblocking(False)
        if identify:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.peer_pid = 0
        """The process that sent last, as this machine counts; 0: not asked for, or nothing came yet."""
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._unsent: deque[memoryview] = deque()
        self._open = True
        self._on_data: OnData | None = None
        self._on_lost: OnLost | None = None

    def listen(self, on_data: OnData, on_lost: OnLost) -> None:
        self._on_data, self._on_lost = on_data, on_lost
        self._loop.add_reader(self._sock, self._readable)

    def write(self, data: bytes) -> None:
        if not self._open:
            return
        if self._unsent:
            self._unsent.append(memoryview(data))
            return
        try:
            num_sent = self._sock.send(data)
        except BlockingIOError:
            num_sent = 0
        except OSError:
            return  # the reader finds the end, behind what the agent said last
        if num_sent < len(data):
            self._unsent.append(memoryview(data)[num_sent:])
            self._loop.add_writer(self._sock, self._writable)

    def close(self) -> None:
        if self._open:
            self._open = False
            self._loop.remove_reader(self._sock)
            if self._unsent:
                self._loop.remove_writer(self._sock)
                self._unsent.clear()
            self._sock.close()

    def _readable(self) -> None:
        assert self._on_data is not None
        fds: list[int] = []
        try:
            data, ancillary, _, _ = self._sock.recvmsg(READ_BYTES, _CONTROL_BYTES, socket.MSG_CMSG_CLOEXEC)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data, ancillary = b"", []
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i")
                numbers.frombytes(payload[: len(payload) - len(payload) % _INT_BYTES])
                fds += numbers
            elif level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
                self.peer_pid = _CREDENTIALS.unpack_from(payload)[0]
        if data:
            self._on_data(data, fds)
        else:
            self._lose()

    def _writable(self) -> None:
        while self._unsent:
            piece = self._unsent[0]
            try:
                num_sent = self._sock.send(piece)
            except BlockingIOError:
                return
            except OSError:
                self._unsent.clear()  # the reader finds the end
                break
            if num_sent < len(piece):
                self._unsent[0] = piece[num_sent:]
            else:
                self._unsent.popleft()
        self._loop.remove_writer(self._sock)

    def _lose(self) -> None:
        assert self._on_lost is not None
        self.close()
        self._on_lost()
