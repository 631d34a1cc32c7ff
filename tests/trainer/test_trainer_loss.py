"""The loss equals its formula, its gradient equals finite differences, and nothing that is not a number gets through."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.trainer.loss import LossConfig, dppo_tv

CONFIG = LossConfig(tv_delta=0.2, kl_tau=0.1, ratio_cap=3.0)


def formula(
    logp: np.ndarray, mu: np.ndarray, advantages: np.ndarray, sequence: np.ndarray, c: LossConfig, frozen: np.ndarray | None = None
) -> float:
    """The docstring of the loss, token by token. `frozen` are the logprobs behind every stop-gradient and mask."""
    fixed = logp if frozen is None else frozen
    total = 0.0
    for s, advantage in enumerate(advantages):
        tokens = [t for t in range(len(logp)) if sequence[t] == s and math.isfinite(fixed[t]) and math.isfinite(mu[t])]
        ratios = [min(max(fixed[t] - mu[t], -20.0), 20.0) for t in tokens]
        if ratios and min(math.exp(r) for r in ratios) < 1e-4:
            continue
        if ratios and advantage < 0 and -sum(ratios) / len(ratios) > 0.2:
            continue
        for t, r in zip(tokens, ratios, strict=True):
            moved = math.exp(fixed[t]) - math.exp(mu[t])
            keep = moved <= c.tv_delta if advantage > 0 else moved >= -c.tv_delta
            live = min(max(logp[t] - mu[t], -20.0), 20.0)
            total += -keep * min(math.exp(r), c.ratio_cap) * advantage * logp[t] + c.kl_tau / 2 * live**2
    return total


logprob = st.floats(-12.0, -1e-3) | st.sampled_from([-30.0, -0.01, math.nan, -math.inf])
rows = st.lists(st.tuples(logprob, logprob | st.just(-1.0), st.integers(0, 2)), min_size=1, max_size=12)
advantage = st.lists(st.floats(-2, 2) | st.just(0.0), min_size=3, max_size=3)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(rows, advantage)
def test_loss_equals_its_formula(rows: list[tuple[float, float, int]], advantages: list[float]) -> None:
    logp, mu, seq = (np.array(x) for x in zip(*rows, strict=True))
    parts = dppo_tv(torch.tensor(logp), torch.tensor(mu), torch.tensor(advantages, dtype=torch.float64), torch.tensor(seq), CONFIG)
    assert float(parts.total) == pytest.approx(formula(logp, mu, np.array(advantages), seq, CONFIG), rel=1e-5, abs=1e-6)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.floats(-6.0, -0.01), st.floats(-6.0, -0.01), st.integers(0, 2)), min_size=1, max_size=8), advantage)
def test_gradient_equals_finite_differences(rows: list[tuple[float, float, int]], advantages: list[float]) -> None:
    logp, mu, seq = (np.array(x) for x in zip(*rows, strict=True))
    live = torch.tensor(logp, requires_grad=True)
    dppo_tv(live, torch.tensor(mu), torch.tensor(advantages, dtype=torch.float64), torch.tensor(seq), CONFIG).total.backward()
    step = 1e-6
    for i in range(len(logp)):
        up, down = logp.copy(), logp.copy()
        up[i] += step
        down[i] -= step
        slope = (formula(up, mu, np.array(advantages), seq, CONFIG, logp) - formula(down, mu, np.array(advantages), seq, CONFIG, logp)) / (
            2 * step
        )
        assert float(live.grad[i]) == pytest.approx(slope, rel=1e-4, abs=1e-5)  # type: ignore[index]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", ["policy", "sampler"])
def test_numbers_that_are_none_never_reach_the_gradient(bad: float, side: str) -> None:
    values = {"policy": [-1.0, -2.0, -1.5], "sampler": [-1.1, -1.9, -1.5]}
    values[side][1] = bad
    logp = torch.tensor(values["policy"], requires_grad=True)
    parts = dppo_tv(logp, torch.tensor(values["sampler"]), torch.tensor([1.0]), torch.zeros(3, dtype=torch.long), CONFIG)
    parts.total.backward()
    assert logp.grad is not None and torch.isfinite(logp.grad).all() and float(logp.grad[1]) == 0.0 and float(logp.grad[0]) != 0.0
    assert parts.is_finite_N.tolist() == [True, False, True] and parts.is_kept_N.tolist() == [True, False, True]


def masks(logp: list[float], mu: list[float], advantage: float) -> tuple[list[bool], bool, bool]:
    n = len(logp)
    parts = dppo_tv(torch.tensor(logp), torch.tensor(mu), torch.tensor([advantage]), torch.zeros(n, dtype=torch.long), CONFIG)
    return parts.is_kept_N.tolist(), bool(parts.is_vetoed_S[0]), bool(parts.is_opsm_S[0])


def test_token_stops_pushing_once_it_moved_its_own_way() -> None:
    low, high = math.log(0.3), math.log(0.6)
    assert masks([high], [low], 1.0)[0] == [False] and masks([high], [low], -1.0)[0] == [True]
    assert masks([low + 0.0, high], [high, high], 1.0)[0] == [True, True]
    assert masks([math.log(0.05)] + [high] * 30, [high] * 31, -1.0)[0][:2] == [False, True]


def test_impossible_token_vetoes_its_sequence_only() -> None:
    logp, mu = torch.tensor([-1.0, -15.0, -1.0]), torch.tensor([-1.0, -1.0, -1.0])
    parts = dppo_tv(logp, mu, torch.tensor([1.0, 1.0]), torch.tensor([0, 0, 1]), CONFIG)
    assert parts.is_vetoed_S.tolist() == [True, False] and parts.is_kept_N.tolist() == [False, False, True]


def test_stale_failure_is_no_evidence_but_stale_success_is() -> None:
    drifted, sampled = [-1.5, -1.5], [-1.0, -1.0]
    assert masks(drifted, sampled, -1.0)[2] and not masks(drifted, sampled, 1.0)[2]


def test_ratio_is_cut_on_one_side() -> None:
    logp = torch.tensor([-0.1], requires_grad=True)
    config = LossConfig(tv_delta=1.0, kl_tau=0.0, ratio_cap=3.0)
    dppo_tv(logp, torch.tensor([-6.0]), torch.tensor([1.0]), torch.tensor([0]), config).total.backward()
    assert float(logp.grad) == pytest.approx(-3.0)  # type: ignore[arg-type]
