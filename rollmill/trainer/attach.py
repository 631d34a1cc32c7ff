"""Trains something other than a model's own parameters: gradients are routed to an overlay as they arise, and the overlay's values are
folded into the live weights, rounded once to the serving dtype.

The model therefore always computes with exactly what would be served; knows neither optimiser nor loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch.utils.hooks import RemovableHandle

from rollmill.model import Model


class Overlay(Protocol):
    """Trainable fp32 tensors that decide the values of some of a model's stored tensors, by their Hugging Face names."""

    @property
    def names(self) -> tuple[str, ...]:
        """The stored tensors it decides."""

    def parameters(self) -> Mapping[str, torch.Tensor]:
        """What an optimiser steps; gradients are gathered in their `.grad`."""

    def take(self, name: str, gradient: torch.Tensor) -> None:
        """Add the gradient of a stored tensor to those of the parameters behind it."""

    def value(self, name: str, base: torch.Tensor) -> torch.Tensor:
        """fp32 value of a stored tensor, `base` being what it is without the overlay."""


class Attached:
    """An overlay on a model: only its tensors get gradients, and the live weights are its values. `detach` puts everything back.

    `base` are the stored tensors without it, in the serving dtype; None copies those that it decides.
    """

    def __init__(self, model: Model, overlay: Overlay, base: Mapping[str, torch.Tensor] | None = None) -> None:
        self.model, self.overlay = model, overlay
        live = model.slices()
        if unknown := [name for name in overlay.names if name not in live]:
            raise ValueError(f"this model has no tensor {unknown[0]!r}; the weights to be trained on it are another model's")
        if base is None:
            base = {name: live[name].to(model.serving_dtype, copy=True) for name in overlay.names}
        self._base = base
        self._trained_before = [p.requires_grad for p in model.parameters()]
        self._handles = _route(model, overlay)
        self.fold()

    @torch.no_grad()
    def fold(self) -> None:
        """Make the live weights the overlay's values; call it whenever its parameters have changed."""
        live = self.model.slices()
        for name in self.overlay.names:
            live[name].copy_(self.overlay.value(name, self._base[name]).to(self.model.serving_dtype))

    @torch.no_grad()
    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        live = self.model.slices()
        for name in self.overlay.names:
            live[name].copy_(self._base[name])
        for parameter, was_trained in zip(self.model.parameters(), self._trained_before, strict=True):
            parameter.requires_grad_(was_trained)


def _route(model: Model, overlay: Overlay) -> list[RemovableHandle]:
    """Hooks that hand each stored tensor's part of a live parameter's gradient on and free it: no full set of gradients ever exists."""
    owners = {p.untyped_storage().data_ptr(): p for p in model.parameters()}
    assert len(owners) == len(list(model.parameters())), "live parameters must not share memory"
    places: dict[torch.nn.Parameter, list[tuple[str, int, torch.Size]]] = {}
    for name in overlay.names:
        view = model.slices()[name]
        owner = owners[view.untyped_storage().data_ptr()]
        places.setdefault(owner, []).append((name, int(view.storage_offset() - owner.storage_offset()), view.shape))
    for parameter in model.parameters():
        parameter.requires_grad_(parameter in places)
    return [owner.register_post_accumulate_grad_hook(_hand_on(overlay, parts)) for owner, parts in places.items()]


def _hand_on(overlay: Overlay, parts: list[tuple[str, int, torch.Size]]) -> Callable[[torch.Tensor], None]:
    @torch.no_grad()
    def hook(live: torch.Tensor) -> None:
        assert live.grad is not None
        flat = live.grad.contiguous().view(-1)
        live.grad = None
        for name, start, shape in parts:
            overlay.take(name, flat[start : start + shape.numel()].view(shape))

    return hook
