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
        # Not even zeroed: what lies behind a sequence's last key is never used, and memory that no page touches costs nothing.
        self._k = [np.empty((num_pages, num_kv_heads, self._padded, PAGE), np.float32) for _ in range(num_layers)]
        self._v = [np.empty((num_pages, num_kv_heads, PAGE, self._padded), np.float32) for _ in range(num_layers)]

    def write(self, layer: int, k_TKE: torch.Tensor, v_TKE: torch.Tensor, spans: Spans) -> None:
        write_rows(_array(k_TKE), _array(v_TKE), spans.slots_T.numpy(), self._k[layer], self._v[layer])

    def attend(self, layer: int, q_THE: torch.Tensor, spans: Spans) -> torch.Tensor:
        q = _array(q_THE)
        if self._padded != self.head_dim:
            q = np.pad(q, ((0, 0), (0, 0), (0, self._padded - self.head_dim)))
        starts, lens = spans.starts_B1.numpy(), spans.lens_B.numpy()
        new_B = np.diff(starts)
        seq_T = np.repeat(np.arange(len(lens), dtype=np.int32), new_B)
        # A token sees the keys up to its own.
        len_T = (np.arange(len(q), dtype=np.int32) - starts[1:][seq_T] + lens[seq_T] + 1).astype(np.int32)
        out, table, scale = np.empty_like(q), spans.table_BP.numpy(), np.float32(self.head_dim**-0.5)
        work_T = 4 * q.shape[1] * q.shape[2] * len_T.astype(np.int64)
        share_rows(lambda a, b: attend_rows(q, self._k[layer], self._v[layer], table, seq_T, len_T, scale, out, a, b), work_T)
        return torch.from_numpy(out[..., : self.head_dim]).to(q_THE.dtype)


def _array(x_TNE: torch.Tensor) -> np.ndarray:
    return x_TNE.detach().float().contiguous().numpy()


class PackedAttend(torch.autograd.Function):
    """Forward through the engine's own loop; backward by torch's kernel on the same inputs, where only accuracy matters."""

    @staticmethod
    def forward(ctx: Any, q_THE: torch.Tensor, k_TKE: torch.Tensor, v_TKE: torch.Tensor, seq_lens: Sequence[int]) -> torch.Tensor:
        ctx.save_for_backward(q_THE, k_TKE, v_TKE)
        ctx.seq_lens = seq_lens
        counts = [-(-n // PAGE) for n in seq_lens]
        ends = np.cumsum(counts).tolist()
        spans = Spans.of(new=seq_lens, before=[0] * len(counts), pages=[range(e - n, e) for n, e in zip(counts, ends, strict=True)])
        pages = CpuPages(ends[-1], num_layers=1, num_kv_heads=k_TKE.shape[1], head_dim=k_TKE.shape[2])
        pages.write(0, k_TKE, v_TKE, spans)
        return pages.attend(0, q_THE, spans)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with torch.enable_grad():
            q, k, v = (x.detach().requires_grad_() for x in ctx.saved_tensors)
            out_THE = sdpa_packed(q, k, v, ctx.seq_lens)
        return *torch.autograd.grad(out_THE, (q, k, v), grads), None
