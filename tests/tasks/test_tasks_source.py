"""Tasks are pure functions of their seeds; splits never meet; names cannot be mistaken for each other."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise, permutations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.records import encode
from rollmill.tasks import TaskSource, open_family
from rollmill.tasks.repo import RepoFamily, script
from rollmill.tasks.repo.corpus import conversation, documents, traces
from rollmill.tasks.repo.kinds import KINDS
from rollmill.tasks.repo.words import NAMES, draw

ROOT = Path(__file__).parents[2]
DIGEST = """
from hashlib import sha256
from rollmill.records import encode
from rollmill.tasks import TaskSource, open_family
from rollmill.tasks.repo import script
source = TaskSource(open_family("repo"), split="train", seed=7, levels=(1, 2, 3))
tasks = [source.task(i) for i in range(60)]
print(sha256(b"".join(encode(t) + repr(script(t, expert=i % 2 == 0)).encode() for i, t in enumerate(tasks))).hexdigest())
"""


def test_task_is_the_same_in_every_process() -> None:
    said = set()
    for salt in ("1", "2"):
        env = {"PYTHONHASHSEED": salt, "PATH": "/usr/bin:/bin"}
        done = subprocess.run([sys.executable, "-c", DIGEST], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=True)
        said.add(done.stdout)
    assert len(said) == 1


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(sorted(KINDS)), st.integers(1, 3), st.integers(0, 2**40))
def test_task_is_a_pure_function_of_its_seed(kind: str, level: int, seed: int) -> None:
    family = RepoFamily()
    first, again = (family.make(kind=kind, level=level, seed=seed, split="train") for _ in range(2))
    assert encode(first) == encode(again)
    other = family.make(kind=kind, level=level, seed=seed, split="heldout")
    assert (other.instruction, other.files) != (first.instruction, first.files)
    assert script(first, expert=True)[-1].tool == "submit" and script(first, expert=False)[-1].tool == "submit"


def test_train_and_heldout_share_no_task() -> None:
    sources = {s: TaskSource(open_family("repo"), split=s, seed=0, levels=(1, 2, 3)) for s in ("train", "heldout")}
    train, heldout = ([s.task(i) for i in range(1500)] for s in sources.values())
    assert {t.task_id for t in train}.isdisjoint(t.task_id for t in heldout)
    assert {(t.instruction, str(t.files)) for t in train}.isdisjoint((t.instruction, str(t.files)) for t in heldout[:128])


def test_task_never_carries_its_answer() -> None:
    """The grader's expectation lives on our side: a task record holds the initial world and the instruction only."""
    task = RepoFamily().make(kind="aggregate", level=1, seed=4, split="train")
    assert set(task.__struct_fields__) == set("schema task_id family kind level seed split instruction files tools".split())


def test_no_name_contains_another() -> None:
    """sed and grep in the scripts match parts of words."""
    assert [(a, b) for a, b in permutations(NAMES, 2) if a in b] == [] and len(set(NAMES)) == len(NAMES)


def test_names_are_no_shell_or_python_words() -> None:
    import builtins
    import keyword

    taken = {*keyword.kwlist, *keyword.softkwlist, *dir(builtins), "cat", "sed", "grep", "awk", "sort", "head", "tail", "read", "txt"}
    assert taken.isdisjoint(NAMES)


@given(st.randoms(use_true_random=False), st.integers(0, 20))
def test_drawn_names_differ(rng: object, count: int) -> None:
    assert len(set(draw(rng, count))) == count  # type: ignore[arg-type]


def test_wrong_choices_name_what_is_known() -> None:
    family = open_family("repo")
    with pytest.raises(ValueError, match="there is no task family 'web'; known: repo"):
        open_family("web")
    with pytest.raises(ValueError, match="has no kind 'paint'; known: fix"):
        TaskSource(family, split="train", seed=0, kinds=("paint",))
    with pytest.raises(ValueError, match="there is no split 'test'"):
        TaskSource(family, split="test", seed=0)
    for level in (0, 4):
        with pytest.raises(ValueError, match=f"task level {level} is outside 1..3; change `tasks.levels`"):
            family.make(kind="fix", level=level, seed=0, split="train")


def test_source_draws_every_kind_and_level_evenly() -> None:
    source = TaskSource(open_family("repo"), split="train", seed=3, levels=(1, 2))
    tasks = [source.task(i) for i in range(1400)]
    for kind in KINDS:
        assert 130 <= sum(t.kind == kind for t in tasks) <= 270
    assert 600 <= sum(t.level == 1 for t in tasks) <= 800


def test_conversations_have_the_shape_the_harness_produces() -> None:
    task = RepoFamily().make(kind="configure", level=1, seed=2, split="train")
    roles = [m["role"] for m in conversation(task, script(task, expert=True), "s")["messages"]]
    assert roles[:2] == ["system", "user"] and roles[-1] == "assistant"
    assert all(a != b for a, b in pairwise(roles))
    family = open_family("repo")
    assert list(traces(family, num=5, seed=1, expert_frac=0.5, levels=(1,), system="s")) == list(
        traces(family, num=5, seed=1, expert_frac=0.5, levels=(1,), system="s")
    )
    assert all(isinstance(row["text"], str) and row["text"] for row in documents(family, num=40, seed=1, levels=(1, 2, 3)))


def test_family_of_your_own_is_opened_by_import_path_and_a_wrong_one_is_named() -> None:
    assert open_family("rollmill.tasks.repo:RepoFamily").name == "repo"
    with pytest.raises(ValueError, match="nowhere:Family"):
        open_family("nowhere:Family")
