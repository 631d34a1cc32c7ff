"""The engine's HTTP face: tokens in, tokens out, whole or as a stream; health, metrics and pressure. Knows no text.

The event loop only moves bytes; all computing happens in the engine's thread.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from typing import TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from rollmill.engine.calls import Call, open_call
from rollmill.engine.engine import EnginePhase
from rollmill.engine.protocol import FRAMES, JSON, MSGPACK, FinishReason, GenerateRequest, ScoreRequest, StreamError, StreamFrame
from rollmill.engine.replies import reply_of, score_of
from rollmill.engine.service import Service
from rollmill.web import (
    ApiError,
    ClientGone,
    EventStream,
    PolicyVersion,
    decode_json,
    decode_msgpack,
    error_response,
    gone_response,
    json_response,
    read_body,
    while_connected,
)

S = TypeVar("S")


async def generate(http: Request) -> Response:
    service: Service = http.app.state.service
    kind, request = await _read(http, GenerateRequest)
    call = await open_call(service, request, streams=False)
    await _end_of(http, call)
    return _native(kind, reply_of(call.seq, service.engine.replica))


async def stream(http: Request) -> Response:
    """Frames, see `StreamFrame`. What goes wrong before the first token still has a status of its own."""
    service: Service = http.app.state.service
    _, request = await _read(http, GenerateRequest)
    call = await open_call(service, request, streams=True)
    frames = _frames(call, service.engine.replica)
    with ExitStack() as undo:
        undo.callback(call.cancel)
        first = await while_connected(http, _next(frames))
        undo.pop_all()

    def failed(error: ApiError) -> bytes:
        return StreamFrame(error=StreamError(status=error.status_code, message=error.detail, version=service.engine.version)).to_bytes()

    return EventStream(_after(first, frames), on_end=call.cancel, on_error=failed, content_type=FRAMES)


async def _frames(call: Call, replica: str) -> AsyncIterator[bytes]:
    async for piece in call.pieces():
        yield StreamFrame(piece=piece).to_bytes()
    yield StreamFrame(reply=reply_of(call.seq, replica)).to_bytes()


async def _next(frames: AsyncIterator[bytes]) -> bytes:
    return await anext(frames)


async def _after(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for frame in rest:
        yield frame


async def _end_of(http: Request, call: Call) -> FinishReason:
    """Wait for it, but free the row as soon as the client leaves or anything fails."""
    try:
        return await while_connected(http, call.ended())
    finally:
        call.cancel()


async def score(http: Request) -> Response:
    service: Service = http.app.state.service
    kind, request = await _read(http, ScoreRequest)
    try:
        as_generate = request.as_generate()
    except ValueError as error:
        raise ApiError(400, str(error)) from error
    call = Call(service.engine, as_generate, score_from=request.start)
    if await _end_of(http, call) is FinishReason.DEADLINE:
        raise ApiError(408, f"the tokens were not scored within {request.deadline_s} s")
    return _native(kind, score_of(call.seq))


async def _read(http: Request, shape: type[S]) -> tuple[str, S]:
    kind = http.headers.get("content-type", JSON).partition(";")[0].strip().lower()
    if kind not in (JSON, MSGPACK):
        raise ApiError(400, f"content-type is {kind!r}, send {JSON} or {MSGPACK}")
    return kind, (decode_msgpack if kind == MSGPACK else decode_json)(await read_body(http), shape)


def _native(kind: str, reply: msgspec.Struct) -> Response:
    """MessagePack as asked, or JSON with bytes in base64."""
    if kind == MSGPACK:
        return Response(msgspec.msgpack.encode(reply), media_type=MSGPACK)
    return json_response(reply)


async def health(http: Request) -> Response:
    engine = http.app.state.service.engine
    return json_response(engine.health(), 200 if engine.phase is EnginePhase.SERVING else 503)


async def pressure(http: Request) -> Response:
    return json_response(http.app.state.service.engine.pressure())


async def metrics(http: Request) -> Response:
    return Response(http.app.state.service.engine.metrics.text(), media_type="text/plain; version=0.0.4")


async def models(http: Request) -> Response:
    service: Service = http.app.state.service
    entry = {"id": service.model_name, "object": "model", "created": 0, "owned_by": "rollmill", "version": service.engine.version}
    return json_response({"object": "list", "data": [entry]})


async def _refused(http: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    http.app.state.service.engine.metrics.refused.labels(str(error.status_code)).inc()
    return error_response(error)


def make_app(service: Service, more: Sequence[BaseRoute] = ()) -> Starlette:
    """The application, with `more` routes beside the engine's own; the caller starts and closes the engine."""
    app = Starlette(
        routes=[
            Route("/v1/generate", generate, methods=["POST"]),
            Route("/v1/stream", stream, methods=["POST"]),
            Route("/v1/score", score, methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/pressure", pressure),
            Route("/health", health),
            Route("/metrics", metrics),
            *more,
        ],
        middleware=[Middleware(PolicyVersion, current=lambda: service.engine.version)],
        exception_handlers={HTTPException: _refused, ClientGone: gone_response, ClientDisconnect: gone_response},
    )
    app.state.service = service
    return app
