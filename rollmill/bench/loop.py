"""Sync against async: the same tasks, model, learning rate and slow tools, one after the other on this machine.

Time to a held-out success is read afterwards from the published weight versions, so that measuring does not disturb
either run: every few steps the version is served again and tried on the same held-out tasks.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from rollmill.bench.report import Row, result, say
from rollmill.chat.format import ChatFormat
from rollmill.config import RunConfig, dump_config, load_config
from rollmill.engine.run import run_engine
from rollmill.fleet.summary import summarise
from rollmill.gateway import Gateway, Replicas
from rollmill.ledger import Ledger
from rollmill.model import Tokenizer
from rollmill.records import Role
from rollmill.rollout.episode import EpisodeRunner
from rollmill.rollout.evaluation import evaluate
from rollmill.rollout.role import limits_of
from rollmill.sandbox import open_backend
from rollmill.tasks import TaskSource, open_family
from rollmill.telemetry import Waits
from rollmill.weights import WeightStore, open_store
from rollmill.weights.manifest import Pointer


class PinnedStore(WeightStore):
    """A store whose newest version is the one we want to look at."""

    def __init__(self, store: WeightStore, version: int) -> None:
        super().__init__(store.objects)
        self._version = version

    def latest(self) -> Pointer | None:
        return Pointer(version=self._version)


def bench_loop(
    run_file: Path,
    work: Path,
    *,
    steps: int,
    latency_s: tuple[float, float],
    target: float,
    every: int,
    num_heldout: int,
    seed: int,
    max_staleness: int = 0,
) -> dict[str, Any]:
    """Run both modes and compare when each reached `target` held-out success; `max_staleness` 0 is the run file's."""
    shutil.rmtree(work, ignore_errors=True)
    found: dict[str, dict[str, Any]] = {}
    for mode in ("async", "sync"):
        sets = [
            f"run.dir={work / mode}",
            f"run.mode={mode}",
            f"run.steps={steps}",
            f"run.seed={seed}",
            f"rollout.tool_latency_s=[{latency_s[0]}, {latency_s[1]}]",
            "rollout.max_running=192",
            "engine.num_slots=192",
            "tasks.num_heldout=0",
        ]
        if max_staleness and mode == "async":
            sets.append(f"trainer.max_staleness={max_staleness}")
        say(f"{mode}: {steps} steps with tools that take {latency_s[0]:g} to {latency_s[1]:g} s ...")
        command = [sys.executable, "-m", "rollmill.cli", "train", str(run_file), *(x for s in sets for x in ("--set", s))]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        config = load_config(work / mode / "run.toml")
        curve = list(_curve(config, work / mode, every, num_heldout))
        found[mode] = {
            "summary": summarise(work / mode),
            "curve": curve,
            "reached_s": _time_to(curve, target),
            "config": dump_config(config),
        }
    rows = []
    for mode, facts in found.items():
        s = facts["summary"]
        rows += [
            Row(name=f"time to {target:.0%} held-out success", peer=mode, value=facts["reached_s"] or float("nan"), unit="s"),
            Row(name="time for all steps", peer=mode, value=facts["curve"][-1]["t_s"], unit="s"),
            Row(name="held-out success at the end", peer=mode, value=facts["curve"][-1]["success"], unit="fraction"),
            Row(name="trainer idle", peer=mode, value=s["trainer_idle_frac"], unit="fraction"),
            Row(name="rollout slots idle at the gate", peer=mode, value=s["rollout_idle_frac"], unit="fraction"),
            Row(name="staleness, mean", peer=mode, value=s["staleness_mean"], unit="versions"),
        ]
    if found["async"]["reached_s"] and found["sync"]["reached_s"]:
        ratio = found["sync"]["reached_s"] / found["async"]["reached_s"]
        rows.append(Row(name=f"async reaches {target:.0%} sooner by", peer="sync/async", value=ratio, unit="times"))
    ratio = found["sync"]["curve"][-1]["t_s"] / found["async"]["curve"][-1]["t_s"]
    rows.append(Row(name="async takes all steps sooner by", peer="sync/async", value=ratio, unit="times"))
    return result("rollmill bench loop", rows, runs={mode: {k: f[k] for k in ("curve", "summary")} for mode, f in found.items()})


def _curve(config: RunConfig, run_dir: Path, every: int, num_heldout: int) -> Iterator[dict[str, float]]:
    """(step, seconds since the first episode started, held-out success) of every `every`-th published version."""
    with Ledger.open_reader(run_dir) as ledger:
        started = next(e.time for e in ledger.events(limit=100000) if e.kind == "episode.running")
        versions = ledger.versions()
    picked = [v for v in versions if v.version % every == 0 or v is versions[-1]]
    for row in picked:
        success = asyncio.run(success_of(config, run_dir, row.version, num_heldout))
        at = max(0.0, row.published_at - started)
        say(f"  {config.run.mode}: version {row.version} after {at:.0f} s solves {success:.0%}")
        yield {"version": row.version, "t_s": at, "success": success}


def _time_to(curve: list[dict[str, float]], target: float) -> float | None:
    """When the curve first crosses the target, interpolated between two looks; None when it never does."""
    for before, after in pairwise(curve):
        if after["success"] >= target:
            rise = after["success"] - before["success"]
            share = 1.0 if rise <= 0 else min(1.0, max(0.0, (target - before["success"]) / rise))
            return before["t_s"] + share * (after["t_s"] - before["t_s"])
    return None


async def success_of(config: RunConfig, run_dir: Path, version: int, num_heldout: int) -> float:
    """Serve one published version and try the held-out tasks with it."""
    ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    store = PinnedStore(open_store(config.weight_store), version)
    engine = asyncio.create_task(
        run_engine(config.model.path, store=store, num_threads=2, num_slots=64, max_len=config.engine.max_len, on_ready=ready.set_result)
    )
    url = f"http://127.0.0.1:{await asyncio.wait_for(ready, 60.0)}"
    waits = Waits()
    gateway = Gateway(ChatFormat(Tokenizer(config.model.path)), Replicas(lambda: [url], waits))
    sandboxes = open_backend(config.rollout.sandbox)
    r, family = config.rollout, open_family(config.tasks.family)
    limits = msgspec.structs.replace(limits_of(config), tool_latency_s=(0.0, 0.0))
    source = TaskSource(family, split="heldout", seed=config.run.seed, kinds=config.tasks.kinds, levels=config.tasks.levels)
    runner = EpisodeRunner(family, gateway, sandboxes, limits, waits)
    try:
        with Ledger.create_or_open(run_dir / "after", Role.ROLLOUT) as ledger:
            label = f"v{version}"
            await evaluate(
                label,
                ledger=ledger,
                source=source,
                runner=runner,
                num_tasks=num_heldout,
                num_at_once=64,
                seed=config.run.seed,
                temperature=r.temperature,
                min_version=version,
                episode_s=r.episode_s,
            )
            return ledger.eval_summary(label)[0].mean_success
    finally:
        await gateway.close()
        await runner.close()
        await sandboxes.close()
        engine.cancel()
        await asyncio.wait([engine], timeout=10.0)
