"""Rollmill's own engine behind the engine protocol: it follows the weight store by itself, so `apply` waits for what it proves."""

from __future__ import annotations

import asyncio
import time

from rollmill.adapters.records import Digest, EngineCaps, PauseMode
from rollmill.engine.client import EngineClient, EngineRejected
from rollmill.weights.errors import WrongWeights

POLL_S = 0.05


class OwnEngine(EngineClient):
    """`generate`, `score` and `health` are the client's. `profile` is the numerics profile the engine was started with."""

    def __init__(self, base_url: str, *, profile: str = "", timeout_s: float = 600.0) -> None:
        super().__init__(base_url, timeout_s=timeout_s)
        self.caps = EngineCaps(
            engine="rollmill", pause_modes=(), sparse_updates=True, routed_experts=True, exact_stamps=True, cuts_tail=True,
            score_temperatures=True, bitwise_profile=profile,
        )  # fmt: skip

    async def pause(self, mode: PauseMode = PauseMode.KEEP) -> None:
        raise EngineRejected(f"pause mode {mode.value!r}: Rollmill's engine swaps between two steps and has no pause")

    async def resume(self) -> None:
        raise EngineRejected("Rollmill's engine swaps between two steps and has no pause to end")

    async def apply(self, version: int, *, timeout_s: float = 600.0) -> Digest:
        """Returns once this version or a newer one is served, with the fingerprint of the live weights."""
        deadline = time.monotonic() + timeout_s
        while (health := await self.health()).version < version:
            if time.monotonic() > deadline:
                why = health.note or "it follows another store, or none"
                raise WrongWeights(f"version {version} is not served after {timeout_s:.0f} s, version {health.version} serves on: {why}")
            await asyncio.sleep(POLL_S)
        return Digest(version=health.version, total=health.fingerprint, tensors={})

    async def digest(self) -> Digest:
        health = await self.health()
        unproven = "" if health.fingerprint else "no version of a store is served yet"
        return Digest(version=health.version, total=health.fingerprint, tensors={}, unproven=unproven)
