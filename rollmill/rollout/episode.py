"""One episode from task to graded trace: a box, a session, the agent loop, and a grader outside the agent's reach.

Whatever our own machinery breaks is raised as RunFailure with its boundary; whatever the agent does ends in a grade.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import msgspec

from rollmill.gateway import Gateway, Session
from rollmill.harness import Limits, run_agent
from rollmill.records import Boundary, Grade, RunFailure, Task, Trace
from rollmill.rollout.worlds import Worlds
from rollmill.sandbox import Sandbox, SandboxBackend, SandboxSpec
from rollmill.tasks import TaskFamily
from rollmill.telemetry import Waits

MAX_FILES, MAX_FILE_BYTES = 200, 1 << 20
PROBE_S = 10.0


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    grade: Grade
    trace: Trace


class EpisodeRunner:
    """Everything an episode needs, shared by all of them."""

    def __init__(self, family: TaskFamily, gateway: Gateway, sandboxes: SandboxBackend, limits: Limits, waits: Waits) -> None:
        self._family, self._gateway, self._sandboxes, self._limits, self._waits = family, gateway, sandboxes, limits, waits
        self._worlds = Worlds(family, sandboxes)

    async def close(self) -> None:
        """Let go of the states that attempts start from; the backend is its owner's to close."""
        await self._worlds.close()

    def open_session(self, key: str, *, seed: int, temperature: float, min_version: int | None) -> Session:
        return self._gateway.open_session(key, seed=seed, temperature=temperature, min_version=min_version)

    async def run(self, task: Task, episode_id: str, session: Session, *, seed: int, deadline: float) -> Finished:
        started = time.monotonic()
        with self._waiting(deadline):
            box = await self._worlds.box(task, lifetime_s=max(1.0, deadline - started + 60.0))
        ready = time.monotonic()
        try:
            rng = random.Random(f"{seed}/{episode_id}")
            played = await run_agent(task, box, session, self._limits, deadline=deadline, rng=rng)
            files = await self._collect(box)
        finally:
            await box.close()
        done = time.monotonic()
        grade = await self._grade(task, files, deadline)
        timing = {**played.timing_s, "sandbox": ready - started, "grade": time.monotonic() - done}
        trace = Trace(
            episode_id=episode_id, windows=(session.window(),), messages=tuple(session.messages), stop=played.stop, timing_s=timing
        )
        return Finished(grade=grade, trace=trace)

    def _waiting(self, deadline: float) -> AbstractContextManager[object]:
        return self._waits.of("sandbox", owner="sandbox backend", deadline_s=max(0.0, deadline - time.monotonic()))

    async def _collect(self, box: Sandbox) -> dict[str, str]:
        """The files the agent left; oversized or unreadable ones count as absent, which is the agent's own doing."""
        files: dict[str, str] = {}
        try:
            for path in (await box.list())[:MAX_FILES]:
                try:
                    files[path] = (await box.read(path, limit_bytes=MAX_FILE_BYTES)).decode("utf-8", "replace")
                except OSError:
                    continue
        except OSError:
            return {}
        return files

    async def _grade(self, task: Task, files: Mapping[str, str], deadline: float) -> Grade:
        async def probe(probe_files: Mapping[str, str], argv: Sequence[str]) -> str:
            with self._waiting(deadline):
                box = await self._sandboxes.create(SandboxSpec(files=dict(probe_files), lifetime_s=PROBE_S + 30.0))
            try:
                result = await box.exec(argv, timeout_s=PROBE_S)
            finally:
                await box.close()
            return "" if result.timed_out or result.exit_code != 0 else result.stdout.decode("utf-8", "replace")

        try:
            grade = await self._family.grade(task, files, probe)
        except RunFailure:
            raise
        except Exception as error:
            # A family is foreign code: whatever it raises is recorded as the grader's failure, never as a reward.
            raise RunFailure(Boundary.GRADER, f"grading {task.task_id} raised {type(error).__name__}: {error}") from error
        if grade.reward != grade.reward or abs(grade.reward) == float("inf"):
            raise RunFailure(Boundary.GRADER, f"grading {task.task_id} gave the reward {grade.reward}")
        return grade
