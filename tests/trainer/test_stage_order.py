"""What a step learns from is a function of seed and step: everything once per pass, micro-batches within bounds and of even cost."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.trainer.stages.order import EpochOrder, WindowOrder, shared_out
from rollmill.trainer.stages.schedule import lr_scale
from rollmill.trainer.stages.settings import Schedule

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=30)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 7), st.integers(0, 3))
def test_a_pass_holds_every_window_once_and_a_step_is_found_without_those_before(num: int, per_step: int, seed: int) -> None:
    order = WindowOrder(num, per_step=per_step, seed=seed)
    seen = [w for step in range(num) for w in order.windows(step)]
    for k in range(per_step):
        assert sorted(seen[k * num : (k + 1) * num]) == list(range(num))
    assert WindowOrder(num, per_step=per_step, seed=seed).windows(num - 1) == order.windows(num - 1)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 100), st.integers(0, 3))
def test_an_epoch_holds_every_sequence_once(lengths: list[int], tokens: int, seed: int) -> None:
    order = EpochOrder(np.array(lengths), tokens_per_batch=tokens, seed=seed)
    num_steps = order.num_steps(1)
    assert sorted(n for step in range(num_steps) for n in order.batch(step)) == list(range(len(lengths)))
    second = [n for step in range(num_steps, order.num_steps(2)) for n in order.batch(step)]
    assert sorted(second) == list(range(len(lengths)))
    late = EpochOrder(np.array(lengths), tokens_per_batch=tokens, seed=seed)
    assert late.batch(num_steps).tolist() == order.batch(num_steps).tolist()


def test_batches_of_an_epoch_hold_about_the_same_tokens() -> None:
    lengths = np.random.default_rng(0).integers(1, 50, 2000)
    order = EpochOrder(lengths, tokens_per_batch=1000, seed=0)
    sizes = [int(lengths[order.batch(step)].sum()) for step in range(order.num_steps(1))]
    # A cut lies within one sequence of where it should.
    assert max(abs(s - np.mean(sizes)) for s in sizes) <= 2 * 50
    assert order.num_steps(0.5) == round(len(sizes) / 2)


@settings(derandomize=True, max_examples=150, deadline=None)
@given(LENGTHS, st.integers(1, 120), st.sampled_from([0.0, 0.01, 0.5]))
def test_micro_batches_hold_everything_once_within_the_bound(lengths: list[int], max_tokens: int, share: float) -> None:
    parts = shared_out(np.array(lengths), max_tokens=max_tokens, attention_share=share)
    assert sorted(i for p in parts for i in p) == list(range(len(lengths)))
    assert all(len(p) == 1 or len(p) * max(lengths[i] for i in p) <= max_tokens for p in parts)


@settings(derandomize=True, max_examples=80, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(10, 60), st.sampled_from([0.0, 0.05]))
def test_no_other_cut_in_order_of_length_has_a_smaller_largest_cost(lengths: list[int], max_tokens: int, share: float) -> None:
    def cost(part: list[int]) -> float:
        return len(part) * (part[0] + share * part[0] ** 2)

    ordered = sorted(lengths, reverse=True)
    found = [
        sorted((lengths[i] for i in p), reverse=True) for p in shared_out(np.array(lengths), max_tokens=max_tokens, attention_share=share)
    ]
    best = np.inf
    for cuts in itertools.combinations(range(1, len(ordered)), len(found) - 1):
        parts = [ordered[a:b] for a, b in itertools.pairwise((0, *cuts, len(ordered)))]
        if all(len(p) == 1 or len(p) * p[0] <= max_tokens for p in parts):
            best = min(best, max(cost(p) for p in parts))
    assert max(cost(p) for p in found) <= best * (1 + 1e-9)


def test_long_sequences_get_company_by_cost_not_by_number() -> None:
    parts = shared_out(np.array([100, *[10] * 20]), max_tokens=200, attention_share=1.0)
    assert [len(p) for p in parts] == [1, 20]


def test_learning_rate_rises_and_falls() -> None:
    def at(step: int, schedule: Schedule) -> float:
        return lr_scale(step, num_steps=100, warmup_steps=10, schedule=schedule, final_frac=0.1)

    for schedule in Schedule:
        values = [at(step, schedule) for step in range(100)]
        assert values[0] < values[5] < values[9] and max(values) <= 1.0
    assert at(50, Schedule.LINEAR) == 1 - 0.9 * 0.5
    assert abs(at(50, Schedule.COSINE) - 0.55) < 1e-12 and at(99, Schedule.CONSTANT) == 1.0
    assert at(99, Schedule.COSINE) < 0.11 and at(99, Schedule.LINEAR) < 0.12
