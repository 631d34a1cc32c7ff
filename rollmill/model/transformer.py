"""The decoder itself: one module tree over a flat packed token batch, used by trainer and engine alike.

The live parameters are kept in `compute_dtype` and always hold values that the serving dtype can represent exactly, so
`serving_tensors` is lossless both ways. Query/key/value and gate/up live fused (one matmul each); outside they carry
their Hugging Face names. Shapes: T tokens, D hidden, V vocabulary, H/K heads, E head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import nn

from rollmill.model.attention import Attention
from rollmill.model.config import ModelConfig


class Layer(nn.Module):
    """Pre-norm attention and SwiGLU."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        c = config
        self.config, self.index = config, index
        self.attn_norm = nn.Parameter(torch.ones(c.hidden_size))
        self.qkv = nn.Parameter(torch.empty((c.num_heads + 2 * c.num_kv_heads) * c.head_dim, c.hidden_size))
        self.out = nn.Parameter(torch.empty(c.hidden_size, c.num_heads * c.head_dim))
        self.mlp_norm = nn.Parameter(torch.ones(c.hidden_size))
        self.gate_up = nn.Parameter(torch.empty(2 * c.intermediate_size, c.hidden_size))
        self.down = nn.Parameter(torch.empty(c.hidden_size, c.intermediate_size))

    def forward(self, x_TD: torch.Tensor, cos_T1E: torch.Tensor, sin_T1E: torch.Tensor, attention: Attention) -> torch.Tensor:
        c = self.config
        h_TD = F.rms_norm(x_TD, (c.hidden_size,), self.attn_norm, c.norm_eps)
        qkv_TNE = F.linear(h_TD, self.qkv).view(-1, c.num_heads + 2 * c.num_kv_heads, c.head_dim)
        qk_TNE, v_TKE = qkv_TNE.split([c.num_heads + c.num_kv_heads, c.num_kv_heads], 1)
        half = c.head_dim // 2
        swapped = torch.cat([-qk_TNE[..., half:], qk_TNE[..., :half]], -1)
        q_THE, k_TKE = (qk_TNE * cos_T1E + swapped * sin_T1E).split([c.num_heads, c.num_kv_heads], 1)
        a_TD = attention(self.index, q_THE, k_TKE, v_TKE).reshape(-1, c.num_heads * c.head_dim)
        x_TD = x_TD + F.linear(a_TD, self.out)
        h_TD = F.rms_norm(x_TD, (c.hidden_size,), self.mlp_norm, c.norm_eps)
        gate, up = F.linear(h_TD, self.gate_up).chunk(2, -1)
        return x_TD + F.linear(F.silu(gate) * up, self.down)

    def named_slices(self) -> Iterator[tuple[str, torch.Tensor]]:
        c, p = self.config, f"model.layers.{self.index}."
        q, k, v = self.qkv.split([c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.num_kv_heads * c.head_dim])
        gate, up = self.gate_up.chunk(2)
        yield p + "input_layernorm.weight", self.attn_norm
        yield p + "self_attn.q_proj.weight", q
        yield p + "self_attn.k_proj.weight", k
        yield p + "self_attn.v_proj.weight", v
        yield p + "self_attn.o_proj.weight", self.out
        yield p + "post_attention_layernorm.weight", self.mlp_norm
        yield p + "mlp.gate_proj.weight", gate
        yield p + "mlp.up_proj.weight", up
        yield p + "mlp.down_proj.weight", self.down


class Model(nn.Module):
    """A dense decoder. `forward` gives normed hidden states; `logits` turns chosen rows into fp32 logits."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.serving_dtype: torch.dtype = getattr(torch, config.dtype)
        self.embed = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_layers))
        self.norm = nn.Parameter(torch.ones(config.hidden_size))
        self.head = None if config.tied else nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        half = config.head_dim // 2
        freq = config.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.outer(torch.arange(config.max_position, dtype=torch.float64), freq).float()
        self.register_buffer("cos", torch.cat([angle.cos(), angle.cos()], -1)[:, None], persistent=False)
        self.register_buffer("sin", torch.cat([angle.sin(), angle.sin()], -1)[:, None], persistent=False)

    def forward(self, tokens_T: torch.Tensor, positions_T: torch.Tensor, attention: Attention) -> torch.Tensor:
        x_TD = F.embedding(tokens_T, self.embed)
        cos, sin = self.get_buffer("cos")[positions_T].to(x_TD.dtype), self.get_buffer("sin")[positions_T].to(x_TD.dtype)
        for layer in self.layers:
            x_TD = layer(x_TD, cos, sin, attention)
        return F.rms_norm(x_TD, (self.config.hidden_size,), self.norm, self.config.norm_eps)

    def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden_ND, self.embed if self.head is None else self.head).float()

    def named_slices(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, view of the live parameter) for every stored tensor; tied weights once."""
        yield "model.embed_tokens.weight", self.embed
        for layer in self.layers:
            assert isinstance(layer, Layer)
            yield from layer.named_slices()
        yield "model.norm.weight", self.norm
        if self.head is not None:
            yield "lm_head.weight", self.head

    @torch.no_grad()
    def serving_tensors(self) -> dict[str, torch.Tensor]:
        """What this model really computes with, in the serving dtype, always fresh memory."""
        return {name: live.detach().to(self.serving_dtype, copy=True).contiguous() for name, live in self.named_slices()}

    @torch.no_grad()
    def load_serving(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy tensors into the live parameters, in place. A subset is fine; a foreign name or shape is not."""
        live = dict(self.named_slices())
        for name, value in tensors.items():
            if name not in live:
                raise ValueError(f"tensor {name!r} is not part of this model; its {len(live)} tensors start with {next(iter(live))!r}")
            if live[name].shape != value.shape:
                raise ValueError(f"tensor {name!r} has shape {tuple(value.shape)}, this model needs {tuple(live[name].shape)}")
        for name, value in tensors.items():
            live[name].copy_(value)

    @torch.no_grad()
    def patch_serving(self, name: str, positions: torch.Tensor, values: torch.Tensor) -> None:
        """Replace single elements (flat positions, int64) of one stored tensor, in place."""
        self._slices()[name].view(-1)[positions] = values.to(self.embed.dtype)

    def _slices(self) -> dict[str, torch.Tensor]:
        return {name: live.detach() for name, live in self.named_slices()}

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Fresh weights: normal with std 0.02, output projections scaled down by depth, rounded to the serving dtype."""
        gen = torch.Generator().manual_seed(seed)
        for name, live in self.named_slices():
            if live.dim() == 1:
                live.fill_(1.0)
                continue
            std = 0.02 / (2 * self.config.num_layers) ** 0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
            live.copy_((torch.randn(live.shape, generator=gen) * std).to(self.serving_dtype))

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())
