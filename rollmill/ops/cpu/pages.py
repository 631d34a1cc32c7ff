"""Keys and values on the CPU in the layout of the compiled loop, and the attention over them; float32 whatever the model computes in.

Keys lie transposed within a page, so that one vector instruction takes the same coordinate of many keys.
Shapes: T packed tokens, H and K query and key/value heads, E head size, P pages, S = 64 positions of a page, B sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rollmill.ops.base import PAGE, Spans
from rollmill.ops.cpu.kernels import attend_rows, write_rows
from rollmill.ops.cpu.threads import share_rows
from rollmill.ops.torch_ops import sdpa_packed

STEP = 8
"""The loop takes this many coordinates at a time, so head sizes are padded to a multiple."""


class CpuPages:
    def __init__(self, num_pages: int, *, num_layers: int, num_kv_heads: int, head_dim: int) -> None:
        self.num_pages, self.head_dim = num_pages, head_dim
        self._padded = -(-head_dim // STEP) * STEP
        self._scale = np.float32(head_dim**-0.5)
        # Not even zeroed: what lies behind a sequence's last key is never used, and memory that no page touches costs nothing.
        self._k = [np.empty((num_pages, num_kv_heads, self._padded, PAGE), np.float32) for _ in range(num_layers)]
        self._v = [np.empty((num_pages, num_kv_heads, PAGE, self._padded), np.float32) for _ in range(num_layers)]

    def write(self, layer: int, k_TKE: torch.Tensor, v_TKE: torch.Tensor, spans: Spans) -> None:
        write_rows(_array(k_TKE), _array(v_TKE), spans.slots_T.numpy(), self._k[layer], self._v[layer])

    def attend(self, layer: int, q_THE: torch.Tensor, spans: Spans) -> torch.Tensor:
        q = _array(q_THE)
        if self._padded != self.head_dim:
            q = np.pad(q, ((0, 0), (0, 0), (0, self._padded - self.head_dim)))
        out = np.empty_like(q)
        # A token sees the keys up to its own.
        position_T = spans.position_T
        work = 4 * q.shape[1] * q.shape[2] * (int(position_T.sum()) + len(q))
        args = (q, self._k[layer], self._v[layer], spans.table_BP.numpy(), spans.seq_T, position_T, self._scale, out)
        share_rows(attend_rows, *args, num_rows=len(q), work=work, work_T=position_T + 1)
        return torch.from_numpy(out if self._padded == self.head_dim else out[..., : self.head_dim]).to(q_THE.dtype)


def _array(x_TNE: torch.Tensor) -> np.ndarray:
    return x_TNE.detach().float().contiguous().numpy()


def attend_packed(q_THE: torch.Tensor, k_TKE: torch.Tensor, v_TKE: torch.Tensor, seq_lens: Sequence[int]) -> torch.Tensor:
    if not (torch.is_grad_enabled() and (q_THE.requires_grad or k_TKE.requires_grad or v_TKE.requires_grad)):
        return _attend_packed(q_THE, k_TKE, v_TKE, seq_lens)
    return PackedAttend.apply(q_THE, k_TKE, v_TKE, seq_lens)


def _attend_packed(q_THE: torch.Tensor, k_TKE: torch.Tensor, v_TKE: torch.Tensor, seq_lens: Sequence[int]) -> torch.Tensor:
    counts = [-(-n // PAGE) for n in seq_lens]
    ends = np.cumsum(counts).tolist()
    spans = Spans.of(new=seq_lens, before=[0] * len(counts), pages=[range(e - n, e) for n, e in zip(counts, ends, strict=True)])
    pages = CpuPages(ends[-1], num_layers=1, num_kv_heads=k_TKE.shape[1], head_dim=k_TKE.shape[2])
    pages.write(0, k_TKE, v_TKE, spans)
    return pages.attend(0, q_THE, spans)


class PackedAttend(torch.autograd.Function):
    """Forward through the engine's own loop; backward by torch's kernel on the same inputs, where only accuracy matters."""

    @staticmethod
    def forward(ctx: Any, q_THE: torch.Tensor, k_TKE: torch.Tensor, v_TKE: torch.Tensor, seq_lens: Sequence[int]) -> torch.Tensor:
        ctx.save_for_backward(q_THE, k_TKE, v_TKE)
        ctx.seq_lens = seq_lens
        return _attend_packed(q_THE, k_TKE, v_TKE, seq_lens)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with torch.enable_grad():
            q, k, v = (x.detach().requires_grad_() for x in ctx.saved_tensors)
            out_THE = sdpa_packed(q, k, v, ctx.seq_lens)
        return *torch.autograd.grad(out_THE, (q, k, v), grads), None
