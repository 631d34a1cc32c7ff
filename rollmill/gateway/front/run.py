"""The life of a gateway that listens: bound, served, swept and closed, on its own or inside a process that has other work."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from rollmill.gateway.dialects.anthropic import Messages
from rollmill.gateway.dialects.dialect import Dialect
from rollmill.gateway.dialects.openai_chat import OpenAIChat
from rollmill.gateway.dialects.openai_text import OpenAIText
from rollmill.gateway.dialects.openapi import openapi_json
from rollmill.gateway.dialects.responses import Responses
from rollmill.gateway.dialects.routes import dialect_routes
from rollmill.gateway.front.edge import EdgeServer
from rollmill.gateway.front.keys import KEYS_ENV, KeyRing
from rollmill.gateway.front.model_call import Limits
from rollmill.gateway.front.route import Incoming, Outgoing, Route
from rollmill.gateway.front.server import GatewayApp
from rollmill.gateway.front.service import Service, base_urls
from rollmill.gateway.gateway import SHUTTING_DOWN, Gateway
from rollmill.gateway.sessions.episode import Episode
from rollmill.web import bind

SWEEP_S = 30.0
GRACEFUL_S = 10.0
LAST_WORDS = 0.8
"""Share of the graceful time after which calls that still run are ended with an error of their own."""
START_S = 30.0
GC_THRESHOLD = 20_000


class GatewayServer:
    """A gateway that is reached over HTTP. Made by `start_gateway`; `await close()` ends it."""

    def __init__(self, app: GatewayApp, server: EdgeServer, origin: str, service: Service, graceful_s: float) -> None:
        self.app, self._server, self.origin, self._service, self._graceful_s = app, server, origin, service, graceful_s
        self._serving: asyncio.Task[None] | None = None
        self._sweeping: asyncio.Task[None] | None = None

    @property
    def gateway(self) -> Gateway:
        return self.app.gateway

    def base_url(self, episode: str = "") -> tuple[str, str]:
        """What OPENAI_BASE_URL and ANTHROPIC_BASE_URL are to be for this episode."""
        return base_urls(self.origin, episode)

    def open_episode(self, key: str, **options: Any) -> tuple[Episode, str]:
        """A new episode that only `end_episode` ends, and the API key that opens it alone. `options` are those of `Episode`."""
        return self.gateway.open_episode(key, is_owned=True, **options), self.app.keys.episode_key(key)

    def end_episode(self, key: str) -> Episode | None:
        """Close it: running calls are stopped, later ones hear 410."""
        return self.gateway.end_episode(key)

    async def start(self, sock: Any) -> None:
        self._serving = asyncio.create_task(self._server.serve(sockets=[sock]))
        self._sweeping = asyncio.create_task(self._sweep())
        up = asyncio.create_task(self._server.is_up.wait())
        await asyncio.wait({self._serving, up}, return_when=asyncio.FIRST_COMPLETED, timeout=START_S)
        up.cancel()
        if not self._server.is_up.is_set():
            await self.close()
            raise OSError(f"the gateway did not come up at {self.origin}")

    def end_on_signals(self) -> None:
        """SIGINT and SIGTERM end it gracefully, a second one at once."""

        def end() -> None:
            self._server.force_exit = self._server.should_exit
            self._finish()

        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, end)

    async def wait(self) -> None:
        """Until it is told to end, by a signal or by `close`."""
        assert self._serving is not None
        await asyncio.shield(self._serving)

    async def close(self) -> None:
        """Accept nothing more, let what runs finish for a while, then end it."""
        self._finish()
        if self._serving is not None:
            await self._serving
        if self._sweeping is not None:
            self._sweeping.cancel()
        await self.gateway.close()

    def _finish(self) -> None:
        if not self._server.should_exit:
            self._server.should_exit = True
            # Before the server cuts the connections: a stream's client is told why.
            asyncio.get_running_loop().call_later(LAST_WORDS * self._graceful_s, self.gateway.stop_running, SHUTTING_DOWN)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self.gateway.sweep(time.monotonic())


async def start_gateway(
    gateway: Gateway,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    keys: KeyRing | None = None,
    routes: Sequence[Route] = (),
    limits: Limits = Limits(),
    opens_unknown: bool = False,
    graceful_s: float = GRACEFUL_S,
    is_open_anywhere: bool = False,
) -> GatewayServer:
    """Listen, and return once connections are accepted. The server owns the gateway from here on.

    Without `keys` only episode keys open anything: what a rollout that starts agents wants.
    """
    ring = keys if keys is not None else KeyRing()
    if ring.is_open and not is_open_anywhere:
        check_loopback(host)
    responses, messages = Responses(), Messages()
    dialects: dict[str, Dialect] = {
        "/v1/chat/completions": OpenAIChat(),
        "/v1/completions": OpenAIText(),
        "/v1/responses": responses,
        "/v1/messages": messages,
    }
    app = GatewayApp(gateway, ring, dialects=dialects, limits=limits, opens_unknown=opens_unknown)
    service = Service(gateway, ring, app.metrics)
    app.mount([*service.routes(), *dialect_routes(gateway, messages, responses), _openapi(), *routes])
    sock = bind(host, port)
    shown = f"[{host}]" if ":" in host else host
    server = EdgeServer(app, graceful_s=graceful_s)
    started = GatewayServer(app, server, f"http://{shown}:{sock.getsockname()[1]}", service, graceful_s)
    await started.start(sock)
    return started


def check_loopback(host: str) -> None:
    """ValueError when a gateway without keys would be open to other machines."""
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_loopback:
            return
    if host != "localhost":
        raise ValueError(
            f"host is {host} and there are no API keys, so anybody who reaches this machine could use the model; "
            f"give a key file (--keys or {KEYS_ENV}), listen on 127.0.0.1, or say --open"
        )


def _openapi() -> Route:
    async def describe(request: Incoming) -> Outgoing:
        return Outgoing(body=openapi_json())

    return Route(method="GET", path="/openapi.json", handler=describe, needs_key=False)


def run(main: Callable[[], Any]) -> Any:
    """`asyncio.run`, on uvloop where it is installed: half the time per call goes into the loop.

    For a process that does nothing else: what it has loaded is kept out of garbage collection, which would stop a thousand streams at
    once to look through it.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main())
    return uvloop.run(main())
