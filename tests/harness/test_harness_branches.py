"""An episode is branched at a turn boundary: the box forks, the conversation forks, and both go on by themselves. Real boxes."""

from __future__ import annotations

import asyncio
import random
import time

import msgspec
import pytest
from harness_fakes import ScriptedSession, call

from rollmill.harness import BoxTools, Limits, Turn, go_on, run_agent
from rollmill.records import StopReason, Task
from rollmill.sandbox import SandboxSpec
from rollmill.sandbox.namespace import NamespaceBackend
from rollmill.tasks.repo import RepoFamily

TASK = Task(task_id="t/1", family="t", kind="k", level=1, seed=0, split="train", instruction="do it", files={})
LIMITS = Limits(max_turns=6, max_tokens_per_turn=16, max_context=10_000, tool_s=10.0)
SPEC = RepoFamily().agent(TASK)


def test_branches_of_an_episode_share_its_past_and_nothing_else() -> None:
    if (reason := NamespaceBackend.probe()) is not None:
        pytest.skip(reason)

    async def scene() -> None:
        backend = NamespaceBackend(num_prepared=4)
        deadline, rng = time.monotonic() + 60.0, random.Random(0)
        branches: list[Turn] = []

        async def at_turn(turn: Turn) -> None:
            if turn.number == 2:
                assert isinstance(turn.tools, BoxTools)
                snapshot = await turn.tools.box.snapshot()
                for word, fork in zip(("left", "right"), await snapshot.fork(2), strict=True):
                    said = [call("bash", command=f"echo {word} >> log; cat log")]
                    session = turn.session.branch(said, [call("submit")])  # type: ignore[call-arg, arg-type]
                    branches.append(msgspec.structs.replace(turn, session=session, tools=turn.tools.on(fork)))
                await snapshot.close()

        try:
            box = await backend.create(SandboxSpec())
            commands = ("echo one >> log", "echo two >> log; echo seen", "echo trunk >> log; cat log")
            trunk = ScriptedSession(*[[call("bash", command=c)] for c in commands], [call("submit")])
            tools = BoxTools(box, TASK.tools)
            run = await run_agent(TASK, trunk, LIMITS, spec=SPEC, tools=tools, deadline=deadline, rng=rng, at_turn=at_turn)  # type: ignore[arg-type]
            ends = [await go_on(branch, TASK, LIMITS, spec=SPEC, deadline=deadline, rng=rng) for branch in branches]
        finally:
            await backend.close()
        assert {run.stop, *(end.stop for end in ends)} == {StopReason.SUBMITTED} and len(ends) == 2
        heard = [[m.text for new in s.heard for m in new] for s in (trunk, *(b.session for b in branches))]  # type: ignore[attr-defined]
        assert [h[-1] for h in heard] == ["one\ntwo\ntrunk\n", "one\ntwo\nleft\n", "one\ntwo\nright\n"]
        assert all(h[:4] == heard[0][:4] and h[3] == "seen\n" for h in heard)

    asyncio.run(scene())
