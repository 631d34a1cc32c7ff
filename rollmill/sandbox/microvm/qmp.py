"""A client of QEMU's machine protocol on one connected socket: a call waits for its own answer, events go to one listener."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable
from typing import Any

MAX_LINE_BYTES = 1 << 22


class QmpError(Exception):
    """QEMU refused, or is gone."""


class Qmp:
    """Made with `open`; `close` ends what is pending."""

    def __init__(self, sock: socket.socket, on_event: Callable[[str, dict[str, Any]], None]) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._on_event = on_event
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._next = 0
        self._greeted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lost: str | None = None
        self._sending = asyncio.Lock()
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def open(cls, sock: socket.socket, on_event: Callable[[str, dict[str, Any]], None], *, deadline_s: float) -> Qmp:
        qmp = cls(sock, on_event)
        try:
            await _within(qmp._greeted, deadline_s, "greet")
            await qmp.call("qmp_capabilities", deadline_s=deadline_s)
        except BaseException:
            qmp.close()
            raise
        return qmp

    async def call(self, command: str, arguments: dict[str, Any] | None = None, *, deadline_s: float, fd: int | None = None) -> Any:
        """The command's `return`; `fd` travels beside the request."""
        if self._lost is not None:
            raise QmpError(f"{command}: {self._lost}")
        self._next += 1
        number = self._next
        request: dict[str, Any] = {"execute": command, "id": number}
        if arguments:
            request["arguments"] = arguments
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending[number] = answer
        try:
            async with self._sending:
                data = json.dumps(request).encode() + b"\n"
                if fd is not None:
                    # A short message into a buffer nobody fills: it is taken whole or QEMU has stopped reading for good.
                    try:
                        data = data[socket.send_fds(self._sock, [data], [fd]) :]
                    except BlockingIOError:
                        raise QmpError(f"{command}: QEMU does not read its requests") from None
                await _within(asyncio.get_running_loop().sock_sendall(self._sock, data), deadline_s, command)
            return await _within(answer, deadline_s, command)
        except OSError as error:
            raise QmpError(f"{command}: {error}") from None
        finally:
            self._pending.pop(number, None)

    def close(self) -> None:
        self._reading.cancel()
        self._lose("closed")
        self._sock.close()

    async def _read(self) -> None:
        loop, buffer = asyncio.get_running_loop(), bytearray()
        with contextlib.suppress(OSError):
            while data := await loop.sock_recv(self._sock, 1 << 16):
                buffer += data
                *lines, rest = bytes(buffer).split(b"\n")
                buffer = bytearray(rest)
                if len(buffer) > MAX_LINE_BYTES:
                    break
                for line in lines:
                    try:
                        message = json.loads(line)
                    except ValueError:
                        self._lose(f"QEMU said what is no message: {line[:100]!r}")
                        return
                    self._hear(message)
        self._lose("QEMU hung up")

    def _hear(self, message: dict[str, Any]) -> None:
        if "QMP" in message:
            if not self._greeted.done():
                self._greeted.set_result(None)
        elif "event" in message:
            self._on_event(str(message["event"]), message.get("data") or {})
        elif (answer := self._pending.get(message.get("id", 0))) is not None and not answer.done():
            if "error" in message:
                answer.set_exception(QmpError(str(message["error"].get("desc", message["error"]))))
            else:
                answer.set_result(message.get("return"))

    def _lose(self, why: str) -> None:
        self._lost = self._lost or why
        for waiting in (self._greeted, *self._pending.values()):
            if not waiting.done():
                waiting.set_exception(QmpError(self._lost))
                waiting.exception()  # whoever awaits it still gets it; nobody need


async def _within(waiting: Any, deadline_s: float, what: str) -> Any:
    try:
        async with asyncio.timeout(deadline_s):
            return await waiting
    except TimeoutError:
        raise QmpError(f"{what}: QEMU did not answer within {deadline_s:g} s") from None
