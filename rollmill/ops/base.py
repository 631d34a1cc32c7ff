"""The seam between the model and what computes it: every sum a forward makes goes through one of these operations.

A numerics profile is one implementation. In the exact profiles an output row is a function of its own input row and the weights
alone: not of how many rows there are, where the row stands, what its neighbours are, or who asks, trainer or engine.
Shapes: T packed tokens, D hidden, N outputs, H and K query and key/value heads, E head size, F inner size, X experts, B sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

PAGE = 64
"""Positions of a page of keys and values, and the tile in which attention walks them."""


def tempered(logits_NV: torch.Tensor, temperature: float | np.ndarray) -> torch.Tensor:
    """Logits over the temperature, of all rows or one for each (0 counts as 1).

    Always divided by a tensor: divided by a number, a GPU multiplies by its reciprocal, which rounds otherwise.
    """
    scale_N = np.broadcast_to(np.asarray(temperature, np.float32), len(logits_NV))
    scale_N = np.where(scale_N == 0, np.float32(1), scale_N)
    if (scale_N == 1).all():
        return logits_NV
    return logits_NV / torch.from_numpy(scale_N).to(logits_NV.device)[:, None]


@dataclass(frozen=True, kw_only=True, eq=False)
class Spans:
    """Where the new tokens of a step lie: sequence b has queries starts[b]..starts[b+1] at the end of its lens[b] keys.

    >>> s = Spans.of(new=[1, 3], before=[64, 0], pages=[[7, 2], [5]])
    >>> s.slots_T.tolist(), s.lens_B.tolist(), s.table_BP.tolist()
    ([128, 320, 321, 322], [65, 3], [[7, 2], [5, 0]])
    """

    table_BP: torch.Tensor
    """int32: the pages of each sequence in order; 0 beyond its end."""
    starts_B1: torch.Tensor
    """int32[B + 1]: first packed token of each sequence, then T."""
    lens_B: torch.Tensor
    """int32: keys of each sequence, the new ones included."""
    slots_T: torch.Tensor
    """int64: page * PAGE + offset where each new token's key and value go."""
    seq_T: np.ndarray
    """int32, on the host: the sequence of each new token."""
    position_T: np.ndarray
    """int64, on the host: its place in that sequence."""
    longest_new: int
    """Most new tokens of any sequence: 1 in a pure decode step."""
    longest: int
    """Most keys of any sequence."""

    @classmethod
    def of(cls, *, new: Sequence[int], before: Sequence[int], pages: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> Spans:
        new_B, before_B = np.asarray(new, np.int64), np.asarray(before, np.int64)
        num_seqs = len(new_B)
        table = np.zeros((num_seqs, max(len(p) for p in pages)), np.int32)
        for row, held in zip(table, pages, strict=True):
            row[: len(held)] = held
        starts = np.zeros(num_seqs + 1, np.int32)
        np.cumsum(new_B, out=starts[1:])
        longest_new = int(new_B.max())
        if longest_new == 1:
            seq_T, position_T = np.arange(num_seqs, dtype=np.int32), before_B
        else:
            seq_T = np.repeat(np.arange(num_seqs, dtype=np.int32), new_B)
            position_T = np.arange(starts[-1]) - starts[seq_T] + before_B[seq_T]
        slots = table[seq_T, position_T // PAGE].astype(np.int64) * PAGE + position_T % PAGE
        lens = (new_B + before_B).astype(np.int32)

        def there(x: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(x).to(device, non_blocking=True)

        return cls(
            table_BP=there(table),
            starts_B1=there(starts),
            lens_B=there(lens),
            slots_T=there(slots),
            seq_T=seq_T,
            position_T=position_T,
            longest_new=longest_new,
            longest=int(lens.max()),
        )


class Pages(Protocol):
    """Keys and values of all layers in pages of PAGE positions; the layout is the implementation's own."""

    num_pages: int

    def write(self, layer: int, k_TKE: torch.Tensor, v_TKE: torch.Tensor, spans: Spans) -> None: ...

    def attend(self, layer: int, q_THE: torch.Tensor, spans: Spans) -> torch.Tensor:
        """Causal attention of the new tokens over their own sequence, their own keys included (written before). No gradient."""
        ...


class Ops(Protocol):
    """What a forward is made of. All but `new_pages` and `pick` can be differentiated."""

    profile: str
    is_exact: bool

    def rms_norm(self, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor: ...

    def add_rms_norm(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rms_norm(x + residual), x + residual)."""
        ...

    def linear(self, x_TD: torch.Tensor, weight_ND: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor: ...

    def linear_fp32(self, x_TD: torch.Tensor, weight_ND: torch.Tensor) -> torch.Tensor:
        """float32 out whatever the inputs are: the head and the router."""
        ...

    def rotate(self, x_THE: torch.Tensor, cos_T1E: torch.Tensor, sin_T1E: torch.Tensor) -> torch.Tensor: ...

    def swiglu(self, gate_up_T2F: torch.Tensor) -> torch.Tensor:
        """silu(first half) * second half."""
        ...

    def sigmoid(self, x_TX: torch.Tensor) -> torch.Tensor:
        """Of float32 scores, element by element."""
        ...

    def top_ids(self, scores_TX: torch.Tensor, k: int) -> torch.Tensor:
        """The k best of each row, ties to the lower id, ascending by id; int64[T, k], without gradient."""
        ...

    def experts(
        self, h_TD: torch.Tensor, ids_TK: torch.Tensor, gates_TK: torch.Tensor, gate_up_X2FD: torch.Tensor, down_XDF: torch.Tensor
    ) -> torch.Tensor:
        """Each token through its experts (ids ascending); the outputs weighted and added in that order in float32."""
        ...

    def attend_packed(self, q_THE: torch.Tensor, k_TKE: torch.Tensor, v_TKE: torch.Tensor, seq_lens: Sequence[int]) -> torch.Tensor:
        """Causal attention within whole sequences laid end to end: the bits of `Pages.attend`, with a gradient."""
        ...

    def score(self, logits_NV: torch.Tensor, ids_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-softmax at `ids_N`, entropy of the row) of float32 logits already divided by the temperature; entropy has no gradient."""
        ...

    def pick(self, logits_NV: torch.Tensor, uniform_N: torch.Tensor) -> torch.Tensor:
        """The token where the cumulative distribution passes `uniform_N` (float64 in [0, 1)); int64[N]."""
        ...

    def new_pages(self, num_pages: int, *, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> Pages: ...

    def refresh(self) -> None:
        """The weights have changed in place: forget whatever was derived from them."""
        ...
