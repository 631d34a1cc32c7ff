"""The connection's own limits: headers of bounded size that arrive in bounded time, and a way to drop a client that does not read.

What uvicorn leaves open; knows no endpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Generator
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rollmill.web import Server

MAX_HEADER_BYTES = 64 * 1024
HEADER_S = 15.0
"""Between the first byte of a request, or the connection, and the end of its headers."""
ABORT = "rollmill_abort"
"""Key of the function in `scope["state"]` that drops the connection at once."""
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class BoundedProtocol(HttpToolsProtocol):
    """Refuses endless headers and connections that say nothing."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._in_headers = True
        self._num_header_bytes = 0
        self._timer: asyncio.TimerHandle | None = self.loop.call_later(HEADER_S, self._expire)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._in_headers or self.transport.is_closing():
            return
        self._num_header_bytes += len(data)
        if self._num_header_bytes > MAX_HEADER_BYTES:
            self.transport.write(_TOO_LARGE)
            self.transport.close()
        elif self._timer is None:
            self._timer = self.loop.call_later(HEADER_S, self._expire)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers, self._num_header_bytes = True, 0
        self.scope["state"][ABORT] = self.transport.abort

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._disarm()
        super().on_headers_complete()

    def _expire(self) -> None:
        self._timer = None
        if self._in_headers and not self.transport.is_closing():
            self.transport.close()

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class EdgeServer(Server):
    """A server that leaves signals to the process it lives in: uvicorn would raise them again before we have closed."""

    def __init__(self, app: Any, *, graceful_s: float) -> None:
        super().__init__(app)
        self.config.http = BoundedProtocol
        # Nobody here asks for the client's address, and nobody outside need know what serves.
        self.config.proxy_headers = self.config.server_header = False
        # uvicorn waits in whole seconds.
        self.config.timeout_graceful_shutdown = max(1, round(graceful_s))
        self.is_up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_up.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield
