"""Accepts connections on listening sockets, a bounded number at once for a box, and hands each to what serves it; it reads no byte."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable

from rollmill.sandbox.egress.channel import Budget, SocketChannel
from rollmill.sandbox.egress.record import Limits

Dialled = tuple[str, int]
"""Address and port that the program in the box connected to."""
Serve = Callable[[SocketChannel, Dialled], Awaitable[None]]
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
PAUSE_S = 0.25
CLOSE_S = 5.0


class Acceptor:
    """At its limit each listener takes one connection more and stops: what comes then waits in the backlog, as at any busy host."""

    def __init__(self, limits: Limits, on_fault: Callable[[Dialled, BaseException], None]) -> None:
        self.budget = Budget(limits.total_bytes)
        self.on_fault = on_fault
        self._slots = asyncio.Semaphore(limits.num_connections)
        self._tasks: set[asyncio.Task[None]] = set()

    def listen(self, listener: socket.socket, serve: Serve) -> None:
        listener.setblocking(False)
        self._keep(asyncio.create_task(self._accept(listener, serve)))

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket, serve: Serve) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as e:
                if e.errno in EXHAUSTED:
                    await asyncio.sleep(PAUSE_S)
                elif e.errno not in (errno.ECONNABORTED, errno.EINTR):
                    self.on_fault(listener.getsockname()[:2], e)
                    return
                continue
            # Taken only now: a listener that waits with a slot in hand would starve the box's other listeners.
            try:
                await self._slots.acquire()
            except BaseException:
                sock.close()
                raise
            self._keep(asyncio.create_task(self._run(sock, serve)))

    async def _run(self, sock: socket.socket, serve: Serve) -> None:
        dialled: Dialled = ("", 0)
        try:
            dialled = sock.getsockname()[:2]
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await serve(SocketChannel(sock, self.budget), dialled)
        except Exception as e:  # noqa: BLE001 - one connection's fault is reported and counted, and leaves the box's others alone
            self.on_fault(dialled, e)
        finally:
            sock.close()
            self._slots.release()

    async def close(self) -> None:
        """End every connection. The listeners stay their owner's."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_S)
