"""Plays attempts with the default harness, in this process: a box where the task needs one, a session, the family's tools."""

from __future__ import annotations

import asyncio
import random
import time

import msgspec

from rollmill.gateway import Gateway, Session
from rollmill.harness import BoxTools, Limits, NoTools, Toolset, run_agent
from rollmill.harness.toolset import AgentSpec
from rollmill.records import Boundary, RunFailure, Task
from rollmill.rollout.grading import collect
from rollmill.rollout.played import Played
from rollmill.rollout.worlds import Worlds
from rollmill.sandbox import Sandbox, SandboxBackend
from rollmill.tasks import TaskFamily, agent_of, needs_box, toolset_of
from rollmill.telemetry import Waits


class OwnAgent:
    """`rollout.played.Player` over `rollmill.harness`."""

    def __init__(self, family: TaskFamily, gateway: Gateway, sandboxes: SandboxBackend, limits: Limits, waits: Waits) -> None:
        self._family, self._gateway, self._limits, self._waits = family, gateway, limits, waits
        self._worlds = Worlds(family, sandboxes)

    def open(self, key: str, *, seed: int, temperature: float, min_version: int | None) -> Session:
        return self._gateway.open_session(key, seed=seed, temperature=temperature, min_version=min_version)

    async def play(self, task: Task, key: str, seat: Session, *, seed: int, deadline: float) -> Played:
        started = time.monotonic()
        box: Sandbox | None = None
        if needs_box(self._family, task):
            with self._waits.of("sandbox", owner="sandbox backend", deadline_s=max(0.0, deadline - started)):
                box = await self._worlds.box(task, lifetime_s=max(1.0, deadline - started + 60.0))
        ready = time.monotonic()
        try:
            spec, tools = self._cast(task, box)
            rng = random.Random(f"{seed}/{key}")
            try:
                run = await run_agent(task, seat, self._limits, spec=spec, tools=tools, deadline=deadline, rng=rng)
                files = {} if box is None else await collect(box)
            except BaseException as error:
                if (close := getattr(tools, "close", None)) is not None:
                    await asyncio.shield(close())
                if (
                    isinstance(tools, BoxTools | NoTools)
                    or not isinstance(error, Exception)
                    or isinstance(error, RunFailure | TimeoutError)
                ):
                    raise
                # A toolset of the family's is foreign code too.
                raise RunFailure(Boundary.TASK, f"the tools of {task.task_id} raised {type(error).__name__}: {error}") from error
        finally:
            if box is not None:
                await box.close()
        return Played(
            stop=run.stop,
            windows=seat.windows(),
            messages=tuple(seat.messages),
            files=files,
            facts=run.facts,
            timing_s={**run.timing_s, "sandbox": ready - started},
            tally=seat.episode.tally,
            num_untrained=seat.episode.untrained().total(),
            skew=seat.episode.skew(),
        )

    def _cast(self, task: Task, box: Sandbox | None) -> tuple[AgentSpec, Toolset]:
        """How it is played and with which tools. A family is foreign code: what it raises is the task's failure."""
        try:
            spec, own = agent_of(self._family, task), toolset_of(self._family, task, box)
        except RunFailure:
            raise
        except Exception as error:
            raise RunFailure(Boundary.TASK, f"the agent of {task.task_id} raised {type(error).__name__}: {error}") from error
        if own is not None:
            return spec, own
        if box is None or not task.tools:
            return spec, NoTools()
        limits = self._limits.under(spec)
        return spec, BoxTools(box, task.tools, strict=spec.strict, tool_s=limits.tool_s, max_chars=limits.max_result_chars)

    async def close(self) -> None:
        await self._worlds.close()


def without_latency(limits: Limits) -> Limits:
    """For evaluation: the benchmark's artificial latency would change nothing but the wait."""
    return msgspec.structs.replace(limits, tool_latency_s=(0.0, 0.0))
