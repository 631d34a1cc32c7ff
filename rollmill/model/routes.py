"""Which experts each token took: recording a forward's choice, and imposing an earlier one; knows nothing of scores.

A route is a set: ids are kept ascending. Rows are packed tokens, columns absolute layers, so dense layers have a column too (-1).
Shapes: T tokens, L layers, K experts per token.
"""

from __future__ import annotations

from typing import Protocol

import torch

from rollmill.model.config import ModelConfig


class Routes(Protocol):
    """Asked by every sparse layer: gets the live router's choice, ascending ids, and returns the one to compute with."""

    def __call__(self, layer: int, ids_TK: torch.Tensor) -> torch.Tensor: ...


class RecordedRoutes:
    """Lets the router choose and keeps what it chose."""

    def __init__(self, config: ModelConfig) -> None:
        self._num_layers = config.num_layers
        self._seen: dict[int, torch.Tensor] = {}

    def __call__(self, layer: int, ids_TK: torch.Tensor) -> torch.Tensor:
        self._seen[layer] = ids_TK
        return ids_TK

    def ids_TLK(self) -> torch.Tensor:
        """The last forward's choice as int16; -1 in dense layers."""
        if not self._seen:
            raise ValueError("no routes were recorded: run a model with sparse layers with this object as `routes` first")
        none_TK = torch.full_like(next(iter(self._seen.values())), -1)
        return torch.stack([self._seen.get(layer, none_TK) for layer in range(self._num_layers)], 1).to(torch.int16)


class ForcedRoutes:
    """Imposes recorded routes; a token whose ids in a layer are all -1 keeps the live router's choice there.

    The weights of the experts are still the live router's scores of them, so that it goes on learning.
    """

    def __init__(self, ids_TLK: torch.Tensor, config: ModelConfig) -> None:
        assert config.moe, "only a model with experts has routes"
        want = (config.num_layers, config.moe.top_k)
        if ids_TLK.dim() != 3 or tuple(ids_TLK.shape[1:]) != want:
            raise ValueError(f"routes have shape {tuple(ids_TLK.shape)}; this model needs (tokens, {want[0]} layers, {want[1]} experts)")
        ids = ids_TLK.long().sort(-1).values
        missing = ids < 0
        if int(ids.max()) >= config.moe.num_experts or bool((ids < -1).any()):
            raise ValueError(f"routes name experts {int(ids.min())}..{int(ids.max())}; this model has 0..{config.moe.num_experts - 1}")
        if bool((missing.any(-1) != missing.all(-1)).any()) or bool(((ids[..., 1:] == ids[..., :-1]) & ~missing[..., 1:]).any()):
            raise ValueError("routes name an expert twice or only some of a token's experts; give all of them, or -1 throughout")
        self._ids_LTK = ids.transpose(0, 1).contiguous()
        self._is_given_LT1 = ~missing.transpose(0, 1)[..., :1].contiguous()

    def __call__(self, layer: int, ids_TK: torch.Tensor) -> torch.Tensor:
        forced = self._ids_LTK[layer]
        if forced.shape != ids_TK.shape:
            raise ValueError(
                f"routes are for {len(forced)} tokens, the batch has {len(ids_TK)}; give them in the order of the packed batch"
            )
        device = ids_TK.device
        return torch.where(self._is_given_LT1[layer].to(device), forced.to(device), ids_TK)
