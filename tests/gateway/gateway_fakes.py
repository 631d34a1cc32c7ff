"""An engine without a model: it answers with token ids of its own choosing and remembers every prompt it was sent."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rollmill.chat.format import ChatFormat
from rollmill.chat.messages import ChatMessage, ChatRole
from rollmill.engine.protocol import FinishReason, GenerateReply, GenerateRequest, Piece, Pressure, Timing, VersionSpan
from rollmill.gateway.routing.replicas import Replicas
from rollmill.gateway.routing.rotation import ReplicaClient
from rollmill.gateway.sessions.episode import Episode
from rollmill.gateway.sessions.placement import Sampling
from rollmill.gateway.sessions.session import Session
from rollmill.model.tokenizer import Tokenizer
from rollmill.telemetry import Waits

DEMO = Path(__file__).parents[2] / "models" / "demo"
TOKENIZER = Tokenizer(DEMO)
CHAT = ChatFormat(TOKENIZER)
TIMING = Timing(queue_s=0.0, first_token_s=0.0, total_s=0.0)
T = TypeVar("T")


def soon() -> float:
    return time.monotonic() + 60.0


def user(text: str) -> ChatMessage:
    return ChatMessage(role=ChatRole.USER, text=text)


def tool(text: str, call_id: str = "") -> ChatMessage:
    return ChatMessage(role=ChatRole.TOOL, text=text, call_id=call_id)


def answer(
    ids: list[int],
    *,
    logprobs: list[float],
    versions: list[int],
    finish: FinishReason,
    replica: str = "fake",
    routes: bytes = b"",
    stale_from: int | None = None,
    forced: list[tuple[int, int]] | None = None,
) -> GenerateReply:
    return GenerateReply(
        token_ids=ids,
        logprobs=np.asarray(logprobs, "<f4").tobytes(),
        spans=[VersionSpan(i, i + 1, v) for i, v in enumerate(versions)],
        finish_reason=finish,
        seed=0,
        num_reused=0,
        replica=replica,
        stale_from=stale_from,
        routes=routes,
        forced=forced or [],
        timing=TIMING,
    )


class FakeEngine:
    """Stands in for an EngineClient. `script` may raise or answer; without one the answers are random tokens."""

    def __init__(
        self, rng: random.Random, script: Callable[[GenerateRequest], GenerateReply] | None = None, max_len: int = 1 << 20
    ) -> None:
        self._rng, self._script, self._max_len = rng, script, max_len
        self.requests: list[GenerateRequest] = []
        self.prompts: list[list[int]] = []
        self.said: list[GenerateReply] = []
        self.is_closed = False
        self.version = 0

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        self.requests.append(request)
        self.prompts.append(list(request.prompt_ids))
        request.check(vocab_size=TOKENIZER.vocab_size, max_len=self._max_len)
        reply = self._script(request) if self._script else self._random(request)
        self.said.append(reply)
        return reply

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Piece | GenerateReply, None]:
        yield await self.generate(request)

    def _random(self, request: GenerateRequest) -> GenerateReply:
        rng = self._rng
        plain = [i for i in range(TOKENIZER.vocab_size) if i not in TOKENIZER.stop_ids]
        ids = rng.choices(plain, k=rng.randint(0, request.max_tokens))
        finish = FinishReason.LENGTH
        if len(ids) < request.max_tokens and (not ids or rng.random() < 0.6):
            ids, finish = [*ids, rng.choice(sorted(TOKENIZER.stop_ids))], FinishReason.STOP
        self.version += rng.randint(0, 1)
        versions = [self.version - (i < len(ids) // 2) for i in range(len(ids))] if self.version else [0] * len(ids)
        return answer(ids, logprobs=[-rng.random() for _ in ids], versions=versions, finish=finish)

    async def pressure(self) -> Pressure:
        return Pressure(running=0, waiting=0, slots=8, kv_used_frac=0.0, version=self.version, tokens_per_s=0.0)

    async def aclose(self) -> None:
        self.is_closed = True


def with_replicas(clients: Mapping[str, ReplicaClient], work: Callable[[Replicas], Awaitable[T]]) -> T:
    """Run `work` in a loop of its own, over real routing to these clients."""

    async def main() -> T:
        replicas = Replicas(lambda: list(clients), Waits(), connect=clients.__getitem__)
        try:
            return await work(replicas)
        finally:
            await replicas.close()

    return asyncio.run(main())


def open_session(
    replicas: Replicas, *, key: str = "g000001.0.0", seed: int = 3, temperature: float = 1.0, wants_routes: bool = False
) -> Session:
    return Session(Episode(key, CHAT, seed=seed, sampling=Sampling(temperature=temperature), wants_routes=wants_routes), replicas)


def with_session(client: ReplicaClient, work: Callable[[Session], Awaitable[T]], **options: Any) -> T:
    return with_replicas({"http://10.0.0.7:8000": client}, lambda replicas: work(open_session(replicas, **options)))
