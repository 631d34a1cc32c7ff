"""Runs a scene, an async function of a fresh box, once for every agent there is: what one does the other must do."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from agent_boxes import LocalBox, command_line

DEADLINE_S = 60.0
Scene = Callable[[LocalBox], Awaitable[None]]


@pytest.fixture(params=["native", "plain"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def agent(kind: str, tmp_path: Path) -> list[str]:
    found = command_line(kind, tmp_path)
    if isinstance(found, str):
        pytest.skip(found)
    return found


@pytest.fixture
def play(agent: list[str], tmp_path: Path) -> Callable[[Scene], None]:
    async def whole(scene: Scene) -> None:
        async with asyncio.timeout(DEADLINE_S):
            box = await LocalBox.open(agent, tmp_path)
            try:
                await scene(box)
            finally:
                await box.close()

    return lambda scene: asyncio.run(whole(scene))
