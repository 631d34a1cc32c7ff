"""Which experts each token takes: recording a forward's choice, and imposing an earlier one; how an expert is weighted is the router's.

A route is a set: ids are kept ascending. Rows are packed tokens, columns absolute layers, so dense layers have a column too (-1).
Shapes: T tokens, L layers, K experts per token, X experts.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
import torch

from rollmill.model.config import ModelConfig
from rollmill.model.route_record import RouteShape
from rollmill.ops.torch_ops import top_ids

DELTA = 0.1
LOGIT_NOISE = 0.05
"""By how much rounding may move a router's logit: bfloat16 values between 8 and 16 lie 2^-4 apart."""


class Routes(Protocol):
    """Asked by every sparse layer for the ids to compute with: gets the live choice, ascending, and the scores it was made by."""

    def __call__(self, layer: int, ids_TK: torch.Tensor, choice_TX: torch.Tensor) -> torch.Tensor: ...


def route_shape(config: ModelConfig) -> RouteShape:
    """What a routing record of this model holds per token."""
    if config.moe is None:
        raise ValueError(f"a {config.family} model without experts has no routes to record or replay")
    layers = tuple(i for i in range(config.num_layers) if config.is_sparse(i))
    return RouteShape(num_layers=config.num_layers, layers=layers, num_experts=config.moe.num_experts, top_k=config.moe.top_k)


class RecordedRoutes:
    """Lets the router choose and keeps what it chose."""

    def __init__(self, config: ModelConfig) -> None:
        self._num_layers = config.num_layers
        self._seen: dict[int, torch.Tensor] = {}

    def __call__(self, layer: int, ids_TK: torch.Tensor, choice_TX: torch.Tensor) -> torch.Tensor:
        self._seen[layer] = ids_TK
        return ids_TK

    def ids_TLK(self) -> torch.Tensor:
        """The last forward's choice as int16; -1 in dense layers."""
        if not self._seen:
            raise ValueError("no routes were recorded: run a model with sparse layers with this object as `routes` first")
        none_TK = torch.full_like(next(iter(self._seen.values())), -1)
        return torch.stack([self._seen.get(layer, none_TK) for layer in range(self._num_layers)], 1).to(torch.int16)


class RouteTally(msgspec.Struct, frozen=True, kw_only=True):
    """How the live router and the recorded routes compared in one forward; tensors stay on the device until someone asks."""

    flipped_L: torch.Tensor
    """Recorded experts that the live router would not have taken, per layer."""
    replaced_L: torch.Tensor
    """Of these, the ones that were not imposed."""
    recorded_L: torch.Tensor
    """Recorded experts, per layer."""
    num_flipped_tokens: torch.Tensor
    """Tokens with a flipped expert in any layer."""
    num_recorded_tokens: torch.Tensor
    """Tokens with a record in any layer."""


class ForcedRoutes:
    """Imposes recorded routes; a token whose ids in a layer are all -1 keeps the live router's choice there.

    The weights of the experts are still the live router's scores of them, so that it goes on learning.
    """

    def __init__(self, ids_TLK: torch.Tensor, config: ModelConfig) -> None:
        assert config.moe, "only a model with experts has routes"
        want = (config.num_layers, config.moe.top_k)
        if ids_TLK.dim() != 3 or tuple(ids_TLK.shape[1:]) != want:
            raise ValueError(f"routes have shape {tuple(ids_TLK.shape)}; this model needs (tokens, {want[0]} layers, {want[1]} experts)")
        ids = ids_TLK.sort(-1).values
        missing = ids < 0
        if int(ids.max()) >= config.moe.num_experts or bool((ids < -1).any()):
            raise ValueError(f"routes name experts {int(ids.min())}..{int(ids.max())}; this model has 0..{config.moe.num_experts - 1}")
        if bool((missing.any(-1) != missing.all(-1)).any()) or bool(((ids[..., 1:] == ids[..., :-1]) & ~missing[..., 1:]).any()):
            raise ValueError("routes name an expert twice or only some of a token's experts; give all of them, or -1 throughout")
        self._ids_LTK = ids.transpose(0, 1).contiguous()
        # By layer, not summed up: a forward that is run twice, for its activations, must not count twice.
        self._flipped: dict[int, torch.Tensor] = {}
        self._replaced: dict[int, torch.Tensor] = {}

    def __call__(self, layer: int, ids_TK: torch.Tensor, choice_TX: torch.Tensor) -> torch.Tensor:
        if self._ids_LTK.device != ids_TK.device:
            self._ids_LTK = self._ids_LTK.to(ids_TK.device)
        forced_TK = self._ids_LTK[layer].long()
        if forced_TK.shape != ids_TK.shape:
            raise ValueError(
                f"routes are for {len(forced_TK)} tokens, the batch has {len(ids_TK)}; give them in the order of the packed batch"
            )
        is_given_T1 = forced_TK[:, :1] >= 0
        forced_TK = torch.where(is_given_T1, forced_TK, ids_TK)
        is_live_TX = torch.zeros_like(choice_TX, dtype=torch.bool).scatter_(1, ids_TK, True)
        self._flipped[layer] = (~is_live_TX.gather(1, forced_TK)).sum(-1)
        taken_TK, self._replaced[layer] = self._impose(forced_TK, ids_TK, choice_TX)
        return taken_TK

    def _impose(self, forced_TK: torch.Tensor, ids_TK: torch.Tensor, choice_TX: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(the ids to compute with, how many of each token's recorded experts are not among them)."""
        return forced_TK, torch.zeros_like(forced_TK[:, 0])

    def tally(self) -> RouteTally:
        """Of the last forward."""
        assert self._flipped, "a tally is of a forward, and there was none"
        recorded_LT = (self._ids_LTK >= 0).sum(-1)
        none_T = torch.zeros_like(recorded_LT[0])
        flipped_LT = torch.stack([self._flipped.get(layer, none_T) for layer in range(len(recorded_LT))])
        return RouteTally(
            flipped_L=flipped_LT.sum(-1),
            replaced_L=torch.stack([self._replaced.get(layer, none_T) for layer in range(len(recorded_LT))]).sum(-1),
            recorded_L=recorded_LT.sum(-1),
            num_flipped_tokens=flipped_LT.any(0).sum(),
            num_recorded_tokens=recorded_LT.any(0).sum(),
        )


class PlausibleRoutes(ForcedRoutes):
    """Imposes a recorded expert only where the live router finds it nearly as good as its own choice.

    With s the live scores, s_(1) and s_(k) the best and the worst of the live choice, a recorded expert e stays iff

        s_e >= s_(k) - max(delta * (s_(1) - s_(k)), floor)

    and every one that does not is replaced by the best live expert that is not taken yet. s is the log of a softmax score: its
    differences are those of the logits, which is where rounding acts, while among probabilities a router that is sure of one
    expert would make the margin so wide that everything passes. A sigmoid router chooses by score plus bias, which has no log
    and is compared as it is; experts outside its best groups have no score and never stay. The floor is what rounding alone can
    do, and keeps the margin open where the live choice is flat or a single expert.
    """

    def __init__(self, ids_TLK: torch.Tensor, config: ModelConfig, *, delta: float = DELTA) -> None:
        super().__init__(ids_TLK, config)
        if not delta >= 0:
            raise ValueError(f"delta is {delta}; give the margin as a share of the live spread, 0 or more")
        assert config.moe
        self._delta, self._is_log = delta, not config.moe.is_sigmoid
        # A sigmoid is nowhere steeper than 1/4.
        self._floor = LOGIT_NOISE if self._is_log else LOGIT_NOISE / 4

    def _impose(self, forced_TK: torch.Tensor, ids_TK: torch.Tensor, choice_TX: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        score_TX = choice_TX.log() if self._is_log else choice_TX
        live_TK = score_TX.gather(1, ids_TK)
        worst_T1 = live_TK.amin(-1, keepdim=True)
        margin_T1 = (self._delta * (live_TK.amax(-1, keepdim=True) - worst_T1)).clamp(min=self._floor)
        recorded_TK = score_TX.gather(1, forced_TK)
        is_kept_TK = recorded_TK >= worst_T1 - margin_T1
        # What is dropped keeps its score, which is below that of all K live ones, so it cannot come back in.
        ranked_TX = score_TX.scatter(1, forced_TK, recorded_TK.masked_fill(is_kept_TK, float("inf")))
        return top_ids(ranked_TX, forced_TK.shape[1]), (~is_kept_TK).sum(-1)


def replayed(mode: str, ids_TLK: torch.Tensor, config: ModelConfig) -> ForcedRoutes | None:
    """The routes of a run's `trainer.router_replay`; None lets the router choose."""
    if mode == "off":
        return None
    return {"r3": ForcedRoutes, "r3_plausible": PlausibleRoutes}[mode](ids_TLK, config)
