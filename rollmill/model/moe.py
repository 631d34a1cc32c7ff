"""The sparse feed-forward block of a decoder layer: norm, router, experts, and their sum in ascending expert id.

Shapes: T tokens, D hidden, K experts per token, X experts, F an expert's inner size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from rollmill.model.attention import Pass
from rollmill.model.config import MoEConfig
from rollmill.model.families import MoENames
from rollmill.model.mlp import feed_forward
from rollmill.model.router import SigmoidRouter, SoftmaxRouter
from rollmill.model.routes import Routes
from rollmill.ops import Ops


class MoE(nn.Module):
    def __init__(self, config: MoEConfig, *, hidden_size: int, names: MoENames, layer: int) -> None:
        super().__init__()
        c = config
        self.config, self.names, self.layer = config, names, layer
        self.norm = nn.Parameter(torch.ones(hidden_size))
        self.router = SigmoidRouter(c, hidden_size) if c.is_sigmoid else SoftmaxRouter(c, hidden_size)
        self.gate_up = nn.Parameter(torch.empty(c.num_experts, 2 * c.expert_size, hidden_size))
        self.down = nn.Parameter(torch.empty(c.num_experts, hidden_size, c.expert_size))
        if c.num_shared:
            self.shared_gate_up = nn.Parameter(torch.empty(2 * c.num_shared * c.expert_size, hidden_size))
            self.shared_down = nn.Parameter(torch.empty(hidden_size, c.num_shared * c.expert_size))

    def forward(self, h_TD: torch.Tensor, call: Pass) -> torch.Tensor:
        """Of normed hidden states."""
        return self.mix(h_TD, call.ops, call.routes)

    def mix(self, h_TD: torch.Tensor, ops: Ops, routes: Routes | None) -> torch.Tensor:
        ids_TK, gates_TK = self.router(h_TD, self.layer, ops, routes)
        out_TD = ops.experts(h_TD, ids_TK, gates_TK, self.gate_up, self.down)
        if self.config.num_shared:
            out_TD = out_TD + feed_forward(ops, h_TD, self.shared_gate_up, self.shared_down)
        return out_TD

    def named_slices(self) -> Iterator[tuple[str, torch.Tensor]]:
        n, block = self.names, self.names.block
        yield "post_attention_layernorm.weight", self.norm
        for name, live in self.router.named_slices():
            yield f"{block}.{name}", live
        for x, (gate_up, down) in enumerate(zip(self.gate_up.unbind(), self.down.unbind(), strict=True)):
            gate, up = gate_up.chunk(2)
            yield f"{block}.experts.{x}.{n.gate}.weight", gate
            yield f"{block}.experts.{x}.{n.up}.weight", up
            yield f"{block}.experts.{x}.{n.down}.weight", down
        if self.config.num_shared:
            gate, up = self.shared_gate_up.chunk(2)
            yield f"{block}.shared_experts.gate_proj.weight", gate
            yield f"{block}.shared_experts.up_proj.weight", up
            yield f"{block}.shared_experts.down_proj.weight", self.shared_down
