"""Losses that push along A log pi with a weight that has no gradient of its own: truncated, masked or none.

l = clamp(log pi - log anchor, -20, 20), r = exp l; sg: without gradient. All give what is to be minimised. Shapes: N sampled tokens of
S windows.
"""

from __future__ import annotations

import torch

from rollmill.algorithms import Cispo, M2po, MiniRl, Mis, Reinforce
from rollmill.trainer.losses.tokens import LOG_RATIO_CLAMP, TokenLoss, Tokens


def reinforce(tokens: Tokens, options: Reinforce) -> TokenLoss:
    """-A log pi.   No token ever stops."""
    never = torch.zeros_like(tokens.is_finite_N)
    return TokenLoss(loss_N=-tokens.advantage_N * tokens.logp_N, is_stopped_N=never, is_cut_N=never)


def cispo(tokens: Tokens, options: Cispo) -> TokenLoss:
    """-sg(clip(r, floor, C)) A log pi.   floor 0, C 5.

    No token ever stops: rare tokens that start another line of thought keep their gradient; above C only the weight stays where it is.
    """
    with torch.no_grad():
        ratio = tokens.log_ratio(options.anchor).exp()
        push_N = ratio.clamp(options.ratio_floor, options.ratio_cap) * tokens.advantage_N
        is_cut = (ratio > options.ratio_cap) | (ratio < options.ratio_floor)
    return TokenLoss(loss_N=-push_N * tokens.logp_N, is_stopped_N=torch.zeros_like(is_cut), is_cut_N=is_cut)


def minirl(tokens: Tokens, options: MiniRl) -> TokenLoss:
    """-keep_t sg(min(pi / mu, C)) A log pi.   eps 0.2 / 0.27, C 5.

    A token stops pushing when r > 1 + eps_high and A > 0, or r < 1 - eps_low and A < 0, r being the ratio to the anchor.
    """
    with torch.no_grad():
        ratio, weight = tokens.log_ratio(options.anchor).exp(), tokens.log_ratio().exp()
        advantage = tokens.advantage_N
        is_stopped = ((advantage > 0) & (ratio > 1 + options.eps_high)) | ((advantage < 0) & (ratio < 1 - options.eps_low))
        push_N = weight.clamp(max=options.ratio_cap) * advantage * ~is_stopped
    return TokenLoss(loss_N=-push_N * tokens.logp_N, is_stopped_N=is_stopped, is_cut_N=weight > options.ratio_cap)


def mis(tokens: Tokens, options: Mis) -> TokenLoss:
    """-sg(w) A log pi, w = rho if low <= rho <= high else 0.   low 0.5, high 2.

    rho is pi / mu of the token, the product over its window, or the geometric mean over its window. A token stops pushing when rho
    leaves [low, high].
    """
    with torch.no_grad():
        log_rho = tokens.log_ratio()
        if options.level == "sequence":
            log_rho = tokens.sum_by_sequence(log_rho).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)[tokens.sequence_N]
        elif options.level == "geometric":
            log_rho = tokens.mean_by_sequence(log_rho)[tokens.sequence_N]
        rho = log_rho.exp()
        is_out = (rho < options.low) | (rho > options.high)
        push_N = rho * tokens.advantage_N * ~is_out
    return TokenLoss(loss_N=-push_N * tokens.logp_N, is_stopped_N=is_out, is_cut_N=torch.zeros_like(is_out))


def m2po(tokens: Tokens, options: M2po) -> TokenLoss:
    """-keep_t r A, r = pi / mu with gradient.   tau 0.04.

    The tokens of a micro-batch with the largest l^2 stop pushing, just so many that the mean of l^2 over the others is <= tau.
    """
    log_ratio = tokens.log_ratio()
    with torch.no_grad():
        # A mean of ascending numbers never falls, so the tokens that stay are the first ones.
        squares = torch.where(tokens.is_live_N, log_ratio.square().double(), torch.inf)
        ascending, order = squares.sort(stable=True)
        ranks = torch.arange(1, len(squares) + 1, device=squares.device)
        is_in = ascending.cumsum(0) / ranks <= options.max_m2
        is_stopped = torch.ones_like(tokens.is_live_N).index_put((order,), ~is_in)
    ratio = log_ratio.exp()
    loss_N = -ratio * tokens.advantage_N * ~is_stopped
    return TokenLoss(loss_N=loss_N, is_stopped_N=is_stopped, is_cut_N=torch.zeros_like(is_stopped))
