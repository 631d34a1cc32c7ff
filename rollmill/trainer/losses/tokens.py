"""What every loss reads and returns: token arrays from which every number that is none has been taken out, and ratios that cannot overflow.

Shapes: N sampled tokens of S windows.
"""

from __future__ import annotations

import msgspec
import torch

LOG_RATIO_CLAMP = 20.0


class LossInputs(msgspec.Struct, frozen=True, kw_only=True):
    """A micro-batch as it was measured; any of its numbers may be NaN or infinite."""

    logprobs_N: torch.Tensor
    """The policy's, with gradient."""
    sampler_N: torch.Tensor
    """Those that the tokens were sampled with."""
    advantages_S: torch.Tensor
    """Of each window's episode."""
    sequence_N: torch.Tensor
    """Which window each token belongs to."""
    length_S: torch.Tensor | None = None
    """Sampled tokens of each window's episode, for `sequence_mean`; None: those of the window."""
    lag_N: torch.Tensor | None = None
    """Versions between the weights that sampled the token and the policy's; None: 0."""
    proximal_N: torch.Tensor | None = None
    """The policy's before the first update of the step; only for losses that need it."""
    reference_N: torch.Tensor | None = None
    """Those of the policy that training started from; only with `kl_ref`."""
    kl_ref: float = 0.0
    """What a nat of divergence from the reference takes from the advantage of a token."""


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """The same after `clean`: everything is finite, and a token that was not is in no mask and has gradient 0."""

    logp_N: torch.Tensor
    mu_N: torch.Tensor
    advantage_N: torch.Tensor
    advantages_S: torch.Tensor
    sequence_N: torch.Tensor
    lag_N: torch.Tensor | None
    proximal_N: torch.Tensor | None
    is_finite_N: torch.Tensor
    is_live_N: torch.Tensor
    """Finite, and left in by every correction."""

    @property
    def num_sequences(self) -> int:
        return len(self.advantages_S)

    def log_ratio(self, anchor: str = "sampler") -> torch.Tensor:
        """Of the policy to the anchor, with gradient."""
        return log_ratio(self.logp_N, self.mu_N if anchor == "sampler" else self.proximal())

    def proximal(self) -> torch.Tensor:
        assert self.proximal_N is not None, "this loss needs the proximal policy's logprobs"
        return self.proximal_N

    def behaviour(self) -> torch.Tensor:
        """Log ratio to the sampler of the proximal policy, or of the policy itself where there is no other; without gradient."""
        return log_ratio(self.logp_N.detach() if self.proximal_N is None else self.proximal_N, self.mu_N)

    def sum_by_sequence(self, x_N: torch.Tensor) -> torch.Tensor:
        """[S]: sums over the finite tokens of each window."""
        zeros_S = torch.zeros(self.num_sequences, dtype=x_N.dtype, device=x_N.device)
        return zeros_S.index_add(0, self.sequence_N, torch.where(self.is_finite_N, x_N, torch.zeros_like(x_N)))

    def mean_by_sequence(self, x_N: torch.Tensor) -> torch.Tensor:
        """[S]: means over the finite tokens of each window; 0 for a window without any."""
        return self.sum_by_sequence(x_N) / self.sum_by_sequence(torch.ones_like(x_N)).clamp(min=1)


class TokenLoss(msgspec.Struct, frozen=True, kw_only=True):
    """What a loss says of each token."""

    loss_N: torch.Tensor
    """To be minimised, with gradient, before corrections and aggregation; finite."""
    is_stopped_N: torch.Tensor
    """Tokens that the loss itself keeps from pushing."""
    is_cut_N: torch.Tensor
    """Tokens whose weight was cut at a cap or floor."""


def log_ratio(logp_N: torch.Tensor, anchor_N: torch.Tensor) -> torch.Tensor:
    """The only way to a ratio: clamped before anyone takes its exponential."""
    return (logp_N - anchor_N).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)


def clean(inputs: LossInputs) -> Tokens:
    """Numbers that are none are replaced, not multiplied by zero: 0 * nan is nan and would reach the optimiser."""
    advantage_N = inputs.advantages_S[inputs.sequence_N]
    is_finite = torch.isfinite(inputs.logprobs_N) & torch.isfinite(inputs.sampler_N) & torch.isfinite(advantage_N)
    for given in (inputs.proximal_N, inputs.reference_N):
        if given is not None:
            is_finite = is_finite & torch.isfinite(given)

    def finite(x_N: torch.Tensor) -> torch.Tensor:
        return torch.where(is_finite, x_N, torch.zeros_like(x_N))

    logp_N = finite(inputs.logprobs_N)
    advantage_N = finite(advantage_N)
    if inputs.kl_ref:
        assert inputs.reference_N is not None, "kl_ref needs the reference's logprobs"
        # k1 inside the advantage: its expected push is the gradient of KL(policy, reference), which k1 as a loss would not have.
        advantage_N = advantage_N - inputs.kl_ref * log_ratio(logp_N.detach(), finite(inputs.reference_N))
    return Tokens(
        logp_N=logp_N,
        mu_N=finite(inputs.sampler_N),
        advantage_N=advantage_N,
        advantages_S=inputs.advantages_S,
        sequence_N=inputs.sequence_N,
        lag_N=inputs.lag_N,
        proximal_N=None if inputs.proximal_N is None else finite(inputs.proximal_N.detach()),
        is_finite_N=is_finite,
        is_live_N=is_finite,
    )
