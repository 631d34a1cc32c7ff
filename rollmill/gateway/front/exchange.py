"""One HTTP request and its reply as plain ASGI messages: who asks, for which episode, and bytes in and out; knows no endpoint.

Plain ASGI because a request object and a router would cost more than everything else the gateway does with a small call.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterable, Mapping
from urllib.parse import unquote

from starlette.types import Receive, Scope, Send

from rollmill.gateway.front.edge import ABORT
from rollmill.gateway.front.keys import key_of
from rollmill.web import ApiError, ClientGone

SESSION_HEADERS = (b"x-multi-turn-session-id", b"x-session-affinity")
EVENTS = b"text/event-stream; charset=utf-8"
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
Header = tuple[bytes, bytes]


def split_path(raw: bytes) -> tuple[str, str]:
    """(episode, path) of `/e/{episode}/...`; the episode is empty where the path names none.

    >>> split_path(b"/e/run%2F7/v1/models")
    ('run/7', '/v1/models')
    """
    path = raw.decode("latin-1")
    if not path.startswith("/e/"):
        return "", unquote(path) if "%" in path else path
    episode, _, rest = path[3:].partition("/")
    return unquote(episode), "/" + (unquote(rest) if "%" in rest else rest)


class Exchange:
    """Made when the headers are there. Once `begin` or `reply` was called the status line is out."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, call_id: str) -> None:
        self.at = self.last_sent = time.monotonic()
        self._receive, self._send, self._scope = receive, send, scope
        self.id = call_id
        self.method: str = scope["method"]
        self.headers: Mapping[bytes, bytes] = dict(scope["headers"])
        self.url_episode, self.path = split_path(scope.get("raw_path") or scope["path"].encode("utf-8", "replace"))
        asked = self.headers.get(b"x-request-id", b"")
        self.request_id = asked if _REQUEST_ID.fullmatch(asked) else call_id.encode()
        self.status = 0
        """0 until the status line is out."""
        self.is_gone = False
        self.version = -1

    @property
    def key(self) -> str:
        return key_of(self.headers)

    @property
    def header_episode(self) -> str:
        """The episode that the session headers name."""
        for name in SESSION_HEADERS:
            if value := self.headers.get(name):
                return value.decode("latin-1").strip()
        return ""

    async def read(self, *, max_bytes: int, within_s: float) -> bytes:
        """The whole body. ApiError 413 when it is larger, 408 when it does not arrive in time; ClientGone."""
        declared = self.headers.get(b"content-length", b"")
        if declared.isdigit() and int(declared) > max_bytes:
            raise ApiError(413, f"the body has {int(declared)} bytes, at most {max_bytes} are read", headers={"connection": "close"})
        try:
            async with asyncio.timeout(within_s):
                message = await self._receive()
                # The usual case costs no copy.
                if message["type"] == "http.request" and not message.get("more_body", False) and len(message["body"]) <= max_bytes:
                    return bytes(message["body"])
                body = bytearray()
                while message["type"] == "http.request":
                    body += message.get("body", b"")
                    if len(body) > max_bytes:
                        raise ApiError(413, f"the body has more than {max_bytes} bytes", headers={"connection": "close"})
                    if not message.get("more_body", False):
                        return bytes(body)
                    message = await self._receive()
        except TimeoutError as error:
            raise ApiError(408, f"the body did not arrive within {within_s:g} s", headers={"connection": "close"}) from error
        raise ClientGone

    async def wait_gone(self) -> None:
        """Until the client has left. The body must have been read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.is_gone = True

    async def reply(self, status: int, body: bytes, *, media_type: bytes = b"application/json", headers: Iterable[Header] = ()) -> None:
        """The whole reply at once."""
        length = str(len(body)).encode()
        await self._start(status, [(b"content-type", media_type), (b"content-length", length), *headers])
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def begin(self, headers: Iterable[Header] = ()) -> None:
        """The head of an event stream."""
        head = ((b"content-type", EVENTS), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
        await self._start(200, [*head, *headers])

    async def write(self, data: bytes, *, is_last: bool = False) -> None:
        self.last_sent = time.monotonic()
        await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})

    async def _start(self, status: int, headers: list[Header]) -> None:
        self.status = status
        headers += (
            (b"x-request-id", self.request_id),
            # Anthropic's clients look for it under this name.
            (b"request-id", self.request_id),
            (b"x-policy-version", str(self.version).encode()),
        )
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    def abort(self) -> None:
        """Drop the connection: the client does not read what it asked for."""
        drop = self._scope.get("state", {}).get(ABORT)
        if drop is not None:
            drop()
