"""All of a model's weights as what is trained, in fp32: the overlay of a training run without adapters."""

from __future__ import annotations

from collections.abc import Mapping

import torch


class FullWeights:
    """An `Overlay` that decides every stored tensor by a master of its own."""

    def __init__(self, base: Mapping[str, torch.Tensor]) -> None:
        self._masters = {name: tensor.to(torch.float32, copy=True) for name, tensor in base.items()}
        self.names = tuple(base)

    def parameters(self) -> Mapping[str, torch.Tensor]:
        return self._masters

    def take(self, name: str, gradient: torch.Tensor) -> None:
        master = self._masters[name]
        master.grad = gradient.float().clone() if master.grad is None else master.grad.add_(gradient)

    def value(self, name: str, base: torch.Tensor) -> torch.Tensor:
        return self._masters[name]

    @torch.no_grad()
    def load(self, params: Mapping[str, torch.Tensor]) -> None:
        """Take over values; they must be of the same model."""
        for name, mine in self._masters.items():
            if name not in params or params[name].shape != mine.shape:
                raise ValueError(f"the stored weights lack {name!r} in this model's shape; they are another model's")
            mine.copy_(params[name])
