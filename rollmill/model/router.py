"""Routers: which experts a token takes and with what weight; always in float32, ties to the lower expert id.

The choice carries no gradient, the weights do. Shapes: T tokens, D hidden, X experts, K chosen, G groups.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from rollmill.model.config import MoEConfig
from rollmill.model.routes import Routes
from rollmill.ops import Ops


def ordered_sum(gates_TK: torch.Tensor) -> torch.Tensor:
    """[T, 1]: one term after the other, where a reduction may choose its order by the number of rows."""
    total_T1 = gates_TK[:, :1]
    for k in range(1, gates_TK.shape[1]):
        total_T1 = total_T1 + gates_TK[:, k : k + 1]
    return total_T1


class SoftmaxRouter(nn.Module):
    """Weights are a softmax over all experts, scaled to sum to one over the chosen ones where the family does so."""

    def __init__(self, config: MoEConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, hidden_size))

    def forward(self, h_TD: torch.Tensor, layer: int, ops: Ops, routes: Routes | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(ascending expert ids, their weights), both [T, K]."""
        scores_TX = ops.linear_fp32(h_TD, self.weight).softmax(-1)
        ids_TK = ops.top_ids(scores_TX.detach(), self.config.top_k)
        if routes is not None:
            ids_TK = routes(layer, ids_TK, scores_TX.detach())
        gates_TK = scores_TX.gather(1, ids_TK)
        return ids_TK, gates_TK / ordered_sum(gates_TK) if self.config.norm_topk else gates_TK

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

    def forward(self, h_TD: torch.Tensor, layer: int, ops: Ops, routes: Routes | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(ascending expert ids, their weights), both [T, K]."""
        c = self.config
        scores_TX = ops.sigmoid(ops.linear_fp32(h_TD, self.weight))
        choice_TX = self._open(scores_TX.detach() + self.bias.float(), ops)
        ids_TK = ops.top_ids(choice_TX, c.top_k)
        if routes is not None:
            ids_TK = routes(layer, ids_TK, choice_TX)
        gates_TK = scores_TX.gather(1, ids_TK)
        if c.norm_topk:
            gates_TK = gates_TK / (ordered_sum(gates_TK) + 1e-20)
        return ids_TK, gates_TK * c.scale

    def _open(self, choice_TX: torch.Tensor, ops: Ops) -> torch.Tensor:
        """Scores with every expert outside the best groups ruled out; a group is as good as its two best experts."""
        c = self.config
        if c.num_groups == 1:
            return choice_TX
        choice_TGx = choice_TX.view(len(choice_TX), c.num_groups, -1)
        groups = ops.top_ids(choice_TGx.topk(2, -1).values.sum(-1), c.top_groups)
        is_open_TG = torch.zeros(choice_TGx.shape[:2], dtype=torch.bool, device=choice_TX.device).scatter_(1, groups, True)
        return choice_TGx.masked_fill(~is_open_TG[..., None], float("-inf")).flatten(1)

    def named_slices(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "gate.weight", self.weight
        yield "gate.e_score_correction_bias", self.bias
