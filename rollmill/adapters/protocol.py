"""The seam between a rollout and an engine, whoever wrote it; what one cannot do it says in `caps` and in its `Digest`."""

from __future__ import annotations

from typing import Protocol

from rollmill.adapters.records import Digest, EngineCaps, PauseMode
from rollmill.engine.protocol import GenerateReply, GenerateRequest, Health, ScoreReply, ScoreRequest


class RolloutEngine(Protocol):
    """Errors are those of rollmill.engine.client: unavailable (try again), version unmet, rejected (the request is wrong)."""

    @property
    def caps(self) -> EngineCaps: ...

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """Sample one continuation; cancelling the awaiting task frees the engine's row."""
        ...

    async def score(self, request: ScoreRequest) -> ScoreReply:
        """Logprobs of given tokens, all under one version."""
        ...

    async def pause(self, mode: PauseMode = PauseMode.KEEP) -> None:
        """Sample nothing until `resume`; returns when no step is under way."""
        ...

    async def resume(self) -> None: ...

    async def apply(self, version: int) -> Digest:
        """Serve this version of the weight store, proved. When it cannot be, the old one serves on and WrongWeights says why."""
        ...

    async def digest(self) -> Digest: ...

    async def health(self) -> Health: ...

    async def aclose(self) -> None: ...
