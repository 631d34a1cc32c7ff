"""What a task family must offer: tasks from seeds, and grades of what an agent said and left behind.

A family is pure but for `Probe`, by which a grader runs a program over the agent's files in a fresh box. The answer stays
on this side: the box is given inputs only, and what it prints is compared here.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from rollmill.harness.toolset import SYSTEM, AgentSpec, Toolset
from rollmill.records import Grade, StopReason, Task
from rollmill.sandbox.interface import Sandbox
from rollmill.sandbox.records import SandboxSpec

Probe = Callable[[Mapping[str, str], Sequence[str]], Awaitable[str]]
"""Runs argv in a fresh box that holds these files; returns what it printed (empty when it failed)."""

SPLITS = ("train", "heldout")


async def no_probe(files: Mapping[str, str], argv: Sequence[str]) -> str:
    """For graders that run none of the agent's code."""
    raise ValueError("this attempt is graded without boxes: the grader cannot run a program here")


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """What a grader sees of one episode.

    >>> Attempt(answer="42", messages=({"role": "assistant", "content": "42"},)).files
    {}
    """

    files: Mapping[str, str] = {}
    """What the agent left in its working directory; empty when the task has no box."""
    messages: tuple[dict[str, Any], ...] = ()
    """The conversation of the longest context window, as chat messages."""
    answer: str = ""
    """The text of what the agent said last, in whichever window."""
    stop: StopReason = StopReason.ANSWERED
    token_ids: tuple[int, ...] = ()
    """Every sampled token, in order."""
    probe: Probe = no_probe
    facts: dict[str, Any] = {}
    """What a toolset or a remote environment reported."""


class TaskFamily(Protocol):
    name: str
    kinds: tuple[str, ...]

    def make(self, *, kind: str, level: int, seed: int, split: str) -> Task:
        """The task of this seed: the same on every machine, for ever."""
        ...

    async def grade(self, task: Task, attempt: Attempt) -> Grade:
        """Judge what the agent said and left behind."""
        ...


class FamilyWithMachine(TaskFamily, Protocol):
    """A family whose tasks need more than files and the default agent. Each of these methods is optional."""

    def machine(self, task: Task) -> SandboxSpec:
        """What the box of this task looks like; its lifetime is the episode's."""
        ...

    async def setup(self, task: Task, box: Sandbox) -> None:
        """Bring a fresh box into the state the agent finds. Runs once per task; every attempt starts from a fork of the result."""
        ...

    def agent(self, task: Task) -> AgentSpec:
        """How the default agent plays it: prompt, tools shown or not, strictness, limits."""
        ...

    def toolset(self, task: Task, box: Sandbox | None) -> Toolset | None:
        """What the agent may call, made anew for every attempt. None: the default tools that `Task.tools` names."""
        ...

    def listed(self, split: str) -> Sequence[tuple[str, int, int]]:
        """(kind, level, seed) of every task, for a family that has only so many: each is then given once per pass over them."""
        ...


def machine_of(family: TaskFamily, task: Task) -> SandboxSpec:
    describe = getattr(family, "machine", None)
    spec: SandboxSpec = SandboxSpec(files=task.files) if describe is None else describe(task)
    return spec


async def set_up(family: TaskFamily, task: Task, box: Sandbox) -> None:
    prepare = getattr(family, "setup", None)
    if prepare is not None:
        await prepare(task, box)


def agent_of(family: TaskFamily, task: Task) -> AgentSpec:
    """The family's own; else the coding agent for tasks with tools, and a plain answer for those without."""
    describe = getattr(family, "agent", None)
    spec: AgentSpec = describe(task) if describe is not None else AgentSpec(system=SYSTEM if task.tools else "")
    return spec


def toolset_of(family: TaskFamily, task: Task, box: Sandbox | None) -> Toolset | None:
    """The family's own toolset for this attempt; None when it has none."""
    make = getattr(family, "toolset", None)
    tools: Toolset | None = None if make is None else make(task, box)
    return tools


def needs_box(family: TaskFamily, task: Task) -> bool:
    """Whether attempts at this task run in a box: tasks of words alone do not."""
    return bool(task.tools or task.files or hasattr(family, "machine") or hasattr(family, "setup"))


class Family:
    """An optional base: gives a family its name, and tasks their ids, splits and random numbers. `make` and `grade` are the author's."""

    name = ""
    kinds: tuple[str, ...] = ("default",)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if not cls.name:
            cls.name = cls.__name__.removesuffix("Family").lower() or cls.__name__.lower()

    def rng(self, task: Task) -> random.Random:
        """The random numbers of this task, the same in `make` and in `grade`; no other task or split shares them."""
        return self.seeded(kind=task.kind, level=task.level, seed=task.seed, split=task.split)

    def seeded(self, *, kind: str, level: int, seed: int, split: str) -> random.Random:
        return random.Random(f"{self.name}/{split}/{kind}/{level}/{seed}")

    def task(
        self,
        instruction: str,
        *,
        kind: str,
        level: int,
        seed: int,
        split: str,
        files: Mapping[str, str] | None = None,
        tools: Sequence[str] = (),
    ) -> Task:
        """A task with an id of its own. Without files and tools it is answered in words, without a box."""
        if split not in SPLITS:
            raise ValueError(f"there is no split {split!r}; known: {', '.join(SPLITS)}")
        if kind not in self.kinds:
            raise ValueError(f"task family {self.name!r} has no kind {kind!r}; known: {', '.join(self.kinds)}")
        return Task(
            task_id=f"{self.name}/{split}/{kind}/{level}/{seed}",
            family=self.name,
            kind=kind,
            level=level,
            seed=seed,
            split=split,
            instruction=instruction,
            files=dict(files or {}),
            tools=tuple(tools),
        )
