"""What a task family must offer: tasks from seeds, and grades from what an agent left behind.

A family is pure but for `Probe`, by which a grader runs a program over the agent's files in a fresh box. The answer stays
on this side: the box is given inputs only, and what it prints is compared here.
"""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from rollmill.records import Grade, Task
from rollmill.sandbox.interface import Sandbox
from rollmill.sandbox.records import SandboxSpec

Probe = Callable[[Mapping[str, str], Sequence[str]], Awaitable[str]]
"""Runs argv in a fresh box that holds these files; returns what it printed (empty when it failed)."""

SPLITS = ("train", "heldout")


class TaskFamily(Protocol):
    name: str
    kinds: tuple[str, ...]

    def make(self, *, kind: str, level: int, seed: int, split: str) -> Task:
        """The task of this seed: the same on every machine, for ever."""
        ...

    async def grade(self, task: Task, files: Mapping[str, str], probe: Probe) -> Grade:
        """Judge the files the agent left in its working directory."""
        ...


class FamilyWithMachine(TaskFamily, Protocol):
    """A family whose tasks need more than files: an image, services, a set-up. Both methods are optional."""

    def machine(self, task: Task) -> SandboxSpec:
        """What the box of this task looks like; its lifetime is the episode's."""
        ...

    async def setup(self, task: Task, box: Sandbox) -> None:
        """Bring a fresh box into the state the agent finds. Runs once per task; every attempt starts from a fork of the result."""
        ...


def machine_of(family: TaskFamily, task: Task) -> SandboxSpec:
    describe = getattr(family, "machine", None)
    spec: SandboxSpec = SandboxSpec(files=task.files) if describe is None else describe(task)
    return spec


async def set_up(family: TaskFamily, task: Task, box: Sandbox) -> None:
    prepare = getattr(family, "setup", None)
    if prepare is not None:
        await prepare(task, box)


def open_family(name: str) -> TaskFamily:
    """The family of that name, or a class of your own as `package.module:Class`."""
    from rollmill.tasks.repo import RepoFamily

    module, colon, attribute = name.partition(":")
    if colon:
        try:
            return getattr(importlib.import_module(module), attribute)()
        except (ImportError, AttributeError) as error:
            raise ValueError(f"tasks.family = {name!r} cannot be loaded: {error}") from error

    known: dict[str, type[TaskFamily]] = {"repo": RepoFamily}
    if name not in known:
        raise ValueError(
            f"there is no task family {name!r}; known: {', '.join(sorted(known))}. "
            "Set `tasks.family` to one of them, or to your own as package.module:Class"
        )
    return known[name]()
