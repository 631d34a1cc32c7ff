"""The policy losses: one function per loss, any of them with any corrections, summed to one number for a micro-batch.

A NaN or infinity of one token is masked and counted before a loss sees it. Knows no model and no optimiser.
Shapes: N sampled tokens of S windows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import torch

from rollmill import algorithms
from rollmill.algorithms import USUAL_CORRECTIONS, Aggregation, LossOptions, Options
from rollmill.trainer.losses import clipped, corrections, divergence, weighted
from rollmill.trainer.losses.tokens import LOG_RATIO_CLAMP, LossInputs, TokenLoss, clean

__all__ = ["FUNCTIONS", "LOG_RATIO_CLAMP", "USUAL_CORRECTIONS", "LossInputs", "LossParts", "policy_loss"]

FUNCTIONS: dict[type[LossOptions], Callable[..., TokenLoss]] = {
    algorithms.DppoTv: divergence.dppo_tv,
    algorithms.DppoKl: divergence.dppo_kl,
    algorithms.Ppo: clipped.ppo,
    algorithms.DecoupledPpo: clipped.decoupled_ppo,
    algorithms.Grpo: clipped.grpo,
    algorithms.Cispo: weighted.cispo,
    algorithms.Gspo: clipped.gspo,
    algorithms.MiniRl: weighted.minirl,
    algorithms.IcePop: clipped.icepop,
    algorithms.Mis: weighted.mis,
    algorithms.M2po: weighted.m2po,
    algorithms.Sapo: clipped.sapo,
    algorithms.Reinforce: weighted.reinforce,
}


class LossParts(msgspec.Struct, frozen=True, kw_only=True):
    """The summed loss (not yet divided) and per-token tensors for diagnostics."""

    total: torch.Tensor
    log_ratio_N: torch.Tensor
    """log pi - log mu before any clamp or mask, detached."""
    reference_ratio_N: torch.Tensor | None
    """log pi - log pi_ref in the same way; None without a reference."""
    is_finite_N: torch.Tensor
    is_kept_N: torch.Tensor
    """Tokens that still push after every mask."""
    is_stopped_N: torch.Tensor
    """Tokens that every correction left in and the loss itself stopped."""
    is_cut_N: torch.Tensor
    """Tokens whose weight the loss cut at a cap or floor."""
    hits: dict[str, torch.Tensor]
    """By correction: the tokens or windows that it took effect on."""


def policy_loss(
    inputs: LossInputs,
    loss: LossOptions,
    corrected_by: Sequence[Options] = USUAL_CORRECTIONS,
    aggregation: Aggregation = "constant",
) -> LossParts:
    """The sum over tokens of one micro-batch; with `sequence_mean` each token counts 1 / (sampled tokens of its episode)."""
    tokens = clean(inputs)
    weight_N: torch.Tensor | None = None
    is_live, hits = tokens.is_finite_N, {}
    with torch.no_grad():
        for options in corrected_by:
            name, correct = corrections.FUNCTIONS[type(options)]
            found = correct(tokens, options)
            hits[name] = found.hit
            if found.is_out_N is not None:
                is_live = is_live & ~found.is_out_N
            if found.weight_N is not None:
                weight_N = found.weight_N if weight_N is None else weight_N * found.weight_N
        if aggregation == "sequence_mean":
            # Counted before any mask, so that masks never re-scale the rest.
            length_S = torch.bincount(tokens.sequence_N, minlength=tokens.num_sequences) if inputs.length_S is None else inputs.length_S
            share_N = 1.0 / length_S[tokens.sequence_N].to(tokens.mu_N.dtype)
            weight_N = share_N if weight_N is None else weight_N * share_N
    tokens = msgspec.structs.replace(tokens, is_live_N=is_live)
    found_loss = FUNCTIONS[type(loss)](tokens, loss)
    loss_N = found_loss.loss_N if weight_N is None else found_loss.loss_N * weight_N
    reference = inputs.reference_N
    return LossParts(
        total=(loss_N * is_live).sum(),
        log_ratio_N=(inputs.logprobs_N - inputs.sampler_N).detach(),
        reference_ratio_N=None if reference is None else (inputs.logprobs_N - reference).detach(),
        is_finite_N=tokens.is_finite_N,
        is_kept_N=is_live & ~found_loss.is_stopped_N,
        is_stopped_N=is_live & found_loss.is_stopped_N,
        is_cut_N=is_live & found_loss.is_cut_N,
        hits=hits,
    )
