"""Batches and micro-batches: pure, complete, and lazy where a group teaches nothing."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.records import StopReason, Trace, Window
from rollmill.trainer.batch import METRICS, GradedEpisode, Lesson, dealt, make_batch, micro_batches


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


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 60), max_size=40), st.integers(1, 6))
def test_hands_cover_every_lesson_once_and_none_is_empty(lengths: list[int], num: int) -> None:
    lessons = [Lesson(window=window(n), advantage=float(i)) for i, n in enumerate(lengths)]
    hands = dealt(lessons, num)
    assert sorted(s.advantage for hand in hands for s in hand) == [float(i) for i in range(len(lengths))]
    assert all(hands) and len(hands) == min(num, len(lessons))
    sizes = [sum(s.window.num_tokens for s in hand) for hand in hands]
    assert not sizes or max(sizes) - min(sizes) <= max(lengths)
    if num == 1 and hands:
        assert hands[0] == lessons


def test_only_episodes_of_one_role_environment_and_root_are_compared() -> None:
    loaded: list[str] = []
    solver = [msgspec.structs.replace(attempt(f"s{i}", float(i), loaded), role="solver") for i in range(2)]
    critic = [msgspec.structs.replace(attempt(f"c{i}", 5.0 + i, loaded), role="critic") for i in range(2)]
    batch = make_batch([[*solver, *critic]])
    assert [s.advantage for s in batch.lessons] == [-1.0, 1.0, -1.0, 1.0]
    for field in ("role", "environment", "chain_root"):
        alone = [msgspec.structs.replace(attempt(f"{i}", float(i), loaded), **{field: str(i)}) for i in range(3)]
        batch = make_batch([alone])
        assert batch.lessons == [] and batch.num_groups_without_signal == 1 and batch.stats["adv/zero_var_frac"] == 1.0


def test_numbers_of_the_advantages_are_always_there_and_add_up() -> None:
    loaded: list[str] = []

    def group(*rewards: float) -> list[GradedEpisode]:
        made = [attempt(f"{i}", r, loaded) for i, r in enumerate(rewards)]
        return [msgspec.structs.replace(a, success=a.reward > 0, parts={"right": a.reward}) for a in made]

    stats = make_batch([group(0, 0, 0, 0), group(1, 0, 0, 0), group(1, 1, 0, 0), group(1, 1, 1, 0), group(1, 1, 1, 1)]).stats
    hist = {name: value for name, value in stats.items() if "hist" in name}
    assert [round(5 * v, 9) for v in hist.values()] == [1, 1, 1, 1, 0, 1] and sum(hist.values()) == pytest.approx(1.0)
    assert stats["adv/zero_var_frac"] == pytest.approx(0.4) and stats["adv/abs_max"] == 1.0 and stats["adv/per_key_std/right"] == 0.5
    assert make_batch([]).stats == dict.fromkeys(METRICS, 0.0)
    odd = [msgspec.structs.replace(a, parts={"note": float("nan")}) for a in group(1, 0)]
    assert "adv/per_key_std/note" not in make_batch([odd]).stats
