"""Keys and values on the device, and attention over them; the same bits whether they lie in pages or packed.

Shapes: T tokens, H and K query and key/value heads, E head size, P pages, S positions of a page, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from rollmill.ops.base import PAGE, Spans
from rollmill.ops.cuda import attention

MAX_PAIRS = 1 << 16
"""Most pairs of sequence and key head in a decode step."""


class CudaPages:
    """A head's page is contiguous, so that a tile of keys is one run of memory."""

    def __init__(
        self, num_pages: int, *, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device | str = "cuda"
    ) -> None:
        attention.check_head(head_dim)
        self.num_pages = num_pages
        self._done_N = torch.zeros(MAX_PAIRS, dtype=torch.int32, device=device)
        self.memory_L2PKSE = torch.zeros(num_layers, 2, num_pages, num_kv_heads, PAGE, head_dim, dtype=dtype, device=device)

    def write(self, layer: int, k_TKE: torch.Tensor, v_TKE: torch.Tensor, spans: Spans) -> None:
        k_PKSE, v_PKSE = self.memory_L2PKSE[layer]
        attention.write(k_TKE.detach(), v_TKE.detach(), k_PKSE, v_PKSE, spans.slots_T)

    def attend(self, layer: int, q_THE: torch.Tensor, spans: Spans) -> torch.Tensor:
        k_PKSE, v_PKSE = self.memory_L2PKSE[layer]
        return attention.attend_pages(q_THE.detach(), k_PKSE, v_PKSE, spans, self._done_N)


def _heads_first(x_TNE: torch.Tensor) -> torch.Tensor:
    return x_TNE.transpose(0, 1)[None]


class _Packed(torch.autograd.Function):
    """Backward recomputes through torch's attention, sequence by sequence: a gradient needs no fixed order."""

    @staticmethod
    def forward(ctx: Any, q_THE: torch.Tensor, k_TKE: torch.Tensor, v_TKE: torch.Tensor, seq_lens: tuple[int, ...]) -> torch.Tensor:
        ctx.save_for_backward(q_THE, k_TKE, v_TKE)
        ctx.seq_lens = seq_lens
        lens_B = torch.tensor(seq_lens, dtype=torch.int32)
        starts_B1 = F.pad(lens_B.cumsum(0, dtype=torch.int32), (1, 0))
        starts_B1, lens_B = (x.pin_memory().to(q_THE.device, non_blocking=True) if q_THE.is_cuda else x for x in (starts_B1, lens_B))
        if k_TKE.stride() != v_TKE.stride() or k_TKE.stride(1) != k_TKE.shape[2]:
            k_TKE, v_TKE = k_TKE.contiguous(), v_TKE.contiguous()
        return attention.attend_packed(q_THE, k_TKE, v_TKE, starts_B1, lens_B, max(seq_lens))

    @staticmethod
    def backward(ctx: Any, g_THE: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            outs = [
                F.scaled_dot_product_attention(_heads_first(q), _heads_first(k), _heads_first(v), is_causal=True, enable_gqa=True)[0]
                for q, k, v in zip(*(x.split(ctx.seq_lens) for x in leaves), strict=True)
            ]
            out_THE = torch.cat(outs, 1).transpose(0, 1)
            return *torch.autograd.grad(out_THE, leaves, g_THE), None


def attend_packed(q_THE: torch.Tensor, k_TKE: torch.Tensor, v_TKE: torch.Tensor, seq_lens: Sequence[int]) -> torch.Tensor:
    """Causal attention within whole sequences laid end to end, with a gradient."""
    attention.check_head(q_THE.shape[2])
    return _Packed.apply(q_THE, k_TKE, v_TKE, tuple(seq_lens))
