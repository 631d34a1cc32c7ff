"""The policy loss `dppo_tv`: sampler-anchored policy gradient with a total-variation mask and always-clamped ratios.

With l = clamp(log pi - log mu, -20, 20), mu the probability the replica really sampled from, A the episode's advantage:

    keep_t = pi - mu <= delta        when A > 0        (a token stops pushing once it moved far enough its own way)
             pi - mu >= -delta       when A <= 0
    w_t    = stop_gradient(min(exp l, C))               one-sided truncation
    veto_i = min_t exp l >= 1e-4                        a sequence with an impossible token teaches nothing
    opsm_i = not (A < 0 and -mean_t l > 0.2)            a stale failure is no evidence
    L = 1 / (B * length_norm) * sum_i veto_i opsm_i sum_t m_t [ -keep_t w_t A_i log pi_t + tau/2 l_t^2 ]

B counts the episodes of the batch before any mask, so masks never re-scale the rest. A token whose logprob is not finite
on either side is masked out and counted. Shapes: N sampled tokens of S sequences.
"""

from __future__ import annotations

import msgspec
import torch

LOG_RATIO_CLAMP = 20.0
VETO_RATIO = 1e-4
OPSM_LIMIT = 0.2


class LossConfig(msgspec.Struct, frozen=True, kw_only=True):
    tv_delta: float = 0.2
    kl_tau: float = 2e-3
    ratio_cap: float = 20.0


class LossParts(msgspec.Struct, frozen=True, kw_only=True):
    """The summed loss (not yet divided) and per-token tensors for diagnostics."""

    total: torch.Tensor
    log_ratio_N: torch.Tensor
    """log pi - log mu before any clamp or mask, detached."""
    is_finite_N: torch.Tensor
    is_kept_N: torch.Tensor
    """Tokens that still push after every mask."""
    is_tv_masked_N: torch.Tensor
    is_vetoed_S: torch.Tensor
    is_opsm_S: torch.Tensor


def dppo_tv(
    logprobs_N: torch.Tensor, sampler_N: torch.Tensor, advantages_S: torch.Tensor, sequence_N: torch.Tensor, config: LossConfig
) -> LossParts:
    """`sequence_N` says which of the S sequences each token belongs to."""
    num_sequences = len(advantages_S)
    is_finite = torch.isfinite(logprobs_N) & torch.isfinite(sampler_N)
    # Replaced, not multiplied by zero: 0 * nan is nan and would reach the optimiser.
    logp = torch.where(is_finite, logprobs_N, torch.zeros_like(logprobs_N))
    mu = torch.where(is_finite, sampler_N, torch.zeros_like(sampler_N))
    log_ratio = (logp - mu).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    with torch.no_grad():
        ratio = log_ratio.exp()
        advantage_N = advantages_S[sequence_N]
        moved = logp.exp() - mu.exp()
        is_tv_masked = torch.where(advantage_N > 0, moved > config.tv_delta, moved < -config.tv_delta)
        ones = torch.ones(num_sequences, dtype=ratio.dtype, device=ratio.device)
        lowest = ones.scatter_reduce(0, sequence_N, ratio, "amin")
        count = torch.zeros_like(ones).index_add(0, sequence_N, is_finite.to(ratio.dtype)).clamp(min=1)
        mean_log = torch.zeros_like(ones).index_add(0, sequence_N, torch.where(is_finite, log_ratio, 0.0)) / count
        is_vetoed = lowest < VETO_RATIO
        is_opsm = (advantages_S < 0) & (-mean_log > OPSM_LIMIT)
        is_live = is_finite & ~(is_vetoed | is_opsm)[sequence_N]
        is_kept = is_live & ~is_tv_masked
        push_N = ratio.clamp(max=config.ratio_cap) * advantage_N * is_kept
    total = (-push_N * logp + 0.5 * config.kl_tau * log_ratio.square() * is_live).sum()
    return LossParts(
        total=total,
        log_ratio_N=(logprobs_N - sampler_N).detach(),
        is_finite_N=is_finite,
        is_kept_N=is_kept,
        is_tv_masked_N=is_tv_masked & is_live,
        is_vetoed_S=is_vetoed,
        is_opsm_S=is_opsm,
    )
