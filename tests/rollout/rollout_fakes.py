"""A rollout world without engines, boxes or gradients: the ledger is real, everything around the dispatcher is a named fake."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

from rollmill.config import RunConfig, parse_config
from rollmill.engine.protocol import Pressure
from rollmill.gateway.sessions.skew import Skew
from rollmill.ledger import CheckpointRow, Ledger, Pacing, cut
from rollmill.records import DropReason, Grade, GroupState, Role, StopReason, Task, Trace, Window
from rollmill.rollout.dispatcher import Dispatcher
from rollmill.rollout.episode import Finished
from rollmill.tasks import TaskSource, open_family
from rollmill.telemetry import Metrics, Waits

DEADLINE_S = 30.0


def config_of(run_dir: Path, *, steps: int = 3, mode: str = "async", **rollout: object) -> RunConfig:
    facts = {"group_size": 4, "max_running": 8, "episode_s": 30.0, "max_retries": 2} | rollout
    return parse_config(
        {
            "run": {"dir": str(run_dir), "steps": steps, "mode": mode},
            "model": {"path": "models/demo"},
            "rollout": facts,
            "trainer": {"groups_per_batch": 2, "max_staleness": 4},
        },
        "test",
    )


def finished(episode_id: str, reward: float, version: int) -> Finished:
    window = Window.of(tokens=[1, 2], sampled=[0, 1], logprobs=[0.0, -1.0], versions=[-1, version])
    trace = Trace(episode_id=episode_id, windows=(window,), stop=StopReason.SUBMITTED)
    return Finished(grade=Grade(reward=reward, success=reward > 0.5), trace=trace)


class FakeSession:
    def __init__(self, min_version: int | None) -> None:
        self.min_version = min_version
        self.oldest_version: int | None = None


class FakeGateway:
    """Tells how busy nobody is, and which version is served; its own replicas."""

    def __init__(self) -> None:
        self.replicas = self
        self.num_retries = 0
        self.served = 0
        self.kv_used_frac = 0.0
        self.num_looks = 0

    async def pressures(self) -> list[Pressure]:
        self.num_looks += 1
        kv = self.kv_used_frac
        return [Pressure(running=0, waiting=0, slots=8, kv_used_frac=kv, version=self.served, tokens_per_s=0.0)]


Behaviour = Callable[[Task, str, FakeSession], Awaitable[Finished]]


class FakeRunner:
    """Plays episodes as `behave` says; by default each succeeds at once, with a reward told by its slot."""

    def __init__(self, gateway: FakeGateway, behave: Behaviour | None = None) -> None:
        self._gateway, self._behave = gateway, behave
        self.tally: Counter[str] = Counter()
        self.skew = Skew()
        self.num_untrained = 0
        self.played: list[str] = []
        self.num_playing = 0
        self.served_at: dict[str, int] = {}

    def open_session(self, key: str, *, seed: int, temperature: float, min_version: int | None) -> FakeSession:
        return FakeSession(min_version)

    async def run(self, task: Task, episode_id: str, session: FakeSession, *, seed: int, deadline: float) -> Finished:
        self.played.append(episode_id)
        self.served_at[episode_id] = self._gateway.served
        self.num_playing += 1
        try:
            await asyncio.sleep(0)
            if self._behave is not None:
                return await self._behave(task, episode_id, session)
            return self.succeed(episode_id)
        finally:
            self.num_playing -= 1

    def succeed(self, episode_id: str) -> Finished:
        return finished(episode_id, float(int(episode_id.split(".")[1]) % 2), self._gateway.served)


class FakeTrainer:
    """Admits and commits by the real rules, learns nothing, publishes a version per step; the replicas follow at once."""

    def __init__(self, config: RunConfig, gateway: FakeGateway) -> None:
        self._config, self._gateway = config, gateway
        self._pacing = Pacing.from_staleness(config.max_staleness, config.trainer.groups_per_batch, config.run.mode)
        self.ledger = Ledger.create_or_open(config.run.dir, Role.TRAINER)
        if self.ledger.progress().version < 0:
            self.publish(0)

    def publish(self, step: int, by: int = 1) -> int:
        version = self.ledger.progress().version + by
        self.ledger.publish_version(version, step, "full", 0, time.time())
        return version

    async def work(self) -> None:
        head = self.ledger.head_checkpoint()
        step = 0 if head is None else head.step + 1
        while step < self._config.run.steps:
            version = self.ledger.progress().version
            window = self.ledger.window(self._pacing.window)
            found = cut(window, version=version, max_staleness=self._config.max_staleness, pacing=self._pacing)
            for row in found.stale:
                if row.state == GroupState.READY:
                    self.ledger.drop_group(row.group_id, DropReason.STALE, time.time())
            if found.admit:
                self.ledger.admit(step, [g.group_id for g in found.admit], version=version, now=time.time())
                await asyncio.sleep(0.02)
                version = self.publish(step)
                await asyncio.sleep(0.02)
                checkpoint = CheckpointRow(step=step, version=version, path=f"c/{step}", digest="d", wall_s=0.0)
                self.ledger.commit_step(checkpoint, time.time())
                await asyncio.sleep(0.02)
                self._gateway.served = version
                step += 1
            await asyncio.sleep(0.005)


class World:
    """One run directory, one fake trainer and as many lives of a dispatcher as a test wants."""

    def __init__(self, config: RunConfig, behave: Behaviour | None = None) -> None:
        self.config, self.gateway = config, FakeGateway()
        self.runner = FakeRunner(self.gateway, behave)
        self.trainer = FakeTrainer(config, self.gateway)
        self.ledger = Ledger.create_or_open(config.run.dir, Role.ROLLOUT)
        self.stop = False

    def dispatcher(self) -> Dispatcher:
        source = TaskSource(open_family("repo"), split="train", seed=0)
        metrics = Metrics(self.config.run.dir, "rollout")
        return Dispatcher(self.config, self.ledger, source, self.runner, self.gateway, metrics, Waits(), lambda: self.stop)  # type: ignore[arg-type]

    async def play(self, also: Callable[[World], Awaitable[None]] | None = None) -> None:
        """Run dispatcher and trainer together to the end, under a deadline; whoever breaks first is raised."""
        roles = [asyncio.create_task(self.dispatcher().run()), asyncio.create_task(self.trainer.work())]
        if also is not None:
            roles.append(asyncio.create_task(also(self)))  # type: ignore[arg-type]
        try:
            async with asyncio.timeout(DEADLINE_S):
                # A dispatcher that was told to stop leaves the trainer waiting for groups, as it should.
                waiting = set(roles)
                while waiting and not (self.stop and roles[0].done()):
                    done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                    for role in done:
                        role.result()
        finally:
            for role in roles:
                role.cancel()
            await asyncio.wait(roles)

    def close(self) -> None:
        self.ledger.close()
        self.trainer.ledger.close()
