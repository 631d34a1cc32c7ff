"""The attention block of a decoder layer: norm, projections, rotary positions, and the seam to whoever holds the keys.

Query, key and value live fused (one matmul); outside they carry their Hugging Face names.
Shapes: T tokens, D hidden, H/K query and key/value heads, N = H + 2K, E head size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from rollmill.model.attention import Pass
from rollmill.model.config import ModelConfig
from rollmill.model.families import QKNorm
from rollmill.ops import Ops


class SelfAttention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        c = config
        self.config, self.layer = config, layer
        self.num_fused = c.num_heads + 2 * c.num_kv_heads
        self.norm = nn.Parameter(torch.ones(c.hidden_size))
        self.qkv = nn.Parameter(torch.empty(self.num_fused * c.head_dim, c.hidden_size))
        self.qkv_bias = nn.Parameter(torch.zeros(self.num_fused * c.head_dim)) if c.qkv_bias else None
        self.out = nn.Parameter(torch.empty(c.hidden_size, c.num_heads * c.head_dim))
        self.out_bias = nn.Parameter(torch.zeros(c.hidden_size)) if c.out_bias else None
        self.qk_norm = c.traits.qk_norm
        if self.qk_norm is not QKNorm.NONE:
            is_whole = self.qk_norm is QKNorm.WHOLE
            self.q_norm = nn.Parameter(torch.ones(c.head_dim * (c.num_heads if is_whole else 1)))
            self.k_norm = nn.Parameter(torch.ones(c.head_dim * (c.num_kv_heads if is_whole else 1)))

    def forward(self, h_TD: torch.Tensor, call: Pass) -> torch.Tensor:
        """Of normed hidden states."""
        c, ops = self.config, call.ops
        qkv_TNE = ops.linear(h_TD, self.qkv, self.qkv_bias).view(-1, self.num_fused, c.head_dim)
        qk_TNE, v_TKE = qkv_TNE.split([c.num_heads + c.num_kv_heads, c.num_kv_heads], 1)
        if self.qk_norm is not QKNorm.NONE:
            q_THE, k_TKE = qk_TNE.split([c.num_heads, c.num_kv_heads], 1)
            qk_TNE = torch.cat([self._normed(ops, q_THE, self.q_norm), self._normed(ops, k_TKE, self.k_norm)], 1)
        q_THE, k_TKE = ops.rotate(qk_TNE, call.cos_T1E, call.sin_T1E).split([c.num_heads, c.num_kv_heads], 1)
        a_TD = call.attention(ops, self.layer, q_THE, k_TKE, v_TKE).reshape(-1, c.num_heads * c.head_dim)
        return ops.linear(a_TD, self.out, self.out_bias)

    def _normed(self, ops: Ops, x_TNE: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows = x_TNE if self.qk_norm is QKNorm.HEAD else x_TNE.flatten(1)
        return ops.rms_norm(rows, weight, self.config.norm_eps).view(x_TNE.shape)

    def named_slices(self) -> Iterator[tuple[str, torch.Tensor]]:
        c = self.config
        sizes = [n * c.head_dim for n in (c.num_heads, c.num_kv_heads, c.num_kv_heads)]
        yield "input_layernorm.weight", self.norm
        for name, part in zip("qkv", self.qkv.split(sizes), strict=True):
            yield f"self_attn.{name}_proj.weight", part
        if self.qkv_bias is not None:
            for name, part in zip("qkv", self.qkv_bias.split(sizes), strict=True):
                yield f"self_attn.{name}_proj.bias", part
        yield "self_attn.o_proj.weight", self.out
        if self.out_bias is not None:
            yield "self_attn.o_proj.bias", self.out_bias
        if self.qk_norm is not QKNorm.NONE:
            yield "self_attn.q_norm.weight", self.q_norm
            yield "self_attn.k_norm.weight", self.k_norm
