"""The routes of the Tinker protocol: decoding, status codes and waiting for results; what requests mean is the service's affair.

A request that can be understood is promised a result, and what is wrong with it is that result: so the order of a client's requests
has no gaps. Only what names nothing known or is no request at all is an HTTP error.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from rollmill.tinker import listing
from rollmill.tinker import requests as ask
from rollmill.tinker.checkpoints import Kind, expiry, parse_path
from rollmill.tinker.service import Service, Unknown
from rollmill.tinker.wire import read_pass
from rollmill.web import ApiError, decode_json, gone_response, json_response, read_body

S = TypeVar("S")
Handler = Callable[[Request], Awaitable[Response]]
MAX_BODY_BYTES = 256 * 2**20
POLL_S = 20.0
"""How long a poll waits for its result; the SDK gives up at 45 s."""
CLIENT_CONFIG = {
    # Keys as they are; one request after the other, whose order is then that of arrival; plain HTTP/1.1.
    "pjwt_auth_enabled": False,
    "parallel_fwdbwd_chunks": False,
    "use_pyqwest_transport": False,
    "create_model_via_load_weights": True,
    "sample_join_sampling_session": True,
}
DYNAMIC_CONFIG = {"sample_cancel_enabled": True}


class KeyGate:
    """Lets in only who sends the key."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app, self._key = app, key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sent = dict(scope.get("headers", [])).get(b"x-api-key", b"")
        is_open = scope["type"] != "http" or scope["path"] == "/api/v1/healthz" or hmac.compare_digest(sent, self._key)
        await (self._app if is_open else json_response({"detail": "the x-api-key is not this server's"}, 401))(scope, receive, send)


def make_app(service: Service, *, key: str | None = None) -> Starlette:
    routes = [Route(f"/api/v1/{path}", handler, methods=[method]) for method, path, handler in _routes(service)]
    return Starlette(
        routes=routes,
        middleware=[Middleware(KeyGate, key=key)] if key else [],
        exception_handlers={
            HTTPException: _refused,
            ValueError: lambda http, error: json_response({"detail": str(error)}, 400),
            Unknown: lambda http, error: json_response({"detail": str(error)}, 404),
            ClientDisconnect: gone_response,
        },
    )


async def _refused(http: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return json_response({"detail": error.detail}, error.status_code)


async def _body(http: Request, shape: type[S]) -> S:
    return decode_json(await read_body(http, MAX_BODY_BYTES), shape)


def _promised(request_id: str, **more: Any) -> Response:
    return json_response({"request_id": request_id, **more})


def _routes(service: Service) -> list[tuple[str, str, Handler]]:
    """(method, path, handler)."""
    return [
        *_session_routes(service),
        *_training_routes(service),
        *_sampling_routes(service),
        *_checkpoint_routes(service),
    ]


def _session_routes(service: Service) -> list[tuple[str, str, Handler]]:
    async def health(http: Request) -> Response:
        return json_response({"status": "ok"})

    async def capabilities(http: Request) -> Response:
        model = {"model_name": service.names[0], "max_context_length": service.model.max_len, "trainable": True, "sampleable": True}
        return json_response({"supported_models": [model]})

    async def config(http: Request) -> Response:
        return json_response(CLIENT_CONFIG)

    async def dynamic_config(http: Request) -> Response:
        return json_response(DYNAMIC_CONFIG)

    async def create(http: Request) -> Response:
        session_id = service.create_session(await _body(http, ask.CreateSession))
        return json_response({"type": "create_session", "session_id": session_id})

    async def heartbeat(http: Request) -> Response:
        body = await _body(http, ask.SessionRef)
        if body.session_id not in service.sessions:
            raise ApiError(410, f"session {body.session_id} has ended")
        service.session(body.session_id)
        return json_response({"type": "session_heartbeat"})

    async def finish(http: Request) -> Response:
        service.finish_session(http.path_params["session_id"])
        return Response(status_code=204)

    async def every(http: Request) -> Response:
        return json_response({"sessions": list(service.sessions)})

    async def one(http: Request) -> Response:
        found = service.session(http.path_params["session_id"])
        told = {"training_run_ids": found.runs, "sampler_ids": found.samplers}
        return json_response({**told, "user_metadata": found.user_metadata, "display_name": found.display_name})

    async def telemetry(http: Request) -> Response:
        # Read and dropped: what happens here stays here.
        await read_body(http, MAX_BODY_BYTES)
        return json_response({"status": "accepted"})

    return [
        ("GET", "healthz", health),
        ("GET", "get_server_capabilities", capabilities),
        ("POST", "client/config", config),
        ("POST", "client/dynamic_config", dynamic_config),
        ("POST", "create_session", create),
        ("POST", "session_heartbeat", heartbeat),
        ("GET", "sessions", every),
        ("GET", "sessions/{session_id}", one),
        ("POST", "sessions/{session_id}/finish", finish),
        ("POST", "telemetry", telemetry),
    ]


def _training_routes(service: Service) -> list[tuple[str, str, Handler]]:
    async def create(http: Request) -> Response:
        return _promised(service.create_model(await _body(http, ask.CreateModel)))

    async def info(http: Request) -> Response:
        body = await _body(http, ask.ModelRef)
        return json_response(listing.model_info(service, service.training_run(body.model_id)))

    async def unload(http: Request) -> Response:
        body = await _body(http, ask.ModelRef)
        return _promised(service.unload_model(body.model_id))

    async def run_pass(http: Request) -> Response:
        return _promised(service.run_pass(read_pass(await read_body(http, MAX_BODY_BYTES))))

    async def optim_step(http: Request) -> Response:
        return _promised(service.optim_step(await _body(http, ask.OptimStep)))

    async def save(http: Request) -> Response:
        return _promised(service.save_weights(await _body(http, ask.SaveWeights)))

    async def save_for_sampler(http: Request) -> Response:
        return _promised(service.save_weights_for_sampler(await _body(http, ask.SaveWeights)))

    async def load(http: Request) -> Response:
        return _promised(service.load_weights(await _body(http, ask.LoadWeights)))

    async def retrieve(http: Request) -> Response:
        promise = service.promises.get((await _body(http, ask.RequestRef)).request_id)
        if promise is None:
            raise ApiError(410, "there is no such request, or its result was kept long enough and is gone")
        if not await promise.settled(POLL_S):
            # The SDK asks again, without a word to its user.
            return json_response({"type": "try_again", "request_id": promise.request_id, "queue_state": "active"}, 408)
        return Response(promise.body, media_type=promise.content_type)

    async def cancel(http: Request) -> Response:
        service.cancel((await _body(http, ask.RequestRef)).request_id)
        return Response(status_code=204)

    return [
        ("POST", "create_model", create),
        ("POST", "get_info", info),
        ("POST", "unload_model", unload),
        ("POST", "forward_backward", run_pass),
        ("POST", "optim_step", optim_step),
        ("POST", "save_weights", save),
        ("POST", "save_weights_for_sampler", save_for_sampler),
        ("POST", "load_weights", load),
        ("POST", "retrieve_future", retrieve),
        ("POST", "cancel_future", cancel),
    ]


def _sampling_routes(service: Service) -> list[tuple[str, str, Handler]]:
    async def create(http: Request) -> Response:
        sampler_id = service.create_sampling_session(await _body(http, ask.CreateSamplingSession))
        return json_response({"type": "create_sampling_session", "sampling_session_id": sampler_id})

    async def join(http: Request) -> Response:
        found = service.sampling_session((await _body(http, ask.SamplingSessionRef)).sampling_session_id)
        counter, found.num_clients = found.num_clients, found.num_clients + 1
        return json_response({"type": "join_sampling_session", "client_counter": counter})

    async def sample(http: Request) -> Response:
        request_id, ids = service.sample(await _body(http, ask.Sample))
        return _promised(request_id, sample_sequence_ids=ids)

    async def info(http: Request) -> Response:
        sampler_id = http.path_params["sampler_id"]
        found = service.sampling_session(sampler_id)
        return json_response({"sampler_id": sampler_id, "base_model": service.tokenizer_id, "model_path": found.model_path})

    return [
        ("POST", "create_sampling_session", create),
        ("POST", "join_sampling_session", join),
        ("POST", "asample", sample),
        ("GET", "samplers/{sampler_id}", info),
    ]


def _checkpoint_routes(service: Service) -> list[tuple[str, str, Handler]]:
    def paging(http: Request, limit: int) -> dict[str, int]:
        given = {"limit": http.query_params.get("limit", str(limit)), "offset": http.query_params.get("offset", "0")}
        if not all(value.isdigit() for value in given.values()):
            raise ApiError(400, f"limit and offset must be counts, not {given}")
        return {name: int(value) for name, value in given.items()}

    def path_of(http: Request) -> str:
        path = f"tinker://{http.path_params['run']}/{http.path_params['kind']}/{http.path_params['name']}"
        parse_path(path)
        return path

    def there(http: Request) -> str:
        """The path of a checkpoint that is there."""
        path = path_of(http)
        try:
            service.checkpoints.facts(path, now=service.now())
        except ValueError as error:
            raise Unknown(str(error)) from error
        return path

    async def runs(http: Request) -> Response:
        return json_response(listing.page("training_runs", listing.training_runs(service), **paging(http, 20)))

    async def run(http: Request) -> Response:
        found = listing.training_run(service, http.path_params["run"])
        if found is None:
            raise Unknown(f"there is no training run {http.path_params['run']}")
        return json_response(found)

    async def of_run(http: Request) -> Response:
        run_id = http.path_params["run"]
        parse_path(f"tinker://{run_id}/{Kind.TRAINING}/x")
        found = [listing.checkpoint(*entry) for entry in service.checkpoints.list(run_id, now=service.now())]
        return json_response({"checkpoints": found})

    async def every(http: Request) -> Response:
        found = [listing.checkpoint(*entry) for entry in service.checkpoints.list(now=service.now())]
        return json_response(listing.page("checkpoints", found, **paging(http, 100)))

    async def info(http: Request) -> Response:
        path = (await _body(http, ask.TinkerPath)).tinker_path
        return json_response(listing.weights_info(service.checkpoints.facts(path, now=service.now())))

    async def delete(http: Request) -> Response:
        service.checkpoints.delete(there(http), now=service.now())
        return Response(status_code=204)

    async def ttl(http: Request) -> Response:
        expires = expiry((await _body(http, ask.Ttl)).ttl_seconds, service.now())
        service.checkpoints.change(there(http), now=service.now(), expires=expires)
        return Response(status_code=204)

    async def publish(http: Request) -> Response:
        service.checkpoints.change(there(http), now=service.now(), is_public=http.method == "POST")
        return Response(status_code=204)

    one = "training_runs/{run}/checkpoints/{kind}/{name}"
    return [
        ("GET", "training_runs", runs),
        ("GET", "training_runs/{run}", run),
        ("GET", "training_runs/{run}/checkpoints", of_run),
        ("GET", "checkpoints", every),
        ("POST", "weights_info", info),
        ("DELETE", one, delete),
        ("PUT", f"{one}/ttl", ttl),
        ("POST", f"{one}/publish", publish),
        ("DELETE", f"{one}/publish", publish),
    ]
