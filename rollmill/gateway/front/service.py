"""The endpoints beside the model calls: models, health, metrics, and the life of episodes for whoever owns them over HTTP."""

from __future__ import annotations

import asyncio
import math
from typing import Any
from urllib.parse import quote

import msgspec

from rollmill.gateway.front.keys import KeyRing
from rollmill.gateway.front.metrics import Metrics
from rollmill.gateway.front.route import Incoming, Outgoing, Route, json_out
from rollmill.gateway.gateway import Gateway, closed_error
from rollmill.gateway.recording.call_rows import new_call_id
from rollmill.gateway.sessions.episode import Episode
from rollmill.gateway.sessions.placement import Sampling
from rollmill.web import ApiError

HEALTH_S = 2.0
MAX_METADATA_BYTES = 64 * 1024


class OpenEpisode(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/episodes`; all of it may be left out."""

    id: str = ""
    """Minted when empty."""
    metadata: dict[str, Any] = {}
    """Told back when the episode ends."""
    seed: int = 0
    temperature: float | None = None
    """With any of these three the episode samples as they say, whatever its calls ask for."""
    top_p: float | None = None
    top_k: int | None = None
    min_version: int | None = None
    """Weights older than this may not answer."""


_OPEN = msgspec.json.Decoder(OpenEpisode)


def base_urls(origin: str, episode: str) -> tuple[str, str]:
    """What an agent's OPENAI_BASE_URL and ANTHROPIC_BASE_URL are set to."""
    root = f"{origin}/e/{quote(episode, safe='')}" if episode else origin
    return f"{root}/v1", root


def summary(episode: Episode, metadata: dict[str, Any]) -> dict[str, Any]:
    """An episode in numbers."""
    windows, skew = episode.windows(), episode.skew()
    return {
        "id": episode.key,
        "object": "episode",
        "is_open": not episode.is_closed,
        "num_windows": len(windows),
        "num_tokens": sum(len(w.tokens_T) for w in windows),
        "num_trained_tokens": int(sum(w.sampled_T.sum() for w in windows)),
        "oldest_version": episode.oldest_version,
        "tally": dict(episode.tally),
        "skew": {"answer_frac": skew.answer_frac, "token_frac": skew.token_frac},
        "metadata": metadata,
    }


class Service:
    """Handlers over one gateway."""

    def __init__(self, gateway: Gateway, keys: KeyRing, metrics: Metrics) -> None:
        self._gateway, self._keys, self._metrics = gateway, keys, metrics
        self._metadata: dict[str, dict[str, Any]] = {}

    def routes(self) -> list[Route]:
        return [
            Route(method="GET", path="/v1/models", handler=self.models),
            Route(method="GET", path="/v1/models/{id}", handler=self.model),
            Route(method="GET", path="/health", handler=self.health, needs_key=False),
            Route(method="GET", path="/metrics", handler=self.prometheus),
            Route(method="POST", path="/v1/episodes", handler=self.open_episode, needs_admin=True),
            Route(method="GET", path="/v1/episodes/{id}", handler=self.show_episode, needs_admin=True),
            Route(method="POST", path="/v1/episodes/{id}/end", handler=self.end_episode, needs_admin=True),
        ]

    def _entry(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": 0, "owned_by": "rollmill"}

    async def models(self, request: Incoming) -> Outgoing:
        return json_out({"object": "list", "data": [self._entry(self._gateway.name)]})

    async def model(self, request: Incoming) -> Outgoing:
        name = request.params["id"]
        version = await self._gateway.version_of(name)
        return json_out({**self._entry(name), "version": version})

    async def health(self, request: Incoming) -> Outgoing:
        """503 while no replica answers: a balancer in front should look elsewhere."""
        try:
            pressures = await asyncio.wait_for(self._gateway.replicas.pressures(), HEALTH_S)
        except TimeoutError:
            pressures = []
        facts = {
            "status": "serving" if pressures else "no replica answers",
            "replicas": len(pressures),
            "versions": sorted({p.version for p in pressures}),
            "running": sum(p.running for p in pressures),
            "waiting": sum(p.waiting for p in pressures),
            "episodes": len(self._gateway.episodes),
        }
        return json_out(facts, 200 if pressures else 503)

    async def prometheus(self, request: Incoming) -> Outgoing:
        if not request.is_admin:
            raise ApiError(403, "this needs a key with may_admin")
        return Outgoing(body=self._metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def open_episode(self, request: Incoming) -> Outgoing:
        try:
            asked = _OPEN.decode(request.body or b"{}")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ApiError(400, f"the body is not a valid request: {error}") from error
        if len(msgspec.json.encode(asked.metadata)) > MAX_METADATA_BYTES:
            raise ApiError(413, f"metadata may have at most {MAX_METADATA_BYTES} bytes")
        key = asked.id or new_call_id()
        try:
            self._gateway.open_episode(key, is_owned=True, seed=asked.seed, sampling=_imposed(asked), min_version=asked.min_version)
        except ValueError as error:
            raise ApiError(400, str(error)) from error
        self._metadata[key] = asked.metadata
        openai_url, anthropic_url = base_urls(f"http://{request.headers.get('host', 'localhost')}", key)
        body = {
            "id": key,
            "object": "episode",
            "key": self._keys.episode_key(key),
            "openai_base_url": openai_url,
            "anthropic_base_url": anthropic_url,
            "metadata": asked.metadata,
        }
        return json_out(body, 201)

    async def show_episode(self, request: Incoming) -> Outgoing:
        key = request.params["id"]
        episode = self._gateway.episodes.get(key)
        if episode is None:
            raise self._missing(key)
        return json_out(summary(episode, self._metadata.get(key, {})))

    async def end_episode(self, request: Incoming) -> Outgoing:
        key = request.params["id"]
        episode = self._gateway.end_episode(key)
        if episode is None:
            raise self._missing(key)
        metadata = self._metadata.pop(key, {})
        # Encoding all its answers again takes a while, and nobody else uses it any more.
        facts = await asyncio.to_thread(summary, episode, metadata)
        return json_out(facts)

    def _missing(self, key: str) -> ApiError:
        return closed_error(key) if self._gateway.episodes.is_closed(key) else ApiError(404, f"there is no episode {key!r}")


def _imposed(asked: OpenEpisode) -> Sampling | None:
    if asked.temperature is None and asked.top_p is None and asked.top_k is None:
        return None
    temperature = 1.0 if asked.temperature is None else asked.temperature
    if not (math.isfinite(temperature) and (temperature == 0 or 1e-3 <= temperature <= 100)):
        raise ApiError(400, f"temperature is {temperature}, it must be 0 or between 0.001 and 100")
    top_p = 1.0 if asked.top_p is None else asked.top_p
    if not 0 < top_p <= 1:
        raise ApiError(400, f"top_p is {top_p}, it must be above 0 and at most 1")
    top_k = asked.top_k or 0
    if not 0 <= top_k < 2**31:
        raise ApiError(400, f"top_k is {top_k}, it must be 0 (off) or a positive count")
    return Sampling(temperature=temperature, top_p=top_p, top_k=top_k)
