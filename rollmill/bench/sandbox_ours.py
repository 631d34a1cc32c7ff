"""Our own sandbox behind the questions that every peer is asked, through the public interface and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

from rollmill.bench.beside import PeerFailed
from rollmill.bench.sandbox_driver import turns_of
from rollmill.records import RunFailure
from rollmill.sandbox import SandboxSpec, open_backend
from rollmill.sandbox.interface import Sandbox, SandboxBackend, Snapshot

CALL_S = 60.0
DEADLINE_S = 600.0
SPEC = SandboxSpec(lifetime_s=3600.0)
_COUNTER = (
    "import os, time\nheld = bytearray(24 << 20)\nn = 0\n"
    "while True:\n n += 1\n open('new', 'w').write(str(n))\n os.rename('new', 'count')\n time.sleep(0.005)\n"
)
"""A process of about 24 MiB whose file grows as long as it lives."""


class Ours:
    """Answers as `sandbox_driver.Peer` does. The loop runs only while a question is answered; boxes live on between them."""

    def __init__(self, backend: str | SandboxBackend = "namespace") -> None:
        self._runner = asyncio.Runner()
        self._backend = self._runner.run(_opened(backend))
        self._held: list[Sandbox] = []
        self._states: dict[str, Snapshot] = {}

    def ask(self, what: str, **options: Any) -> dict[str, Any]:
        try:
            return self._runner.run(asyncio.wait_for(getattr(self, f"_{what}")(**options), DEADLINE_S))
        except (RunFailure, ValueError, OSError) as error:
            raise PeerFailed(str(error) or type(error).__name__) from error

    def close(self) -> None:
        with self._runner:
            self._runner.run(asyncio.wait_for(self._backend.close(), CALL_S))

    async def _capabilities(self) -> dict[str, Any]:
        found = await self._backend.capabilities()
        return {"live_fork": found.live_fork, "facts": dict(found.facts)}

    async def _ready(self, num: int, limit_s: float, state: str = "") -> dict[str, Any]:
        snapshot = await self._snapshot_of(state) if state else None
        took = []
        for _ in turns_of(num, limit_s):
            begun = time.perf_counter()
            if snapshot:
                (box,) = await snapshot.fork(1)
            else:
                box = await self._backend.create(SPEC)
            took.append(time.perf_counter() - begun)
            await box.close()
        return {"seconds": took}

    async def _cycles(self, num: int, limit_s: float, at_once: int) -> dict[str, Any]:
        turns, done = turns_of(num, limit_s), 0

        async def work() -> None:
            nonlocal done
            for _ in turns:
                box = await self._backend.create(SPEC)
                _expect((await box.exec(["true"], timeout_s=CALL_S)).exit_code)
                await box.close()
                done += 1

        begun = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(at_once)))
        return {"num": done, "seconds": time.perf_counter() - begun}

    async def _execs(self, num: int, limit_s: float) -> dict[str, Any]:
        box = await self._backend.create(SPEC)
        took = []
        for _ in turns_of(num, limit_s):
            begun = time.perf_counter()
            result = await box.exec(["true"], timeout_s=CALL_S)
            took.append(time.perf_counter() - begun)
            _expect(result.exit_code)
        await box.close()
        return {"seconds": took}

    async def _hold(self, num: int, limit_s: float, state: str = "") -> dict[str, Any]:
        snapshot = await self._snapshot_of(state) if state else None
        async with asyncio.timeout(limit_s):
            begun = time.perf_counter()
            if snapshot:
                self._held = await snapshot.fork(num)
            else:
                self._held = await asyncio.gather(*(self._backend.create(SPEC) for _ in range(num)))
            return {"seconds": time.perf_counter() - begun}

    async def _alive(self) -> dict[str, Any]:
        """How many of the held boxes still run a command."""
        found = await asyncio.gather(*(box.exec(["true"], timeout_s=CALL_S) for box in self._held))
        return {"num": sum(result.exit_code == 0 for result in found)}

    async def _drop(self) -> dict[str, Any]:
        held, self._held = self._held, []
        begun = time.perf_counter()
        await asyncio.gather(*(box.close() for box in held))
        return {"seconds": time.perf_counter() - begun}

    async def _files(self, state: str) -> dict[str, Any]:
        (box,) = await (await self._snapshot_of(state)).fork(1)
        found = len(await box.list())
        await box.close()
        return {"num": found}

    async def _freeze(self, state: str, num: int, limit_s: float) -> dict[str, Any]:
        """How long a snapshot of the state takes, the box going on afterwards."""
        box = await self._backend.create(_filled(state))
        took = []
        for turn in turns_of(num, limit_s):
            await box.write("turn", str(turn).encode())
            begun = time.perf_counter()
            snapshot = await box.snapshot()
            took.append(time.perf_counter() - begun)
            await snapshot.close()
        await box.close()
        return {"seconds": took}

    async def _live(self, num: int, limit_s: float) -> dict[str, Any]:
        """A running process frozen once, then resumed in forks, each proved by a count that goes on."""
        box = await self._backend.create(SandboxSpec(lifetime_s=SPEC.lifetime_s, live=True))
        await box.write("counter.py", _COUNTER.encode())
        await box.exec("setsid python3 counter.py < /dev/null > /dev/null 2>&1 &", timeout_s=CALL_S)
        await _count(box, 10)
        begun = time.perf_counter()
        snapshot = await box.snapshot(live=True)
        froze_s = time.perf_counter() - begun
        took = []
        for _ in turns_of(num, limit_s):
            begun = time.perf_counter()
            (kid,) = await snapshot.fork(1)
            took.append(time.perf_counter() - begun)
            await _count(kid, await _count(kid, 10) + 3)
            await kid.close()
        await snapshot.close()
        await box.close()
        return {"seconds": took, "froze": froze_s}

    async def _snapshot_of(self, state: str) -> Snapshot:
        if state not in self._states:
            box = await self._backend.create(_filled(state))
            self._states[state] = await box.snapshot()
            await box.close()
        return self._states[state]


async def _opened(backend: str | SandboxBackend) -> SandboxBackend:
    return open_backend(backend) if isinstance(backend, str) else backend


def _filled(state: str) -> SandboxSpec:
    root = Path(state)
    files = {str(path.relative_to(root)): path.read_text() for path in sorted(root.rglob("*")) if path.is_file()}
    return SandboxSpec(files=files, lifetime_s=SPEC.lifetime_s)


def _expect(status: int) -> None:
    if status:
        raise PeerFailed(f"`true` ended with {status}")


async def _count(box: Sandbox, least: int) -> int:
    """The counter once it has come so far."""
    async with asyncio.timeout(CALL_S):
        while True:
            with contextlib.suppress(FileNotFoundError):
                if (found := int(await box.read("count"))) >= least:
                    return found
            await asyncio.sleep(0.005)
