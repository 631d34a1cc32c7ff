"""The default agent loop: ask the policy, run its tools, tell it the results, until it submits or runs out of budget."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from rollmill.gateway.session import ContextFull, Session
from rollmill.harness.tools import CallError, parse_calls, run_tool
from rollmill.records import Boundary, RunFailure, StopReason, Task
from rollmill.sandbox.interface import Sandbox

SYSTEM = "You are a coding agent. Use the tools, then submit."


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The budget of one episode."""

    max_turns: int
    max_tokens_per_turn: int
    max_context: int
    """Tokens of context, the replica's limit."""
    tool_s: float
    max_bad_calls: int = 3
    """Replies that are no valid tool call after which the episode ends."""
    tools_s: float = 60.0
    """Seconds that all tool calls of an episode may take together."""
    max_result_chars: int = 2000
    """A longer tool result is cut in the middle."""
    tool_latency_s: tuple[float, float] = (0.0, 0.0)
    """Extra seconds each tool call really takes, drawn evenly."""


class AgentRun(msgspec.Struct, frozen=True, kw_only=True):
    stop: StopReason
    timing_s: dict[str, float]


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """The boundary before a turn: no tool runs, so the box is quiet and can be frozen, and the session can be branched.

    A branch is `Turn(number=t.number, pending=t.pending, session=t.session.branch(key), box=(await (await t.box.snapshot()).fork(1))[0])`.
    """

    number: int
    """From 0; the first is the start of the episode."""
    pending: list[dict[str, Any]]
    """Messages that the policy has not seen yet."""
    session: Session
    box: Sandbox
    num_bad: int = 0
    """Replies so far that were no valid tool call."""


AtTurn = Callable[[Turn], Awaitable[None]]


def first_turn(task: Task, box: Sandbox, session: Session) -> Turn:
    pending = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task.instruction}]
    return Turn(number=0, pending=pending, session=session, box=box)


async def run_agent(
    task: Task, box: Sandbox, session: Session, limits: Limits, *, deadline: float, rng: random.Random, at_turn: AtTurn | None = None
) -> AgentRun:
    """Play one episode. Whatever the policy does ends in a StopReason; only our own machinery raises."""
    return await go_on(first_turn(task, box, session), task, limits, deadline=deadline, rng=rng, at_turn=at_turn)


async def go_on(turn: Turn, task: Task, limits: Limits, *, deadline: float, rng: random.Random, at_turn: AtTurn | None = None) -> AgentRun:
    """Play from a turn to the end; `at_turn` is called at every boundary, the given one included."""
    timing = {"model": 0.0, "tool": 0.0}
    box, session, num_bad, new = turn.box, turn.session, turn.num_bad, turn.pending
    for number in range(turn.number, limits.max_turns):
        if at_turn is not None:
            await at_turn(Turn(number=number, pending=list(new), session=session, box=box, num_bad=num_bad))
        started = time.monotonic()
        try:
            reply = await session.reply(new, max_tokens=limits.max_tokens_per_turn, max_context=limits.max_context, deadline=deadline)
        except ContextFull as full:
            if session.num_tokens == 0:
                # The policy has not said a word yet: the task is too long, which no agent can help.
                raise RunFailure(Boundary.TASK, f"{task.task_id} does not fit: {full}") from full
            return AgentRun(stop=StopReason.MAX_TOKENS, timing_s=timing)
        timing["model"] += time.monotonic() - started
        if not reply.is_complete:
            return AgentRun(stop=StopReason.MAX_TOKENS, timing_s=timing)
        new = []
        try:
            calls = parse_calls(reply.text, task.tools)
        except CallError as error:
            num_bad += 1
            if num_bad >= limits.max_bad_calls:
                return AgentRun(stop=StopReason.BAD_CALLS, timing_s=timing)
            new.append({"role": "tool", "content": str(error)})
            continue
        for call in calls:
            if call.name == "submit":
                return AgentRun(stop=StopReason.SUBMITTED, timing_s=timing)
            started = time.monotonic()
            if limits.tool_latency_s[1] > 0:
                # A real process in the box really takes this long, as a slow build or test suite would.
                slow_s = rng.uniform(*limits.tool_latency_s)
                await box.exec(["sleep", f"{slow_s:.3f}"], timeout_s=slow_s + limits.tool_s)
            result = await run_tool(call, box, timeout_s=limits.tool_s, max_chars=limits.max_result_chars)
            new.append({"role": "tool", "content": result})
            timing["tool"] += time.monotonic() - started
            if timing["tool"] > limits.tools_s:
                return AgentRun(stop=StopReason.TIME_OUT, timing_s=timing)
    return AgentRun(stop=StopReason.MAX_TURNS, timing_s=timing)
