"""One backend on trial: a loop that lasts, the backend open on it, and one box that the harmless claims share."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import msgspec

from rollmill.sandbox.interface import Sandbox, SandboxBackend
from rollmill.sandbox.records import Capabilities, SandboxSpec

T = TypeVar("T")
DEADLINE_S = 120.0
SPEC = SandboxSpec(
    files={"first.txt": "wörld\n", "below/second.txt": "2"},
    env={"OF_BOX": "of the box"},
    memory_bytes=256 << 20,
    num_processes=64,
)


class Scene:
    def __init__(self, runner: asyncio.Runner, backend: SandboxBackend, *, num_burst: int, is_isolated: bool) -> None:
        self.backend = backend
        self.is_isolated = is_isolated
        self.num_burst = num_burst
        self._runner = runner
        self.capabilities: Capabilities = self._run(backend.capabilities)
        self._box: Sandbox | None = None

    @property
    def box(self) -> Sandbox:
        """Shared: a claim uses names of its own in it and leaves it working."""
        assert self._box is not None
        return self._box

    def play(self, claim: Callable[[], Awaitable[None]]) -> None:
        async def whole() -> None:
            if self._box is None:
                self._box = await self.backend.create(SPEC)
            await claim()

        self._run(whole)

    @contextlib.asynccontextmanager
    async def fresh(self, **changes: object) -> AsyncIterator[Sandbox]:
        box = await self.backend.create(msgspec.structs.replace(SPEC, **changes))
        try:
            yield box
        finally:
            await box.close()

    def _run(self, action: Callable[[], Awaitable[T]]) -> T:
        async def bounded() -> T:
            async with asyncio.timeout(DEADLINE_S):
                return await action()

        return self._runner.run(bounded())
