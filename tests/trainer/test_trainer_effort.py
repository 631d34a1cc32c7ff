"""Effort: counted from what a trace says, priced by a curve that bends, and taken from the reward before anything is compared."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.algorithms import Effort
from rollmill.records import StopReason, Trace, Window
from rollmill.trainer.batch import GradedEpisode, make_batch
from rollmill.trainer.effort import Usage, concave, cost, usage_of


def window(sampled: list[int]) -> Window:
    n = len(sampled)
    return Window.of(tokens=[3] * n, sampled=sampled, logprobs=[0.0] * n, versions=[0 if s else -1 for s in sampled])


def trace(*windows: Window, messages: tuple[dict, ...] = ()) -> Trace:
    return Trace(episode_id="e", windows=windows, messages=messages, stop=StopReason.SUBMITTED)


def test_sampled_tokens_are_divided_by_the_characters_of_the_messages() -> None:
    call = {"function": {"name": "ls", "arguments": '{"a": 12345678}'[:8]}}
    said = {"role": "assistant", "reasoning_content": "x" * 20, "content": "y" * 10, "tool_calls": [call]}
    found = usage_of(trace(window([0, 0, 1, 1, 0, 0, 0, 1, 1, 0]), messages=({"role": "user", "content": "z" * 99}, said)))
    assert (found.thinking_tokens, found.answer_tokens, found.call_tokens) == (2.0, 1.0, 1.0)
    # The prompt before the first sample and what follows the last are no tool output.
    assert (found.output_tokens, found.calls, found.turns) == (3.0, 1.0, 2.0)


def test_trace_without_messages_or_samples() -> None:
    assert usage_of(trace(window([0, 1, 1]), window([0, 1]))) == Usage(answer_tokens=3.0, turns=2.0)
    assert usage_of(trace(window([0, 0]))) == usage_of(trace()) == Usage()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.floats(0, 1e6), st.floats(1e-6, 10), st.floats(0, 3))
def test_curve_equals_its_formula_rises_and_bends(x: float, k: float, q: float) -> None:
    if abs(1 - q) > 1e-3:
        assert concave(x, k, q) == pytest.approx(((1 + k * x) ** (1 - q) - 1) / (k * (1 - q)), rel=1e-6, abs=1e-6)
    assert 0 <= concave(x, k, q) <= x * (1 + 1e-12)
    further = concave(x + 1, k, q)
    assert further >= concave(x, k, q) * (1 - 1e-12) and concave(x + 2, k, q) - further <= further - concave(x, k, q) + 1e-9 * (1 + further)


def test_curve_at_its_limits() -> None:
    assert (
        concave(5.0, 2.0, 1.0) == math.log1p(10.0) / 2.0 and concave(5.0, 2.0, 0.0) == pytest.approx(5.0) and concave(0.0, 1.0, 0.5) == 0.0
    )
    assert concave(5.0, 2.0, 1.0 + 1e-9) == pytest.approx(concave(5.0, 2.0, 1.0))


def test_effort_is_taken_from_the_reward_and_makes_equal_successes_differ() -> None:
    short, long = trace(window([0, 1])), trace(window([0] + [1] * 9))
    attempts = [GradedEpisode(episode_id=n, reward=1.0, load=lambda t=t: t) for n, t in (("s", short), ("l", long))]
    batch = make_batch([attempts], effort=Effort(scale=0.1, k=1.0, q=0.0))
    assert [x.advantage for x in batch.lessons] == pytest.approx([0.8, -0.8])
    assert batch.rewards == [1.0, 1.0] and batch.stats["adv/effort_mean"] == pytest.approx(0.5)
    assert cost(usage_of(long), Effort(scale=0.1, k=1.0, q=0.0)) == pytest.approx(0.9)


def test_without_effort_no_trace_of_a_flat_group_is_read() -> None:
    def load() -> Trace:
        raise AssertionError("read")

    batch = make_batch([[GradedEpisode(episode_id=n, reward=1.0, load=load) for n in "ab"]], effort=Effort())
    assert batch.lessons == [] and batch.num_groups_without_signal == 1
