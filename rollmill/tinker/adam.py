"""AdamW whose every setting comes with the step; a gradient that is not finite is dropped whole and never reaches the moments."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
import torch


class AdamParams(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one step; the defaults are the protocol's."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    """Decoupled."""
    grad_clip_norm: float = 0.0
    """Largest global L2 norm of the gradient; 0: no clipping."""

    def check(self) -> None:
        for name in ("learning_rate", "eps", "weight_decay", "grad_clip_norm"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"adam_params.{name} is {value}, it must be a number from 0")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"adam_params.{name} is {getattr(self, name)}, it must be from 0 to below 1")


class Adam:
    """Owns the moments of the given parameters."""

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._params, self.num_steps = parameters, 0
        self._adam = torch.optim.AdamW(list(parameters.values()), lr=0.0, weight_decay=0.0, fused=True)

    def step(self, params: AdamParams) -> dict[str, float]:
        """Apply the gathered gradients and forget them. Returns metrics."""
        params.check()
        held = [p for p in self._params.values() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in held if p.grad is not None])) if held else 0.0
        is_applied = bool(held) and math.isfinite(norm)
        if is_applied:
            if params.grad_clip_norm:
                torch.nn.utils.clip_grads_with_norm_(held, params.grad_clip_norm, torch.tensor(norm))
            for group in self._adam.param_groups:
                group |= {"lr": params.learning_rate, "betas": (params.beta1, params.beta2)}
                group |= {"eps": params.eps, "weight_decay": params.weight_decay}
            self._adam.step()
            self.num_steps += 1
        self.drop()
        return {"grad_norm": norm, "is_applied": float(is_applied), "num_steps": float(self.num_steps)}

    def drop(self) -> None:
        """Forget the gathered gradients."""
        for parameter in self._params.values():
            parameter.grad = None

    def moments(self) -> dict[str, torch.Tensor]:
        """`KEY|exp_avg` and so on; a parameter that never had a gradient has none."""
        found = {key: self._adam.state.get(p, {}) for key, p in self._params.items()}
        return {f"{key}|{field}": tensor for key, slots in found.items() for field, tensor in slots.items()}

    def load(self, moments: Mapping[str, torch.Tensor], num_steps: int) -> None:
        self._adam.state.clear()
        for name, tensor in moments.items():
            key, _, field = name.rpartition("|")
            if key not in self._params:
                raise ValueError(f"the stored optimiser has moments of {key!r}, which is not trained here")
            home = self._params[key]
            # A fused step wants its step count beside the parameter too.
            self._adam.state[home][field] = tensor.to(home.device, copy=True)
        self.num_steps = num_steps
