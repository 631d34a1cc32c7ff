"""Runs scripts and graders through the real tools in real boxes, several boxes at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

import pytest

from rollmill.harness import ToolCall, run_tool
from rollmill.records import Grade, Task
from rollmill.rollout.episode import EpisodeRunner
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


def grader(backend: SandboxBackend) -> EpisodeRunner:
    """The part of an episode that collects and judges; it asks no policy."""
    return EpisodeRunner(open_family("repo"), None, backend, None, Waits())  # type: ignore[arg-type]


async def judge(backend: SandboxBackend, task: Task, box: Sandbox) -> Grade:
    runner, deadline = grader(backend), asyncio.get_running_loop().time() + DEADLINE_S
    return await runner._grade(task, await runner._collect(box), deadline)


async def play_script(backend: SandboxBackend, task: Task, *, expert: bool) -> tuple[Grade, list[str]]:
    """(the grade, every scripted result that the real tools contradicted)."""
    box = await backend.create(SandboxSpec(files=task.files))
    wrong = []
    try:
        for play in script(task, expert=expert):
            if play.tool == "submit":
                break
            call = ToolCall(name=play.tool, arguments=dict(play.arguments))
            result = await run_tool(call, box, timeout_s=10.0, max_chars=2000)
            if result != play.result:
                wrong.append(f"{task.task_id}: {play.tool} {dict(play.arguments)} gave {result!r}, the script says {play.result!r}")
        return await judge(backend, task, box), wrong
    finally:
        await box.close()
