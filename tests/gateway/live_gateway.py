"""A gateway that really listens, in a thread of its own, in front of stub replicas: what contract tests with sync and async clients use."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from stub_replica import DEMO

from rollmill.chat.format import ChatFormat
from rollmill.gateway.front.keys import KeyRing
from rollmill.gateway.front.run import GatewayServer, start_gateway
from rollmill.gateway.gateway import Gateway
from rollmill.gateway.routing.replicas import Replicas
from rollmill.gateway.sessions.episode import Episode
from rollmill.model.tokenizer import Tokenizer
from rollmill.telemetry import Waits

R = TypeVar("R")
START_S = 30.0


def wait_until(holds: Callable[[], bool], deadline_s: float = 10.0) -> None:
    """What another thread brings about."""
    until = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < until, "it did not come about"
        time.sleep(0.005)


class LiveGateway:
    """Use as a context manager. `options` go to `start_gateway`, `gateway_options` to `Gateway`."""

    def __init__(
        self,
        urls: Callable[[], list[str]],
        *,
        model: Path = DEMO,
        keys: KeyRing | None = None,
        gateway_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self._urls, self._model, self._gateway_options = urls, model, gateway_options or {}
        self._options = {"keys": keys if keys is not None else KeyRing(is_open=True), "opens_unknown": True, "graceful_s": 1.0, **options}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="live-gateway", daemon=True)
        self._up = threading.Event()
        self._error: BaseException | None = None
        self.server: GatewayServer

    def __enter__(self) -> LiveGateway:
        self._thread.start()
        assert self._up.wait(START_S), "the gateway did not start"
        if self._error is not None:
            self._thread.join(START_S)
            raise self._error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.do(self.server.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_S)
        self._loop.close()

    @property
    def url(self) -> str:
        return self.server.base_url()[0]

    @property
    def gateway(self) -> Gateway:
        return self.server.gateway

    def do(self, work: Coroutine[Any, Any, R]) -> R:
        """Run it in the gateway's own loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(START_S)

    def episode(self, key: str) -> Episode:
        episode = self.gateway.episodes.get(key)
        assert episode is not None, f"episode {key} is not open"
        return episode

    def num_tasks(self) -> int:
        """Tasks of the loop beside the one that asks."""

        async def count() -> int:
            return len(asyncio.all_tasks()) - 1

        return self.do(count())

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self.server = self._loop.run_until_complete(self._start())
        except (ValueError, OSError) as error:
            self._error = error
            self._up.set()
            return
        self._up.set()
        self._loop.run_forever()

    async def _start(self) -> GatewayServer:
        gateway = Gateway(ChatFormat(Tokenizer(self._model)), Replicas(self._urls, Waits()), **self._gateway_options)
        return await start_gateway(gateway, **self._options)
