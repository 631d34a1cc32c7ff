"""Runs a scene, an async function of a fresh backend, under a deadline; skips where this machine can make no boxes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from rollmill.sandbox.namespace import NamespaceBackend

DEADLINE_S = 120.0
Scene = Callable[[NamespaceBackend], Awaitable[None]]


@pytest.fixture(scope="session")
def machine() -> None:
    reason = NamespaceBackend.probe()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture
def play(machine: None) -> Callable[[Scene], None]:
    async def whole(scene: Scene) -> None:
        backend = NamespaceBackend()
        try:
            async with asyncio.timeout(DEADLINE_S):
                await scene(backend)
        finally:
            await backend.close()

    return lambda scene: asyncio.run(whole(scene))
