"""A family of one's own is found by import path or file, and what it lacks is said before a run begins."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from rollmill.records import Grade, Task
from rollmill.tasks import Attempt, Family, TaskSource, agent_of, needs_box, open_family, toolset_of

WHOLE = """
import signal
from rollmill.tasks import Family, Grade

class Mine(Family):
    def make(self, *, kind, level, seed, split):
        return self.task("say hi", kind=kind, level=level, seed=seed, split=split)

    async def grade(self, task, attempt):
        return Grade(reward=float("hi" in attempt.answer), success=True)

class Half:
    name = "half"
    def make(self, **options): ...

family = Mine()
def build():
    signal.signal(signal.SIGTERM, lambda *_: None)
    return Mine()
number = 3
"""


@pytest.fixture
def env(tmp_path: Path) -> Path:
    path = tmp_path / "env.py"
    path.write_text(WHOLE)
    return path


def test_file_may_name_a_class_an_instance_or_a_function(env: Path) -> None:
    for name in ("Mine", "family", "build"):
        family = open_family(f"{env}:{name}")
        assert family.name == "mine" and TaskSource(family, split="train", seed=0).task(0).instruction == "say hi"


def test_signals_by_which_a_run_is_stopped_stay_ours(env: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    open_family(f"{env}:build")
    assert signal.getsignal(signal.SIGTERM) is before


def test_import_path_still_works() -> None:
    assert open_family("rollmill.tasks.repo:RepoFamily").name == "repo"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("nowhere:Family", "'nowhere:Family' cannot be loaded: No module named 'nowhere'"),
        ("{env}:Missing", "has no attribute 'Missing'"),
        ("{env}.none.py:Mine", "No such file"),
        ("{env}:Half", r"is no task family: Half lacks grade\(\), `kinds`, a tuple of texts"),
        ("{env}:number", r"int lacks make\(\), grade\(\), `name`, a text, `kinds`"),
    ],
)
def test_what_is_wrong_is_named(name: str, told: str, env: Path) -> None:
    with pytest.raises(ValueError, match=told):
        open_family(name.replace("{env}", str(env)))


def test_file_that_is_no_program_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def (")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"bad.py:X' cannot be loaded: invalid syntax"):
            open_family(f"{tmp_path / 'bad.py'}:X")


class Plain(Family):
    kinds = ("a", "b")

    def make(self, *, kind: str, level: int, seed: int, split: str) -> Task:
        number = self.seeded(kind=kind, level=level, seed=seed, split=split).randint(0, 10**9)
        return self.task(f"say {number}", kind=kind, level=level, seed=seed, split=split)

    async def grade(self, task: Task, attempt: Attempt) -> Grade:
        right = str(self.rng(task).randint(0, 10**9)) in attempt.answer
        return Grade(reward=float(right), success=right)


def test_base_gives_ids_splits_and_the_same_numbers_to_make_and_grade() -> None:
    import asyncio

    family = Plain()
    task = family.make(kind="a", level=1, seed=7, split="train")
    assert family.name == "plain" and task.task_id == "plain/train/a/1/7" and task.tools == () and not needs_box(family, task)
    assert family.make(kind="a", level=1, seed=7, split="heldout").instruction != task.instruction
    assert asyncio.run(family.grade(task, Attempt(answer=task.instruction))).success
    assert agent_of(family, task).system == "" and toolset_of(family, task, None) is None
    with pytest.raises(ValueError, match="there is no split 'test'"):
        family.make(kind="a", level=1, seed=7, split="test")
    with pytest.raises(ValueError, match="'plain' has no kind 'c'; known: a, b"):
        family.make(kind="c", level=1, seed=7, split="train")


def test_family_without_hooks_is_played_by_the_coding_agent() -> None:
    class Old:
        name, kinds = "old", ("k",)

    task = Task(task_id="t", family="old", kind="k", level=1, seed=0, split="train", instruction="do", files={})
    family: Any = Old()
    assert agent_of(family, task).system.startswith("You are a coding agent") and needs_box(family, task)
