"""The decoder itself: one module tree over a flat packed token batch, used by trainer and engine alike.

The live parameters are kept in `compute_dtype` and always hold values that the serving dtype can represent exactly, so
`serving_tensors` is lossless both ways. What lives fused is a contiguous view per Hugging Face name outside.
Shapes: T tokens, D hidden, V vocabulary, E head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rollmill.model.attention import Attention, Pass
from rollmill.model.config import ModelConfig
from rollmill.model.mlp import MLP
from rollmill.model.moe import MoE
from rollmill.model.rope import rope_tables
from rollmill.model.routes import Routes
from rollmill.model.self_attention import SelfAttention
from rollmill.ops import Ops, ops_for, tempered

LOGIT_ROWS = 1024
"""Rows of logits that exist at once: a bound on memory, without effect on the bits."""


class Layer(nn.Module):
    """Two blocks, each with its own norm, added to the stream."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.index, self.norm_eps = index, config.norm_eps
        self.attn = SelfAttention(config, index)
        self.mlp: MLP | MoE = _sparse(config, index) if config.is_sparse(index) else MLP(config)

    def forward(self, x_TD: torch.Tensor, add_TD: torch.Tensor | None, call: Pass) -> tuple[torch.Tensor, torch.Tensor]:
        """The stream, and what is still to be added to it: the next norm adds it in the same pass over memory."""
        ops, eps = call.ops, self.norm_eps
        if add_TD is None:
            h_TD = ops.rms_norm(x_TD, self.attn.norm, eps)
        else:
            h_TD, x_TD = ops.add_rms_norm(add_TD, x_TD, self.attn.norm, eps)
        h_TD, x_TD = ops.add_rms_norm(self.attn.forward(h_TD, call), x_TD, self.mlp.norm, eps)
        return x_TD, self.mlp.forward(h_TD, call)

    def named_slices(self) -> Iterator[tuple[str, torch.Tensor]]:
        for block in (self.attn, self.mlp):
            for name, live in block.named_slices():
                yield f"model.layers.{self.index}.{name}", live


def _sparse(config: ModelConfig, index: int) -> MoE:
    names = config.traits.moe
    assert config.moe and names, "only a family with experts has sparse layers"
    return MoE(config.moe, hidden_size=config.hidden_size, names=names, layer=index)


class Model(nn.Module):
    """A decoder. `forward` gives normed hidden states; `logits` turns chosen rows into fp32 logits."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, config: ModelConfig, *, numerics: str = "exact") -> None:
        """`numerics` names a profile of `rollmill.ops`."""
        super().__init__()
        self.config, self.numerics = config, numerics
        self._ops: Ops | None = None
        self.recompute_layers = False
        """Keep only each layer's input for the backward pass and compute the rest again: less memory, the same bits."""
        self._views: dict[str, torch.Tensor] | None = None
        self.serving_dtype: torch.dtype = getattr(torch, config.dtype)
        self.embed = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_layers))
        self.norm = nn.Parameter(torch.ones(config.hidden_size))
        self.head = None if config.tied else nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        cos, sin = self._angles()
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def _angles(self) -> tuple[torch.Tensor, torch.Tensor]:
        c = self.config
        return rope_tables(head_dim=c.head_dim, theta=c.rope_theta, max_position=c.max_position, scaling=c.rope_scaling)

    def forward(
        self, tokens_T: torch.Tensor, positions_T: torch.Tensor, attention: Attention, routes: Routes | None = None
    ) -> torch.Tensor:
        """`routes` records or imposes which experts the sparse layers take.

        Inside, `forward` is called directly: a small model's step is short enough to notice the bookkeeping of module calls.
        """
        x_TD = nn.functional.embedding(tokens_T, self.embed)
        call = Pass(self.ops, self.cos[positions_T], self.sin[positions_T], attention, routes)
        is_recomputed = self.recompute_layers and torch.is_grad_enabled()
        add_TD: torch.Tensor | None = None
        for layer in self.layers:
            if is_recomputed:
                x_TD, add_TD = checkpoint(layer.forward, x_TD, add_TD, call, use_reentrant=False)
            else:
                x_TD, add_TD = layer.forward(x_TD, add_TD, call)
        assert add_TD is not None, "a decoder has at least one layer"
        return self.ops.add_rms_norm(add_TD, x_TD, self.norm, self.config.norm_eps)[0]

    def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        return self.ops.linear_fp32(hidden_ND, self.embed if self.head is None else self.head)

    def score(self, hidden_ND: torch.Tensor, ids_N: torch.Tensor, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        """(logprob of each token, entropy) under rows of hidden states. Logits are made block by block and not kept for the backward."""
        parts = []
        for rows_RD, ids_R in zip(hidden_ND.split(LOGIT_ROWS), ids_N.split(LOGIT_ROWS), strict=True):
            if torch.is_grad_enabled() and len(hidden_ND) > LOGIT_ROWS:
                parts.append(checkpoint(self._score_block, rows_RD, ids_R, temperature, use_reentrant=False))
            else:
                parts.append(self._score_block(rows_RD, ids_R, temperature))
        logprobs, entropies = zip(*parts, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    def _score_block(self, hidden_RD: torch.Tensor, ids_R: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        return self.ops.score(tempered(self.logits(hidden_RD), temperature), ids_R)

    def named_slices(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, contiguous view of the live parameter) for every stored tensor; tied weights once."""
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
        live = self.slices()
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
        self.slices()[name].view(-1)[positions] = values.to(self.embed.dtype)

    def slices(self) -> dict[str, torch.Tensor]:
        """Name -> view of the live parameter, without gradient. Made once: a model with experts has tens of thousands of names."""
        if self._views is None:
            self._views = {name: live.detach() for name, live in self.named_slices()}
        return self._views

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        # Another device or dtype means other memory.
        self._views = self._ops = None
        where = self.cos.device
        super()._apply(fn, recurse)
        # Angles stay float32: in bfloat16 a late position would be turned by another one's angle.
        if self.cos.dtype != torch.float32 or (where.type == "meta" and not self.cos.is_meta):
            self.cos, self.sin = (table.to(self.embed.device) for table in self._angles())
        return self

    def __getstate__(self) -> dict[str, Any]:
        # A copy's parameters get memory of their own.
        return self.__dict__ | {"_views": None, "_ops": None}

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Fresh weights: normal with std 0.02, output projections scaled down by depth, rounded to the serving dtype."""
        gen = torch.Generator().manual_seed(seed)
        for name, live in self.named_slices():
            if live.dim() == 1:
                live.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            is_output = name.endswith(("o_proj.weight", "down_proj.weight", "w2.weight"))
            std = 0.02 / (2 * self.config.num_layers) ** 0.5 if is_output else 0.02
            live.copy_((torch.randn(live.shape, generator=gen) * std).to(self.serving_dtype))

    @property
    def ops(self) -> Ops:
        """What computes this model, where it lies now."""
        if self._ops is None:
            self._ops = ops_for(self.numerics, self.embed.device)
        return self._ops

    @contextmanager
    def computed_by(self, ops: Ops) -> Iterator[None]:
        """For a while, compute with other operations than the profile's own."""
        before, self._ops = self._ops, ops
        try:
            yield
        finally:
            self._ops = before

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())
