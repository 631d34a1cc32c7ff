"""What one forward passes to every layer, and the attention of whole sequences: the seam that lets one module tree serve both sides.

Shapes: T packed tokens, H query heads, K key/value heads, E head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from rollmill.model.routes import Routes
from rollmill.ops import Ops, Pages, Spans


class Attention(Protocol):
    """Attends within each sequence of the batch. Queries and keys arrive rotated."""

    def __call__(self, ops: Ops, layer: int, q_THE: torch.Tensor, k_TKE: torch.Tensor, v_TKE: torch.Tensor) -> torch.Tensor: ...


class Pass(NamedTuple):
    """One forward over a packed batch, as every layer sees it."""

    ops: Ops
    cos_T1E: torch.Tensor
    sin_T1E: torch.Tensor
    attention: Attention
    routes: Routes | None


class PackedAttention:
    """Causal attention over whole sequences laid end to end, without a cache: training and scoring."""

    def __init__(self, seq_lens: Sequence[int], device: torch.device | str = "cpu") -> None:
        assert len(seq_lens) and min(seq_lens) > 0, "a packed batch needs at least one token per sequence"
        self.seq_lens = tuple(int(n) for n in seq_lens)
        self.positions_T = torch.from_numpy(np.concatenate([np.arange(n) for n in self.seq_lens])).to(device)

    def __call__(self, ops: Ops, layer: int, q_THE: torch.Tensor, k_TKE: torch.Tensor, v_TKE: torch.Tensor) -> torch.Tensor:
        return ops.attend_packed(q_THE, k_TKE, v_TKE, self.seq_lens)


class PagedAttention:
    """Attention of new tokens over pages that hold what came before; their own keys are written first. Without gradient."""

    def __init__(self, pages: Pages, spans: Spans) -> None:
        self.pages, self.spans = pages, spans

    def __call__(self, ops: Ops, layer: int, q_THE: torch.Tensor, k_TKE: torch.Tensor, v_TKE: torch.Tensor) -> torch.Tensor:
        self.pages.write(layer, k_TKE, v_TKE, self.spans)
        return self.pages.attend(layer, q_THE, self.spans)
