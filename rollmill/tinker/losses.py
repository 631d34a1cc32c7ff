"""The protocol's loss functions: pure functions of the policy's logprobs to one loss per position, summed and never divided.

With p = log pi of the target, q = the logprob it was sampled with, A its advantage and r = exp(clamp(p - q, -20, 20)):

    cross_entropy          -w p
    importance_sampling    -r A
    ppo                    -min(r A, clamp(r, low, high) A)            low 0.8, high 1.2
    cispo                  -stop_gradient(clamp(r, low, high)) A p     low 0.8, high 1.2
    dro                    -(A p - beta / 2 (p - q)^2)                 beta 0.05

A position where any of them is not finite is left out and counted. Shapes: M positions of all data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import torch

LOG_RATIO_CLAMP = 20.0
Inputs = Mapping[str, torch.Tensor]
Config = Mapping[str, float]


class LossFn(msgspec.Struct, frozen=True, kw_only=True):
    """A loss function with what it needs and takes."""

    terms: Callable[[torch.Tensor, Inputs, Config], torch.Tensor]
    """(logprobs [M], inputs [M] by name, settings) -> loss [M]."""
    needs: frozenset[str]
    """Inputs that every datum must have, besides `target_tokens`."""
    takes: frozenset[str] = frozenset()
    """Inputs that a datum may have."""
    defaults: Mapping[str, float] = {}
    """Settings; one that is also in `takes` may be given per position instead."""


def cross_entropy(logprobs_M: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    return -logprobs_M * inputs["weights"]


def importance_sampling(logprobs_M: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    return -_ratio(logprobs_M, inputs) * inputs["advantages"]


def ppo(logprobs_M: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    ratio_M = _ratio(logprobs_M, inputs)
    return -torch.minimum(ratio_M * inputs["advantages"], _clipped(ratio_M, inputs, config) * inputs["advantages"])


def cispo(logprobs_M: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    return -_clipped(_ratio(logprobs_M, inputs), inputs, config).detach() * inputs["advantages"] * logprobs_M


def dro(logprobs_M: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    return -(logprobs_M * inputs["advantages"] - 0.5 * config["beta"] * (logprobs_M - inputs["logprobs"]).square())


def _ratio(logprobs_M: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    return (logprobs_M - inputs["logprobs"]).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()


def _clipped(ratio_M: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    low, high = (inputs.get(name, torch.full_like(ratio_M, config[name])) for name in ("clip_low_threshold", "clip_high_threshold"))
    return torch.minimum(torch.maximum(ratio_M, low), high)


_SAMPLED = frozenset({"logprobs", "advantages"})
_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}

LOSSES: Mapping[str, LossFn] = {
    "cross_entropy": LossFn(terms=cross_entropy, needs=frozenset(), takes=frozenset({"weights"})),
    "importance_sampling": LossFn(terms=importance_sampling, needs=_SAMPLED),
    "ppo": LossFn(terms=ppo, needs=_SAMPLED, takes=frozenset(_CLIP), defaults=_CLIP),
    "cispo": LossFn(terms=cispo, needs=_SAMPLED, takes=frozenset(_CLIP), defaults=_CLIP),
    "dro": LossFn(terms=dro, needs=_SAMPLED, defaults={"beta": 0.05}),
}


def loss_named(name: str) -> LossFn:
    if name not in LOSSES:
        raise ValueError(f"loss_fn is {name!r}; this server has {', '.join(LOSSES)}, and forward_backward_custom for any other")
    return LOSSES[name]


def settings_of(loss: LossFn, config: Mapping[str, float | str]) -> dict[str, float]:
    """The defaults with what the request sets."""
    for key, value in config.items():
        if key not in loss.defaults:
            raise ValueError(f"loss_fn_config has {key!r}; this loss takes {', '.join(loss.defaults) or 'no settings'}")
        if isinstance(value, str) or not -1e30 < value < 1e30:
            raise ValueError(f"loss_fn_config has {key} = {value!r}, it must be a number")
    return {**loss.defaults, **{key: float(value) for key, value in config.items()}}


def summed(loss: LossFn, logprobs_M: torch.Tensor, inputs: Inputs, settings: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum of the losses, number of positions left out because something was not finite)."""
    is_finite_M = torch.isfinite(logprobs_M)
    for values_M in inputs.values():
        is_finite_M = is_finite_M & torch.isfinite(values_M)
    # Replaced, not multiplied by zero: 0 * nan is nan and would reach the optimiser.
    clean = {name: torch.where(is_finite_M, values_M, 0.0) for name, values_M in inputs.items()}
    terms_M = loss.terms(torch.where(is_finite_M, logprobs_M, 0.0), clean, settings)
    return torch.where(is_finite_M, terms_M, 0.0).sum(), (~is_finite_M).sum()
