"""An engine without a model: it answers with token ids of its own choosing and remembers every prompt it was sent."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np

from rollmill.engine.protocol import FinishReason, GenerateReply, GenerateRequest, Pressure, Timing, VersionSpan
from rollmill.gateway import Gateway
from rollmill.model.tokenizer import Tokenizer
from rollmill.telemetry import Waits

DEMO = Path(__file__).parents[2] / "models" / "demo"
TOKENIZER = Tokenizer(DEMO)
TIMING = Timing(queue_s=0.0, first_token_s=0.0, total_s=0.0)


def answer(
    ids: list[int],
    *,
    logprobs: list[float],
    versions: list[int],
    finish: FinishReason,
    replica: str = "fake",
    routes: bytes = b"",
    stale_from: int | None = None,
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


class FakeGateway(Gateway):
    """A gateway whose connections are fakes."""

    def __init__(self, engines: dict[str, FakeEngine], waits: Waits | None = None) -> None:
        super().__init__(TOKENIZER, lambda: list(engines), waits or Waits())
        self._clients = engines  # type: ignore[assignment]
