"""The agent loop: whatever the policy does ends in a stop reason; only our own machinery raises."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from harness_fakes import EchoBox, ScriptedSession, call, reply

from rollmill.chat.messages import Call, ChatMessage, ChatRole
from rollmill.gateway.sessions.session import Reply
from rollmill.harness import AgentRun, AgentSpec, BoxTools, FunctionTools, Limits, NoTools, Toolset, Turn, run_agent
from rollmill.records import Boundary, RunFailure, StopReason, Task
from rollmill.tasks.repo import RepoFamily

OLD = ("bash", "read", "write", "edit", "submit")
TASK = Task(task_id="t/1", family="t", kind="k", level=1, seed=0, split="train", instruction="do it", files={})
LIMITS = Limits(max_turns=4, max_tokens_per_turn=16, max_context=100, tool_s=1.0, max_result_chars=50)
ROOMY = Limits(max_turns=9, max_tokens_per_turn=16, max_context=10_000, tool_s=1.0, max_bad_calls=4)
REPO = RepoFamily().agent(TASK)


def play(
    session: ScriptedSession,
    box: EchoBox | None = None,
    limits: Limits = LIMITS,
    task: Task = TASK,
    spec: AgentSpec = REPO,
    tools: Toolset | None = None,
    **options: Any,
) -> AgentRun:
    deadline = time.monotonic() + 60.0
    tools = tools or BoxTools(box or EchoBox(), task.tools, tool_s=limits.tool_s, max_chars=limits.max_result_chars)  # type: ignore[arg-type]
    run = run_agent(task, session, limits, spec=spec, tools=tools, deadline=deadline, rng=random.Random(0), **options)  # type: ignore[arg-type]
    return asyncio.run(run)


def test_submitting_ends_the_episode() -> None:
    session, box = ScriptedSession([call("bash", command="ls")], [call("submit")]), EchoBox()
    run = play(session, box)
    assert run.stop is StopReason.SUBMITTED and box.commands == ["ls"]
    assert [[m.role for m in new] for new in session.heard] == [["system", "user"], ["tool"]]
    assert session.told == [["ls"]] and set(run.timing_s) == {"model", "tool"}
    assert (run.num_turns, run.num_calls, run.num_bad_calls) == (2, 2, 0)


def test_the_repo_family_shows_no_schemas_and_its_prompt_is_the_one_models_were_taught() -> None:
    session = ScriptedSession([call("submit")])
    play(session)
    assert session.asked[0]["tools"] == [] and session.asked[0]["reads_calls"]
    assert [m.text for m in session.heard[0]] == ["You are a coding agent. Use the tools, then submit.", "do it"]


def test_results_name_the_call_they_answer() -> None:
    session = ScriptedSession([call("bash", command="a")], [call("submit")])
    play(session)
    assert session.heard[1] == [ChatMessage(role=ChatRole.TOOL, text="a", call_id="call_bash", name="bash")]


def test_calls_after_a_submit_are_not_run() -> None:
    box = EchoBox()
    said = [call("bash", command="a"), call("submit"), call("bash", command="b")]
    assert play(ScriptedSession(said), box).stop is StopReason.SUBMITTED
    assert box.commands == ["a"]


def test_submit_with_wrong_arguments_does_not_end_the_episode() -> None:
    session = ScriptedSession([call("submit", answer="3")], [call("submit")])
    assert play(session, limits=ROOMY).stop is StopReason.SUBMITTED
    assert session.told == [["error: submit has no argument 'answer'; it takes: none"]]


def test_several_calls_of_one_turn_are_answered_in_order() -> None:
    session = ScriptedSession([call("bash", command="a"), call("bash", command="b")], [call("submit")])
    play(session)
    assert session.told == [["a", "b"]]


def test_every_call_of_a_turn_is_answered_though_one_is_invalid() -> None:
    session, box = ScriptedSession([call("bash"), call("bash", command="b"), call("fly")], [call("submit")]), EchoBox()
    run = play(session, box, limits=ROOMY)
    assert run.stop is StopReason.SUBMITTED and run.num_bad_calls == 1 and box.commands == ["b"]
    assert session.told == [
        ["error: bash needs the text argument 'command'", "b", f"error: unknown tool 'fly'; tools: {', '.join(OLD)}"],
    ]


def test_calls_beyond_the_limit_of_a_turn_are_answered_and_not_run() -> None:
    spec, box = msgspec.structs.replace(REPO, max_calls_per_turn=2), EchoBox()
    session = ScriptedSession([call("bash", command=c) for c in "abc"], [call("submit")])
    assert play(session, box, limits=ROOMY, spec=spec).stop is StopReason.SUBMITTED
    assert box.commands == ["a", "b"] and session.told == [["a", "b", "error: not run, a reply may hold 2 calls"]]


def test_turns_are_counted() -> None:
    session = ScriptedSession(*[[call("bash", command="x")]] * 9)
    assert play(session).stop is StopReason.MAX_TURNS and len(session.heard) == LIMITS.max_turns


def test_invalid_call_is_told_and_costs_a_turn() -> None:
    session = ScriptedSession("hm", [call("fly")], [call("bash")], [call("submit")])
    assert play(session, limits=ROOMY).stop is StopReason.SUBMITTED
    assert session.told == [
        [f"error: no tool call found; answer with <tool_call>{{...}}</tool_call>, tools: {', '.join(OLD)}"],
        [f"error: unknown tool 'fly'; tools: {', '.join(OLD)}"],
        ["error: bash needs the text argument 'command'"],
    ]
    assert all(m.role is ChatRole.TOOL for new in session.heard[1:] for m in new)


def test_malformed_calls_are_told_in_the_readers_words() -> None:
    session = ScriptedSession(
        reply("<tool_call>{x}</tool_call>", problems=("error: the tool call is not valid JSON: why",)), [call("submit")]
    )
    assert play(session, limits=ROOMY).stop is StopReason.SUBMITTED
    assert session.told == [["error: the tool call is not valid JSON: why"]]


@pytest.mark.parametrize("arguments", ["{x", "[1]", "3", '"ls"', "[" * 100_000, "9" * 10_000])
def test_arguments_that_are_no_object_are_an_answer_not_an_exception(arguments: str) -> None:
    session = ScriptedSession([Call(id="c", name="bash", arguments=arguments)], [call("submit")])
    assert play(session, limits=ROOMY).stop is StopReason.SUBMITTED
    assert session.told[0][0].startswith("error: ")


def test_truncated_reply_ends_the_episode_unrun() -> None:
    box = EchoBox()
    cut = reply("", call("bash", command="rm"), is_complete=False, num_tokens=16)
    assert play(ScriptedSession(cut), box).stop is StopReason.MAX_TOKENS and box.commands == []


def test_tool_result_that_overflows_the_context_ends_the_episode_gracefully() -> None:
    limits = Limits(max_turns=4, max_tokens_per_turn=16, max_context=100, tool_s=1.0, max_result_chars=2000)
    session = ScriptedSession([call("bash", command="x" * 500)], [call("submit")])
    assert play(session, limits=limits).stop is StopReason.MAX_TOKENS and len(session.heard) == 1


def test_long_tool_result_that_fits_does_not_end_the_episode() -> None:
    """Only tokens count: a result of more characters than the context has tokens may well fit."""

    class Compact(ScriptedSession):
        async def reply(self, new: Sequence[ChatMessage], **options: Any) -> Reply:
            return await super().reply([msgspec.structs.replace(m, text=m.text[::100]) for m in new], **options)

    limits = Limits(max_turns=4, max_tokens_per_turn=16, max_context=100, tool_s=1.0, max_result_chars=5000)
    assert play(Compact([call("bash", command="x" * 500)], [call("submit")]), limits=limits).stop is StopReason.SUBMITTED


def test_instruction_that_does_not_fit_is_the_tasks_failure() -> None:
    task = Task(task_id="t/2", family="t", kind="k", level=1, seed=0, split="train", instruction="x" * 200, files={})
    with pytest.raises(RunFailure, match="t/2 does not fit") as caught:
        play(ScriptedSession(), task=task)
    assert caught.value.boundary is Boundary.TASK


@pytest.mark.parametrize("boundary", [Boundary.MODEL, Boundary.SANDBOX])
def test_failures_of_our_own_pass_through(boundary: Boundary) -> None:
    failure = RunFailure(boundary, "broken")
    session = ScriptedSession(failure) if boundary is Boundary.MODEL else ScriptedSession([call("bash", command="x")])
    with pytest.raises(RunFailure) as caught:
        play(session, EchoBox(failure))
    assert caught.value is failure


def test_tool_outside_the_tasks_list_is_refused() -> None:
    task = Task(task_id="t/3", family="t", kind="k", level=1, seed=0, split="train", instruction="x", files={}, tools=("read", "submit"))
    session, box = ScriptedSession([call("bash", command="x")], [call("submit")]), EchoBox()
    assert play(session, box, ROOMY, task).stop is StopReason.SUBMITTED
    assert box.commands == [] and session.told == [["error: unknown tool 'bash'; tools: read, submit"]]


def test_too_many_invalid_calls_end_the_episode_with_a_grade() -> None:
    limits = msgspec.structs.replace(ROOMY, max_bad_calls=2)
    assert play(ScriptedSession("hm", "hm", [call("submit")]), limits=limits).stop is StopReason.BAD_CALLS


def test_tools_that_use_up_the_time_end_the_episode_with_a_grade() -> None:
    limits = msgspec.structs.replace(ROOMY, tools_s=0.0)
    assert play(ScriptedSession([call("bash", command="true")], [call("submit")]), limits=limits).stop is StopReason.TIME_OUT


def test_tokens_of_an_episode_are_a_budget_of_their_own() -> None:
    limits = msgspec.structs.replace(ROOMY, max_episode_tokens=20)
    session = ScriptedSession(*[reply("", call("bash", command="x"), num_tokens=9)] * 9)
    assert play(session, limits=limits).stop is StopReason.MAX_TOKENS
    assert [a["max_tokens"] for a in session.asked] == [16, 11, 2]


def test_wall_time_ends_the_episode_before_the_next_turn() -> None:
    limits = msgspec.structs.replace(ROOMY, wall_s=-1.0)
    session = ScriptedSession([call("submit")])
    assert play(session, limits=limits).stop is StopReason.TIME_OUT and session.heard == []


def test_limits_of_a_spec_take_the_place_of_the_runs() -> None:
    spec = msgspec.structs.replace(REPO, max_turns=1, max_tokens_per_turn=5)
    session = ScriptedSession([call("bash", command="x")], [call("submit")])
    assert play(session, spec=spec).stop is StopReason.MAX_TURNS and session.asked[0]["max_tokens"] == 5


def test_without_tools_the_first_reply_is_the_answer() -> None:
    session = ScriptedSession("42")
    run = play(session, tools=NoTools(), spec=AgentSpec())
    assert run.stop is StopReason.ANSWERED and [m.role for m in session.heard[0]] == ["user"]
    assert session.asked == [{"max_tokens": 16, "tools": [], "reads_calls": False}]


def test_tools_that_end_nothing_are_used_until_the_policy_answers() -> None:
    def double(n: int) -> int:
        """Twice a number."""
        return 2 * n

    session = ScriptedSession([call("double", n=4)], "8")
    assert play(session, tools=FunctionTools([double]), spec=AgentSpec()).stop is StopReason.ANSWERED
    assert session.told == [["8"]] and session.asked[0]["tools"] == ["double"]


def test_whatever_an_authors_tool_returns_can_be_told() -> None:
    def dump(what: str) -> str:
        return {"long": "x" * 1000, "odd": "a\ud800b"}[what]

    session = ScriptedSession([call("dump", what="long"), call("dump", what="odd")], "fine")
    play(session, tools=FunctionTools([dump]), spec=AgentSpec(), limits=msgspec.structs.replace(ROOMY, max_result_chars=10))
    assert session.told == [["xxxxx\n[990 characters left out]\nxxxxx", "a?b"]]


def test_a_valid_call_that_fails_is_no_bad_call() -> None:
    def move(to: str) -> str:
        raise ValueError("the game is over")

    session = ScriptedSession(*[[call("move", to="a")]] * 6, "I see")
    run = play(session, tools=FunctionTools([move]), spec=AgentSpec(), limits=ROOMY)
    assert (run.stop, run.num_bad_calls) == (StopReason.ANSWERED, 0) and session.told == [["error: the game is over"]] * 6


def test_a_call_may_be_demanded_and_advice_then_comes_from_the_user() -> None:
    def double(n: int) -> int:
        return 2 * n

    session = ScriptedSession("hm", [call("double", n=1)])
    run = play(session, tools=FunctionTools([double], ends=["double"]), spec=AgentSpec())
    assert run.stop is StopReason.SUBMITTED
    assert session.heard[1] == [ChatMessage(role=ChatRole.USER, text="error: no tool call found; tools: double")]


class Watched:
    """Tools that meet each other: `look` ends only once all of them are inside."""

    ends = frozenset({"done"})
    read_only = frozenset({"look"})

    def __init__(self, num: int, broken: str = "") -> None:
        self.together, self.most, self.inside, self.broken = asyncio.Barrier(num), 0, 0, broken
        self.log: list[str] = []

    def tools(self) -> tuple[Any, ...]:
        return FunctionTools({"look": self.look, "act": self.act, "done": self.done}).tools()

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        if arguments.get("at") == self.broken:
            raise RunFailure(Boundary.SANDBOX, "gone")
        return await getattr(self, name)(**arguments)

    async def look(self, at: str) -> str:
        self.inside += 1
        self.most = max(self.most, self.inside)
        await asyncio.wait_for(self.together.wait(), 10.0)
        self.inside -= 1
        return at

    async def act(self, at: str) -> str:
        self.log.append(f"> {at}")
        await asyncio.sleep(0)
        self.log.append(f"< {at}")
        return at

    async def done(self) -> str:
        return ""


def test_calls_that_only_read_run_at_the_same_time_and_are_answered_in_order() -> None:
    session, tools = ScriptedSession([call("look", at=a) for a in "abc"], [call("done")]), Watched(3)
    assert play(session, tools=tools, spec=AgentSpec(), limits=ROOMY).stop is StopReason.SUBMITTED
    assert session.told == [["a", "b", "c"]] and tools.most == 3


def test_one_call_that_writes_makes_the_whole_reply_run_in_order() -> None:
    session, tools = ScriptedSession([call("act", at="a"), call("look", at="b"), call("act", at="c")], [call("done")]), Watched(1)
    assert play(session, tools=tools, spec=AgentSpec(), limits=ROOMY).stop is StopReason.SUBMITTED
    assert tools.log == ["> a", "< a", "> c", "< c"] and session.told == [["a", "b", "c"]]


def test_a_broken_box_under_calls_at_once_is_told_by_its_own_name() -> None:
    with pytest.raises(RunFailure, match="sandbox: gone"):
        play(ScriptedSession([call("look", at=a) for a in "abc"]), tools=Watched(3, broken="b"), spec=AgentSpec(), limits=ROOMY)


class Opening(NoTools):
    """An environment that speaks first and reports at the end."""

    async def start(self) -> str:
        return " The board is empty."

    def facts(self) -> dict[str, Any]:
        return {"won": True}


def test_a_toolset_may_speak_first_and_report_at_the_end() -> None:
    session = ScriptedSession("fine")
    run = play(session, tools=Opening(), spec=AgentSpec())
    assert session.heard[0][-1].text == "do it The board is empty." and run.facts == {"won": True}


def test_an_opening_of_ones_own_takes_the_place_of_system_and_instruction() -> None:
    opening = (
        ChatMessage(role=ChatRole.USER, text="q"),
        ChatMessage(role=ChatRole.ASSISTANT, text="a"),
        ChatMessage(role=ChatRole.USER, text="r"),
    )
    session = ScriptedSession("fine")
    play(session, tools=NoTools(), spec=AgentSpec(system="unused", opening=opening))
    assert session.heard[0] == list(opening)


def test_latency_is_drawn_per_call_and_spent_in_the_box() -> None:
    limits, box = msgspec.structs.replace(ROOMY, tool_latency_s=(0.25, 0.5)), EchoBox()
    play(ScriptedSession([call("bash", command="a"), call("bash", command="b")], [call("submit")]), box, limits=limits)
    rng = random.Random(0)
    first, second = f"{rng.uniform(0.25, 0.5):.3f}", f"{rng.uniform(0.25, 0.5):.3f}"
    assert box.commands == [first, "a", second, "b"]


def test_every_turn_boundary_is_shown_with_what_is_spent() -> None:
    seen: list[Turn] = []

    async def at_turn(turn: Turn) -> None:
        seen.append(turn)

    play(ScriptedSession("hm", [call("bash", command="x")], [call("submit")]), limits=ROOMY, at_turn=at_turn)
    assert [(t.number, t.num_bad, t.num_sampled, len(t.pending)) for t in seen] == [(0, 0, 0, 2), (1, 1, 1, 1), (2, 1, 2, 1)]
    assert all(isinstance(t.tools, BoxTools) for t in seen)
