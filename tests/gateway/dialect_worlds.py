"""A gateway that listens in front of a scripted replica, and what an agent's loop over it must leave behind: one exact window."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
from live_gateway import LiveGateway
from stub_replica import Say, StubReplica

from rollmill.gateway.front.keys import KeyRing
from rollmill.gateway.front.run import GatewayServer
from rollmill.gateway.gateway import Gateway
from rollmill.gateway.recording.record import SqliteRecorder
from rollmill.gateway.sessions.episode import Episode

T = TypeVar("T")
TOOL_CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'


def scripted(*texts: str) -> Say:
    """One text per request, in order; the last one for ever."""
    left = list(texts)
    return lambda request: left.pop(0) if len(left) > 1 else left[0]


def calling(name: str, arguments: str = "{}", before: str = "") -> str:
    return before + TOOL_CALL % (name, arguments)


class World:
    """Use as a context manager."""

    def __init__(
        self,
        say: Say,
        *,
        keys: KeyRing | None = None,
        urls: Callable[[], list[str]] | None = None,
        record: Path | None = None,
        **stub: Any,
    ) -> None:
        """`urls`: other replicas than the stub. `record`: folder of the call record. `stub`: options of the stub replica."""
        self.stub = StubReplica(say, **stub)
        options = {"recorder": SqliteRecorder(record)} if record is not None else {}
        self._live = LiveGateway(urls or (lambda: [self.stub.url]), keys=keys, gateway_options=options)
        self._stack = ExitStack()

    def __enter__(self) -> World:
        self._stack.enter_context(self.stub)
        self._stack.enter_context(self._live)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    @property
    def server(self) -> GatewayServer:
        return self._live.server

    @property
    def gateway(self) -> Gateway:
        return self._live.gateway

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """In the gateway's loop."""
        return self._live.do(work)

    def url(self, episode: str = "") -> str:
        """For `anthropic.Anthropic(base_url=...)`; OpenAI's clients want `/v1` after it."""
        return self.server.base_url(episode)[1]

    def episode(self, key: str) -> Episode:
        return self._live.episode(key)

    def asked(self) -> list[str]:
        """Every prompt that the replica got, as text."""
        return [self.gateway.chat.tokenizer.decode(r.prompt_ids) for r in self.stub.requests]

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
