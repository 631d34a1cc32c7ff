"""Rollmill's own engine as one engine among others."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from aiohttp import web
from server_fakes import serving

from rollmill.adapters.own import OwnEngine
from rollmill.adapters.protocol import RolloutEngine
from rollmill.engine.client import EngineRejected
from rollmill.engine.protocol import Health
from rollmill.weights import WrongWeights


class FollowingFake:
    """An engine that holds one more version each time it is asked, up to `newest`."""

    def __init__(self, newest: int, version: int = -1) -> None:
        self.version, self.newest = version, newest

    async def health(self, request: web.Request) -> web.Response:
        self.version = min(self.version + 1, self.newest)
        note = "" if self.version < self.newest else "the store is damaged"
        shown = Health(phase="serving", version=self.version, fingerprint=f"{self.version:032x}", running=0, waiting=0, note=note)
        return web.Response(body=msgspec.json.encode(shown), content_type="application/json")


def test_apply_waits_until_the_engine_has_proved_the_version() -> None:
    async def main() -> None:
        async with serving({"GET /health": FollowingFake(9).health}) as url, OwnEngine(url) as engine:
            checked: RolloutEngine = engine
            assert (await checked.apply(3)).total == f"{3:032x}"
            assert (await checked.digest()).version == 4

    asyncio.run(main())


def test_apply_says_what_keeps_the_engine_behind() -> None:
    async def main() -> None:
        async with serving({"GET /health": FollowingFake(2, version=2).health}) as url, OwnEngine(url) as engine:
            with pytest.raises(WrongWeights, match="version 2 serves on: the store is damaged"):
                await engine.apply(3, timeout_s=0.2)

    asyncio.run(main())


def test_pause_is_refused_since_swaps_need_none() -> None:
    async def main() -> None:
        engine = OwnEngine("http://127.0.0.1:9")
        with pytest.raises(EngineRejected):
            await engine.pause()

    asyncio.run(main())
