"""The engine's HTTP face: the native endpoints, health, metrics and pressure; the OpenAI ones are in `openai_api`.

The event loop only moves bytes; all computing happens in the engine's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from rollmill.engine.calls import ApiError, Calls, ClientGone, while_connected
from rollmill.engine.engine import EnginePhase, reply_of, score_of
from rollmill.engine.http_edge import PolicyVersion, decode_json, decode_msgpack, error_response, gone_response, json_response, read_body
from rollmill.engine.openai_api import chat_completions, completions
from rollmill.engine.protocol import JSON, MSGPACK, FinishReason, GenerateReply, GenerateRequest, ScoreReply, ScoreRequest
from rollmill.engine.service import Service

S = TypeVar("S")


async def generate(http: Request) -> Response:
    service: Service = http.app.state.service
    kind, request = await _read(http, GenerateRequest)
    calls = Calls(service.engine, [request], streams=False)

    async def finish() -> GenerateReply:
        async for _ in calls:
            pass
        return reply_of(calls.seqs[0], service.engine.replica)

    return _native(kind, await while_connected(http, calls, finish()))


async def score(http: Request) -> Response:
    service: Service = http.app.state.service
    kind, request = await _read(http, ScoreRequest)
    try:
        as_generate = request.as_generate()
    except ValueError as error:
        raise ApiError(400, str(error)) from error
    calls = Calls(service.engine, [as_generate], streams=False, score_from=request.start)

    async def finish() -> ScoreReply:
        async for _, update in calls:
            if update.finished is FinishReason.DEADLINE:
                raise ApiError(408, f"the tokens were not scored within {request.deadline_s} s")
        return score_of(calls.seqs[0])

    return _native(kind, await while_connected(http, calls, finish()))


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


def make_app(service: Service, more: Sequence[BaseRoute] = ()) -> Starlette:
    """The application, with `more` routes beside the engine's own; the caller starts and closes the engine."""
    app = Starlette(
        routes=[
            Route("/v1/generate", generate, methods=["POST"]),
            Route("/v1/score", score, methods=["POST"]),
            Route("/v1/chat/completions", chat_completions, methods=["POST"]),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/pressure", pressure),
            Route("/health", health),
            Route("/metrics", metrics),
            *more,
        ],
        middleware=[Middleware(PolicyVersion, current=lambda: service.engine.version)],
        exception_handlers={HTTPException: error_response, ClientGone: gone_response, ClientDisconnect: gone_response},
    )
    app.state.service = service
    return app
