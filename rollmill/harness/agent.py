"""The default agent loop: ask the policy, run its tools, tell it the results, until it submits, answers or runs out of budget.

The same loop plays training, evaluation and production; it knows no token, no grader and no run.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import msgspec

from rollmill.chat.messages import Call, ChatMessage, ChatRole, Tool
from rollmill.gateway.sessions.session import ContextFull, Reply, Session
from rollmill.harness.tools import BoxTools, shorten
from rollmill.harness.toolset import SYSTEM, AgentSpec, CallError, Toolset
from rollmill.records import Boundary, RunFailure, StopReason, Task

__all__ = ["SYSTEM", "AgentRun", "AtTurn", "Limits", "Turn", "first_turn", "go_on", "run_agent"]


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
    max_episode_tokens: int | None = None
    """Tokens that the policy may sample in all its turns together."""
    wall_s: float | None = None
    """Seconds after which no further turn begins. Only for use outside training: there a slow machine of ours would end episodes."""
    max_result_chars: int = 2000
    """A longer tool result is cut in the middle."""
    tool_latency_s: tuple[float, float] = (0.0, 0.0)
    """Extra seconds each tool call really takes, drawn evenly."""

    def under(self, spec: AgentSpec) -> Limits:
        """These limits with the task's own in place of the run's."""
        own = {f: v for f in ("max_turns", "max_tokens_per_turn", "max_episode_tokens") if (v := getattr(spec, f)) is not None}
        return msgspec.structs.replace(self, **own)


class AgentRun(msgspec.Struct, frozen=True, kw_only=True):
    stop: StopReason
    timing_s: dict[str, float]
    """Seconds spent per wait: model, tool."""
    num_turns: int = 0
    num_calls: int = 0
    num_bad_calls: int = 0
    """Replies that were no valid tool call."""
    facts: dict[str, Any] = {}
    """What the toolset tells the grader."""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """The boundary before a turn: no tool runs, so the box is quiet and can be frozen, and the session can be branched.

    A branch over BoxTools: `msgspec.structs.replace(turn, session=turn.session.branch(key), tools=turn.tools.on(fork))`.
    """

    number: int
    """From 0; the first is the start of the episode."""
    pending: list[ChatMessage]
    """Messages that the policy has not seen yet."""
    session: Session
    tools: Toolset
    num_bad: int = 0
    """Replies so far that were no valid tool call."""
    num_sampled: int = 0
    """Tokens sampled so far."""


AtTurn = Callable[[Turn], Awaitable[None]]


async def first_turn(task: Task, session: Session, *, spec: AgentSpec, tools: Toolset) -> Turn:
    """The opening, with what the toolset has to say first."""
    opening = list(spec.opening)
    if not opening:
        system = [ChatMessage(role=ChatRole.SYSTEM, text=spec.system)] if spec.system else []
        opening = [*system, ChatMessage(role=ChatRole.USER, text=task.instruction)]
    start = getattr(tools, "start", None)
    if start is not None and (said := await start()):
        opening[-1] = msgspec.structs.replace(opening[-1], text=opening[-1].text + said)
    return Turn(number=0, pending=opening, session=session, tools=tools)


async def run_agent(
    task: Task,
    session: Session,
    limits: Limits,
    *,
    spec: AgentSpec,
    tools: Toolset,
    deadline: float,
    rng: random.Random,
    at_turn: AtTurn | None = None,
) -> AgentRun:
    """Play one episode. Whatever the policy does ends in a StopReason; only our own machinery raises."""
    turn = await first_turn(task, session, spec=spec, tools=tools)
    return await go_on(turn, task, limits, spec=spec, deadline=deadline, rng=rng, at_turn=at_turn)


async def go_on(
    turn: Turn, task: Task, limits: Limits, *, spec: AgentSpec, deadline: float, rng: random.Random, at_turn: AtTurn | None = None
) -> AgentRun:
    """Play from a turn to the end; `at_turn` is called at every boundary, the given one included."""
    return await _Play(turn, task, limits.under(spec), spec, deadline, rng).run(at_turn)


class _Play:
    """One episode being played: what it has used of its budget, and what the policy has not been told yet."""

    def __init__(self, turn: Turn, task: Task, limits: Limits, spec: AgentSpec, deadline: float, rng: random.Random) -> None:
        self._turn, self._task, self._limits, self._spec, self._deadline, self._rng = turn, task, limits, spec, deadline, rng
        self._session, self._tools = turn.session, turn.tools
        self._known: tuple[Tool, ...] = turn.tools.tools()
        self._shown = self._known if spec.show_tools else ()
        self._needs_call = bool(turn.tools.ends) if spec.needs_call is None else spec.needs_call
        self._read_only: frozenset[str] = getattr(turn.tools, "read_only", frozenset())
        self._number, self._num_bad, self._num_sampled, self._num_calls = turn.number, turn.num_bad, turn.num_sampled, 0
        self._model_s = self._tool_s = 0.0

    async def run(self, at_turn: AtTurn | None) -> AgentRun:
        stop = await self._play(at_turn)
        facts: dict[str, Any] = getattr(self._tools, "facts", dict)()
        return AgentRun(
            stop=stop,
            timing_s={"model": self._model_s, "tool": self._tool_s},
            num_turns=self._number,
            num_calls=self._num_calls,
            num_bad_calls=self._num_bad,
            facts=facts,
        )

    async def _play(self, at_turn: AtTurn | None) -> StopReason:
        new, began, limits = list(self._turn.pending), time.monotonic(), self._limits
        while self._number < limits.max_turns:
            if limits.wall_s is not None and time.monotonic() - began > limits.wall_s:
                return StopReason.TIME_OUT
            if at_turn is not None:
                await at_turn(
                    Turn(
                        number=self._number,
                        pending=list(new),
                        session=self._session,
                        tools=self._tools,
                        num_bad=self._num_bad,
                        num_sampled=self._num_sampled,
                    )
                )
            reply = await self._ask(new)
            if reply is None or not reply.is_complete:
                return StopReason.MAX_TOKENS
            if not reply.message.calls and not reply.problems and not self._needs_call:
                return StopReason.ANSWERED
            new, stop = await self._act(reply)
            if stop is not None:
                return stop
        return StopReason.MAX_TURNS

    async def _ask(self, new: Sequence[ChatMessage]) -> Reply | None:
        """What the policy says to this; None when the budget has no room for an answer."""
        limits, max_tokens = self._limits, self._limits.max_tokens_per_turn
        if limits.max_episode_tokens is not None:
            max_tokens = min(max_tokens, limits.max_episode_tokens - self._num_sampled)
            if max_tokens < 1:
                return None
        started = time.monotonic()
        try:
            reply = await self._session.reply(
                new,
                max_tokens=max_tokens,
                max_context=limits.max_context,
                deadline=self._deadline,
                tools=self._shown,
                reads_calls=bool(self._known),
            )
        except ContextFull as full:
            if self._session.num_tokens == 0:
                # The policy has not said a word yet: the task is too long, which no agent can help.
                raise RunFailure(
                    Boundary.TASK,
                    f"{self._task.task_id} does not fit: {full}; raise engine.max_len, or show the model less: "
                    "fewer tools, or `AgentSpec(show_tools=False)` from the family's `agent`",
                ) from full
            return None
        finally:
            self._model_s += time.monotonic() - started
        self._number += 1
        self._num_sampled += reply.num_tokens
        return reply

    async def _act(self, reply: Reply) -> tuple[list[ChatMessage], StopReason | None]:
        """Run the calls of a reply: the results in order, each call answered; and why the episode ends, if it does."""
        calls, told = reply.message.calls, [self._told(problem) for problem in reply.problems]
        if not calls and not told:
            told = [self._told(self._spec.no_call.replace("{tools}", ", ".join(t.name for t in self._known)))]
        is_bad, stop, results = bool(told), None, list[ChatMessage]()
        started = time.monotonic()
        at_once = len(calls) > 1 and all(c.name in self._read_only for c in calls)
        for batch in [calls] if at_once else [(c,) for c in calls]:
            allowed = max(0, self._spec.max_calls_per_turn - len(results))
            waits_s = [self._rng.uniform(*self._limits.tool_latency_s) if self._is_slow(c) else 0.0 for c in batch[:allowed]]
            done = await _together([self._call(c, s) for c, s in zip(batch[:allowed], waits_s, strict=True)])
            too_many = f"error: not run, a reply may hold {self._spec.max_calls_per_turn} calls"
            done += [(too_many, True)] * (len(batch) - len(done))
            results += [self._result(c, text) for c, (text, _) in zip(batch, done, strict=True)]
            is_bad |= any(failed for _, failed in done)
            if any(c.name in self._tools.ends and not failed for c, (_, failed) in zip(batch, done, strict=True)):
                stop = StopReason.SUBMITTED
            elif self._tool_s + time.monotonic() - started > self._limits.tools_s:
                stop = StopReason.TIME_OUT
            if stop is not None:
                break
        self._tool_s += time.monotonic() - started if calls else 0.0
        self._num_bad += is_bad
        if stop is None and is_bad and self._num_bad >= self._limits.max_bad_calls:
            stop = StopReason.BAD_CALLS
        return results + told, stop

    def _told(self, text: str) -> ChatMessage:
        return ChatMessage(role=self._spec.told_as, text=text)

    def _result(self, call: Call, text: str) -> ChatMessage:
        # The default tools cut what they say themselves; an author's may return anything, also what no tokenizer takes.
        said = text if isinstance(self._tools, BoxTools) else shorten(text, self._limits.max_result_chars)
        said = said if said.isascii() else said.encode("utf-8", "replace").decode()
        return ChatMessage(role=ChatRole.TOOL, text=said, call_id=call.id, name=call.name)

    def _is_slow(self, call: Call) -> bool:
        return self._limits.tool_latency_s[1] > 0 and call.name not in self._tools.ends

    async def _call(self, call: Call, wait_s: float) -> tuple[str, bool]:
        """(what the policy is told, whether the call was invalid)."""
        self._num_calls += 1
        try:
            arguments = _arguments(call)
            if wait_s > 0:
                await (self._tools.pass_time(wait_s) if isinstance(self._tools, BoxTools) else asyncio.sleep(wait_s))
            return await self._tools.call(call.name, arguments), False
        except CallError as error:
            return str(error), True


def _arguments(call: Call) -> dict[str, Any]:
    try:
        found = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise CallError(f"error: the tool call is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise CallError('error: a tool call needs "name" and "arguments"')
    return found


async def _together(calls: list[Coroutine[Any, Any, tuple[str, bool]]]) -> list[tuple[str, bool]]:
    if len(calls) == 1:
        return [await calls[0]]
    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(c) for c in calls]
    except ExceptionGroup as failures:
        # The group has ended the other calls already; what broke is told by its own name.
        raise failures.exceptions[0] from failures
    return [task.result() for task in running]
