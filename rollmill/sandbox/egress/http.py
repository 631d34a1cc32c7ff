"""HTTP/1 messages read from a channel piece by piece and written anew, so that no two readers can see them differently; judges nothing."""

from __future__ import annotations

from collections import deque
from typing import Any

import httptools
import msgspec

from rollmill.sandbox.egress.channel import Channel

Headers = tuple[tuple[bytes, bytes], ...]
HOP = frozenset((b"connection", b"keep-alive", b"proxy-connection", b"proxy-authorization", b"te", b"trailer", b"upgrade"))
"""Headers between two neighbours. Trailers are not carried on."""
KEPT = frozenset((b"host", b"content-length", b"transfer-encoding"))
"""Never dropped, even when a Connection header names them: a message without them would be another message."""


class BadMessage(ValueError):
    """Bytes that are not the HTTP/1 we are willing to pass on."""


class HeadTooLarge(BadMessage):
    """More head than the limit."""


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """A request's or a response's head; of `method`/`target` and `status`/`phrase` one pair is filled."""

    method: str = ""
    target: str = ""
    status: int = 0
    phrase: bytes = b""
    version: str
    headers: Headers
    is_kept_alive: bool

    def values(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.headers if key.lower() == name]

    @property
    def is_chunked(self) -> bool:
        return bool(self.values(b"transfer-encoding"))

    @property
    def ends_with_connection(self) -> bool:
        """Only for responses: whether the body is all that comes until the connection closes."""
        return not (self.is_chunked or self.values(b"content-length") or self.status in (204, 304) or self.status < 200)

    def to_bytes(self, *, close: bool) -> bytes:
        """As it is passed on, without the headers that were for us alone."""
        first = (
            f"{self.method} {self.target} HTTP/{self.version}".encode() if self.method else b"HTTP/1.1 %d %s" % (self.status, self.phrase)
        )
        named = {part.strip().lower() for value in self.values(b"connection") for part in value.split(b",")}
        dropped = (HOP | named) - KEPT
        lines = [first, *(key + b": " + value for key, value in self.headers if key.lower() not in dropped)]
        if close:
            lines.append(b"Connection: close")
        return b"\r\n".join([*lines, b"", b""])


class MessageReader:
    """Messages of one channel in order: `head`, then `body` until it gives None, then the next `head`."""

    def __init__(self, channel: Channel, *, is_request: bool, head_bytes: int) -> None:
        self.channel, self.is_request, self.head_bytes = channel, is_request, head_bytes
        self._events: deque[Head | bytes | None] = deque()
        self._error: BadMessage | None = None
        self._is_over = False
        self._num_head = 0
        self._new_parser()

    def _new_parser(self) -> None:
        self._parser: Any = (httptools.HttpRequestParser if self.is_request else httptools.HttpResponseParser)(self)
        self.on_message_begin()

    def on_message_begin(self) -> None:
        self._start, self._is_head_over = b"", False
        self._headers: list[tuple[bytes, bytes]] = []

    def on_url(self, data: bytes) -> None:
        self._start += data

    on_status = on_url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_head_over:
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._is_head_over, self._num_head = True, 0
        version = self._parser.get_http_version()
        keep = version == "1.1" and self._parser.should_keep_alive()
        if version not in ("1.0", "1.1"):
            self._error = self._error or BadMessage(f"HTTP version {version}")
        if self._error:
            return
        headers = tuple(self._headers)
        if self.is_request:
            method, target = self._parser.get_method().decode("ascii"), self._start.decode("ascii", "backslashreplace")
            self._events.append(Head(method=method, target=target, version=version, headers=headers, is_kept_alive=keep))
        else:
            status = self._parser.get_status_code()
            self._events.append(Head(status=status, phrase=self._start, version=version, headers=headers, is_kept_alive=keep))

    def on_body(self, data: bytes) -> None:
        if not self._error:
            self._events.append(data)

    def on_message_complete(self) -> None:
        if not self._error:
            self._events.append(None)

    def _feed(self, data: bytes) -> None:
        self._num_head += len(data)
        while data:
            try:
                self._parser.feed_data(data)
                data = b""
            except httptools.HttpParserUpgrade as e:
                # The headers that asked for another protocol are not passed on, so what follows is HTTP still.
                data = data[e.args[0] :]
                self._new_parser()
            except httptools.HttpParserError as e:
                self._error = self._error or BadMessage(str(e) or type(e).__name__)
                return
        if self._is_head_over:
            self._num_head = 0
        elif self._num_head > self.head_bytes:
            self._error = self._error or HeadTooLarge(f"head is larger than {self.head_bytes} bytes")

    async def _next(self) -> Head | bytes | None:
        while not self._events:
            if self._error:
                raise self._error
            data = b"" if self._is_over else await self.channel.read()
            if not data:
                self._is_over = True
                raise EOFError("connection closed in the middle of a message")
            self._feed(data)
        return self._events.popleft()

    async def is_waiting(self) -> bool:
        """Wait for the first bytes of another message; False: the other side is done."""
        if self._events or self._error:
            return True
        data = await self.channel.read()
        self._feed(data)
        self._is_over = not data
        return bool(data)

    async def head(self) -> Head:
        event = await self._next()
        assert isinstance(event, Head), "the body before it was not read to its end"
        if len(event.target) + sum(len(k) + len(v) + 4 for k, v in event.headers) > self.head_bytes:
            raise HeadTooLarge(f"head is larger than {self.head_bytes} bytes")
        return event

    async def body(self) -> bytes | None:
        """The next piece; None: the message is over."""
        event = await self._next()
        assert not isinstance(event, Head), "two heads without an end between them"
        return event


def refusal(status: int, phrase: str, text: str) -> bytes:
    """A short answer of our own, after which the connection closes."""
    body = text.encode() + b"\n"
    head = f"HTTP/1.1 {status} {phrase}\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body
