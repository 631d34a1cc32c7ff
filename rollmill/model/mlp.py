"""The dense feed-forward block of a decoder layer: norm and SwiGLU, gate and up fused in one matmul.

Shapes: T tokens, D hidden, F inner size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from rollmill.model.attention import Pass
from rollmill.model.config import ModelConfig
from rollmill.ops import Ops


def feed_forward(ops: Ops, h_TD: torch.Tensor, gate_up_2FD: torch.Tensor, down_DF: torch.Tensor) -> torch.Tensor:
    return ops.linear(ops.swiglu(ops.linear(h_TD, gate_up_2FD)), down_DF)


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.norm = nn.Parameter(torch.ones(config.hidden_size))
        self.gate_up = nn.Parameter(torch.empty(2 * config.intermediate_size, config.hidden_size))
        self.down = nn.Parameter(torch.empty(config.hidden_size, config.intermediate_size))

    def forward(self, h_TD: torch.Tensor, call: Pass) -> torch.Tensor:
        """Of normed hidden states."""
        return feed_forward(call.ops, h_TD, self.gate_up, self.down)

    def named_slices(self) -> Iterator[tuple[str, torch.Tensor]]:
        gate, up = self.gate_up.chunk(2)
        yield "post_attention_layernorm.weight", self.norm
        yield "mlp.gate_proj.weight", gate
        yield "mlp.up_proj.weight", up
        yield "mlp.down_proj.weight", self.down
