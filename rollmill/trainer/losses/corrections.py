"""Corrections that compose with any loss: each says which tokens may teach at all, and with what weight.

w = exp(clamp(log rho, -20, 20)), rho the ratio to the sampler of the proximal policy, or of the policy itself where a loss needs no
proximal one. Everything here is without gradient. Shapes: N sampled tokens of S windows.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch

from rollmill.algorithms import Opsm, Options, SequenceBand, SequenceMax, Tis, TokenBand, Veto
from rollmill.trainer.losses.tokens import Tokens


class Correction(msgspec.Struct, frozen=True, kw_only=True):
    """What one correction found."""

    hit: torch.Tensor
    """[N] or [S]: the tokens or windows it took effect on, for the metrics."""
    is_out_N: torch.Tensor | None = None
    """Tokens that teach nothing; None: all do."""
    weight_N: torch.Tensor | None = None
    """What a token's loss is multiplied by; None: 1."""


def tis(tokens: Tokens, options: Tis) -> Correction:
    """Weight min(w, cap): unbiased up to the cap, biased towards smaller steps above it.   cap 2."""
    ratio = tokens.behaviour().exp()
    return Correction(hit=(ratio > options.cap) & tokens.is_finite_N, weight_N=ratio.clamp(max=options.cap))


def token_band(tokens: Tokens, options: TokenBand) -> Correction:
    """A token is out when w < low or w > high.   0.5, 5."""
    ratio = tokens.behaviour().exp()
    is_out = ((ratio < options.low) | (ratio > options.high)) & tokens.is_finite_N
    return Correction(hit=is_out, is_out_N=is_out)


def sequence_band(tokens: Tokens, options: SequenceBand) -> Correction:
    """A window is out when exp(mean_t log w) < low or > high; long windows are judged as short ones.   0.99, 1.01."""
    mean_S = tokens.mean_by_sequence(tokens.behaviour()).exp()
    return _windows(tokens, (mean_S < options.low) | (mean_S > options.high))


def sequence_max(tokens: Tokens, options: SequenceMax) -> Correction:
    """A window is out when max_t (w - 1 - log w) > c: the only mask whose bound does not grow void with the length.   c 10."""
    log_w = tokens.behaviour()
    k3 = torch.where(tokens.is_finite_N, log_w.expm1() - log_w, torch.zeros_like(log_w))
    most_S = torch.zeros(tokens.num_sequences, dtype=k3.dtype, device=k3.device).scatter_reduce(0, tokens.sequence_N, k3, "amax")
    return _windows(tokens, most_S > options.max_k3)


def veto(tokens: Tokens, options: Veto) -> Correction:
    """A window with an impossible token is out: min_t w < c.   c 1e-4."""
    ratio = torch.where(tokens.is_finite_N, tokens.behaviour().exp(), 1.0)
    ones_S = torch.ones(tokens.num_sequences, dtype=ratio.dtype, device=ratio.device)
    return _windows(tokens, ones_S.scatter_reduce(0, tokens.sequence_N, ratio, "amin") < options.min_ratio)


def opsm(tokens: Tokens, options: Opsm) -> Correction:
    """A failure far off the policy is no evidence: out when A < 0 and -mean_t (log pi - log mu) > limit.   0.2."""
    mean_S = tokens.mean_by_sequence(tokens.log_ratio().detach())
    return _windows(tokens, (tokens.advantages_S < 0) & (-mean_S > options.limit))


FUNCTIONS: dict[type[Options], tuple[str, Callable[..., Correction]]] = {
    Tis: ("tis", tis),
    TokenBand: ("token_band", token_band),
    SequenceBand: ("sequence_band", sequence_band),
    SequenceMax: ("sequence_max", sequence_max),
    Veto: ("veto", veto),
    Opsm: ("opsm", opsm),
}


def _windows(tokens: Tokens, is_out_S: torch.Tensor) -> Correction:
    return Correction(hit=is_out_S, is_out_N=is_out_S[tokens.sequence_N])
