"""`verifiers` environments as they are: their rows, prompts, tools and rubric; what plays its own loop is refused with the way out."""

from __future__ import annotations

import asyncio
import builtins
import random
import signal
from typing import Any

import pytest

vf = pytest.importorskip("verifiers")

from datasets import Dataset  # noqa: E402

from rollmill.harness import CallError  # noqa: E402
from rollmill.records import Boundary, Grade, RunFailure, StopReason, Task  # noqa: E402
from rollmill.tasks import Attempt, TaskSource, agent_of, needs_box, toolset_of  # noqa: E402
from rollmill.tasks.verifiers import VerifiersFamily, from_verifiers  # noqa: E402

ROWS = [{"question": f"What is {n} + {n}?", "answer": str(2 * n), "info": {"n": n}, "hint": "add"} for n in range(1, 13)]


@pytest.fixture(autouse=True)
def own_signals() -> Any:
    """The package takes over the signals of whoever makes an environment."""
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def rows() -> Dataset:
    return Dataset.from_list(ROWS)


def first(family: VerifiersFamily) -> Task:
    return TaskSource(family, split="train", seed=0).task(0)


def conversation(family: VerifiersFamily, *said: str, **more: Any) -> Attempt:
    opening = [{"role": str(m.role), "content": m.text} for m in agent_of(family, first(family)).opening]
    answers = [{"role": "assistant", "content": text} for text in said]
    return Attempt(messages=(*opening, *answers), answer=said[-1] if said else "", **more)


def grade(family: VerifiersFamily, attempt: Attempt) -> Grade:
    return asyncio.run(family.grade(first(family), attempt))


def test_rubric_scores_with_its_parser_weights_and_every_argument_it_names() -> None:
    parser = vf.XMLParser(["answer"])
    seen: dict[str, Any] = {}

    async def right(completion: Any, answer: str, parser: Any, prompt: Any, info: Any, state: Any, hint: str) -> float:
        seen.update(roles=[m.role for m in prompt], info=info, hint=hint, turns=len(state["trajectory"]), stop=state["stop_condition"])
        return float(parser.parse_answer(completion) == answer)

    rubric = vf.Rubric(funcs=[right, parser.get_format_reward_func()], weights=[1.0, 0.5], parser=parser)
    family = from_verifiers(vf.SingleTurnEnv(dataset=rows(), system_prompt="be brief", parser=parser, rubric=rubric), name="sums")
    task = first(family)
    truth = family.row(task)["answer"]
    found = grade(family, conversation(family, f"<answer>{truth}</answer>", stop=StopReason.ANSWERED))
    assert (found.reward, found.success, found.note) == (1.5, True, "")
    assert found.parts == {"right": 1.0, "format_reward_func": 1.0, "num_turns": 1.0}
    assert seen == {"roles": ["system", "user"], "info": {"n": int(truth) // 2}, "hint": "add", "turns": 1, "stop": "answered"}
    assert grade(family, conversation(family, "no tags")).parts["right"] == 0.0
    assert not needs_box(family, task) and toolset_of(family, task, None) is None
    assert agent_of(family, task).max_turns == 1 and task.instruction.startswith("What is")
    assert family.name == "sums" and TaskSource(family, split="heldout", seed=0).task(0).split == "heldout"


def test_reward_function_that_raises_is_zero_as_in_the_package_and_the_note_says_so() -> None:
    def careless(completion: Any) -> float:
        return 1.0 / 0

    def fine(completion: Any) -> float:
        return 1.0

    family = from_verifiers(vf.SingleTurnEnv(dataset=rows(), rubric=vf.Rubric(funcs=[careless, fine])))
    found = grade(family, conversation(family, "x"))
    assert found.reward == 1.0 and "careless" in found.note and "division by zero" in found.note
    assert grade(from_verifiers(vf.SingleTurnEnv(dataset=rows(), rubric=vf.Rubric(funcs=[fine]))), conversation(family, "x")).note == ""


def test_evaluation_dataset_of_the_environment_is_held_out() -> None:
    rubric = vf.Rubric(funcs=[lambda completion: 1.0])
    judge = Dataset.from_list([{"question": "judge me", "answer": "x"}])
    family = from_verifiers(vf.SingleTurnEnv(dataset=rows, eval_dataset=lambda: judge, rubric=rubric))
    assert len(family.listed("train")) == len(ROWS) and [n for _, _, n in family.listed("heldout")] == [0]
    assert TaskSource(family, split="heldout", seed=0).task(0).instruction == "judge me"


class Fatal(Exception): ...


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one
        b: the other
    """
    if a == 666:
        raise Fatal("stop")
    return a + b


def tool_family(**options: Any) -> VerifiersFamily:
    def right(completion: Any, answer: str) -> float:
        return float(answer in str(completion[-1].content))

    return from_verifiers(vf.ToolEnv(dataset=rows(), tools=[add], max_turns=4, rubric=vf.Rubric(funcs=[right]), **options))


def test_tools_of_a_tool_env_are_shown_and_called_as_the_environment_does() -> None:
    family = tool_family(stop_errors=[Fatal], error_formatter=lambda e: f"oops: {e}")
    tools = toolset_of(family, first(family), None)
    assert tools is not None and [t.name for t in tools.tools()] == ["add"] and "a" in tools.tools()[0].parameters["properties"]
    assert asyncio.run(tools.call("add", {"a": 2, "b": 3})) == "5" and agent_of(family, first(family)).max_turns == 4
    assert asyncio.run(tools.call("add", {"a": 2})) == "oops: add() missing 1 required positional argument: 'b'"
    with pytest.raises(CallError, match="unknown tool 'sub'; tools: add"):
        asyncio.run(tools.call("sub", {}))
    with pytest.raises(RunFailure, match="add raised Fatal: stop") as caught:
        asyncio.run(tools.call("add", {"a": 666, "b": 1}))
    assert caught.value.boundary is Boundary.TASK


def test_conversations_with_tool_calls_are_scored_and_counted() -> None:
    family = tool_family()
    truth = family.row(first(family))["answer"]
    asked = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 1}}}
    attempt = conversation(family)
    more = (
        {"role": "assistant", "content": "", "tool_calls": [asked]},
        {"role": "tool", "content": truth, "tool_call_id": "c1", "name": "add"},
        {"role": "assistant", "content": f"It is {truth}"},
    )
    found = grade(family, Attempt(messages=(*attempt.messages, *more)))
    assert (found.reward, found.parts["total_tool_calls"], found.parts["add_calls"], found.parts["num_turns"]) == (1.0, 1.0, 1.0, 2.0)


def test_what_cannot_be_played_here_is_refused_with_the_way_out() -> None:
    class Chatty(vf.MultiTurnEnv):
        async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
            return []

    def ranks(completions: Any) -> list[float]:
        return [0.0 for _ in completions]

    with pytest.raises(ValueError, match=r"Chatty, which plays its own loop; .* Run it as a program"):
        from_verifiers(lambda: Chatty(dataset=rows(), rubric=vf.Rubric()))
    with pytest.raises(ValueError, match="reward functions over a whole group"):
        from_verifiers(vf.SingleTurnEnv(dataset=rows(), rubric=vf.Rubric(funcs=[ranks])))
    with pytest.raises(ValueError, match="n cannot be given to an environment that is made already"):
        from_verifiers(vf.SingleTurnEnv(dataset=rows(), rubric=vf.Rubric()), n=3)


def test_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name == "verifiers":
            raise ImportError("no verifiers")
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match=r"pip install 'rollmill\[verifiers\]'"):
        from_verifiers("some-env")


def test_the_package_itself_gives_the_same_conversation_the_same_reward() -> None:
    """Played by the package's own loop and by ours, with one scripted model: reward and metrics are equal."""
    from verifiers.types import ClientConfig, Response, ResponseMessage, ToolCall

    from rollmill.harness.agent import Limits, run_agent

    script = [("", [("c1", "add", '{"a": 3, "b": 4}'), ("c2", "add", '{"a": 1}')]), ("So it is 14.", [])]

    def careful(completion: Any, answer: str, state: Any, parser: Any, info: Any) -> float:
        told = [m.content for m in completion if m.role == "tool"]
        return len(told) + 0.1 * len(state["trajectory"]) + info["n"] + float(answer in (parser.parse_answer(completion) or ""))

    environment = vf.ToolEnv(dataset=rows(), tools=[add], rubric=vf.Rubric(funcs=[careful], weights=[0.5]), system_prompt="use tools")
    family = from_verifiers(environment, name="sums")
    task = first(family)
    left = list(script)

    async def scripted(state: Any, prompt: Any, **options: Any) -> Any:
        text, calls = left.pop(0)
        found = [ToolCall(id=i, name=n, arguments=a) for i, n, a in calls] or None
        message = ResponseMessage(content=text, tool_calls=found, finish_reason="stop", is_truncated=False)
        return Response(id="r", created=0, model="m", message=message)

    environment.get_model_response = scripted
    theirs = asyncio.run(environment._run_rollout_state(dict(family.row(task)), ClientConfig(), "m", {}))

    class Session:
        """The same model, behind our seam."""

        num_tokens = 0

        def __init__(self) -> None:
            self.left, self.messages = list(script), list[dict[str, Any]]()

        async def reply(self, new: Any, **options: Any) -> Any:
            from rollmill.chat.messages import Call, ChatMessage, ChatRole
            from rollmill.gateway.sessions.session import Reply

            text, calls = self.left.pop(0)
            said = ChatMessage(role=ChatRole.ASSISTANT, text=text, calls=tuple(Call(id=i, name=n, arguments=a) for i, n, a in calls))
            self.messages += [m.as_template() for m in (*new, said)]
            return Reply(text=text, message=said, is_complete=True, num_tokens=1)

    session: Any = Session()
    tools = toolset_of(family, task, None)
    assert tools is not None
    limits = Limits(max_turns=9, max_tokens_per_turn=9, max_context=99, tool_s=9.0)

    async def ours() -> Grade:
        run = await run_agent(task, session, limits, spec=agent_of(family, task), tools=tools, deadline=0.0, rng=random.Random(0))
        return await family.grade(task, Attempt(messages=tuple(session.messages), stop=run.stop, facts=run.facts))

    found = asyncio.run(ours())
    assert (found.reward, found.parts) == (theirs["reward"], theirs["metrics"])
    assert [(m["role"], m["content"]) for m in session.messages[2:]] == [(m.role, m.content) for m in theirs["completion"]]
