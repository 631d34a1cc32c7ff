"""The default loss with its usual corrections: bit for bit the one expression it is, with masks that do what they say."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.algorithms import DppoTv
from rollmill.trainer.losses import LossInputs, LossParts, policy_loss

CONFIG = DppoTv(tv_delta=0.2, kl_tau=0.1, ratio_cap=3.0)


def plain(
    logprobs: torch.Tensor, sampler: torch.Tensor, advantages: torch.Tensor, sequence: torch.Tensor, c: DppoTv
) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, tokens that push): the whole default in one piece, in the order of operations that its bits are defined by."""
    finite = torch.isfinite(logprobs) & torch.isfinite(sampler)
    logp = torch.where(finite, logprobs, torch.zeros_like(logprobs))
    mu = torch.where(finite, sampler, torch.zeros_like(sampler))
    log_ratio = (logp - mu).clamp(-20.0, 20.0)
    with torch.no_grad():
        ratio, advantage = log_ratio.exp(), advantages[sequence]
        moved = logp.exp() - mu.exp()
        masked = torch.where(advantage > 0, moved > c.tv_delta, moved < -c.tv_delta)
        ones = torch.ones(len(advantages), dtype=ratio.dtype)
        lowest = ones.scatter_reduce(0, sequence, ratio, "amin")
        count = torch.zeros_like(ones).index_add(0, sequence, finite.to(ratio.dtype)).clamp(min=1)
        mean_log = torch.zeros_like(ones).index_add(0, sequence, torch.where(finite, log_ratio, 0.0)) / count
        out = (lowest < 1e-4) | ((advantages < 0) & (-mean_log > 0.2))
        live = finite & ~out[sequence]
        push = ratio.clamp(max=c.ratio_cap) * advantage * (live & ~masked)
    return (-push * logp + 0.5 * c.kl_tau * log_ratio.square() * live).sum(), live & ~masked


logprob = st.floats(-12.0, -0.0009765625, width=32) | st.sampled_from([-30.0, -0.01, math.nan, -math.inf])
rows = st.lists(st.tuples(logprob, logprob | st.just(-1.0), st.integers(0, 2)), min_size=1, max_size=12)
advantage = st.lists(st.floats(-2, 2, width=32) | st.just(0.0), min_size=3, max_size=3)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(rows, advantage, st.sampled_from([CONFIG, DppoTv()]))
def test_default_is_bit_equal_to_its_plain_expression(
    rows: list[tuple[float, float, int]], advantages: list[float], config: DppoTv
) -> None:
    logp, mu, seq = (torch.tensor(x) for x in zip(*rows, strict=True))
    advantages_S = torch.tensor(advantages, dtype=torch.float32)
    one, two = logp.clone().requires_grad_(), logp.clone().requires_grad_()
    wanted, kept = plain(one, mu, advantages_S, seq, config)
    parts = policy_loss(LossInputs(logprobs_N=two, sampler_N=mu, advantages_S=advantages_S, sequence_N=seq), config)
    assert torch.equal(wanted, parts.total) and torch.equal(kept, parts.is_kept_N)
    [a], [b] = torch.autograd.grad(wanted / 24.0, one), torch.autograd.grad(parts.total / 24.0, two)
    assert torch.equal(a, b) and torch.isfinite(a).all()


def parts_of(logp: list[float], mu: list[float], advantages: list[float], sequence: list[int] | None = None) -> LossParts:
    at = torch.tensor(sequence or [0] * len(logp))
    inputs = LossInputs(logprobs_N=torch.tensor(logp), sampler_N=torch.tensor(mu), advantages_S=torch.tensor(advantages), sequence_N=at)
    return policy_loss(inputs, CONFIG)


def test_token_stops_pushing_once_it_moved_its_own_way() -> None:
    low, high = math.log(0.3), math.log(0.6)
    assert parts_of([high], [low], [1.0]).is_kept_N.tolist() == [False]
    assert parts_of([high], [low], [-1.0]).is_kept_N.tolist() == [True]
    assert parts_of([low, high], [high, high], [1.0]).is_kept_N.tolist() == [True, True]
    assert parts_of([math.log(0.05)] + [high] * 30, [high] * 31, [-1.0]).is_kept_N.tolist()[:2] == [False, True]


def test_impossible_token_vetoes_its_window_only() -> None:
    parts = parts_of([-1.0, -15.0, -1.0], [-1.0, -1.0, -1.0], [1.0, 1.0], [0, 0, 1])
    assert parts.hits["veto"].tolist() == [True, False] and parts.is_kept_N.tolist() == [False, False, True]


def test_stale_failure_is_no_evidence_but_stale_success_is() -> None:
    drifted, sampled = [-1.5, -1.5], [-1.0, -1.0]
    assert parts_of(drifted, sampled, [-1.0]).hits["opsm"].tolist() == [True]
    assert parts_of(drifted, sampled, [1.0]).hits["opsm"].tolist() == [False]


def test_ratio_is_cut_on_one_side() -> None:
    logp = torch.tensor([-0.1], requires_grad=True)
    config = DppoTv(tv_delta=1.0, kl_tau=0.0, ratio_cap=3.0)
    inputs = LossInputs(logprobs_N=logp, sampler_N=torch.tensor([-6.0]), advantages_S=torch.tensor([1.0]), sequence_N=torch.tensor([0]))
    parts = policy_loss(inputs, config)
    parts.total.backward()
    assert float(logp.grad) == pytest.approx(-3.0) and parts.is_cut_N.tolist() == [True]  # type: ignore[arg-type]
