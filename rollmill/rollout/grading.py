"""Collects what an agent left and has the family judge it, outside the agent's reach. The grader's mistakes are failures, never rewards."""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from rollmill.harness.remote import MAX_REWARD
from rollmill.records import Boundary, Grade, RunFailure, Task
from rollmill.rollout.played import Played
from rollmill.sandbox import Sandbox, SandboxBackend, SandboxSpec
from rollmill.tasks import Attempt, TaskFamily
from rollmill.telemetry import Waits

MAX_FILES, MAX_FILE_BYTES = 200, 1 << 20
PROBE_S = 10.0


async def collect(box: Sandbox) -> dict[str, str]:
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


class Grader:
    def __init__(self, family: TaskFamily, sandboxes: SandboxBackend, waits: Waits) -> None:
        self._family, self._sandboxes, self._waits = family, sandboxes, waits

    def waiting(self, deadline: float) -> AbstractContextManager[object]:
        return self._waits.of("sandbox", owner="sandbox backend", deadline_s=max(0.0, deadline - time.monotonic()))

    async def grade(self, task: Task, played: Played, *, deadline: float) -> Grade:
        async def probe(files: Mapping[str, str], argv: Sequence[str]) -> str:
            with self.waiting(deadline):
                box = await self._sandboxes.create(SandboxSpec(files=dict(files), lifetime_s=PROBE_S + 30.0))
            try:
                result = await box.exec(argv, timeout_s=PROBE_S)
            finally:
                await box.close()
            return "" if result.timed_out or result.exit_code != 0 else result.stdout.decode("utf-8", "replace")

        attempt = Attempt(
            files=played.files,
            messages=played.messages,
            answer=last_answer(played.messages) if played.answer is None else played.answer,
            stop=played.stop,
            token_ids=tuple(i for w in played.windows for i in w.tokens_T[w.sampled_T != 0].tolist()),
            probe=probe,
            facts=played.facts,
        )
        try:
            grade = _sound(await self._family.grade(task, attempt))
        except RunFailure:
            raise
        except Exception as error:
            # A family is foreign code: whatever it raises is recorded as the grader's failure, never as a reward.
            raise RunFailure(Boundary.GRADER, f"grading {task.task_id} raised {type(error).__name__}: {error}{_where(error)}") from error
        if not abs(grade.reward) <= MAX_REWARD:  # nor for NaN
            raise RunFailure(
                Boundary.GRADER,
                f"grading {task.task_id} gave the reward {grade.reward}; it must be a number of at most {MAX_REWARD:g} either way",
            )
        return grade


def _sound(grade: Grade) -> Grade:
    """With plain numbers and text: graders compute with arrays and with what models wrote, and the ledger keeps neither."""
    if not isinstance(grade, Grade):
        raise TypeError(f"grade() returned {grade!r}, it must return a Grade")
    parts = {str(name): float(value) for name, value in grade.parts.items()}
    return Grade(reward=float(grade.reward), success=bool(grade.success), parts=parts, note=_text(grade.note))


def _text(words: str) -> str:
    return str(words).encode("utf-8", "replace").decode()


def last_answer(messages: Sequence[Mapping[str, Any]]) -> str:
    """The text of the last thing the agent said."""
    return next((str(m.get("content") or "") for m in reversed(messages) if m.get("role") == "assistant"), "")


def _where(error: Exception) -> str:
    """The line of the author's file that raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if len(frames) > 1 else ""
