"""The losses of preference learning as pure functions of logprobs: sums over each answer under the policy and the reference.

Shapes: N pairs.
"""

from __future__ import annotations

import msgspec
import torch
import torch.nn.functional as F

from rollmill.trainer.stages.settings import DpoLoss


class Pairs(msgspec.Struct, frozen=True, kw_only=True):
    """Logprobs of N pairs, each the sum over the tokens of an answer, and how many tokens that were."""

    chosen_N: torch.Tensor
    rejected_N: torch.Tensor
    num_chosen_N: torch.Tensor
    num_rejected_N: torch.Tensor
    ref_chosen_N: torch.Tensor
    """Zeros where the loss needs no reference."""
    ref_rejected_N: torch.Tensor


def preference_losses(p: Pairs, *, loss: DpoLoss, beta: float, label_smoothing: float, gamma: float) -> torch.Tensor:
    """One loss per pair. With c, r the logprobs of chosen and rejected, n their tokens, and s the label smoothing:

    sigmoid   h = beta ((c - c_ref) - (r - r_ref))           L = -(1 - s) log sigma(h) - s log sigma(-h)
    ipo       h = (c - c_ref) / n_c - (r - r_ref) / n_r      L = (h - 1 / (2 beta))^2
    simpo     h = beta (c / n_c - r / n_r) - gamma           L as for sigmoid, no reference

    sigmoid and simpo push for ever but ever less: dL/dh = -sigma(-h) without smoothing; with it they stop at sigma(h) = 1 - s.
    ipo stops at h = 1 / (2 beta) and pulls back beyond.
    """
    if loss is DpoLoss.IPO:
        gain = (p.chosen_N - p.ref_chosen_N) / p.num_chosen_N - (p.rejected_N - p.ref_rejected_N) / p.num_rejected_N
        return (gain - 1.0 / (2.0 * beta)) ** 2
    if loss is DpoLoss.SIMPO:
        lead = beta * (p.chosen_N / p.num_chosen_N - p.rejected_N / p.num_rejected_N) - gamma
    else:
        lead = beta * ((p.chosen_N - p.ref_chosen_N) - (p.rejected_N - p.ref_rejected_N))
    return -(1.0 - label_smoothing) * F.logsigmoid(lead) - label_smoothing * F.logsigmoid(-lead)


def implicit_rewards(p: Pairs, *, loss: DpoLoss, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(chosen, rejected): what the policy is taken to be optimal for, beta times the gain over the reference; simpo: the mean logprob."""
    if loss is DpoLoss.SIMPO:
        return beta * p.chosen_N / p.num_chosen_N, beta * p.rejected_N / p.num_rejected_N
    return beta * (p.chosen_N - p.ref_chosen_N), beta * (p.rejected_N - p.ref_rejected_N)
