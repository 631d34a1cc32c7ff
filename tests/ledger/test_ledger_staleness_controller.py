"""The staleness controller: its bounds, its reactions, and how it settles on a toy model of throughput and sample quality."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.ledger.staleness import ControllerState, Limits, Reading, Verdict, ess_of_k3, harm, start, update

FAST = settings(max_examples=150, deadline=None, derandomize=True)
fractions = st.floats(0, 1)
anything = st.one_of(st.floats(0, 1), st.sampled_from([math.nan, math.inf, -math.inf]))
readings = st.builds(
    Reading,
    ess=anything,
    k3_fresh=st.one_of(st.floats(0, 0.1), st.just(math.nan)),
    k3_old=st.one_of(st.floats(0, 0.1), st.just(math.inf)),
    trainer_wait_frac=anything,
    rollout_idle_frac=anything,
    tokens_per_s=st.one_of(st.floats(0, 1e6), st.just(math.nan)),
)
limits_ = st.integers(1, 12).flatmap(lambda most: st.builds(Limits, hard_max=st.just(most), first=st.integers(1, most)))


def reading(**changes: float) -> Reading:
    healthy = {"ess": 1.0, "k3_fresh": 0.0, "k3_old": 0.0, "trainer_wait_frac": 0.0, "rollout_idle_frac": 0.0, "tokens_per_s": 1000.0}
    return Reading(**(healthy | changes))


def bounds(given_: list[Reading], limits: Limits, state: ControllerState | None = None) -> list[int]:
    state, found = state or start(limits), []
    for one in given_:
        state = update(state, one, limits)
        found.append(state.bound)
    return found


@FAST
@given(st.lists(readings, max_size=80), limits_)
def test_bound_never_leaves_its_range_and_moves_by_one_or_halves(given_: list[Reading], limits: Limits) -> None:
    before = limits.first
    for bound in bounds(given_, limits):
        assert 1 <= bound <= limits.hard_max
        assert bound - before in (-1, 0, 1) or bound == max(1, before // 2)
        before = bound


@FAST
@given(readings, limits_)
def test_constant_input_never_swings(one: Reading, limits: Limits) -> None:
    found = bounds([one] * 400, limits)
    moves = [b > a for a, b in pairwise(found) if a != b]
    # One direction only, but for a single raise that bought nothing and is taken back.
    assert len(set(moves)) <= 1 or moves == [True, False]
    assert len(set(found[-100:])) == 1


@FAST
@given(readings, fractions, fractions)
def test_worse_samples_are_never_less_harm(one: Reading, less_ess: float, more_k3: float) -> None:
    worse = msgspec.structs.replace(one, ess=one.ess - less_ess, k3_old=one.k3_old + more_k3)
    assert harm(worse, Limits()) >= harm(one, Limits())


@FAST
@given(st.lists(readings, max_size=40), st.lists(readings, min_size=1, max_size=40))
def test_resumed_controller_goes_on_as_if_nothing_had_happened(first: list[Reading], rest: list[Reading]) -> None:
    state = start(Limits())
    for one in first:
        state = update(state, one, Limits())
    stored = msgspec.json.decode(msgspec.json.encode(state), type=ControllerState)
    assert stored == state
    assert bounds(rest, Limits(), stored) == bounds(rest, Limits(), state)


def test_bound_rises_only_while_each_side_waits_for_the_other() -> None:
    limits = Limits(min_gain=-1.0)
    assert bounds([reading(trainer_wait_frac=0.5)] * 60, limits)[-1] == limits.first
    assert bounds([reading(rollout_idle_frac=0.5)] * 60, limits)[-1] == limits.first
    assert bounds([reading(trainer_wait_frac=0.5, rollout_idle_frac=0.5)] * 400, limits)[-1] == limits.hard_max


def test_bound_falls_to_one_while_old_tokens_teach_badly() -> None:
    limits = Limits(first=8)
    assert bounds([reading(ess=0.8)] * 200, limits)[-1] == 1
    assert bounds([reading(k3_old=0.1)] * 200, limits)[-1] == 1
    assert bounds([reading(ess=0.5)], limits) == [4]


@pytest.mark.parametrize(("ess", "k3_old", "level"), [(0.99, 0.0063, 0), (0.96, 0.021, 0), (0.9, 0.064, 1), (0.8, 0.13, 2)])
def test_lags_that_did_no_harm_to_the_corrected_loss_are_tolerated(ess: float, k3_old: float, level: int) -> None:
    """Lags 1, 2, 4 and 8 of the table in docs/staleness.md: the first three learnt as fresh samples did."""
    assert harm(reading(ess=ess, k3_old=k3_old), Limits()) == level
    assert ess_of_k3(k3_old) == pytest.approx(ess, abs=0.02)


def test_mismatch_of_fresh_tokens_is_not_blamed_on_age() -> None:
    limits = Limits(first=8)
    numerics = reading(ess=0.6, k3_fresh=0.03, k3_old=0.031)
    assert harm(numerics, limits) == 0
    assert bounds([numerics] * 100, limits)[-1] == 8


def test_neutral_readings_neither_raise_nor_lower() -> None:
    limits = Limits(first=4)
    between = reading(ess=0.93, trainer_wait_frac=0.5, rollout_idle_frac=0.5)
    assert set(bounds([between] * 200, limits)) == {4}


def test_raise_that_buys_nothing_is_taken_back_and_not_tried_again() -> None:
    limits = Limits(first=2)
    found = bounds([reading(trainer_wait_frac=0.2, rollout_idle_frac=0.2)] * 300, limits)
    assert max(found) == 3
    assert found[-1] == 2
    assert sum(a != b for a, b in pairwise(found)) == 2


def test_raise_is_judged_only_after_its_own_groups_arrive() -> None:
    limits, state = Limits(), start(Limits())
    waiting = reading(trainer_wait_frac=0.3, rollout_idle_frac=0.3)
    while state.bound == limits.first:
        state = update(state, waiting, limits)
    raised_at = state.num_steps
    while state.verdict is not Verdict.NO_GAIN:
        state = update(state, waiting, limits)
    assert state.num_steps - raised_at >= limits.first + 1 + limits.judge_after


def toy(bound: int, tolerance: float) -> Reading:
    """Waste falls with the square of the lag, as stragglers are hidden; sample quality falls linearly beyond `tolerance` versions."""
    wasted = 0.4 / bound**2
    return reading(
        ess=1.0 - 0.04 * max(0.0, bound - tolerance),
        k3_old=0.002 * bound,
        trainer_wait_frac=wasted,
        rollout_idle_frac=wasted * 1.2,
        tokens_per_s=1000 * (1 - wasted),
    )


@pytest.mark.parametrize(("tolerance", "expected"), [(8.0, {3, 4}), (2.0, {3, 4}), (0.0, {1, 2})])
def test_closed_loop_settles_where_waiting_ends_or_quality_does(tolerance: float, expected: set[int]) -> None:
    limits, state, found = Limits(), start(Limits()), []
    for _ in range(800):
        state = update(state, toy(state.bound, tolerance), limits)
        found.append(state.bound)
    assert set(found[400:]) <= expected
    assert sum(a != b for a, b in pairwise(found[400:])) <= 4


def test_harmful_bound_is_tried_again_ever_more_rarely() -> None:
    limits, state = Limits(), start(Limits())
    tried_at = []
    for step in range(3000):
        # Quality gives way above 2 versions, and everybody waits: the worst case for swinging.
        one = reading(
            k3_old=0.1 if state.bound > 2 else 0.0, trainer_wait_frac=0.5, rollout_idle_frac=0.5, tokens_per_s=1000.0 * state.bound
        )
        state = update(state, one, limits)
        if state.verdict is Verdict.RAISED:
            tried_at.append(step)
    gaps = [b - a for a, b in pairwise(tried_at)]
    assert gaps == sorted(gaps)
    assert len(tried_at) <= 9


def test_reading_comes_from_the_metrics_of_a_step() -> None:
    metrics = {f"mm/lag_{lag}/{what}": 0.0 for lag in ("0", "1", "2_3", "4_7", "8_up") for what in ("token_frac", "k3")}
    metrics |= {"mm/num_tokens": 100.0, "mm/ess": 0.97, "mm/lag_0/k3": 1e-5, "timing_s/wait_batch": 1.0, "timing_s/step": 3.0}
    metrics |= {"mm/lag_1/token_frac": 0.5, "mm/lag_1/k3": 2e-3, "perf/num_tokens": 400.0}
    metrics |= {"mm/lag_2_3/token_frac": 0.001, "mm/lag_2_3/k3": 9.0}
    found = Reading.from_metrics(metrics, rollout_idle_frac=0.25)
    assert found == reading(ess=0.97, k3_fresh=1e-5, k3_old=2e-3, trainer_wait_frac=0.25, rollout_idle_frac=0.25, tokens_per_s=100.0)
    assert Reading.from_metrics(metrics | {"mm/num_tokens": 0.0}, rollout_idle_frac=0.25) is None


@pytest.mark.parametrize("bad", [{"first": 0}, {"first": 9}, {"ess_bad": 0.99}, {"ess_worst": 0.0}, {"patience": 0}])
def test_limits_that_contradict_each_other_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"must|choose|count"):
        Limits(**bad)  # type: ignore[arg-type]


@FAST
@given(st.lists(readings, max_size=60), readings, fractions, fractions)
def test_worse_samples_never_give_a_higher_bound(before: list[Reading], one: Reading, less_ess: float, more_k3: float) -> None:
    limits, state = Limits(), start(Limits())
    for seen in before:
        state = update(state, seen, limits)
    worse = msgspec.structs.replace(one, ess=one.ess - less_ess, k3_old=one.k3_old + more_k3)
    assert update(state, worse, limits).bound <= update(state, one, limits).bound


def test_noisy_readings_do_not_make_it_wander() -> None:
    limits, state, rng, found = Limits(), start(Limits()), random.Random(0), []
    for _ in range(2000):
        exact = toy(state.bound, 3.0)
        noisy = msgspec.structs.replace(
            exact,
            tokens_per_s=exact.tokens_per_s * rng.uniform(0.7, 1.3),
            trainer_wait_frac=exact.trainer_wait_frac * rng.uniform(0.5, 1.5),
            rollout_idle_frac=exact.rollout_idle_frac * rng.uniform(0.5, 1.5),
            ess=min(1.0, exact.ess + rng.uniform(-0.02, 0.02)),
        )
        state = update(state, noisy, limits)
        found.append(state.bound)
    assert set(found[200:]) <= {2, 3, 4, 5}
    assert sum(a != b for a, b in pairwise(found)) <= 40
