"""Times the namespace sandbox on this machine beside a plain subprocess: create, exec `true`, close, whole cycles; prints JSON."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rollmill.sandbox import SandboxSpec
from rollmill.sandbox.namespace import NamespaceBackend

NUM_CYCLES = 100
NUM_TOGETHER = 200


def _summary(seconds: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(seconds, n=100)
    return {"p50_ms": round(cuts[49] * 1e3, 3), "p90_ms": round(cuts[89] * 1e3, 3), "p99_ms": round(cuts[98] * 1e3, 3)}


async def _plain_subprocess() -> list[float]:
    times = []
    for _ in range(NUM_CYCLES):
        begun = time.perf_counter()
        process = await asyncio.create_subprocess_exec("true", stdout=asyncio.subprocess.PIPE)
        await process.communicate()
        times.append(time.perf_counter() - begun)
    return times


async def _cycles(backend: NamespaceBackend) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {"create": [], "exec_true": [], "close": []}
    for _ in range(NUM_CYCLES):
        marks = [time.perf_counter()]
        box = await backend.create(SandboxSpec())
        marks.append(time.perf_counter())
        await box.exec(["true"], timeout_s=30)
        marks.append(time.perf_counter())
        await box.close()
        marks.append(time.perf_counter())
        for name, begun, ended in zip(times, marks, marks[1:], strict=False):
            times[name].append(ended - begun)
    return times


async def _together(backend: NamespaceBackend) -> float:
    async def cycle() -> None:
        box = await backend.create(SandboxSpec())
        await box.exec(["true"], timeout_s=60)
        await box.close()

    begun = time.perf_counter()
    await asyncio.gather(*(cycle() for _ in range(NUM_TOGETHER)))
    return NUM_TOGETHER / (time.perf_counter() - begun)


async def main() -> None:
    backend = NamespaceBackend()
    begun = time.perf_counter()
    capabilities = await backend.capabilities()
    start_s = time.perf_counter() - begun
    # The peer runs in the same minute, before and after, so that a busy machine shows in both.
    peer = await _plain_subprocess()
    times = await _cycles(backend)
    peer += await _plain_subprocess()
    rate = await _together(backend)
    await backend.close()
    report = {
        "num_cycles": NUM_CYCLES,
        "num_cores": os.cpu_count(),
        "load_1min": os.getloadavg()[0],
        "capabilities": capabilities,
        "backend_start_ms": round(start_s * 1e3, 1),
        **{name: _summary(values) for name, values in times.items()},
        "peer_subprocess_true": _summary(peer),
        "cycles_per_s_burst_of_200": round(rate, 1),
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    asyncio.run(main())
