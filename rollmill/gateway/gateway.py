"""Routes one generate call to a replica and tries again where that is token-safe; lives in the rollout process.

A call is token-safe to repeat because it carries its whole prompt and a failed one returned nothing. A replica that is
down, full or on a wrong version is waited for until the call's deadline; then, or at once when a replica refuses the call
itself, the failure is the model's, never a reward.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Callable

import msgspec

from rollmill.engine.client import EngineClient, EngineRejected, EngineUnavailable, VersionUnmet
from rollmill.engine.protocol import GenerateReply, GenerateRequest, Pressure
from rollmill.gateway.session import Session
from rollmill.model.tokenizer import Tokenizer
from rollmill.records import Boundary, RunFailure
from rollmill.telemetry import Waits

RETRY_S = 0.2


class Gateway:
    """Owns the connections. `replicas` names the base URLs that are in rotation now; it may change at any time."""

    def __init__(self, tokenizer: Tokenizer, replicas: Callable[[], list[str]], waits: Waits, *, wants_routes: bool = False) -> None:
        """`wants_routes`: sessions ask for the experts of every token, which a trainer that replays them needs."""
        self.tokenizer, self._replicas, self._waits, self.wants_routes = tokenizer, replicas, waits, wants_routes
        self._clients: dict[str, EngineClient] = {}
        self.num_retries = 0

    def open_session(self, key: str, *, seed: int, temperature: float, min_version: int | None = None) -> Session:
        return Session(self, key, seed=seed, temperature=temperature, min_version=min_version)

    async def generate(self, request: GenerateRequest, *, deadline: float) -> GenerateReply:
        """Sample on the replica this session belongs to, on another when that one fails."""
        last = "none: the call came after its deadline"
        # Not `hash`, which is salted per process: a run repeated with one seed sends each conversation the same way.
        home = zlib.crc32((request.session or "").encode())
        with self._waits.of("policy", owner="engine", deadline_s=max(0.0, deadline - time.monotonic())):
            for attempt in range(1_000_000):
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    break
                urls = sorted(self._replicas())
                pause_s, last = RETRY_S, last if urls else "no replica is in rotation"
                if urls:
                    # The session key decides first, so that a conversation finds its cache; a failure moves on by one.
                    url = urls[(home + attempt) % len(urls)]
                    try:
                        reply = await asyncio.wait_for(self._client(url).generate(request), left_s)
                        # A replica that gives no name of its own goes by its address.
                        return reply if reply.replica else msgspec.structs.replace(reply, replica=url.rpartition("//")[2])
                    except TimeoutError:
                        last = "the replica did not answer in time"
                    except VersionUnmet as error:
                        last = str(error)
                    except EngineUnavailable as error:
                        last, pause_s = str(error), min(error.retry_after_s, 1.0)
                    except EngineRejected as error:
                        raise RunFailure(Boundary.MODEL, str(error)) from error
                self.num_retries += 1
                await asyncio.sleep(min(pause_s, max(0.0, deadline - time.monotonic())))
        raise RunFailure(Boundary.MODEL, f"no answer before the deadline; the last problem was: {last}")

    async def pressures(self) -> list[Pressure]:
        """How busy the replicas are; those that do not answer are left out. Replicas that left are forgotten here."""
        for url in set(self._clients) - set(self._replicas()):
            await self._clients.pop(url).aclose()
        found = await asyncio.gather(*(self._client(url).pressure() for url in self._replicas()), return_exceptions=True)
        return [p for p in found if isinstance(p, Pressure)]

    def _client(self, url: str) -> EngineClient:
        if url not in self._clients:
            self._clients[url] = EngineClient(url)
        return self._clients[url]

    async def close(self) -> None:
        for client in self._clients.values():
            await client.aclose()
