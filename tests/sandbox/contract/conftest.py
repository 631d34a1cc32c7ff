"""Opens each backend once; the whole contract runs on it. What cannot run on this machine is skipped with the reason it gives."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from contract_scene import Scene
from contract_stages import STAGES


@pytest.fixture(scope="session", params=[pytest.param(name, marks=STAGES[name].marks) for name in sorted(STAGES)])
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    stage = STAGES[request.param]
    with asyncio.Runner() as runner, stage.opened(runner, tmp_path_factory.mktemp(request.param)) as backend:
        if isinstance(backend, str):
            pytest.skip(backend)
        scene = Scene(runner, backend, num_burst=stage.num_burst, is_isolated=stage.is_isolated)
        try:
            yield scene
        finally:
            runner.run(backend.close())
