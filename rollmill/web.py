"""The HTTP manners of every server here: bounded bodies, strict decoding, error bodies, streams that end with their client, a socket
that says when it listens; knows no endpoint and nothing else of Rollmill."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec
import uvicorn
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

R = TypeVar("R")
S = TypeVar("S")
MAX_BODY_BYTES = 8 * 2**20
# nginx's word for a client that left; nobody reads it, it only shows in the access log.
STATUS_CLIENT_GONE = 499
GRACEFUL_S = 5
KEEP_ALIVE_S = 75
EVENTS = "text/event-stream; charset=utf-8"
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "version_unmet",
    429: "rate_limit_error",
}


class ApiError(HTTPException):
    """An answer other than 200, with a text that says what to change; `extra` joins the JSON body."""

    def __init__(self, status: int, message: str, *, headers: dict[str, str] | None = None, extra: dict[str, Any] | None = None) -> None:
        super().__init__(status, message, headers)
        self.extra = extra or {}


class ClientGone(Exception):
    """The client closed its connection; there is nobody to answer."""


async def read_body(http: Request, max_bytes: int = MAX_BODY_BYTES) -> bytes:
    """The whole body, or 413 as soon as it is known to be too large."""
    declared = http.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise ApiError(413, f"the body has {declared} bytes, at most {max_bytes} are read")
    body = bytearray()
    async for part in http.stream():
        body += part
        if len(body) > max_bytes:
            raise ApiError(413, f"the body has more than {max_bytes} bytes, which is the most that is read")
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


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def error_body(status: int, message: str, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The OpenAI error shape; of `extra`, `param` and `code` go into it, `retryable` and `version` stand beside it."""
    kind, more = _KINDS.get(status, "invalid_request_error" if 400 <= status < 500 else "server_error"), dict(extra or {})
    error = {"message": message, "type": kind, "param": more.pop("param", None), "code": more.pop("code", status)}
    return {"error": error, **more}


def error_response(error: HTTPException) -> Response:
    extra = error.extra if isinstance(error, ApiError) else {}
    return json_response(error_body(error.status_code, str(error.detail), extra), error.status_code, dict(error.headers or {}))


async def gone_response(http: Request, error: Exception) -> Response:
    """The handler of `ClientGone` and of starlette's `ClientDisconnect`."""
    return Response(status_code=STATUS_CLIENT_GONE)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(http: Request, work: Coroutine[Any, Any, R]) -> R:
    """Await `work`, but cancel it and raise `ClientGone` as soon as the client leaves. The body must have been read."""
    task, gone = asyncio.create_task(work), asyncio.create_task(_gone(http.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


def error_event(error: ApiError) -> bytes:
    return b"data: " + msgspec.json.encode(error_body(error.status_code, str(error.detail), error.extra)) + b"\n\n"


class EventStream(Response):
    """Events, sent as they come, that stop as soon as the client leaves; `on_end` is called however it ends.

    An `ApiError` out of `events` comes after the status line: it travels as the last event, as `on_error` writes it.
    """

    def __init__(
        self,
        events: AsyncIterator[bytes],
        *,
        on_end: Callable[[], None],
        on_error: Callable[[ApiError], bytes] = error_event,
        content_type: str = EVENTS,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._events, self._on_end, self._on_error = events, on_end, on_error
        self.status_code, self.background = 200, None
        self.init_headers({"content-type": content_type, "cache-control": "no-cache", **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, gone = asyncio.create_task(self._send(send)), asyncio.create_task(_gone(receive))
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
            await send({"type": "http.response.body", "body": self._on_error(error), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


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


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; 0 lets the system choose the port."""
    # asyncio turns Nagle's algorithm off only where the protocol is named; with it a reply of two writes takes a delayed ACK, 40 ms.
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        # Listening at once turns a second bind to the same port away here, with a clear text, instead of later.
        sock.listen(2048)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            text = f"port {port} on {host} is in use; stop what listens there, or set another port (0 chooses a free one)"
            raise OSError(errno.EADDRINUSE, text) from error
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}; set another host or port") from error
    return sock


class Server(uvicorn.Server):
    """Says when it listens. `await server.serve(sockets=[bind(host, port)])`; set `should_exit` to end it."""

    def __init__(self, app: ASGIApp, on_ready: Callable[[], None] = lambda: None) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=GRACEFUL_S,
                timeout_keep_alive=KEEP_ALIVE_S,
            )
        )
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()
