"""Losses whose gradient flows through the ratio r and ends where r leaves a band: the PPO family.

r = exp(clamp(log pi - log anchor, -20, 20)), the anchor being the sampler or the proximal policy; sg: without gradient. All give what
is to be minimised. Shapes: N sampled tokens of S windows.
"""

from __future__ import annotations

import torch

from rollmill.algorithms import DecoupledPpo, Grpo, Gspo, IcePop, Ppo, Sapo
from rollmill.trainer.losses.tokens import TokenLoss, Tokens, log_ratio


def ppo(tokens: Tokens, options: Ppo) -> TokenLoss:
    """-min(r A, clip(r, 1 - eps_low, 1 + eps_high) A), at A < 0 no less than c A.   eps 0.2 / 0.28, c 3.

    A token stops pushing when r > 1 + eps_high and A > 0, or r < 1 - eps_low and A < 0, or r > c and A < 0.
    """
    loss, ratio = _clipped(tokens, tokens.log_ratio(options.anchor), options.eps_low, options.eps_high)
    with torch.no_grad():
        is_far = (tokens.advantage_N < 0) & (ratio > options.dual_clip)
    loss_N = torch.where(is_far, -options.dual_clip * tokens.advantage_N, loss.loss_N)
    return TokenLoss(loss_N=loss_N, is_stopped_N=loss.is_stopped_N | is_far, is_cut_N=loss.is_cut_N)


def grpo(tokens: Tokens, options: Grpo) -> TokenLoss:
    """-min(r A, clip(r, 1 - eps_low, 1 + eps_high) A), averaged over each window's tokens.   eps 0.2.

    A token stops pushing when r > 1 + eps_high and A > 0, or r < 1 - eps_low and A < 0.
    """
    return _clipped(tokens, tokens.log_ratio(options.anchor), options.eps_low, options.eps_high)[0]


def decoupled_ppo(tokens: Tokens, options: DecoupledPpo) -> TokenLoss:
    """-sg(min(pi_prox / mu, C)) min(r A, clip(r, 1 - eps_low, 1 + eps_high) A), r = pi / pi_prox.   eps 0.2, C 2.

    pi_prox is the policy before the first update of the step, or interpolated: a token of lag v was sampled v + 1 updates before the
    policy that this step makes and v before the one that it starts from, so log pi_prox = log mu + v / (v + 1) (sg(log pi) - log mu).
    A token stops pushing when r > 1 + eps_high and A > 0, or r < 1 - eps_low and A < 0.
    """
    with torch.no_grad():
        if options.proximal == "interpolate":
            lag = torch.zeros_like(tokens.mu_N) if tokens.lag_N is None else tokens.lag_N.to(tokens.mu_N.dtype)
            proximal = tokens.mu_N + lag / (lag + 1) * log_ratio(tokens.logp_N, tokens.mu_N)
        else:
            proximal = tokens.proximal()
        behaviour = log_ratio(proximal, tokens.mu_N).exp()
    loss, _ = _clipped(tokens, log_ratio(tokens.logp_N, proximal), options.eps_low, options.eps_high)
    loss_N = behaviour.clamp(max=options.behaviour_cap) * loss.loss_N
    return TokenLoss(loss_N=loss_N, is_stopped_N=loss.is_stopped_N, is_cut_N=behaviour > options.behaviour_cap)


def icepop(tokens: Tokens, options: IcePop) -> TokenLoss:
    """-sg(m) min(r A, clip(r, 1 - eps_low, 1 + eps_high) A), r = pi / pi_prox, m = rho if low <= rho <= high else 0, rho = pi_prox / mu.

    low 0.5, high 5, eps 0.2 / 0.28. A token stops pushing when rho leaves [low, high], or r > 1 + eps_high and A > 0, or
    r < 1 - eps_low and A < 0.
    """
    loss, _ = _clipped(tokens, log_ratio(tokens.logp_N, tokens.proximal()), options.eps_low, options.eps_high)
    with torch.no_grad():
        rho = log_ratio(tokens.proximal(), tokens.mu_N).exp()
        is_out = (rho < options.low) | (rho > options.high)
    return TokenLoss(loss_N=rho * ~is_out * loss.loss_N, is_stopped_N=loss.is_stopped_N | is_out, is_cut_N=torch.zeros_like(is_out))


def gspo(tokens: Tokens, options: Gspo) -> TokenLoss:
    """-min(s A, clip(s, 1 - eps_low, 1 + eps_high) A), s = exp(mean_t l_t) of the window.   eps 3e-4 / 4e-4.

    Written per token, s_t = sg(s) pi / sg(pi): the same gradient where all tokens of a window share A, and right where they do not.
    A window stops pushing when s > 1 + eps_high and A > 0, or s < 1 - eps_low and A < 0.
    """
    log_r_N = tokens.log_ratio(options.anchor)
    log_s_N = tokens.mean_by_sequence(log_r_N.detach())[tokens.sequence_N] + (log_r_N - log_r_N.detach())
    return _clipped(tokens, log_s_N, options.eps_low, options.eps_high)[0]


def sapo(tokens: Tokens, options: Sapo) -> TokenLoss:
    """-4 / tau sigmoid(tau (r - 1)) A, tau for A > 0 and for A <= 0.   tau 1.0 / 1.05.

    No token stops at once: its push r A 4 s (1 - s), s = sigmoid(tau (r - 1)), is r A at r = 1 and fades with |tau (r - 1)|.
    """
    ratio = tokens.log_ratio(options.anchor).exp()
    tau = torch.full_like(ratio, options.tau_negative).masked_fill(tokens.advantage_N > 0, options.tau_positive)
    never = torch.zeros_like(tokens.is_finite_N)
    return TokenLoss(loss_N=-(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * tokens.advantage_N, is_stopped_N=never, is_cut_N=never)


def _clipped(tokens: Tokens, log_ratio_N: torch.Tensor, eps_low: float, eps_high: float) -> tuple[TokenLoss, torch.Tensor]:
    """(the clipped loss, the ratio without gradient)."""
    ratio, advantage = log_ratio_N.exp(), tokens.advantage_N
    loss_N = -torch.minimum(ratio * advantage, ratio.clamp(1 - eps_low, 1 + eps_high) * advantage)
    fixed = ratio.detach()
    is_stopped = ((advantage > 0) & (fixed > 1 + eps_high)) | ((advantage < 0) & (fixed < 1 - eps_low))
    return TokenLoss(loss_N=loss_N, is_stopped_N=is_stopped, is_cut_N=torch.zeros_like(is_stopped)), fixed
