"""Runs scripts and graders through the real tools in real boxes, several boxes at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

import pytest

from rollmill.harness import BoxTools
from rollmill.records import Grade, StopReason, Task
from rollmill.rollout.grading import Grader, collect
from rollmill.rollout.played import Played
from rollmill.sandbox import Sandbox, SandboxBackend, SandboxSpec
from rollmill.sandbox.namespace import NamespaceBackend
from rollmill.tasks import open_family
from rollmill.tasks.repo import script
from rollmill.telemetry import Waits

DEADLINE_S = 120.0
AT_ONCE = 6
T = TypeVar("T")
A = TypeVar("A")


def in_boxes(scene: Callable[[SandboxBackend, A], Awaitable[T]], items: Iterable[A]) -> list[T]:
    """`scene` over every item, a few at a time, on one backend and under one deadline."""
    if (reason := NamespaceBackend.probe()) is not None:
        pytest.skip(reason)

    async def whole() -> list[T]:
        backend, slots = NamespaceBackend(), asyncio.Semaphore(AT_ONCE)

        async def one(item: A) -> T:
            async with slots:
                return await scene(backend, item)

        try:
            async with asyncio.timeout(DEADLINE_S):
                return list(await asyncio.gather(*(one(item) for item in items)))
        finally:
            await backend.close()

    return asyncio.run(whole())


async def judge(backend: SandboxBackend, task: Task, box: Sandbox) -> Grade:
    """Collect what lies in the box and have it graded, as an episode does."""
    played = Played(stop=StopReason.SUBMITTED, windows=(), files=await collect(box))
    return await Grader(open_family("repo"), backend, Waits()).grade(task, played, deadline=asyncio.get_running_loop().time() + DEADLINE_S)


async def play_script(backend: SandboxBackend, task: Task, *, expert: bool) -> tuple[Grade, list[str]]:
    """(the grade, every scripted result that the real tools contradicted)."""
    box = await backend.create(SandboxSpec(files=task.files))
    tools, wrong = BoxTools(box, task.tools, tool_s=10.0), []
    try:
        for play in script(task, expert=expert):
            if play.tool == "submit":
                break
            result = await tools.call(play.tool, dict(play.arguments))
            if result != play.result:
                wrong.append(f"{task.task_id}: {play.tool} {dict(play.arguments)} gave {result!r}, the script says {play.result!r}")
        return await judge(backend, task, box), wrong
    finally:
        await box.close()
