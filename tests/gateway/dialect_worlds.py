"""A gateway that listens, over a scripted replica, in a thread of its own: what clients that block can talk to."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
from stub_replica import DEMO, Say, StubReplica

from rollmill.chat.format import ChatFormat
from rollmill.gateway.episode import Episode
from rollmill.gateway.gateway import Gateway
from rollmill.gateway.keys import KeyRing
from rollmill.gateway.model_call import Limits
from rollmill.gateway.record import SqliteRecorder
from rollmill.gateway.replicas import Replicas
from rollmill.gateway.run import GatewayServer, start_gateway
from rollmill.model.tokenizer import Tokenizer
from rollmill.telemetry import Waits

T = TypeVar("T")
DEADLINE_S = 30.0
TOOL_CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'


def scripted(*texts: str) -> Say:
    """One text per request, in order; the last one for ever."""
    left = list(texts)
    return lambda request: left.pop(0) if len(left) > 1 else left[0]


def calling(name: str, arguments: str = "{}", before: str = "") -> str:
    return before + TOOL_CALL % (name, arguments)


class LiveGateway:
    """Use as a context manager."""

    def __init__(
        self,
        say: Say,
        *,
        keys: KeyRing | None = None,
        limits: Limits = Limits(),
        urls: Callable[[], list[str]] | None = None,
        record: Path | None = None,
        **stub: Any,
    ) -> None:
        """`urls`: other replicas than the stub. `record`: folder of the call record. `stub`: options of the stub replica."""
        self.stub = StubReplica(say, **stub)
        self._keys = keys if keys is not None else KeyRing(is_open=True)
        self._limits, self._urls, self._record = limits, urls, record
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="gateway", daemon=True)
        self.server: GatewayServer

    def __enter__(self) -> LiveGateway:
        self.stub.__enter__()
        self._thread.start()
        self.server = self.run(self._start())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.run(self.server.close())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(DEADLINE_S)
            self._loop.close()
            self.stub.__exit__(kind, error, trace)

    async def _start(self) -> GatewayServer:
        replicas = Replicas(self._urls or (lambda: [self.stub.url]), Waits())
        recorder = SqliteRecorder(self._record) if self._record is not None else None
        self.gateway = Gateway(ChatFormat(Tokenizer(DEMO)), replicas, recorder=recorder)
        return await start_gateway(self.gateway, keys=self._keys, limits=self._limits, opens_unknown=True, graceful_s=1)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """In the gateway's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(DEADLINE_S)

    def url(self, episode: str = "") -> str:
        """For `anthropic.Anthropic(base_url=...)`; OpenAI's clients want `/v1` after it."""
        return self.server.base_url(episode)[1]

    def episode(self, key: str) -> Episode:
        async def find() -> Episode | None:
            return self.gateway.episodes.get(key)

        found = self.run(find())
        assert found is not None, f"there is no episode {key}"
        return found

    def check_one_exact_window(self, key: str) -> None:
        """The episode's calls all appended, and what it trains is what the replica was asked and said, id by id."""
        episode = self.episode(key)
        (window,) = episode.windows()
        said = [s for s in self.stub.sampled if s.request.session == key]
        last = said[-1]
        assert window.tokens_T.tolist() == [*last.request.prompt_ids, *last.token_ids]
        flags = np.zeros(len(window.tokens_T), np.int64)
        for one in said:
            start = len(one.request.prompt_ids)
            flags[start : start + len(one.token_ids)] = 1
        assert window.sampled_T.tolist() == flags.tolist()
        tally = dict(episode.tally)
        assert (tally.get("first"), tally.get("appended", 0)) == (1, len(said) - 1), tally
        assert not any(tally.get(kind) for kind in ("forked", "realigned", "orphaned", "abandoned", "retried")), tally


def sampled_texts(world: LiveGateway, requests: Sequence[Any] | None = None) -> list[str]:
    """What the replica was asked, as text."""
    decode = world.gateway.chat.tokenizer.decode
    return [decode(r.prompt_ids) for r in (requests if requests is not None else world.stub.requests)]
