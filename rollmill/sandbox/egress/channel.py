"""Byte channels to a box and to the outside, plain and TLS, over bare sockets: reads and writes only, deadlines are their callers'."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from typing import Protocol

READ_BYTES = 1 << 16


class BudgetSpent(ConnectionError):
    """The box has used all the bytes it was given."""


class Budget:
    """The bytes a box may still move."""

    def __init__(self, total_bytes: int) -> None:
        self.left_bytes = total_bytes

    def take(self, num: int) -> None:
        self.left_bytes -= num
        if self.left_bytes < 0:
            raise BudgetSpent("byte budget of the box is spent")


class Channel(Protocol):
    async def read(self) -> bytes: ...
    async def write(self, data: bytes) -> None: ...
    async def finish(self) -> None: ...
    def is_stale(self) -> bool: ...
    def cut(self) -> None: ...
    def close(self) -> None: ...


class SocketChannel:
    """A connected TCP socket. `cut` wakes whoever waits on it and may be called at any time; `close` only when nobody does."""

    def __init__(self, sock: socket.socket, budget: Budget | None = None) -> None:
        sock.setblocking(False)
        self.sock, self.budget = sock, budget
        self.loop = asyncio.get_running_loop()
        self.num_read_bytes = self.num_written_bytes = 0
        self._pushed_back = b""

    def push_back(self, data: bytes) -> None:
        """The next read gives these bytes again."""
        self._pushed_back = data + self._pushed_back

    async def read(self) -> bytes:
        """Empty: the other side will send no more."""
        if self._pushed_back:
            data, self._pushed_back = self._pushed_back, b""
            return data
        data = await self.loop.sock_recv(self.sock, READ_BYTES)
        self.num_read_bytes += len(data)
        if self.budget:
            self.budget.take(len(data))
        return data

    async def write(self, data: bytes) -> None:
        if self.budget:
            self.budget.take(len(data))
        await self.loop.sock_sendall(self.sock, data)
        self.num_written_bytes += len(data)

    async def finish(self) -> None:
        """No more will be written; reading goes on."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)

    def is_stale(self) -> bool:
        """Whether an idle connection was closed, or spoke out of turn."""
        try:
            self.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def cut(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.sock.close()


class TlsChannel:
    """TLS over a channel whose first bytes may have been read and pushed back, which a transport could not do."""

    def __init__(self, raw: SocketChannel, context: ssl.SSLContext, *, server_name: str = "") -> None:
        self.raw = raw
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_side=not server_name, server_hostname=server_name or None)
        self._turn = asyncio.Lock()

    async def _flush(self) -> None:
        # Reader and writer both flush: without turns the halves of two records would mix on the wire.
        async with self._turn:
            if data := self._out.read():
                await self.raw.write(data)

    async def _fill(self) -> None:
        if data := await self.raw.read():
            self._in.write(data)
        else:
            self._in.write_eof()

    async def handshake(self) -> None:
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                await self._flush()
                await self._fill()
            except ssl.SSLError:
                with contextlib.suppress(OSError):
                    await self._flush()
                raise
            else:
                return await self._flush()

    async def read(self) -> bytes:
        while True:
            try:
                return self._tls.read(READ_BYTES)
            except ssl.SSLWantReadError:
                await self._flush()
                await self._fill()
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                return b""

    async def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._tls.write(view) :]
        await self._flush()

    async def finish(self) -> None:
        with contextlib.suppress(ssl.SSLError, OSError):
            try:
                self._tls.unwrap()
            except ssl.SSLWantReadError:
                await self._flush()
        await self.raw.finish()

    def is_stale(self) -> bool:
        return self.raw.is_stale()

    def cut(self) -> None:
        self.raw.cut()

    def close(self) -> None:
        self.raw.close()
