"""Text and traces to learn the `repo` world from: documents for mid-training, expert and novice conversations for SFT."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

from rollmill.records import Task
from rollmill.tasks.family import TaskFamily
from rollmill.tasks.repo import problem_of, script
from rollmill.tasks.repo.kinds import Play, Problem
from rollmill.tasks.repo.words import draw
from rollmill.tasks.source import TaskSource


def conversation(task: Task, plays: tuple[Play, ...], system: str) -> dict[str, Any]:
    """A scripted trace as chat messages, in the shape the harness produces."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}, {"role": "user", "content": task.instruction}]
    for play in plays:
        call = {"type": "function", "function": {"name": play.tool, "arguments": dict(play.arguments)}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        if play.tool != "submit":
            messages.append({"role": "tool", "content": play.result})
    return {"messages": messages}


def traces(
    family: TaskFamily, *, num: int, seed: int, expert_frac: float, levels: tuple[int, ...], system: str
) -> Iterator[dict[str, Any]]:
    """A mixture of expert and novice conversations over training tasks."""
    source, rng = TaskSource(family, split="train", seed=seed, levels=levels), random.Random(seed)
    for index in range(num):
        task = source.task(index)
        yield conversation(task, script(task, expert=rng.random() < expert_frac), system)


def documents(family: TaskFamily, *, num: int, seed: int, levels: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """Plain text of the same world: files, shell sessions, tool calls, and drills that teach copying."""
    source, rng = TaskSource(family, split="train", seed=seed, levels=levels), random.Random(seed)
    for index in range(num):
        task = source.task(index)
        problem = problem_of(task.kind, task.level, task.seed, task.split)
        yield {"text": rng.choice([_files, _shell, _calls, _drill])(problem, rng)}


def _files(problem: Problem, rng: random.Random) -> str:
    return "\n".join(f"{path}:\n{text}" for path, text in {**problem.files, **problem.expected}.items())


def _shell(problem: Problem, rng: random.Random) -> str:
    lines = [f"$ cat {path}\n{text}" for path, text in problem.files.items()]
    lines += [f"$ {p.arguments['command']}\n" for p in problem.expert if p.tool == "bash"]
    lines += [f"$ cat {path}\n{text}\n" for path, text in problem.expected.items()]
    return "".join(lines)


def _calls(problem: Problem, rng: random.Random) -> str:
    plays = problem.expert if rng.random() < 0.5 else problem.novice
    said = [f"{json.dumps({'name': p.tool, 'arguments': dict(p.arguments)})}\n{p.result}" for p in plays]
    return f"{problem.instruction}\n" + "\n".join(said)


def _drill(problem: Problem, rng: random.Random) -> str:
    words = draw(rng, rng.randint(2, 8))
    numbers = [str(rng.randint(1, 99)) for _ in words]
    pairs = list(zip(words, numbers, strict=True))
    said = " ".join(f"{w} {n}" for w, n in pairs)
    rng.shuffle(pairs)
    return f"{said}\n{said}\n" + "\n".join(f"{w} = {n}" for w, n in pairs)
