"""The example environments, each played through a whole episode with a scripted policy: prompt, tools, grade, trained tokens."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollmill.chat.format import ChatFormat
from rollmill.engine.protocol import FinishReason, GenerateReply, GenerateRequest, Timing, VersionSpan
from rollmill.gateway import Gateway
from rollmill.harness import Limits
from rollmill.model.tokenizer import Tokenizer
from rollmill.records import StopReason, Task
from rollmill.rollout.episode import EpisodeRunner, Finished
from rollmill.sandbox.namespace import NamespaceBackend
from rollmill.tasks import TaskSource, needs_box, open_family
from rollmill.telemetry import Waits

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "environments"
TOKENIZER = Tokenizer(ROOT / "models" / "demo")
LIMITS = Limits(max_turns=20, max_tokens_per_turn=500, max_context=9000, tool_s=10.0)


class Policy:
    """Samples the tokens of what `say` answers to the conversation's text so far."""

    def __init__(self, say: Callable[[str], str]) -> None:
        self._say = say
        self.sampled: list[int] = []

    async def generate(self, request: GenerateRequest, *, deadline: float) -> GenerateReply:
        ids = [*TOKENIZER.encode(self._say(TOKENIZER.decode(request.prompt_ids))), max(TOKENIZER.stop_ids)]
        self.sampled += ids
        return GenerateReply(
            token_ids=ids,
            logprobs=np.zeros(len(ids), "<f4").tobytes(),
            spans=[VersionSpan(0, len(ids), 1)],
            finish_reason=FinishReason.STOP,
            seed=0,
            num_reused=0,
            timing=Timing(queue_s=0.0, first_token_s=0.0, total_s=0.0),
        )

    async def close(self) -> None: ...


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def played(family_name: str, say: Callable[[Task], Callable[[str], str]]) -> tuple[Task, Finished]:
    """The first training task, played to its end; what is trained is what was sampled."""

    async def scene() -> tuple[Task, Finished]:
        family = open_family(family_name)
        task = TaskSource(family, split="train", seed=0).task(0)
        if needs_box(family, task) and (reason := NamespaceBackend.probe()) is not None:
            pytest.skip(reason)
        policy, backend, waits = Policy(say(task)), NamespaceBackend(), Waits()
        gateway = Gateway(ChatFormat(TOKENIZER), policy)  # type: ignore[arg-type]
        runner = EpisodeRunner(family, gateway, backend, LIMITS, waits)
        try:
            session = runner.open_session("e", seed=0, temperature=1.0, min_version=None)
            async with asyncio.timeout(60.0):
                done = await runner.run(task, "e", session, seed=0, deadline=time.monotonic() + 60.0)
        finally:
            await runner.close()
            await backend.close()
        trained = [int(t) for w in done.trace.windows for t in w.tokens_T[w.sampled_T != 0]]
        assert trained == policy.sampled and trained
        return task, done

    return asyncio.run(scene())


def scripted(*said: str) -> Callable[[Task], Callable[[str], str]]:
    left = list(said)
    return lambda task: lambda text: left.pop(0)


def test_a_family_of_ones_own_is_under_sixty_lines_and_is_played_in_a_box() -> None:
    assert len((FOLDER / "sorting.py").read_text().splitlines()) < 60

    def say(task: Task) -> Callable[[str], str]:
        flag = "-rn" if task.kind == "down" else "-n"
        left = [call("read", path="in.txt"), call("bash", command=f"sort {flag} in.txt > out.txt"), call("submit")]
        return lambda text: left.pop(0)

    _, done = played(f"{FOLDER}/sorting.py:SortFamily", say)
    assert (done.trace.stop, done.grade.reward, done.grade.parts) == (StopReason.SUBMITTED, 1.0, {"present": 1.0, "sorted": 1.0})
    _, done = played(f"{FOLDER}/sorting.py:SortFamily", scripted(call("bash", command="cat in.txt in.txt > out.txt"), call("submit")))
    assert (done.grade.reward, done.grade.success) == (0.1, False)


def test_rows_are_answered_in_words_without_a_box() -> None:
    def say(task: Task) -> Callable[[str], str]:
        words = task.instruction.split()
        return lambda text: f"It is {int(words[2]) + int(words[4].strip('?'))}."

    task, done = played(f"{FOLDER}/sums.py:family", say)
    assert (done.trace.stop, done.grade.reward) == (StopReason.ANSWERED, 1.0)
    assert [m["role"] for m in done.trace.messages] == ["system", "user", "assistant"] and task.files == {}
    assert played(f"{FOLDER}/sums.py:family", scripted("no idea"))[1].grade.reward == 0.0


def test_trl_environment_is_played_through_its_methods() -> None:
    def say(task: Task) -> Callable[[str], str]:
        low, high = 1, 100

        def move(text: str) -> str:
            nonlocal low, high
            last = text.rpartition("<|im_start|>tool\n")[2].partition("<|im_end|>")[0]
            middle = (low + high) // 2
            if last == "right":
                return "Found it."
            low, high = (middle + 1, high) if last == "higher" else (low, middle - 1) if last == "lower" else (low, high)
            return call("guess", number=(low + high) // 2)

        return move

    _, done = played(f"{FOLDER}/trl_guess.py:family", say)
    num = sum("tool_calls" in m for m in done.trace.messages)
    assert done.trace.stop is StopReason.ANSWERED and done.grade.success and 1 <= num <= 7
    assert done.grade.parts == {"brevity": -0.01 * num, "GuessEnv": 1.0}
    assert done.trace.messages[0]["content"] == "Guess my number. It is between 1 and 100."
    _, lost = played(f"{FOLDER}/trl_guess.py:family", scripted(call("guess", number="x"), "I give up."))
    told = [m["content"] for m in lost.trace.messages if m["role"] == "tool"]
    assert not lost.grade.success and told == ["error: guess needs the whole number argument 'number', got \"x\""]


def test_verifiers_environment_is_scored_by_its_own_rubric() -> None:
    pytest.importorskip("verifiers")
    before = signal.getsignal(signal.SIGTERM)

    def say(task: Task) -> Callable[[str], str]:
        return lambda text: f"<answer>{task.instruction.split()[-1].strip('.')[::-1]}</answer>"

    _, done = played(f"{FOLDER}/verifiers_reverse.py:family", say)
    assert done.grade.parts["right"] == 1.0 and done.grade.reward == pytest.approx(1.1, abs=1e-12) and done.grade.success
    assert signal.getsignal(signal.SIGTERM) is before
    assert played(f"{FOLDER}/verifiers_reverse.py:family", scripted("no"))[1].grade.parts["right"] == 0.0


@pytest.mark.parametrize(("name", "secret"), [("sums.py:family", "answer"), ("trl_guess.py:family", "secret")])
def test_examples_hold_no_answer_in_their_tasks_and_hold_some_out(name: str, secret: str) -> None:
    family: Any = open_family(f"{FOLDER}/{name}")
    for split in ("train", "heldout"):
        task = TaskSource(family, split=split, seed=0).task(0)
        assert secret not in str(task) and secret in family.row(task) and not task.files
