"""What a TRL user has works as it is: reward functions with columns, weights and None, environment classes, chat and text prompts."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

from rollmill.harness import CallError
from rollmill.records import Boundary, Grade, RunFailure, Task
from rollmill.tasks import Attempt, TaskSource, agent_of, needs_box, toolset_of
from rollmill.tasks.trl import TrlFamily, from_trl

CHAT = [{"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "2+2"}], "truth": "4", "topic": "math"}]
SAID = (
    {"role": "system", "content": "s"},
    {"role": "user", "content": "2+2"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}],
    },
    {"role": "tool", "content": "4", "tool_call_id": "c", "name": "add"},
    {"role": "assistant", "content": "It is 4"},
)


def first(family: TrlFamily) -> Task:
    return TaskSource(family, split="train", seed=0).task(0)


def grade(family: TrlFamily, attempt: Attempt) -> Grade:
    return asyncio.run(family.grade(first(family), attempt))


def test_text_prompts_give_text_completions_and_columns_as_lists() -> None:
    seen: dict[str, Any] = {}

    def reward(prompts: list[str], completions: list[str], truth: list[str], **kwargs: Any) -> list[float]:
        seen.update(kwargs, prompts=prompts, completions=completions)
        return [1.0 if t in c else 0.0 for c, t in zip(completions, truth, strict=True)]

    family = from_trl([{"prompt": "2+2", "truth": "4", "topic": "math"}], reward)
    found = grade(family, Attempt(answer="It is 4", messages=SAID, token_ids=(5, 6, 7)))
    assert found == Grade(reward=1.0, success=True, parts={"reward": 1.0})
    assert (seen["prompts"], seen["completions"], seen["completion_ids"], seen["topic"]) == (["2+2"], ["It is 4"], [[5, 6, 7]], ["math"])
    assert not needs_box(family, first(family)) and agent_of(family, first(family)).needs_call is False


def test_chat_prompts_give_the_messages_after_the_prompt_tool_messages_included() -> None:
    seen: dict[str, Any] = {}

    async def reward(prompts: Any, completions: Any, **kwargs: Any) -> list[float]:
        seen.update(prompts=prompts, completions=completions)
        return [float(len(completions[0]))]

    family = from_trl(CHAT, reward, success_at=3.0)
    assert grade(family, Attempt(answer="It is 4", messages=SAID)).reward == 3.0
    assert seen["prompts"] == [list(SAID[:2])] and seen["completions"] == [list(SAID[2:])]
    assert [m.role for m in agent_of(family, first(family)).opening] == ["system", "user"]
    other = ({"role": "system", "content": "an agent's own"}, *SAID[1:])
    assert grade(family, Attempt(messages=other)).reward == 3.0
    bare = ({"role": "user", "content": "all in one"}, *SAID[2:])
    assert grade(family, Attempt(messages=bare)).reward == 3.0


def test_several_functions_are_weighted_and_named_and_none_does_not_count() -> None:
    def right(completions: Any, **kwargs: Any) -> list[float]:
        return [1.0]

    def short(completions: Any, **kwargs: Any) -> list[float]:
        return [0.5]

    def code_only(topic: list[str], **kwargs: Any) -> list[float | None]:
        return [None if t != "code" else 1.0 for t in topic]

    family = from_trl(CHAT, [right, short, code_only], reward_weights=[1.0, 0.2, 3.0])
    assert grade(family, Attempt(messages=SAID)) == Grade(reward=1.1, success=True, parts={"right": 1.0, "short": 0.5})
    with pytest.raises(ValueError, match="no reward function applies to trl/train/default/1/0"):
        grade(from_trl(CHAT, code_only), Attempt(messages=SAID))
    with pytest.raises(ValueError, match="reward_weights has 1 numbers for 2"):
        from_trl(CHAT, [right, short], reward_weights=[1.0])


def test_metrics_that_a_function_logs_become_parts() -> None:
    def reward(log_metric: Any, **kwargs: Any) -> list[float]:
        log_metric("length", 3)
        kwargs["log_extra"]("seen", ["x"])
        return [0.0]

    assert grade(from_trl(CHAT, reward), Attempt(messages=SAID)).parts == {"length": 3.0, "reward": 0.0}


def test_functions_that_cannot_be_called_here_are_refused_at_once() -> None:
    def wants_state(trainer_state: Any, **kwargs: Any) -> list[float]:
        return [0.0]

    def compares(completions: Any, **kwargs: Any) -> list[float]:
        return [0.0]

    compares.group_wise = True  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="wants_state needs 'trainer_state', which is not given"):
        from_trl(CHAT, wants_state)
    with pytest.raises(ValueError, match="compares the completions of a group"):
        from_trl(CHAT, compares)
    with pytest.raises(ValueError, match="'some/reward-model' is a model"):
        from_trl(CHAT, ["some/reward-model"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="nothing gives a reward"):
        from_trl(CHAT, environment_factory=Silent)
    with pytest.raises(ValueError, match="neither a train_dataset nor an environment_factory"):
        from_trl(None, compares)


def test_a_function_without_kwargs_is_given_what_it_names() -> None:
    def fixed(completions: Any, truth: Any) -> list[float]:
        return [float(truth == ["4"])]

    assert grade(from_trl(CHAT, fixed), Attempt(messages=SAID)).reward == 1.0


def test_wrong_answers_of_a_function_are_the_graders_failure() -> None:
    def number(**kwargs: Any) -> Any:
        return 1.0

    with pytest.raises(ValueError, match=r"number returned 1\.0; it must return a list"):
        grade(from_trl(CHAT, number), Attempt(messages=SAID))


def test_functions_that_need_the_main_thread_get_it() -> None:
    def where(**kwargs: Any) -> list[float]:
        return [float(threading.current_thread() is threading.main_thread())]

    assert grade(from_trl(CHAT, where), Attempt(messages=SAID)).reward == 0.0
    assert grade(from_trl(CHAT, where, in_threads=False), Attempt(messages=SAID)).reward == 1.0


def test_rewards_may_be_arrays_and_not_a_number_means_none() -> None:
    def array(**kwargs: Any) -> Any:
        return np.array([0.5], np.float32)

    def not_here(**kwargs: Any) -> list[float]:
        return [float("nan")]

    def generated(**kwargs: Any) -> Any:
        return (r for r in [1])

    assert grade(from_trl(CHAT, [array, not_here, generated]), Attempt(messages=SAID)).parts == {"array": 0.5, "generated": 1.0}
    for wrong in (lambda **kwargs: "1", lambda **kwargs: [1.0, 2.0], lambda **kwargs: {"a": 1.0}):
        with pytest.raises(ValueError, match="one reward per completion"):
            grade(from_trl(CHAT, wrong), Attempt(messages=SAID))


def test_reasoning_is_in_the_text_unless_there_are_tools() -> None:
    seen: list[Any] = []

    def reward(completions: Any, **kwargs: Any) -> list[float]:
        seen.append(completions[0])
        return [0.0]

    def tool() -> str:
        "Do it."
        return ""

    said = (*SAID[:2], {"role": "assistant", "content": "4", "reasoning_content": "2 and 2"})
    aloud = "<think>\n2 and 2\n</think>\n4"
    grade(from_trl(CHAT, reward), Attempt(messages=said))
    grade(from_trl([{"prompt": "2+2"}], reward), Attempt(messages=said, answer="4"))
    grade(from_trl(CHAT, reward, tools=[tool]), Attempt(messages=said))
    assert seen == [[{"role": "assistant", "content": aloud}], aloud, [said[2]]]


def test_columns_whose_names_are_taken_are_not_passed_on() -> None:
    def wants(completion: Any, **kwargs: Any) -> list[float]:
        return [0.0]

    def takes(**kwargs: Any) -> list[float]:
        return [float("completion" in kwargs or "prompt" in kwargs)]

    rows = [{**CHAT[0], "completion": "the target"}]
    assert grade(from_trl(rows, takes), Attempt(messages=SAID)).reward == 0.0
    with pytest.raises(ValueError, match="wants needs 'completion', which is not given"):
        from_trl(rows, wants)


class Silent:
    def reset(self, **kwargs: Any) -> None: ...


class Door:
    """Opens with the right word."""

    made = 0

    def __init__(self) -> None:
        Door.made += 1
        self.word, self.reward, self.is_open = "", 0.0, False

    def reset(self, word: str, **kwargs: Any) -> str | None:
        self.word = word
        return f" It has {len(word)} letters."

    def say(self, word: str) -> str:
        """
        Say a word to the door.

        Args:
            word: the word

        Returns:
            what happens
        """
        if self.is_open:
            raise ValueError("It is open already.")
        self.is_open = word == self.word
        self.reward = float(self.is_open)
        return "It opens." if self.is_open else "Nothing happens."


class ScoredDoor(Door):
    async def get_reward(self) -> float:
        return 2.0 * self.reward


WORDS = [{"prompt": [{"role": "user", "content": "Open the door."}], "word": "sesame"}]


def opened(family: TrlFamily, *words: str) -> tuple[list[str], dict[str, Any], str | None]:
    tools: Any = toolset_of(family, first(family), None)

    async def scene() -> tuple[list[str], dict[str, Any], str | None]:
        said, told = await tools.start(), []
        for word in words:
            try:
                told.append(await tools.call("say", {"word": word}))
            except CallError as error:
                told.append(str(error))
        return told, tools.facts(), said

    return asyncio.run(scene())


def test_environment_methods_are_tools_over_an_instance_of_the_attempts_own() -> None:
    def by_state(environments: list[Door], **kwargs: Any) -> list[float]:
        return [e.reward for e in environments]

    family = from_trl(WORDS, by_state, environment_factory=Door)
    tools = toolset_of(family, first(family), None)
    assert tools is not None and [t.name for t in tools.tools()] == ["say"]
    assert tools.tools()[0].description == "Say a word to the door."
    assert tools.tools()[0].parameters["properties"]["word"] == {"type": "string", "description": "the word"}
    told, facts, said = opened(family, "plum", "sesame", "sesame")
    assert told == ["Nothing happens.", "It opens.", "error: It is open already."] and said == " It has 6 letters."
    other = opened(family, "plum")[1]
    assert facts["environment"] is not other["environment"]
    assert grade(family, Attempt(messages=SAID, facts=facts)).reward == 1.0
    assert grade(family, Attempt(messages=SAID, facts=other)).reward == 0.0


def test_environments_may_score_themselves() -> None:
    def bonus(environments: Any, **kwargs: Any) -> list[float]:
        return [0.5]

    _, facts, _ = opened(from_trl(WORDS, environment_factory=ScoredDoor), "sesame")
    found = grade(from_trl(WORDS, bonus, environment_factory=ScoredDoor), Attempt(messages=SAID, facts=facts))
    assert found == Grade(reward=2.5, success=True, parts={"bonus": 0.5, "ScoredDoor": 2.0})
    plain = from_trl(WORDS, environment_factory=Door)
    assert grade(plain, Attempt(messages=SAID, facts=opened(plain, "sesame")[1])) == Grade(reward=1.0, success=True, parts={"Door": 1.0})


def test_environment_is_closed_once_its_attempt_is_over() -> None:
    closed: list[bool] = []

    class Held(Door):
        def close(self) -> None:
            closed.append(self.is_open)
            raise ConnectionError("gone already")

    family = from_trl(WORDS, environment_factory=Held)
    _, facts, _ = opened(family, "sesame")
    assert grade(family, Attempt(messages=SAID, facts=facts)).reward == 1.0 and closed == [True]
    tools: Any = toolset_of(family, first(family), None)
    asyncio.run(tools.start())
    asyncio.run(tools.close())
    assert closed == [True, False]


def test_rows_may_choose_among_environments_and_need_no_prompt() -> None:
    class Window(Door): ...

    both = {"door": Door, "window": Window}
    family = from_trl(
        [{"environment": "window", "word": "w"}], environment_factory=both, eval_dataset=[{"environment": "door", "word": "d"}]
    )
    assert type(opened(family)[1]["environment"]) is Window
    assert [m.text for m in agent_of(family, first(family)).opening] == [""]
    with pytest.raises(ValueError, match="row 0 names the environment 'roof' in its column `environment`; known: door, window"):
        from_trl([{"environment": "roof", "word": "w"}], environment_factory=both)


def test_environment_that_sets_the_task_by_itself_needs_no_dataset() -> None:
    class Dice:
        def reset(self) -> str:
            return "Roll."

        def get_reward(self) -> float:
            return 1.0

    family = from_trl(environment_factory=Dice)
    assert len({TaskSource(family, split=s, seed=0).task(3).task_id for s in ("train", "heldout")}) == 2


def test_environment_that_cannot_start_is_the_tasks_failure() -> None:
    class Broken(Door):
        def reset(self, **kwargs: Any) -> str:
            raise KeyError("no server")

    with pytest.raises(RunFailure, match=r"Broken.reset raised KeyError") as caught:
        opened(from_trl(WORDS, environment_factory=Broken))
    assert caught.value.boundary is Boundary.TASK
    with pytest.raises(ValueError, match="environment Task has no reset"):
        from_trl(WORDS, environment_factory=lambda: first(from_trl(WORDS, environment_factory=Door)))


def test_plain_functions_may_be_tools_beside_the_environment() -> None:
    def hint() -> str:
        """Ask for help."""
        return "Think of seeds."

    def reward(completions: Any, **kwargs: Any) -> list[float]:
        return [0.0]

    tools = toolset_of(family := from_trl(WORDS, environment_factory=Door, tools=[hint]), first(family), None)
    assert tools is not None and [t.name for t in tools.tools()] == ["say", "hint"]
    alone = toolset_of(family := from_trl(CHAT, reward, tools=[hint]), first(family), None)
    assert alone is not None and asyncio.run(alone.call("hint", {})) == "Think of seeds."
