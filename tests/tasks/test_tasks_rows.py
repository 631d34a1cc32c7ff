"""Families of rows: each row is one task, prompts never change sides, and the reward is what the author's function says."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.chat.messages import Call, ChatMessage, ChatRole
from rollmill.records import Grade
from rollmill.tasks import Attempt, RowFamily, TaskSource, agent_of, needs_box, toolset_of
from rollmill.tasks.rows import message_of


def rows_of(num: int) -> list[dict[str, Any]]:
    return [{"prompt": f"question {n}", "answer": str(n), "kind": "even" if n % 2 == 0 else "odd", "level": 1 + n % 3} for n in range(num)]


def equal(attempt: Attempt, row: Any) -> float:
    return float(attempt.answer == row["answer"])


def test_every_row_is_given_once_per_pass_in_another_order() -> None:
    source = TaskSource(RowFamily(rows_of(50), equal), split="train", seed=1, levels=(1, 2, 3))
    num = len(source.family.listed("train"))  # type: ignore[attr-defined]
    passes = [[source.task(i).instruction for i in range(p * num, (p + 1) * num)] for p in range(2)]
    assert sorted(passes[0]) == sorted(passes[1]) and passes[0] != passes[1] and len(set(passes[0])) == num
    again = TaskSource(RowFamily(rows_of(50), equal), split="train", seed=1, levels=(1, 2, 3))
    assert [again.task(i).instruction for i in range(num)] == passes[0]


def test_kinds_and_levels_of_a_run_choose_rows() -> None:
    family = RowFamily(rows_of(60), equal)
    assert family.kinds == ("even", "odd")
    source = TaskSource(family, split="train", seed=0, kinds=("odd",), levels=(2,))
    tasks = [source.task(i) for i in range(30)]
    assert {(t.kind, t.level) for t in tasks} == {("odd", 2)} and all(int(t.instruction.split()[1]) % 6 == 1 for t in tasks)
    with pytest.raises(ValueError, match=r"no train task of the kinds even and the levels \(9,\); it has \d+ train tasks in all"):
        TaskSource(family, split="train", seed=0, kinds=("even",), levels=(9,))


@settings(derandomize=True, max_examples=50, deadline=None)
@given(st.lists(st.text(max_size=4), min_size=2, max_size=60), st.floats(0.01, 0.9))
def test_no_prompt_is_on_both_sides_and_growth_moves_none(prompts: list[str], frac: float) -> None:
    rows = [{"prompt": p} for p in prompts]
    sides = {
        split: {rows[n]["prompt"] for _, _, n in RowFamily(rows, equal, heldout_frac=frac).listed(split)} for split in ("train", "heldout")
    }
    assert sides["train"] | sides["heldout"] == set(prompts) and sides["heldout"]
    if len(set(prompts)) == 1:
        return
    assert sides["train"].isdisjoint(sides["heldout"])
    more = [*rows, *({"prompt": f"a longer prompt {n}"} for n in range(5))]
    grown = RowFamily(more, equal, heldout_frac=frac)
    # Only the one that was held out for want of any other may come back.
    assert len(sides["heldout"] - {more[n]["prompt"] for _, _, n in grown.listed("heldout")}) <= 1


def test_rows_that_share_one_prompt_are_told_apart_by_their_columns() -> None:
    family = RowFamily([{"prompt": "guess", "secret": n} for n in range(50)], equal)
    train, heldout = ({n for _, _, n in family.listed(split)} for split in ("train", "heldout"))
    assert train and heldout and train | heldout == set(range(50)) and not train & heldout
    same = RowFamily([{"prompt": "roll"}] * 3, equal)
    assert same.listed("train") == same.listed("heldout") and len(same.listed("train")) == 3


def test_own_heldout_rows_are_used_as_they_are() -> None:
    family = RowFamily(rows_of(3), equal, heldout=[{"prompt": "judge", "answer": "x"}])
    assert len(family.listed("train")) == 3 and TaskSource(family, split="heldout", seed=0).task(0).instruction == "judge"


def test_task_never_carries_its_answer_and_is_the_same_again() -> None:
    family = RowFamily([{"prompt": "q", "answer": "secret"}], equal)
    task = TaskSource(family, split="train", seed=0).task(0)
    assert "secret" not in str(task) and family.row(task)["answer"] == "secret"
    assert family.make(kind=task.kind, level=task.level, seed=task.seed, split=task.split) == task


def test_rows_without_files_and_tools_need_no_box() -> None:
    family = RowFamily([{"prompt": "q", "answer": "a"}], equal, system="s")
    task = TaskSource(family, split="train", seed=0).task(0)
    assert not needs_box(family, task) and toolset_of(family, task, None) is None
    assert agent_of(family, task).system == "s"
    boxed = RowFamily([{"prompt": "q", "files": {"a.txt": "x"}}], equal, tools=("bash", "submit"))
    task = TaskSource(boxed, split="train", seed=0).task(0)
    assert needs_box(boxed, task) and task.files == {"a.txt": "x"} and task.tools == ("bash", "submit")


def test_functions_of_ones_own_become_tools_without_a_box() -> None:
    def look_up(word: str) -> str:
        """Look a word up."""
        return word.upper()

    family = RowFamily([{"prompt": "q"}], equal, functions=[look_up])
    task = TaskSource(family, split="train", seed=0).task(0)
    tools = toolset_of(family, task, None)
    assert tools is not None and [t.name for t in tools.tools()] == ["look_up"] and not needs_box(family, task)
    with pytest.raises(ValueError, match="either tools in a box or functions"):
        RowFamily([{"prompt": "q"}], equal, functions=[look_up], tools=("bash",))


def test_prompts_of_several_messages_open_the_conversation() -> None:
    prompt = [
        {"role": "user", "content": [{"type": "text", "text": "2+2"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "function": {"name": "add", "arguments": {"a": 2}}}]},
        {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "4"},
        {"role": "user", "content": "3+3"},
    ]
    family = RowFamily([{"prompt": prompt}], equal, system="s")
    task = TaskSource(family, split="train", seed=0).task(0)
    opening = agent_of(family, task).opening
    assert task.instruction == "3+3" and [m.role for m in opening] == ["system", "user", "assistant", "tool", "user"]
    assert opening[2] == ChatMessage(role=ChatRole.ASSISTANT, calls=(Call(id="c1", name="add", arguments='{"a": 2}'),))
    assert message_of({"role": "developer", "content": "x"}).role is ChatRole.SYSTEM
    with pytest.raises(ValueError, match="no text; images"):
        message_of({"role": "user", "content": [{"type": "image_url", "image_url": {}}]})
    with pytest.raises(ValueError, match="role 'critic'"):
        message_of({"role": "critic", "content": "x"})


def test_reward_is_a_number_or_a_whole_grade_and_nothing_is_an_error() -> None:
    async def graded(attempt: Attempt, row: Any) -> Grade:
        return Grade(reward=0.5, success=True, note="half")

    def judge(reward: Any) -> Grade:
        family = RowFamily([{"prompt": "q", "answer": "a"}], reward, success_at=0.9)
        task = TaskSource(family, split="train", seed=0).task(0)
        return asyncio.run(family.grade(task, Attempt(answer="a")))

    assert judge(equal) == Grade(reward=1.0, success=True) and judge(graded).note == "half"
    assert judge(lambda attempt, row: 0.8) == Grade(reward=0.8, success=False)
    with pytest.raises(ValueError, match="returned nothing for rows/train/default/1/0"):
        judge(lambda attempt, row: None)


def test_rows_come_from_jsonl_files_and_datasets(tmp_path: Path) -> None:
    from datasets import Dataset

    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows_of(20)) + "\n")
    listed = RowFamily(rows_of(20), equal).listed("train")
    assert RowFamily(path, equal).listed("train") == listed == RowFamily(Dataset.from_list(rows_of(20)), equal).listed("train")
    path.write_text('{"prompt": "q"}\n{x\n')
    with pytest.raises(ValueError, match=r"rows.jsonl line 2 is not JSON"):
        RowFamily(path, equal)
    with pytest.raises(ValueError, match="cannot be counted; give a list"):
        RowFamily(iter(rows_of(2)), equal)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="there are no rows"):
        RowFamily([], equal)
    with pytest.raises(ValueError, match="no column 'prompt' with text or messages; it has: question"):
        TaskSource(RowFamily([{"question": "q"}], equal), split="train", seed=0).task(0)
