"""What a role tells the world: named waits, a metrics stream on disk, and a small HTTP port with health and Prometheus text.

Observability never stops training: a failed write of a metric is counted and forgotten.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

log = logging.getLogger("rollmill")


class WaitTimeout(RuntimeError):
    """A named wait outlived its deadline."""


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """Something a role is waiting for right now."""

    name: str
    owner: str
    """Who must act to end it."""
    since: float
    deadline_s: float


class Waits:
    """Every wait of a role: who it waits for, since when, and how long in all."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._now: dict[int, Wait] = {}
        self._total_s: defaultdict[str, float] = defaultdict(float)
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def of(self, name: str, *, owner: str, deadline_s: float) -> Iterator[Callable[[], None]]:
        """Marks a wait; the yielded function raises WaitTimeout once the deadline has passed."""
        wait = Wait(name=name, owner=owner, since=self._clock(), deadline_s=deadline_s)

        def check() -> None:
            waited = self._clock() - wait.since
            if waited > deadline_s:
                raise WaitTimeout(f"waited {waited:.0f} s for {name}, which {owner} must provide; the limit is {deadline_s:.0f} s")

        with self._lock:
            self._now[id(wait)] = wait
        try:
            yield check
        finally:
            with self._lock:
                del self._now[id(wait)]
                self._total_s[name] += self._clock() - wait.since

    def current(self) -> list[Wait]:
        with self._lock:
            return list(self._now.values())

    def totals_s(self) -> dict[str, float]:
        """Seconds per wait name so far, running waits included."""
        with self._lock:
            totals = dict(self._total_s)
            for wait in self._now.values():
                totals[wait.name] = totals.get(wait.name, 0.0) + self._clock() - wait.since
        return totals


class Metrics:
    """One JSONL stream per role plus gauges of the newest values. Each line: {"t": unix seconds, "step": n, name: value}."""

    def __init__(self, run_dir: Path, role: str) -> None:
        folder = run_dir / "metrics"
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"{role}.jsonl").open("a", buffering=1)
        self._registry, self._gauges = CollectorRegistry(), dict[str, Gauge]()
        self.role, self.num_lost = role, 0

    def write(self, values: dict[str, float], *, step: int) -> None:
        for name, value in values.items():
            key = "rollmill_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
            if key not in self._gauges:
                self._gauges[key] = Gauge(key, name, registry=self._registry)
            self._gauges[key].set(value)
        try:
            finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
            self._file.write(json.dumps({"t": round(time.time(), 3), "step": step, **finite}) + "\n")
        except OSError:
            self.num_lost += 1

    def prometheus(self) -> bytes:
        return generate_latest(self._registry)


def read_metrics(run_dir: Path, role: str) -> list[dict[str, Any]]:
    """All complete lines of a role's stream; a torn last line is skipped."""
    path = run_dir / "metrics" / f"{role}.jsonl"
    rows = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return rows


class RoleServer:
    """/health and /metrics of a role, in a thread of its own, so that a busy role still answers."""

    def __init__(
        self, metrics: Metrics, waits: Waits, note: Callable[[], dict[str, Any]], *, host: str = "127.0.0.1", port: int = 0
    ) -> None:
        self._metrics, self._waits, self._note = metrics, waits, note
        routes = [Route("/health", self._health), Route("/metrics", self._prometheus)]
        config = uvicorn.Config(Starlette(routes=routes), host=host, port=port, log_level="error", lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._server.serve()), name="role-server", daemon=True)

    def start(self, deadline_s: float = 20.0) -> int:
        """Serve; returns the bound port."""
        self._thread.start()
        until = time.monotonic() + deadline_s
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > until:
                raise OSError(f"the health port of {self._metrics.role} did not open within {deadline_s:.0f} s")
            time.sleep(0.01)
        return int(self._server.servers[0].sockets[0].getsockname()[1])

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(5.0)

    async def _health(self, request: Request) -> JSONResponse:
        now = time.monotonic()
        waits = [
            {"name": w.name, "owner": w.owner, "waited_s": round(now - w.since, 3), "deadline_s": w.deadline_s}
            for w in self._waits.current()
        ]
        return JSONResponse({"role": self._metrics.role, "waits": waits, **self._note()})

    async def _prometheus(self, request: Request) -> Response:
        return Response(self._metrics.prometheus(), media_type="text/plain; version=0.0.4")
