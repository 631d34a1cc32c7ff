"""Families from `verifiers` environments: their dataset, prompts, tools and rubric used as they are, the model calls made by us.

Supported are environments whose loop is the agent's own: SingleTurnEnv and ToolEnv. One with a loop of its own (another MultiTurnEnv) runs
as a foreign agent instead, its client pointed at the gateway.
"""

from __future__ import annotations

import contextvars
import json
import logging
import math
from collections.abc import Mapping
from typing import Any

import msgspec

from rollmill.chat.messages import Tool
from rollmill.harness.toolset import AgentSpec, CallError, Toolset, said
from rollmill.records import Boundary, Grade, RunFailure, Task
from rollmill.sandbox.interface import Sandbox
from rollmill.tasks.family import Attempt
from rollmill.tasks.rows import Row, RowFamily

_raised: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("raised", default=None)


def from_verifiers(
    environment: Any, *, name: str = "", heldout_frac: float = 0.1, success_at: float | None = None, **env_args: Any
) -> VerifiersFamily:
    """`environment`: an environment, a function that makes one, or the id of an installed one, which `env_args` configure.
    `success_at`: the reward from which a task counts as solved; None: the environment's own `pass_threshold`."""
    vf = _package()
    if isinstance(environment, str):
        found = vf.load_environment(environment, **env_args)
    elif isinstance(environment, vf.Environment):
        if env_args:
            raise ValueError(f"{', '.join(env_args)} cannot be given to an environment that is made already; pass a function that makes it")
        found = environment
    else:
        found = environment(**env_args)
    return VerifiersFamily(found, name=name, heldout_frac=heldout_frac, success_at=success_at)


class VerifiersFamily(RowFamily):
    """One environment's rows. A reward function that raises counts as 0, as it does in `verifiers`; the grade's note says so."""

    def __init__(self, environment: Any, *, name: str, heldout_frac: float, success_at: float | None) -> None:
        vf = _package()
        title = environment.env_id or type(environment).__name__
        if not isinstance(environment, vf.SingleTurnEnv | vf.ToolEnv) or isinstance(environment, vf.StatefulToolEnv):
            raise ValueError(
                f"{title} is a {type(environment).__name__}, which plays its own loop; only SingleTurnEnv and ToolEnv are played by "
                "the default agent. Run it as a program: its client with base_url = OPENAI_BASE_URL (see docs/agents.md)"
            )
        if environment.requires_group_rollouts:
            raise ValueError(f"{title} has reward functions over a whole group; here each attempt is graded by itself")
        train = environment.build_dataset()
        own = environment.build_eval_dataset()
        if train is None:
            raise ValueError(f"{title} has no training dataset; give it one, or use its evaluation dataset as `dataset`")
        super().__init__(
            train,
            _never,
            name=name or title.replace("/", "-"),
            heldout=own,
            heldout_frac=heldout_frac,
            success_at=environment.pass_threshold if success_at is None else success_at,
        )
        self.environment = environment
        logging.getLogger("verifiers").addHandler(_LISTENER)

    def agent(self, task: Task) -> AgentSpec:
        max_turns = int(getattr(self.environment, "max_turns", 1))
        spec = super().agent(task)
        return msgspec.structs.replace(spec, needs_call=False, strict=False, max_turns=max_turns if max_turns > 0 else None)

    def toolset(self, task: Task, box: Sandbox | None) -> Toolset | None:
        return VerifiersTools(self.environment) if getattr(self.environment, "tool_map", None) else None

    async def grade(self, task: Task, attempt: Attempt) -> Grade:
        state, rubric = self._state(self.row(task), attempt), self.environment.rubric
        heard: list[str] = []
        token = _raised.set(heard)
        try:
            await rubric.score_group([state])
            await rubric.cleanup(state)
        finally:
            _raised.reset(token)
        reward = float(state["reward"])
        if not math.isfinite(reward):
            raise ValueError(f"the rubric of {self.name!r} gave {task.task_id} the reward {reward}")
        parts = {str(k): float(v) for k, v in (state.get("metrics") or {}).items()}
        return Grade(reward=reward, success=reward >= self._success_at, parts=parts, note="; ".join(heard)[:500])

    def _state(self, row: Row, attempt: Attempt) -> Any:
        """What the package's own loop would hand to the rubric after this episode."""
        from verifiers.types import RolloutTiming, State, flatten_task_input
        from verifiers.utils.message_utils import normalize_messages

        raw = {k: v for k, v in row.items() if v is not None}
        if isinstance(raw.get("info"), str):
            raw["info"] = json.loads(raw["info"])
        task = flatten_task_input(raw)
        state = State(input=task)
        prompt = self.prompt_of(row)
        num_opening = len(prompt) if isinstance(prompt, list) else 1
        messages = [{**m, "content": m.get("content") or ""} for m in attempt.messages]
        state["task"] = task
        state["prompt"] = normalize_messages(prompt)
        completion = normalize_messages(messages[num_opening:])
        answers = [n for n, m in enumerate(completion) if m.role == "assistant"]
        state["trajectory"] = [
            {
                "prompt": state["prompt"] + completion[:n],
                "completion": [completion[n]],
                "response": None,
                "tokens": None,
                "reward": None,
                "advantage": None,
                "is_truncated": False,
                "trajectory_id": "",
                "extras": {},
            }
            for n in answers
        ]
        state["completion"] = completion
        state["tool_defs"] = self.environment.tool_defs or []
        state["is_completed"], state["is_truncated"] = True, attempt.stop in ("max_tokens", "max_turns")
        state["stop_condition"] = str(attempt.stop)
        state["reward"] = state["metrics"] = state["error"] = state["final_env_response"] = None
        state["timing"] = RolloutTiming()
        return state


class VerifiersTools:
    """A ToolEnv's tools: its schemas, its calls, its way of telling errors."""

    ends: frozenset[str] = frozenset()

    def __init__(self, environment: Any) -> None:
        self._environment = environment

    def tools(self) -> tuple[Tool, ...]:
        defs = self._environment.tool_defs or ()
        return tuple(Tool(name=d.name, description=d.description, parameters=dict(d.parameters), is_strict=bool(d.strict)) for d in defs)

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        environment = self._environment
        if name not in environment.tool_map:
            raise CallError(f"error: unknown tool {name[:40]!r}; tools: {', '.join(environment.tool_map)}")
        try:
            message = await environment.call_tool(name, arguments, "")
        except RunFailure:
            raise
        except Exception as error:
            if any(isinstance(error, kind) for kind in environment.stop_errors):
                raise RunFailure(Boundary.TASK, f"tool {name} raised {type(error).__name__}: {error}") from error
            # The package tells the model and goes on; so does this one.
            return str(environment.error_formatter(error))
        content = message.content
        return content if isinstance(content, str) else said([dict(part) for part in content])


class _Listener(logging.Handler):
    """Hears of reward functions that raised, which the package logs and scores as 0, for the grade that is being made."""

    def emit(self, record: logging.LogRecord) -> None:
        heard = _raised.get()
        if heard is not None and record.levelno >= logging.ERROR:
            heard.append(record.getMessage())


_LISTENER = _Listener()


def _package() -> Any:
    try:
        import verifiers
    except ImportError as error:
        raise ValueError("this needs the package `verifiers`: pip install 'rollmill[verifiers]'") from error
    return verifiers


def _never(attempt: Attempt, row: Mapping[str, Any]) -> float:
    raise AssertionError("a verifiers family grades by its rubric")
