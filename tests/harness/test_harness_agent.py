"""The agent loop: whatever the policy does ends in a stop reason; only our own machinery raises."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from typing import Any

import pytest

from rollmill.gateway import ContextFull, Reply
from rollmill.harness import AgentRun, Limits, run_agent
from rollmill.records import Boundary, RunFailure, StopReason, Task
from rollmill.sandbox import ExecResult

TASK = Task(task_id="t/1", family="t", kind="k", level=1, seed=0, split="train", instruction="do it", files={})
LIMITS = Limits(max_turns=4, max_tokens_per_turn=16, max_context=100, tool_s=1.0, max_result_chars=50)


class FakeSession:
    """Says what it was told to say; a token is a character."""

    def __init__(self, *said: str | Reply | Exception) -> None:
        self._left = list(said)
        self.num_tokens = 0
        self.heard: list[list[dict[str, Any]]] = []

    async def reply(self, new: Sequence[dict[str, Any]], *, max_tokens: int, max_context: int, deadline: float) -> Reply:
        size = self.num_tokens + sum(len(m["content"]) for m in new)
        if size >= max_context:
            raise ContextFull(size, max_context)
        self.heard.append(list(new))
        said = self._left.pop(0)
        if isinstance(said, Exception):
            raise said
        reply = said if isinstance(said, Reply) else Reply(text=said, is_complete=True, num_tokens=1)
        self.num_tokens = size + reply.num_tokens
        return reply


class FakeBox:
    """Echoes commands instead of running them."""

    def __init__(self, error: Exception | None = None) -> None:
        self.commands: list[str] = []
        self._error = error

    async def exec(self, argv: Sequence[str], *, timeout_s: float, stdin: bytes = b"", max_output_bytes: int = 1 << 16) -> ExecResult:
        self.commands.append(argv[-1])
        if self._error:
            raise self._error
        return ExecResult(exit_code=0, stdout=argv[-1].encode(), num_output_bytes=len(argv[-1]), timed_out=False, wall_s=0.0)


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def play(session: FakeSession, box: FakeBox | None = None, limits: Limits = LIMITS, task: Task = TASK) -> AgentRun:
    deadline = time.monotonic() + 60.0
    return asyncio.run(run_agent(task, box or FakeBox(), session, limits, deadline=deadline, rng=random.Random(0)))  # type: ignore[arg-type]


def test_submitting_ends_the_episode() -> None:
    session, box = FakeSession(call("bash", command="ls"), call("submit")), FakeBox()
    run = play(session, box)
    assert run.stop is StopReason.SUBMITTED and box.commands == ["ls"]
    assert [[m["role"] for m in new] for new in session.heard] == [["system", "user"], ["tool"]]
    assert session.heard[1][0]["content"] == "ls" and set(run.timing_s) == {"model", "tool"}


def test_calls_after_a_submit_are_not_run() -> None:
    box = FakeBox()
    assert play(FakeSession(call("bash", command="a") + call("submit") + call("bash", command="b")), box).stop is StopReason.SUBMITTED
    assert box.commands == ["a"]


def test_several_calls_of_one_turn_are_answered_in_order() -> None:
    session = FakeSession(call("bash", command="a") + call("bash", command="b"), call("submit"))
    play(session)
    assert [m["content"] for m in session.heard[1]] == ["a", "b"]


def test_turns_are_counted() -> None:
    session = FakeSession(*[call("bash", command="x")] * 9)
    assert play(session).stop is StopReason.MAX_TURNS and len(session.heard) == LIMITS.max_turns


def test_invalid_call_is_told_and_costs_a_turn() -> None:
    limits = Limits(max_turns=4, max_tokens_per_turn=16, max_context=1000, tool_s=1.0, max_bad_calls=4)
    session = FakeSession("hm", call("fly"), call("bash"), call("submit"))
    assert play(session, limits=limits).stop is StopReason.SUBMITTED
    told = [new[0]["content"] for new in session.heard[1:]]
    assert ["no tool call" in told[0], "unknown tool 'fly'" in told[1], "needs the text argument" in told[2]] == [True] * 3


def test_truncated_reply_ends_the_episode_unrun() -> None:
    box = FakeBox()
    cut = Reply(text=call("bash", command="rm"), is_complete=False, num_tokens=16)
    assert play(FakeSession(cut), box).stop is StopReason.MAX_TOKENS and box.commands == []


def test_tool_result_that_overflows_the_context_ends_the_episode_gracefully() -> None:
    limits = Limits(max_turns=4, max_tokens_per_turn=16, max_context=100, tool_s=1.0, max_result_chars=2000)
    session = FakeSession(call("bash", command="x" * 500), call("submit"))
    assert play(session, limits=limits).stop is StopReason.MAX_TOKENS and len(session.heard) == 1


def test_long_tool_result_that_fits_does_not_end_the_episode() -> None:
    """Only tokens count: a result of more characters than the context has tokens may well fit."""

    class Compact(FakeSession):
        async def reply(self, new: Sequence[dict[str, Any]], **options: Any) -> Reply:
            return await super().reply([{**m, "content": m["content"][::100]} for m in new], **options)

    limits = Limits(max_turns=4, max_tokens_per_turn=16, max_context=100, tool_s=1.0, max_result_chars=5000)
    assert play(Compact(call("bash", command="x" * 500), call("submit")), limits=limits).stop is StopReason.SUBMITTED


def test_instruction_that_does_not_fit_is_the_tasks_failure() -> None:
    task = Task(task_id="t/2", family="t", kind="k", level=1, seed=0, split="train", instruction="x" * 200, files={})
    with pytest.raises(RunFailure, match="t/2 does not fit") as caught:
        play(FakeSession(), task=task)
    assert caught.value.boundary is Boundary.TASK


@pytest.mark.parametrize("boundary", [Boundary.MODEL, Boundary.SANDBOX])
def test_failures_of_our_own_pass_through(boundary: Boundary) -> None:
    failure = RunFailure(boundary, "broken")
    session = FakeSession(failure) if boundary is Boundary.MODEL else FakeSession(call("bash", command="x"))
    with pytest.raises(RunFailure) as caught:
        play(session, FakeBox(failure))
    assert caught.value is failure


def test_tool_outside_the_tasks_list_is_refused() -> None:
    task = Task(task_id="t/3", family="t", kind="k", level=1, seed=0, split="train", instruction="x", files={}, tools=("read", "submit"))
    limits, box = Limits(max_turns=4, max_tokens_per_turn=16, max_context=1000, tool_s=1.0), FakeBox()
    session = FakeSession(call("bash", command="x"), call("submit"))
    assert play(session, box, limits, task).stop is StopReason.SUBMITTED
    assert box.commands == [] and session.heard[1][0]["content"] == "error: unknown tool 'bash'; tools: read, submit"


def test_too_many_invalid_calls_end_the_episode_with_a_grade() -> None:
    limits = Limits(max_turns=9, max_tokens_per_turn=16, max_context=1000, tool_s=1.0, max_bad_calls=2)
    assert play(FakeSession("hm", "hm", call("submit")), limits=limits).stop is StopReason.BAD_CALLS


def test_tools_that_use_up_the_time_end_the_episode_with_a_grade() -> None:
    limits = Limits(max_turns=9, max_tokens_per_turn=16, max_context=1000, tool_s=1.0, tools_s=0.0)
    assert play(FakeSession(call("bash", command="true"), call("submit")), limits=limits).stop is StopReason.TIME_OUT
