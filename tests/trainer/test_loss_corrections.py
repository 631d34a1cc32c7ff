"""Corrections: each equals its sentence on plain numbers, judges the proximal policy where there is one, and composes with the others."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.algorithms import CORRECTIONS, Grpo, Opsm, Options, Reinforce, SequenceBand, SequenceMax, Tis, TokenBand, Veto
from rollmill.trainer.losses import LossInputs, LossParts, policy_loss
from rollmill.trainer.losses.corrections import FUNCTIONS

ALL = (Tis(), TokenBand(), SequenceBand(low=0.5, high=2.0), SequenceMax(max_k3=3.0), Veto(min_ratio=0.05), Opsm())


def plain(options: Options, log_w: np.ndarray, sequence: np.ndarray, advantages: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(weight, whether it may teach) of each token, one token at a time."""
    weight, keep = np.ones(len(log_w)), np.ones(len(log_w), bool)
    for t in range(len(log_w)):
        mine, adv, w = log_w[sequence == sequence[t]], advantages[sequence[t]], math.exp(log_w[t])
        if isinstance(options, Tis):
            weight[t] = min(w, options.cap)
        elif isinstance(options, TokenBand):
            keep[t] = options.low <= w <= options.high
        elif isinstance(options, SequenceBand):
            keep[t] = options.low <= math.exp(mine.mean()) <= options.high
        elif isinstance(options, SequenceMax):
            keep[t] = max(math.exp(x) - 1 - x for x in mine) <= options.max_k3
        elif isinstance(options, Veto):
            keep[t] = math.exp(mine.min()) >= options.min_ratio
        elif isinstance(options, Opsm):
            keep[t] = not (adv < 0 and -mine.mean() > options.limit)
    return weight, keep


def measured(log_w: np.ndarray, sequence: np.ndarray, advantages: np.ndarray, chosen: tuple[Options, ...]) -> tuple[LossParts, np.ndarray]:
    """Under REINFORCE the gradient of a token is -A times its weight, so it shows weight and mask at once."""
    logp = torch.full((len(log_w),), -3.0, dtype=torch.float64, requires_grad=True)
    inputs = LossInputs(
        logprobs_N=logp,
        sampler_N=torch.tensor(-3.0 - log_w),
        advantages_S=torch.tensor(advantages),
        sequence_N=torch.tensor(sequence),
    )
    parts = policy_loss(inputs, Reinforce(), chosen)
    parts.total.backward()
    assert logp.grad is not None
    return parts, -logp.grad.numpy() / advantages[sequence]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.sets(st.sampled_from(ALL), min_size=1))
def test_any_corrections_together_multiply_weights_and_join_masks(seed: int, chosen: set[Options]) -> None:
    rng = np.random.default_rng(seed)
    log_w, sequence, advantages = rng.normal(0, 1.0, 12), np.sort(rng.integers(0, 4, 12)), rng.choice([-1.0, 2.0], 4)
    wanted = np.ones(12)
    for options in chosen:
        weight, keep = plain(options, log_w, sequence, advantages)
        wanted *= weight * keep
    _, found = measured(log_w, sequence, advantages, tuple(chosen))
    assert found == pytest.approx(wanted, rel=1e-12)


def test_hits_count_tokens_for_token_corrections_and_windows_for_the_others() -> None:
    log_w = np.array([math.log(8.0), 0.0, 0.0, -4.0, -4.0])
    parts, _ = measured(log_w, np.array([0, 0, 1, 2, 2]), np.array([1.0, 1.0, -1.0]), ALL)
    assert {name: hit.tolist() for name, hit in parts.hits.items()} == {
        "tis": [True, False, False, False, False],
        "token_band": [True, False, False, True, True],
        "sequence_band": [True, False, True],
        "sequence_max": [True, False, True],
        "veto": [False, False, True],
        "opsm": [False, False, True],
    }
    assert parts.is_kept_N.tolist() == [False, False, True, False, False]


def test_weights_and_masks_judge_the_proximal_policy_where_there_is_one() -> None:
    """With several updates a step the live ratio is the loss's own business; the gap to the sampler is the proximal policy's."""
    logp = torch.tensor([-1.0], requires_grad=True)
    inputs = LossInputs(
        logprobs_N=logp,
        sampler_N=torch.tensor([-2.0]),
        proximal_N=torch.tensor([-1.0 - math.log(1.1)]),
        advantages_S=torch.tensor([1.0]),
        sequence_N=torch.tensor([0]),
    )
    policy_loss(inputs, Grpo(anchor="proximal"), (Tis(cap=50.0),)).total.backward()
    assert logp.grad is not None and float(logp.grad) == pytest.approx(-1.1 * math.exp(1.0) / 1.1, rel=1e-5)


def test_window_without_a_finite_token_is_judged_by_none() -> None:
    inputs = LossInputs(
        logprobs_N=torch.tensor([math.nan, -1.0]),
        sampler_N=torch.tensor([-1.0, -1.0]),
        advantages_S=torch.tensor([-1.0, -1.0]),
        sequence_N=torch.tensor([0, 1]),
    )
    parts = policy_loss(inputs, Reinforce(), ALL)
    assert not any(hit.any() for hit in parts.hits.values()) and parts.is_kept_N.tolist() == [False, True]


def test_every_correction_has_a_function_of_its_name() -> None:
    assert {kind: name for name, kind in CORRECTIONS.items()} == {kind: name for kind, (name, _) in FUNCTIONS.items()}
