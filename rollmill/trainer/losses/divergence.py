"""Losses that stop a token by how far its probability moved, not by its ratio, which is volatile where probabilities are small.

l = clamp(log pi - log mu, -20, 20); sg: without gradient. Shapes: N sampled tokens.
"""

from __future__ import annotations

import torch

from rollmill.algorithms import DppoKl, DppoTv
from rollmill.trainer.losses.tokens import TokenLoss, Tokens

TINY = 1e-12


def dppo_tv(tokens: Tokens, options: DppoTv) -> TokenLoss:
    """-keep_t sg(min(exp l, C)) A log pi + tau/2 l^2.   delta 0.2, tau 2e-3, C 20.

    A token stops pushing when pi - mu > delta and A > 0, or pi - mu < -delta and A <= 0. The pull by tau stays.
    """
    with torch.no_grad():
        moved = tokens.logp_N.exp() - tokens.mu_N.exp()
        is_stopped = torch.where(tokens.advantage_N > 0, moved > options.tv_delta, moved < -options.tv_delta)
    return _pushed(tokens, is_stopped, options.ratio_cap, options.kl_tau)


def dppo_kl(tokens: Tokens, options: DppoKl) -> TokenLoss:
    """As `dppo_tv` with D = mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi)).   delta 0.05, tau 2e-3, C 20.

    A token stops pushing when D > delta and it moved its own way: pi > mu and A > 0, or pi < mu and A <= 0.
    """
    with torch.no_grad():
        mu, rest_mu = tokens.mu_N.exp(), _rest(tokens.mu_N)
        divergence = mu * (tokens.mu_N - tokens.logp_N) + rest_mu * (rest_mu.log() - _rest(tokens.logp_N).log())
        is_own_way = torch.where(tokens.advantage_N > 0, tokens.logp_N > tokens.mu_N, tokens.logp_N < tokens.mu_N)
    return _pushed(tokens, is_own_way & (divergence > options.kl_delta), options.ratio_cap, options.kl_tau)


def _pushed(tokens: Tokens, is_stopped: torch.Tensor, cap: float, tau: float) -> TokenLoss:
    log_ratio = tokens.log_ratio()
    with torch.no_grad():
        ratio = log_ratio.exp()
        push_N = ratio.clamp(max=cap) * tokens.advantage_N * ~is_stopped
    return TokenLoss(loss_N=-push_N * tokens.logp_N + 0.5 * tau * log_ratio.square(), is_stopped_N=is_stopped, is_cut_N=ratio > cap)


def _rest(logp_N: torch.Tensor) -> torch.Tensor:
    """1 - p, by expm1, which keeps its digits where p is nearly 1; never 0."""
    return (-logp_N.clamp(max=0).expm1()).clamp(min=TINY)
