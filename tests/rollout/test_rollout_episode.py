"""One episode and held-out evaluation: the grader's mistakes are the grader's, and failures of ours are tried again."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from rollout_fakes import FakeSession, finished

from rollmill.gateway.sessions.skew import Skew
from rollmill.harness import AgentRun, Limits
from rollmill.ledger import Ledger
from rollmill.records import Boundary, Grade, Role, RunFailure, StopReason, Task, Window, encode
from rollmill.rollout import evaluation, own
from rollmill.rollout.episode import EpisodeRunner, Finished
from rollmill.rollout.evaluation import evaluate
from rollmill.sandbox import Capabilities, ExecResult, SandboxSpec
from rollmill.tasks import Attempt, TaskSource, open_family
from rollmill.telemetry import Waits

TASK = Task(task_id="t/1", family="t", kind="k", level=1, seed=0, split="train", instruction="x", files={"a": "1"})


class FakeBox:
    def __init__(self, files: Mapping[str, str]) -> None:
        self.files, self.is_closed = dict(files), False

    async def exec(self, argv: Sequence[str], *, timeout_s: float, stdin: bytes = b"", max_output_bytes: int = 1 << 16) -> ExecResult:
        return ExecResult(exit_code=1, stdout=b"partial", num_output_bytes=7, timed_out=False, wall_s=0.0)

    async def read(self, path: str, *, limit_bytes: int = 1 << 20) -> bytes:
        return self.files[path].encode()

    async def list(self) -> list[str]:
        return sorted(self.files)

    async def close(self) -> None:
        self.is_closed = True


class FakeBackend:
    """Makes boxes and cannot fork them."""

    def __init__(self) -> None:
        self.boxes: list[FakeBox] = []

    async def capabilities(self) -> Capabilities:
        return Capabilities(backend="fake", isolation="none", fork=False)

    async def create(self, spec: SandboxSpec) -> FakeBox:
        self.boxes.append(FakeBox(spec.files))
        return self.boxes[-1]

    async def close(self) -> None: ...


class FakeFamily:
    name, kinds = "t", ("k",)

    def __init__(self, verdict: Grade | Exception) -> None:
        self._verdict = verdict
        self.seen: list[Attempt] = []
        self.printed: list[str] = []

    async def grade(self, task: Task, attempt: Attempt) -> Grade:
        self.seen.append(attempt)
        self.printed.append(await attempt.probe({"b": "2"}, ["true"]))
        if isinstance(self._verdict, Exception):
            raise self._verdict
        return self._verdict


class QuietSession(FakeSession):
    """One that was played already."""

    messages = ({"role": "user", "content": "x"}, {"role": "assistant", "content": "done"}, {"role": "tool", "content": "ok"})

    def __init__(self) -> None:
        super().__init__(None)
        self.episode, self.tally = self, Counter({"appended": 2})

    def windows(self) -> tuple[Window, ...]:
        return (Window.of(tokens=[1, 5, 2, 6], sampled=[0, 1, 0, 1], logprobs=[0.0, -1.0, 0.0, -1.0], versions=[-1, 0, -1, 0]),)

    def untrained(self) -> Counter[str]:
        return Counter({"orphaned": 3})

    def skew(self) -> Skew:
        return Skew(num_answers=2, num_skewed=1, num_tokens=4, num_skewed_tokens=1)


LIMITS = Limits(max_turns=4, max_tokens_per_turn=8, max_context=64, tool_s=1.0)


def play(
    family: FakeFamily, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch, error: BaseException | None = None, task: Task = TASK
) -> Finished:
    async def agent(*args: object, **kwargs: object) -> AgentRun:
        if error is not None:
            raise error
        return AgentRun(stop=StopReason.SUBMITTED, timing_s={"model": 0.0, "tool": 0.0}, facts={"num": 1})

    async def scene() -> Finished:
        done = await runner.run(task, "e", QuietSession(), seed=0, deadline=time.monotonic() + 60)
        assert (runner.tally["appended"], runner.num_untrained, runner.skew.token_frac) == (2, 3, 0.25)
        return done

    monkeypatch.setattr(own, "run_agent", agent)
    runner = EpisodeRunner(family, None, backend, LIMITS, Waits())  # type: ignore[arg-type]
    return asyncio.run(scene())


def test_episode_is_graded_from_a_fresh_box_and_closes_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    family, backend = FakeFamily(Grade(reward=0.5, success=False)), FakeBackend()
    done = play(family, backend, monkeypatch)
    assert done.grade.reward == 0.5 and done.trace.stop is StopReason.SUBMITTED
    assert set(done.trace.timing_s) == {"model", "tool", "sandbox", "grade"}
    assert [b.files for b in backend.boxes] == [{"a": "1"}, {"b": "2"}] and all(b.is_closed for b in backend.boxes)
    assert family.printed == [""], "a probe that failed tells nothing"


def test_grader_sees_files_words_tokens_and_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    family = FakeFamily(Grade(reward=0.5, success=False))
    done = play(family, FakeBackend(), monkeypatch)
    (seen,) = family.seen
    assert (dict(seen.files), seen.answer, seen.token_ids, seen.stop) == ({"a": "1"}, "done", (5, 6), StopReason.SUBMITTED)
    assert seen.messages == done.trace.messages == QuietSession.messages and seen.facts == {"num": 1}


def test_task_of_words_alone_is_played_without_a_box(monkeypatch: pytest.MonkeyPatch) -> None:
    family, backend = FakeFamily(Grade(reward=1.0, success=True)), FakeBackend()
    words = Task(task_id="t/2", family="t", kind="k", level=1, seed=0, split="train", instruction="x", files={}, tools=())
    assert play(family, backend, monkeypatch, task=words).grade.reward == 1.0
    assert [b.files for b in backend.boxes] == [{"b": "2"}] and dict(family.seen[0].files) == {}, "only the grader's"


def test_family_whose_cast_raises_fails_at_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    class BrokenCast(FakeFamily):
        def toolset(self, task: Task, box: object) -> None:
            raise KeyError("no such column")

    backend = FakeBackend()
    with pytest.raises(RunFailure, match="no such column") as caught:
        play(BrokenCast(Grade(reward=1.0, success=True)), backend, monkeypatch)
    assert caught.value.boundary is Boundary.TASK and all(b.is_closed for b in backend.boxes)


class NoisyTools:
    """An author's toolset that breaks its promise, and counts how often it was let go."""

    ends: frozenset[str] = frozenset()
    num_closed = 0

    async def close(self) -> None:
        self.num_closed += 1


@pytest.mark.parametrize("error", [KeyError("no such row"), RunFailure(Boundary.SANDBOX, "gone")])
def test_toolset_of_the_familys_that_raises_ends_its_attempt_and_not_the_run(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = NoisyTools()

    class WithTools(FakeFamily):
        def toolset(self, task: Task, box: object) -> NoisyTools:
            return tools

    with pytest.raises(RunFailure) as caught:
        play(WithTools(Grade(reward=1.0, success=True)), FakeBackend(), monkeypatch, error)
    assert caught.value.boundary is (Boundary.TASK if isinstance(error, KeyError) else Boundary.SANDBOX)
    assert tools.num_closed == 1


def test_grade_is_kept_as_plain_numbers_and_text(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = Grade(reward=np.float32(0.5), success=np.bool_(True), parts={"a": np.int64(2)}, note="half \ud800")  # type: ignore[arg-type, dict-item]
    found = play(FakeFamily(odd), FakeBackend(), monkeypatch).grade
    assert msgspec.msgpack.decode(encode(found), type=Grade) == Grade(reward=0.5, success=True, parts={"a": 2.0}, note="half ?")


@pytest.mark.parametrize(
    "verdict",
    [
        KeyError("oops"),
        None,
        0.5,
        Grade(reward=math.nan, success=False),
        Grade(reward=-math.inf, success=True),
        Grade(reward=1e308, success=True),
        Grade(reward=None, success=True),  # type: ignore[arg-type]
    ],
)
def test_grader_that_breaks_is_a_failure_of_the_grader(verdict: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FakeBackend()
    with pytest.raises(RunFailure, match="grading t/1") as caught:
        play(FakeFamily(verdict), backend, monkeypatch)
    assert caught.value.boundary is Boundary.GRADER and all(b.is_closed for b in backend.boxes)


def test_failure_inside_the_grader_keeps_its_own_boundary(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunFailure) as caught:
        play(FakeFamily(RunFailure(Boundary.SANDBOX, "gone")), FakeBackend(), monkeypatch)
    assert caught.value.boundary is Boundary.SANDBOX


def test_box_is_closed_when_the_agent_loop_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FakeBackend()
    with pytest.raises(asyncio.CancelledError):
        play(FakeFamily(Grade(reward=0.0, success=False)), backend, monkeypatch, asyncio.CancelledError())
    assert [b.is_closed for b in backend.boxes] == [True]


class FlakyRunner:
    """Fails the first `num_bad` attempts at each task, then succeeds; a hang counts as an attempt."""

    def __init__(self, num_bad: int, *, hangs: bool = False, boundary: Boundary = Boundary.MODEL) -> None:
        self._num_bad, self._hangs, self._boundary = num_bad, hangs, boundary
        self.keys: list[str] = []
        self.num_running = 0

    def open_session(self, key: str, *, seed: int, temperature: float, min_version: int | None) -> FakeSession:
        return FakeSession(min_version)

    async def run(self, task: Task, key: str, session: FakeSession, *, seed: int, deadline: float) -> Finished:
        self.keys.append(key)
        self.num_running += 1
        try:
            await asyncio.sleep(0)
            if int(key.rpartition("/")[2]) < self._num_bad:
                if self._hangs:
                    await asyncio.Event().wait()
                raise RunFailure(self._boundary, "down")
            return finished(key, 1.0, 3)
        finally:
            self.num_running -= 1


def judge(run_dir: Path, runner: FlakyRunner, label: str = "before", episode_s: float = 30.0) -> None:
    async def scene(ledger: Ledger) -> None:
        async with asyncio.timeout(60):
            await evaluate(
                label,
                ledger=ledger,
                source=TaskSource(open_family("repo"), split="heldout", seed=0),
                runner=runner,  # type: ignore[arg-type]
                num_tasks=6,
                num_at_once=3,
                seed=0,
                temperature=1.0,
                min_version=3,
                episode_s=episode_s,
            )
            assert runner.num_running == 0

    with Ledger.create_or_open(run_dir, Role.ROLLOUT) as ledger:
        asyncio.run(scene(ledger))


def test_evaluation_tries_failures_again_and_counts_each_task_once(tmp_path: Path) -> None:
    runner = FlakyRunner(2)
    judge(tmp_path, runner)
    assert len(runner.keys) == 18
    with Ledger.open_reader(tmp_path) as ledger:
        [summary] = ledger.eval_summary("before")
        assert (summary.num_episodes, summary.num_success, summary.version) == (6, 6, 3)
    again = FlakyRunner(0)
    judge(tmp_path, again)
    assert again.keys == [], "what has a result is not tried again"


def test_hanging_evaluation_episode_is_given_up_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "GRACE_S", 0.02)
    runner = FlakyRunner(1, hangs=True)
    judge(tmp_path, runner, episode_s=0.02)
    assert len(runner.keys) == 12


def test_evaluation_that_cannot_succeed_ends_loudly_and_leaves_nothing_running(tmp_path: Path) -> None:
    runner = FlakyRunner(99)
    with pytest.raises(RunFailure, match="down"):
        judge(tmp_path, runner)
    assert runner.num_running == 0


def test_held_out_task_that_no_restart_mends_is_told_to_a_person(tmp_path: Path) -> None:
    with pytest.raises(evaluation.EvaluationFails, match="at last at grader: down"):
        judge(tmp_path, FlakyRunner(99, boundary=Boundary.GRADER))
