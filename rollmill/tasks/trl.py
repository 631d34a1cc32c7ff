"""Families from what a TRL user has: a dataset, reward functions and environment classes, used as they are and without TRL.

Reward functions are called with lists of one attempt, since attempts are graded as they end: a function that compares the completions of
a group with each other has nothing to compare here, and is refused when it is marked `group_wise`.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from rollmill.chat.messages import Tool
from rollmill.harness.toolset import AgentSpec, FunctionTools, Toolset, called, named
from rollmill.records import Boundary, Grade, RunFailure, Task
from rollmill.sandbox.interface import Sandbox
from rollmill.tasks.family import Attempt
from rollmill.tasks.rows import Row, RowFamily, Rows, column

log = logging.getLogger("rollmill.tasks")
Factory = Callable[[], Any]
RESERVED = ("reset", "get_reward", "close")
"""Public methods of an environment that are no tools."""
_TAKEN = ("prompt", "completion", "completion_ids")
"""Columns that are not passed on: their names are taken."""
_GIVEN = {"prompts", "completions", "completion_ids", "environments", "log_metric", "log_extra"}


def from_trl(
    train_dataset: Rows | None = None,
    reward_funcs: Callable[..., Any] | Sequence[Callable[..., Any]] = (),
    *,
    environment_factory: Factory | Mapping[str, Factory] | None = None,
    eval_dataset: Rows | None = None,
    reward_weights: Sequence[float] | None = None,
    tools: Sequence[Callable[..., Any]] = (),
    name: str = "trl",
    system: str = "",
    heldout_frac: float = 0.1,
    success_at: float = 1.0,
    strict: bool = True,
    in_threads: bool = True,
) -> TrlFamily:
    """`strict=False`: arguments of tools are coerced where that is safe, and unknown ones ignored. `in_threads=False`: blocking reward
    functions are called in the main thread, for those that need it (signals, such as `math_verify`'s)."""
    return TrlFamily(
        train_dataset,
        [reward_funcs] if callable(reward_funcs) else list(reward_funcs),
        environment_factory=environment_factory,
        eval_dataset=eval_dataset,
        reward_weights=reward_weights,
        tools=tools,
        name=name,
        system=system,
        heldout_frac=heldout_frac,
        success_at=success_at,
        strict=strict,
        in_threads=in_threads,
    )


class TrlFamily(RowFamily):
    """Rows with a `prompt` column; every other column goes to the reward functions and to `reset`."""

    def __init__(
        self,
        train_dataset: Rows | None,
        reward_funcs: Sequence[Callable[..., Any]],
        *,
        environment_factory: Factory | Mapping[str, Factory] | None,
        eval_dataset: Rows | None,
        reward_weights: Sequence[float] | None,
        tools: Sequence[Callable[..., Any]],
        name: str,
        system: str,
        heldout_frac: float,
        success_at: float,
        strict: bool,
        in_threads: bool,
    ) -> None:
        if environment_factory is None and train_dataset is None:
            raise ValueError("there is neither a train_dataset nor an environment_factory: nothing says what the tasks are")
        factories = {"": environment_factory} if callable(environment_factory) else dict(environment_factory or {})
        # Without rows the environment sets the task by itself, at every reset.
        rows, own = (train_dataset, eval_dataset) if train_dataset is not None else ([{}], [{}])
        super().__init__(
            rows, _never, name=name, heldout=own, heldout_frac=heldout_frac, system=system, strict=strict, success_at=success_at
        )
        self._in_threads, self._extra_tools = in_threads, list(tools)
        self._environments = {label: _Environment(factory, label) for label, factory in factories.items()}
        self._check_labels()
        self._rewards = self._named_rewards(reward_funcs)
        weights = list(reward_weights) if reward_weights is not None else [1.0] * len(self._rewards)
        if len(weights) != len(self._rewards):
            raise ValueError(f"reward_weights has {len(weights)} numbers for {len(self._rewards)} reward functions")
        self._weights = dict(zip(self._rewards, weights, strict=True))
        if not self._rewards and not all(e.can_score for e in self._environments.values()):
            raise ValueError("nothing gives a reward: pass reward_funcs, or give the environment a get_reward() method or a `reward`")

    def prompt_of(self, row: Row) -> str | list[dict[str, Any]]:
        if row.get(self._prompt) is None and self._environments:
            return [{"role": "user", "content": ""}]
        return super().prompt_of(row)

    def agent(self, task: Task) -> AgentSpec:
        return msgspec.structs.replace(super().agent(task), needs_call=False)

    def toolset(self, task: Task, box: Sandbox | None) -> Toolset | None:
        row = self.row(task)
        if self._environments:
            return EnvironmentTools(self._environment(row), row, self._extra_tools, strict=self._strict)
        return FunctionTools(self._extra_tools, strict=self._strict) if self._extra_tools else None

    async def grade(self, task: Task, attempt: Attempt) -> Grade:
        try:
            return await self._grade(task, attempt)
        finally:
            await _close(attempt.facts.get("environment"))

    async def _grade(self, task: Task, attempt: Attempt) -> Grade:
        row, environment = self.row(task), attempt.facts.get("environment")
        parts: dict[str, float] = {}
        given = self._given(row, attempt, parts)
        total: list[float] = []
        for name, function in self._rewards.items():
            if (score := await self._score(name, function, given)) is not None:
                parts[name] = score
                total.append(self._weights[name] * score)
        if environment is not None and (score := await self._environment(row).score(environment, alone=not self._rewards)) is not None:
            parts[type(environment).__name__] = score
            total.append(score)
        if not total:
            raise ValueError(f"no reward function applies to {task.task_id}: all of them returned None")
        return Grade(reward=sum(total), success=sum(total) >= self._success_at, parts=parts)

    def _given(self, row: Row, attempt: Attempt, parts: dict[str, float]) -> dict[str, Any]:
        prompt = self.prompt_of(row)
        given: dict[str, Any] = {column: [value] for column, value in row.items() if column not in (self._prompt, *_TAKEN)}
        said = [dict(m) for m in attempt.messages]
        if not (self._environments or self._extra_tools):
            said = [_thinking_aloud(m) for m in said]
        if isinstance(prompt, str):
            given |= {"prompts": [prompt], "completions": [_last_words(said, attempt.answer)]}
        else:
            start = _num_opening([str(m["role"]) for m in prompt], said)
            given |= {"prompts": [said[:start]], "completions": [said[start:]]}
        if self._environments:
            given["environments"] = [attempt.facts.get("environment")]
        given["completion_ids"] = [list(attempt.token_ids)]
        given["log_metric"] = lambda name, value: parts.__setitem__(str(name), float(value))
        given["log_extra"] = lambda column, values: None
        return given

    async def _score(self, name: str, function: Callable[..., Any], given: dict[str, Any]) -> float | None:
        parameters = inspect.signature(function).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            given = {k: v for k, v in given.items() if k in parameters}
        if self._in_threads or inspect.iscoroutinefunction(function):
            found = await called(function, **given)
        else:
            found = function(**given)
        # Arrays and tensors do as well as lists.
        if isinstance(found, str | bytes | Mapping) or not hasattr(found, "__iter__") or len(scores := list(found)) != 1:
            raise ValueError(f"reward function {name} returned {found!r}; it must return a list with one reward per completion, here one")
        # Not a number means the same as None.
        return None if scores[0] is None or math.isnan(scores[0]) else float(scores[0])

    def _named_rewards(self, functions: Sequence[Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
        found: dict[str, Callable[..., Any]] = {}
        columns = {column for table in self._tables.values() for column in (getattr(table, "column_names", None) or table[0])}
        for function in functions:
            if not callable(function) or hasattr(function, "forward"):
                raise ValueError(f"reward function {function!r} is a model; wrap it in a function of (prompts, completions, **columns)")
            name = getattr(function, "__name__", type(function).__name__)
            if getattr(function, "group_wise", False):
                raise ValueError(f"reward function {name} compares the completions of a group; here each attempt is graded by itself")
            parameters = inspect.signature(function).parameters.values()
            needed = {p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
            known = columns.difference(_TAKEN) | _GIVEN - (set() if self._environments else {"environments"})
            if lacking := sorted(needed - known):
                raise ValueError(f"reward function {name} needs {lacking[0]!r}, which is not given; given: {', '.join(sorted(known))}")
            found[name if name not in found else f"{name}_{len(found)}"] = function
        return found

    def _environment(self, row: Row) -> _Environment:
        return self._environments[""] if "" in self._environments else self._environments[row["environment"]]

    def _check_labels(self) -> None:
        if not self._environments or "" in self._environments:
            return
        for table in self._tables.values():
            for number, label in enumerate(column(table, "environment", None)):
                if label not in self._environments:
                    known = ", ".join(self._environments)
                    raise ValueError(f"row {number} names the environment {label!r} in its column `environment`; known: {known}")


class _Environment:
    """What there is to know of an environment class before any attempt: its tools and how it scores."""

    def __init__(self, factory: Factory, label: str) -> None:
        self.factory = factory
        probe = factory()
        self.title = label or type(probe).__name__
        if not callable(getattr(probe, "reset", None)):
            raise ValueError(f"environment {self.title} has no reset(**row) method")
        self.tools: tuple[Tool, ...] = FunctionTools(_tool_methods(probe)).tools()
        self.has_get_reward = callable(getattr(probe, "get_reward", None))
        self.can_score = self.has_get_reward or "reward" in vars(probe) or hasattr(type(probe), "reward")

    async def score(self, environment: Any, *, alone: bool) -> float | None:
        """By its own get_reward; by its `reward` where no function scores (`alone`)."""
        if self.has_get_reward:
            return float(await called(environment.get_reward))
        return float(environment.reward) if alone and self.can_score else None


class EnvironmentTools:
    """The public methods of one environment instance as tools; the instance is this attempt's alone."""

    ends: frozenset[str] = frozenset()

    def __init__(self, environment: _Environment, row: Row, extra: Sequence[Callable[..., Any]] = (), *, strict: bool = True) -> None:
        self._environment, self._row, self._extra, self._strict = environment, row, extra, strict
        self._functions: FunctionTools | None = None
        self._instance: Any = None

    def tools(self) -> tuple[Tool, ...]:
        return self._environment.tools + (FunctionTools(self._extra).tools() if self._extra else ())

    async def start(self) -> str | None:
        """A fresh instance, reset with the row's columns; what it says first."""
        try:
            self._instance = await called(self._environment.factory)
            said = await called(self._instance.reset, **self._row)
        except RunFailure:
            raise
        except Exception as error:
            # An environment is foreign code: one that cannot start is the task's failure, never a reward.
            raise RunFailure(Boundary.TASK, f"{self._environment.title}.reset raised {type(error).__name__}: {error}") from error
        self._functions = FunctionTools({**_tool_methods(self._instance), **named(list(self._extra))}, strict=self._strict)
        if said is not None and not isinstance(said, str):
            raise RunFailure(Boundary.TASK, f"{self._environment.title}.reset returned {type(said).__name__}; it must return text or None")
        return said

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        assert self._functions is not None, "start() comes first"
        return await self._functions.call(name, arguments)

    def facts(self) -> dict[str, Any]:
        return {"environment": self._instance}

    async def close(self) -> None:
        await _close(self._instance)


async def _close(environment: Any) -> None:
    """An instance is one attempt's alone, and may hold a connection. What it raises now changes no grade."""
    close = getattr(environment, "close", None)
    if callable(close):
        try:
            await called(close)
        except Exception as error:  # noqa: BLE001
            log.warning("%s.close raised %s: %s", type(environment).__name__, type(error).__name__, error)


def _tool_methods(environment: object) -> dict[str, Callable[..., Any]]:
    return {n: m for n, m in named(environment).items() if n not in RESERVED}


def _num_opening(roles: Sequence[str], messages: Sequence[Mapping[str, Any]]) -> int:
    """How many leading messages are the prompt. An agent of one's own may have put a system message before it."""
    said = [str(m.get("role")) for m in messages]
    for start in (0, 1):
        if said[start : start + len(roles)] == list(roles):
            return start + len(roles)
    return next((n for n, role in enumerate(said) if role == "assistant"), len(said))


def _thinking_aloud(message: dict[str, Any]) -> dict[str, Any]:
    """Without tools an answer is one text, reasoning and all: what reward functions that look for `<think>` expect."""
    thought = message.get("reasoning_content")
    if not thought:
        return message
    rest = {k: v for k, v in message.items() if k != "reasoning_content"}
    return {**rest, "content": f"<think>\n{thought}\n</think>\n{message.get('content') or ''}"}


def _last_words(said: Sequence[Mapping[str, Any]], answer: str) -> str:
    """The last assistant message; `answer` where the conversation is not told."""
    return next((str(m.get("content") or "") for m in reversed(said) if m.get("role") == "assistant"), answer)


def _never(attempt: Attempt, row: Row) -> float:
    raise AssertionError("a TRL family grades by its own reward functions")
