"""An episode is branched at a turn boundary: the box forks, the conversation forks, and both go on by themselves. Real boxes."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from typing import Any

import pytest

from rollmill.gateway import Reply
from rollmill.harness import Limits, Turn, go_on, run_agent
from rollmill.records import StopReason, Task
from rollmill.sandbox import SandboxSpec
from rollmill.sandbox.namespace import NamespaceBackend

TASK = Task(task_id="t/1", family="t", kind="k", level=1, seed=0, split="train", instruction="do it", files={})
LIMITS = Limits(max_turns=6, max_tokens_per_turn=16, max_context=10_000, tool_s=10.0)


def bash(command: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'bash', 'arguments': {'command': command}})}</tool_call>"


SUBMIT = '<tool_call>{"name": "submit", "arguments": {}}</tool_call>'


class ScriptedSession:
    """Says what it was told to say, and remembers what it heard; a branch remembers it too."""

    num_tokens = 1

    def __init__(self, said: Sequence[str], heard: Sequence[str] = ()) -> None:
        self._left, self.heard = list(said), list(heard)

    def branch(self, said: Sequence[str]) -> ScriptedSession:
        return ScriptedSession(said, self.heard)

    async def reply(self, new: Sequence[dict[str, Any]], *, max_tokens: int, max_context: int, deadline: float) -> Reply:
        self.heard += [m["content"] for m in new]
        return Reply(text=self._left.pop(0), is_complete=True, num_tokens=1)


def test_branches_of_an_episode_share_its_past_and_nothing_else() -> None:
    if (reason := NamespaceBackend.probe()) is not None:
        pytest.skip(reason)

    async def scene() -> None:
        backend = NamespaceBackend(num_prepared=4)
        deadline, rng = time.monotonic() + 60.0, random.Random(0)
        branches: list[Turn] = []

        async def at_turn(turn: Turn) -> None:
            if turn.number == 2:
                snapshot = await turn.box.snapshot()
                for word, box in zip(("left", "right"), await snapshot.fork(2), strict=True):
                    session = turn.session.branch([bash(f"echo {word} >> log; cat log"), SUBMIT])  # type: ignore[arg-type]
                    branches.append(Turn(number=turn.number, pending=turn.pending, session=session, box=box))
                await snapshot.close()

        try:
            box = await backend.create(SandboxSpec())
            trunk = ScriptedSession(
                [bash("echo one >> log"), bash("echo two >> log; echo seen"), bash("echo trunk >> log; cat log"), SUBMIT]
            )
            run = await run_agent(TASK, box, trunk, LIMITS, deadline=deadline, rng=rng, at_turn=at_turn)  # type: ignore[arg-type]
            ends = [await go_on(branch, TASK, LIMITS, deadline=deadline, rng=rng) for branch in branches]
        finally:
            await backend.close()
        assert {run.stop, *(end.stop for end in ends)} == {StopReason.SUBMITTED} and len(ends) == 2
        heard = [trunk.heard, *(branch.session.heard for branch in branches)]  # type: ignore[attr-defined]
        assert [h[-1] for h in heard] == ["one\ntwo\ntrunk\n", "one\ntwo\nleft\n", "one\ntwo\nright\n"]
        assert all(h[:4] == heard[0][:4] and h[3] == "seen\n" for h in heard)

    asyncio.run(scene())
