"""One episode from task to graded trace: somebody plays it, a grader outside the agent's reach judges it.

Whatever our own machinery breaks is raised as RunFailure with its boundary; whatever the agent does ends in a grade.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import msgspec

from rollmill.gateway import Gateway
from rollmill.gateway.sessions.skew import Skew
from rollmill.harness import Limits
from rollmill.records import Grade, Task, Trace
from rollmill.rollout.grading import Grader
from rollmill.rollout.own import OwnAgent
from rollmill.rollout.played import Player
from rollmill.sandbox import SandboxBackend
from rollmill.tasks import TaskFamily
from rollmill.telemetry import Waits


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    grade: Grade
    trace: Trace


class EpisodeRunner:
    """Everything an episode needs, shared by all of them. `player` is who plays; None: the default harness."""

    def __init__(
        self,
        family: TaskFamily,
        gateway: Gateway,
        sandboxes: SandboxBackend,
        limits: Limits,
        waits: Waits,
        *,
        player: Player | None = None,
    ) -> None:
        self._player: Player = player if player is not None else OwnAgent(family, gateway, sandboxes, limits, waits)
        self._grader = Grader(family, sandboxes, waits)
        self.tally: Counter[str] = Counter()
        """What the model calls of all played episodes were: see docs/sessions.md."""
        self.num_untrained = 0
        self.skew = Skew()

    async def close(self) -> None:
        """Let go of what attempts share; the backend is its owner's to close."""
        await self._player.close()

    def open_session(self, key: str, *, seed: int, temperature: float, min_version: int | None) -> Any:
        """The attempt's place at the model; it has `oldest_version`."""
        return self._player.open(key, seed=seed, temperature=temperature, min_version=min_version)

    async def run(self, task: Task, episode_id: str, session: Any, *, seed: int, deadline: float) -> Finished:
        played = await self._player.play(task, episode_id, session, seed=seed, deadline=deadline)
        self.tally += played.tally
        self.num_untrained += played.num_untrained
        self.skew += played.skew
        done = time.monotonic()
        grade = played.grade if played.grade is not None else await self._grader.grade(task, played, deadline=deadline)
        timing = {**played.timing_s, "grade": time.monotonic() - done}
        trace = Trace(episode_id=episode_id, windows=played.windows, messages=played.messages, stop=played.stop, timing_s=timing)
        return Finished(grade=grade, trace=trace)
