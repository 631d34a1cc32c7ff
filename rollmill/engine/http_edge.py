"""Bounded bodies, strict decoding, error bodies and event streams: the HTTP manners shared by all endpoints."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollmill.engine.calls import ApiError, ClientGone

S = TypeVar("S")
MAX_BODY_BYTES = 8 * 2**20
# nginx's word for a client that left; nobody reads it, it only shows in the access log.
STATUS_CLIENT_GONE = 499
_KINDS = {
    400: "invalid_request_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    409: "version_unmet",
    413: "invalid_request_error",
}


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, "application/json")


async def read_body(http: Request) -> bytes:
    """The whole body, or 413 as soon as it is known to be too large."""
    declared = http.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > MAX_BODY_BYTES:
        raise ApiError(413, f"the body has {declared} bytes, at most {MAX_BODY_BYTES} are read")
    body = bytearray()
    async for part in http.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise ApiError(413, f"the body has more than {MAX_BODY_BYTES} bytes, which is the most that is read")
    return bytes(body)


def _decode(body: bytes, shape: type[S], decode: Callable[..., S], name: str) -> S:
    try:
        return decode(body, type=shape)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not a valid {name} request: {error}") from error


def decode_json(body: bytes, shape: type[S]) -> S:
    return _decode(body, shape, msgspec.json.decode, "JSON")


def decode_msgpack(body: bytes, shape: type[S]) -> S:
    return _decode(body, shape, msgspec.msgpack.decode, "MessagePack")


async def error_response(http: Request, error: Exception) -> Response:
    """The OpenAI error shape; `retryable` and `version` stand beside it where they apply."""
    assert isinstance(error, HTTPException)
    status, extra = error.status_code, error.extra if isinstance(error, ApiError) else {}
    if hasattr(http.app.state, "service"):
        http.app.state.service.engine.metrics.refused.labels(str(status)).inc()
    body = {"error": {"message": str(error.detail), "type": _KINDS.get(status, "server_error"), "param": None, "code": status}, **extra}
    return json_response(body, status, dict(error.headers or {}))


async def gone_response(http: Request, error: Exception) -> Response:
    assert isinstance(error, ClientGone | ClientDisconnect)
    return Response(status_code=STATUS_CLIENT_GONE)


class EventStream(Response):
    """Server-sent events that stop, and call `on_end`, as soon as the client leaves."""

    def __init__(self, events: AsyncIterator[bytes], *, on_end: Callable[[], None]) -> None:
        self._events, self._on_end = events, on_end
        self.status_code, self.background = 200, None
        self.init_headers({"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, gone = asyncio.create_task(self._send(send)), asyncio.create_task(self._wait_gone(receive))
        try:
            await asyncio.wait({body, gone}, return_when=asyncio.FIRST_COMPLETED)
            if body.done():
                body.result()
        finally:
            body.cancel()
            gone.cancel()
            self._on_end()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except ApiError as error:
            # The status line is out already: the error travels as the last event.
            body = {"error": {"message": error.detail, "type": "server_error", "code": error.status_code}, **error.extra}
            await send({"type": "http.response.body", "body": b"data: " + msgspec.json.encode(body) + b"\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    @staticmethod
    async def _wait_gone(receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass


class PolicyVersion:
    """Puts `x-policy-version` on every reply, errors included."""

    def __init__(self, app: ASGIApp, current: Callable[[], int]) -> None:
        self._app, self._current = app, current

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", []), (b"x-policy-version", str(self._current()).encode())]}
            await send(message)

        await self._app(scope, receive, stamped if scope["type"] == "http" else send)
