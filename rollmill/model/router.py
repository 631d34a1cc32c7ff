"""Routers: which experts a token takes and with what weight; always in float32, ties to the lower expert id.

The choice carries no gradient, the weights do. Shapes: T tokens, D hidden, X experts, K chosen, G groups.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from rollmill.model.config import MoEConfig
from rollmill.model.routes import Routes


def top_ids(scores_TX: torch.Tensor, k: int) -> torch.Tensor:
    """The k best, ascending by id. A stable sort, since `topk` leaves it open which of two equal scores wins."""
    return scores_TX.sort(dim=-1, descending=True, stable=True).indices[:, :k].sort(-1).values


class SoftmaxRouter(nn.Module):
    """Weights are a softmax over all experts, scaled to sum to one over the chosen ones where the family does so."""

    def __init__(self, config: MoEConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, hidden_size))

    def forward(self, h_TD: torch.Tensor, layer: int, routes: Routes | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(ascending expert ids, their weights), both [T, K]."""
        scores_TX = F.linear(h_TD.float(), self.weight.float()).softmax(-1)
        ids_TK = top_ids(scores_TX.detach(), self.config.top_k)
        if routes is not None:
            ids_TK = routes(layer, ids_TK)
        gates_TK = scores_TX.gather(1, ids_TK)
        return ids_TK, gates_TK / gates_TK.sum(-1, keepdim=True) if self.config.norm_topk else gates_TK

    def named_slices(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "gate.weight", self.weight


class SigmoidRouter(nn.Module):
    """DeepSeek-V3's: each expert scored on its own, chosen by score plus a balancing bias from the best groups, weighted by score."""

    def __init__(self, config: MoEConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, hidden_size))
        # Moved by load balancing, not by gradients.
        self.bias = nn.Parameter(torch.zeros(config.num_experts), requires_grad=False)

    def forward(self, h_TD: torch.Tensor, layer: int, routes: Routes | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(ascending expert ids, their weights), both [T, K]."""
        c = self.config
        scores_TX = F.linear(h_TD.float(), self.weight.float()).sigmoid()
        ids_TK = top_ids(self._open(scores_TX.detach() + self.bias.float()), c.top_k)
        if routes is not None:
            ids_TK = routes(layer, ids_TK)
        gates_TK = scores_TX.gather(1, ids_TK)
        if c.norm_topk:
            gates_TK = gates_TK / (gates_TK.sum(-1, keepdim=True) + 1e-20)
        return ids_TK, gates_TK * c.scale

    def _open(self, choice_TX: torch.Tensor) -> torch.Tensor:
        """Scores with every expert outside the best groups ruled out; a group is as good as its two best experts."""
        c = self.config
        if c.num_groups == 1:
            return choice_TX
        choice_TGx = choice_TX.view(len(choice_TX), c.num_groups, -1)
        groups = top_ids(choice_TGx.topk(2, -1).values.sum(-1), c.top_groups)
        is_open_TG = torch.zeros(choice_TGx.shape[:2], dtype=torch.bool, device=choice_TX.device).scatter_(1, groups, True)
        return choice_TGx.masked_fill(~is_open_TG[..., None], float("-inf")).flatten(1)

    def named_slices(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "gate.weight", self.weight
        yield "gate.e_score_correction_bias", self.bias
