"""HTTP/1.1 to one server over kept connections, with as little between bytes and callers as a gateway of thousands of calls a second
can afford; knows no endpoint.

A connection is used again only after a reply that was read to its end; whatever ends otherwise closes it. All problems are OSErrors.
"""

from __future__ import annotations

import asyncio
from typing import cast
from urllib.parse import urlsplit

import httptools

# Of a body that nobody reads; then the sender has to wait.
MAX_UNREAD_BYTES = 2**20


class Connection(asyncio.Protocol):
    """One request at a time: `begin`, `head`, then `read` or `rest`, and back to its pool with `Connections.give_back`."""

    def __init__(self, idle: dict[Connection, None]) -> None:
        self._idle, self._loop = idle, asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_busy = self._is_paused = False
        self._error: OSError | None = None
        """Why it is of no more use."""

    def begin(self, data: bytes, within_s: float) -> None:
        """Send a request; the whole reply has so many seconds."""
        self.status, self.retry_after = 0, "1"
        self.is_whole = self._has_head = self._has_length = self._keeps_alive = False
        self._parts: list[bytes] = []
        self._num_unread = self.num_received = 0
        self._is_busy = True
        self._timer = self._loop.call_later(within_s, self._expire, within_s)
        self._transport.write(data)

    async def head(self) -> None:
        """Until `status` and `retry_after` are known."""
        while not self._has_head:
            await self._more()

    async def read(self) -> bytes:
        """What has come of the body, at least one byte; nothing at its end."""
        while not self._parts:
            if self.is_whole:
                return b""
            if self._error is not None:
                raise self._error
            # As in `_more`: a stream waits here for every token.
            self._waiter = self._loop.create_future()
            await self._waiter
        parts, self._parts, self._num_unread = self._parts, [], 0
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def rest(self) -> bytes:
        """The body to its end."""
        data = await self.read()
        if self.is_whole and not self._parts:
            return data
        parts = [data]
        while data := await self.read():
            parts.append(data)
        return b"".join(parts)

    def end(self) -> bool:
        """The exchange is over. Returns whether another may follow; if not, the connection is closed."""
        if self._timer is not None:
            self._timer.cancel()
        self._is_busy = False
        if self.is_whole and self._keeps_alive and self._error is None and not self._is_paused:
            return True
        self.fail(ConnectionAbortedError("the connection was closed on our side"))
        return False

    def fail(self, error: OSError) -> None:
        """Whoever waits hears this; the connection is of no more use."""
        self._error = self._error or error
        self._transport.abort()
        self._wake()

    async def _more(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _expire(self, within_s: float) -> None:
        self.fail(TimeoutError(f"no whole reply within {within_s:g} s"))

    # What the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if not self._is_busy:
            # Nobody asked: what would be read as the next reply is not it.
            self.fail(ConnectionError("bytes came that belong to no request"))
            return
        self.num_received += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.fail(ConnectionError(f"not HTTP: {error}"))
            return
        if self._num_unread > MAX_UNREAD_BYTES and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self._idle.pop(self, None)
        if self._is_busy and self._has_head and not self._has_length and error is None:
            # Such a body ends with its connection.
            self.is_whole = True
        self._error = self._error or ConnectionResetError(str(error) if error else "the server closed the connection")
        self._wake()

    # What the parser calls.

    def on_message_begin(self) -> None:
        if self.is_whole:
            raise ConnectionError("a second reply came to one request")

    def on_header(self, name: bytes, value: bytes) -> None:
        match name.lower():
            case b"retry-after":
                self.retry_after = value.decode("latin-1")
            case b"content-length" | b"transfer-encoding":
                self._has_length = True

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._has_head = True

    def on_body(self, data: bytes) -> None:
        self._parts.append(data)
        self._num_unread += len(data)

    def on_message_complete(self) -> None:
        self.is_whole, self._keeps_alive = True, self._parser.should_keep_alive()


class Connections:
    """To one server, as many as are needed at once."""

    def __init__(self, base_url: str, *, connect_s: float) -> None:
        url = urlsplit(base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"{base_url!r} is not the address of a server; write http://host:port")
        self._host, self._is_tls, self._connect_s = url.hostname, url.scheme == "https", connect_s
        self._port = url.port or (443 if self._is_tls else 80)
        self._prefix, self._host_header = url.path.rstrip("/"), url.netloc.rpartition("@")[2]
        self._idle: dict[Connection, None] = {}
        self._busy: set[Connection] = set()
        self.closed = False

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    async def send(self, method: str, path: str, within_s: float, *, body: bytes = b"", content_type: str = "") -> Connection:
        """Returns when the head of the reply has come; whoever gets it must `give_back`."""
        kind = f"content-type: {content_type}\r\n" if content_type else ""
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\nhost: {self._host_header}\r\n{kind}content-length: {len(body)}\r\n\r\n"
        data = head.encode("latin-1") + body
        while True:
            is_used = bool(self._idle)
            connection = self._idle.popitem()[0] if is_used else await self._connect()
            self._busy.add(connection)
            try:
                connection.begin(data, within_s)
                await connection.head()
            except ConnectionError:
                is_stale = is_used and not connection.num_received
                self.give_back(connection)
                # The server may hang up on an idle connection just when it is used; then it has not looked at the request.
                if not is_stale or self.closed:
                    raise
            except BaseException:
                self.give_back(connection)
                raise
            else:
                return connection

    def give_back(self, connection: Connection) -> None:
        """Its exchange is over, read to the end or not."""
        self._busy.discard(connection)
        if connection.end() and not self.closed:
            self._idle[connection] = None

    async def close(self) -> None:
        self.closed = True
        for connection in (*self._idle, *self._busy):
            connection.fail(ConnectionAbortedError("this client was closed"))
        self._idle.clear()
        # Transports close their sockets in the loop's next turn.
        await asyncio.sleep(0)

    async def _connect(self) -> Connection:
        if self.closed:
            raise ConnectionAbortedError("this client was closed")
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._connect_s):
            _, connection = await loop.create_connection(
                lambda: Connection(self._idle), self._host, self._port, ssl=True if self._is_tls else None
            )
        return connection
