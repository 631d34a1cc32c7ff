"""Attention over a flat packed token batch: the seam that lets one module tree serve trainer and engine.

Shapes: T packed tokens, B sequences, L longest of them, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F


class Attention(Protocol):
    """Attends within each sequence of the batch. Queries and keys arrive rotated."""

    def __call__(self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> torch.Tensor: ...


def attend(q_BHLD: torch.Tensor, k_BKLD: torch.Tensor, v_BKLD: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Softmax attention; causal when no mask is given."""
    if q_BHLD.shape[1] != k_BKLD.shape[1]:
        num_shared = q_BHLD.shape[1] // k_BKLD.shape[1]
        k_BKLD, v_BKLD = k_BKLD.repeat_interleave(num_shared, 1), v_BKLD.repeat_interleave(num_shared, 1)
    return F.scaled_dot_product_attention(q_BHLD, k_BKLD, v_BKLD, attn_mask=mask, is_causal=mask is None)


class PackedAttention:
    """Causal attention over whole sequences laid end to end, without a cache: training and scoring.

    Only this op sees padding; every linear layer runs on the T real tokens.
    """

    def __init__(self, seq_lens: Sequence[int], device: torch.device | str = "cpu") -> None:
        assert seq_lens and min(seq_lens) > 0, "a packed batch needs at least one token per sequence"
        self.num_seqs, self.longest = len(seq_lens), max(seq_lens)
        lens_B = torch.tensor(seq_lens)
        starts_B = torch.cumsum(lens_B, 0) - lens_B
        seq_T = torch.repeat_interleave(torch.arange(self.num_seqs), lens_B)
        self.positions_T = (torch.arange(int(lens_B.sum())) - starts_B[seq_T]).to(device)
        # Without padding the scatter and the gather would both be identities: skip them.
        self.is_dense = self.num_seqs * self.longest == int(lens_B.sum())
        self.padded_T = (seq_T * self.longest).to(device) + self.positions_T

    def _pad(self, x_TND: torch.Tensor) -> torch.Tensor:
        num_heads, dim = x_TND.shape[1:]
        if not self.is_dense:
            padded = x_TND.new_zeros(self.num_seqs * self.longest, num_heads, dim)
            x_TND = padded.index_copy(0, self.padded_T, x_TND)
        return x_TND.view(self.num_seqs, self.longest, num_heads, dim).transpose(1, 2)

    def __call__(self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> torch.Tensor:
        out_BHLD = attend(self._pad(q_THD), self._pad(k_TKD), self._pad(v_TKD), None)
        out = out_BHLD.transpose(1, 2).reshape(self.num_seqs * self.longest, *q_THD.shape[1:])
        return out if self.is_dense else out.index_select(0, self.padded_T)
