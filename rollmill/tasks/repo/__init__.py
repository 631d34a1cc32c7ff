"""The `repo` family: procedurally generated micro-repository tasks, with scripts to learn them from."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping

from rollmill.chat.messages import ChatRole
from rollmill.harness.toolset import SYSTEM, AgentSpec
from rollmill.records import Grade, Task
from rollmill.tasks.family import SPLITS, Attempt, Probe
from rollmill.tasks.repo.kinds import KINDS, Play, Problem, probe_argv

MAX_LEVEL = 3
NO_CALL = "error: no tool call found; answer with <tool_call>{...}</tool_call>, tools: {tools}"


def problem_of(kind: str, level: int, seed: int, split: str) -> Problem:
    """The problem behind a task; seeds of different splits never meet because the split is part of the key."""
    return KINDS[kind](random.Random(f"repo/{split}/{kind}/{level}/{seed}"), level)


class RepoFamily:
    """Seven kinds of small job in a folder of files, three levels each."""

    name = "repo"
    kinds = tuple(KINDS)

    def make(self, *, kind: str, level: int, seed: int, split: str) -> Task:
        if kind not in KINDS:
            raise ValueError(f"task family 'repo' has no kind {kind!r}; known: {', '.join(KINDS)}")
        if not 1 <= level <= MAX_LEVEL:
            raise ValueError(f"task level {level} is outside 1..{MAX_LEVEL}; change `tasks.levels`")
        if split not in SPLITS:
            raise ValueError(f"there is no split {split!r}; known: {', '.join(SPLITS)}")
        problem = problem_of(kind, level, seed, split)
        return Task(
            task_id=f"repo/{split}/{kind}/{level}/{seed}",
            family=self.name,
            kind=kind,
            level=level,
            seed=seed,
            split=split,
            instruction=problem.instruction,
            files=dict(problem.files),
        )

    def agent(self, task: Task) -> AgentSpec:
        """Small models learn this prompt by heart: it names no tools, since their schemas would fill the context."""
        return AgentSpec(system=SYSTEM, show_tools=False, no_call=NO_CALL, told_as=ChatRole.TOOL)

    async def grade(self, task: Task, attempt: Attempt) -> Grade:
        problem = problem_of(task.kind, task.level, task.seed, task.split)
        note = _first_difference(problem, attempt.files)
        if not note and problem.hidden_calls is not None:
            note = await _run_hidden_calls(problem, attempt.files, attempt.probe)
        return Grade(reward=0.0 if note else 1.0, success=not note, note=note or "all checks passed")


def _first_difference(problem: Problem, files: Mapping[str, str]) -> str:
    for path, text in problem.expected.items():
        if path not in files:
            return f"{path} is missing"
        if files[path].split() != text.split():
            return f"{path} does not hold what it should"
    for path in problem.absent:
        if path in files:
            return f"{path} should be gone"
    return ""


async def _run_hidden_calls(problem: Problem, files: Mapping[str, str], probe: Probe) -> str:
    assert problem.hidden_calls is not None
    path, function, _, results = problem.hidden_calls
    if path not in files:
        return f"{path} is missing"
    printed = (await probe({path: files[path]}, probe_argv(problem))).strip().splitlines()
    try:
        got = json.loads(printed[-1]) if printed else None
    except (ValueError, RecursionError):
        # Deeply nested output must not break the grader: the agent would swap a reward of 0 for a failure of ours.
        got = None
    return "" if got == list(results) else f"{function} in {path} returns wrong values"


def script(task: Task, *, expert: bool) -> tuple[Play, ...]:
    """The tool calls an expert or a novice would make, for supervised learning."""
    problem = problem_of(task.kind, task.level, task.seed, task.split)
    return problem.expert if expert else problem.novice
