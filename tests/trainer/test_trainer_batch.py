"""Advantages, batches and micro-batches: pure, complete, and lazy where a group teaches nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.records import StopReason, Trace, Window
from rollmill.trainer.advantage import has_signal, leave_one_out
from rollmill.trainer.batch import GradedEpisode, Lesson, make_batch, micro_batches

reward = st.floats(-10, 10, allow_nan=False)


@given(st.lists(reward, min_size=2, max_size=16))
def test_advantage_is_reward_minus_mean_of_the_others(rewards: list[float]) -> None:
    found = leave_one_out(np.array(rewards))
    for i, r in enumerate(rewards):
        others = rewards[:i] + rewards[i + 1 :]
        assert found[i] == pytest.approx(r - sum(others) / len(others), abs=1e-9)
    assert abs(found.sum()) < 1e-6


def test_lone_episode_and_infinite_reward() -> None:
    assert leave_one_out(np.array([3.0])).tolist() == [0.0] and not has_signal(np.array([3.0])) and not has_signal(np.array([]))
    with pytest.raises(ValueError, match="rewards must be finite"):
        leave_one_out(np.array([1.0, math.nan]))


def window(length: int, num_sampled: int = 1) -> Window:
    sampled = [0] * (length - num_sampled) + [1] * num_sampled
    return Window.of(tokens=[7] * length, sampled=sampled, logprobs=[0.0] * length, versions=[1 if s else -1 for s in sampled])


def attempt(name: str, reward: float, loaded: list[str], *windows: Window) -> GradedEpisode:
    def load() -> Trace:
        loaded.append(name)
        return Trace(episode_id=name, windows=windows or (window(4),), stop=StopReason.SUBMITTED)

    return GradedEpisode(episode_id=name, reward=reward, load=load)


def test_group_without_spread_is_counted_and_never_loaded() -> None:
    loaded: list[str] = []
    flat = [attempt(f"flat{i}", 1.0, loaded) for i in range(3)]
    mixed = [attempt("a", 1.0, loaded), attempt("b", 0.0, loaded)]
    batch = make_batch([flat, mixed])
    assert loaded == ["a", "b"] and [s.advantage for s in batch.lessons] == [1.0, -1.0]
    assert (batch.num_episodes, batch.num_groups, batch.num_groups_without_signal) == (5, 2, 1)
    assert batch.rewards == [1.0, 1.0, 1.0, 1.0, 0.0] and batch.num_tokens == 8


def test_episode_at_the_mean_and_window_without_samples_teach_nothing() -> None:
    loaded: list[str] = []
    group = [attempt("a", 0.0, loaded), attempt("b", 0.5, loaded), attempt("c", 1.0, loaded, window(5, 0), window(6))]
    batch = make_batch([group])
    assert loaded == ["a", "c"] and [s.window.num_tokens for s in batch.lessons] == [4, 6]


def test_empty_batch_is_a_batch() -> None:
    batch = make_batch([])
    assert (batch.lessons, batch.num_episodes, batch.num_groups) == ([], 0, 0)


@given(st.lists(st.integers(1, 60), max_size=40), st.integers(1, 120))
def test_micro_batches_cover_every_lesson_once_within_the_bound(lengths: list[int], max_tokens: int) -> None:
    lessons = [Lesson(window=window(n), advantage=float(i)) for i, n in enumerate(lengths)]
    chunks = list(micro_batches(lessons, max_tokens))
    assert sorted(s.advantage for c in chunks for s in c) == [float(i) for i in range(len(lengths))]
    for chunk in chunks:
        padded = len(chunk) * max(s.window.num_tokens for s in chunk)
        assert padded <= max_tokens or len(chunk) == 1
