"""The engine's HTTP face: the native endpoint, health, metrics and pressure; the OpenAI ones are in `openai_api`.

The event loop only moves bytes; all computing happens in the engine's thread.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from rollmill.engine.calls import ApiError, Calls, ClientGone, while_connected
from rollmill.engine.engine import EnginePhase, reply_of
from rollmill.engine.http_edge import PolicyVersion, decode_json, decode_msgpack, error_response, gone_response, json_response, read_body
from rollmill.engine.openai_api import chat_completions, completions
from rollmill.engine.protocol import JSON, MSGPACK, GenerateReply, GenerateRequest
from rollmill.engine.service import Service


async def generate(http: Request) -> Response:
    service: Service = http.app.state.service
    kind = http.headers.get("content-type", JSON).partition(";")[0].strip().lower()
    if kind not in (JSON, MSGPACK):
        raise ApiError(400, f"content-type is {kind!r}, send {JSON} or {MSGPACK}")
    body = await read_body(http)
    request = (decode_msgpack if kind == MSGPACK else decode_json)(body, GenerateRequest)
    calls = Calls(service.engine, [request], streams=False)

    async def finish() -> GenerateReply:
        async for _ in calls:
            pass
        return reply_of(calls.seqs[0])

    reply = await while_connected(http, calls, finish())
    if kind == MSGPACK:
        return Response(msgspec.msgpack.encode(reply), media_type=MSGPACK)
    fields: dict[str, Any] = {**msgspec.structs.asdict(reply), "logprobs": base64.b64encode(reply.logprobs).decode()}
    return json_response(fields)


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
