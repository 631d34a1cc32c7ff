"""The best of a GPU when nobody asks for equal bits: torch's default products and fused attention, whole or around our row kernels.

Only for being measured against: attention reads the pages' memory as if each sequence's keys lay in one piece, so that no peer pays for
gathering pages, and the values it finds there mean nothing. Shapes as in `rollmill.ops.base`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from rollmill.ops.base import PAGE, Spans
from rollmill.ops.cuda import CudaOps, CudaPages
from rollmill.ops.torch_ops import TorchOps


def _grouped_experts(
    swiglu: TorchOps | CudaOps,
    h_TD: torch.Tensor,
    ids_TK: torch.Tensor,
    gates_TK: torch.Tensor,
    gate_up_X2FD: torch.Tensor,
    down_XDF: torch.Tensor,
) -> torch.Tensor:
    """Torch's grouped product, without waiting for the host, and a sum in whatever order."""
    k = ids_TK.shape[1]
    order_M = ids_TK.flatten().argsort()
    ends_X = torch.searchsorted(ids_TK.flatten()[order_M], torch.arange(len(down_XDF), device=h_TD.device), right=True).int()
    inner_MF = swiglu.swiglu(torch._grouped_mm(h_TD[order_M // k], gate_up_X2FD.transpose(1, 2), offs=ends_X))
    y_MD = torch._grouped_mm(inner_MF, down_XDF.transpose(1, 2), offs=ends_X)
    weighted_MD = (y_MD * gates_TK.flatten()[order_M, None]).to(h_TD.dtype)
    return torch.zeros_like(h_TD).index_add_(0, order_M // k, weighted_MD)


def _fused_packed(q_THE: torch.Tensor, k_TKE: torch.Tensor, v_TKE: torch.Tensor, seq_lens: Sequence[int]) -> torch.Tensor:
    assert len(set(seq_lens)) == 1, "measured with sequences of one length, which need no padding"
    q, k, v = (x.reshape(len(seq_lens), seq_lens[0], -1, x.shape[-1]).transpose(1, 2) for x in (q_THE, k_TKE, v_TKE))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).reshape(q_THE.shape)


class MixedOps(CudaOps):
    """Our norms, rotations, activations, scores and picks around torch's products and attention."""

    profile = "mixed"
    is_exact = False

    def linear(self, x_TD: torch.Tensor, weight_ND: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(x_TD, weight_ND, bias_N)

    def linear_fp32(self, x_TD: torch.Tensor, weight_ND: torch.Tensor) -> torch.Tensor:
        return torch.mm(x_TD, weight_ND.t(), out_dtype=torch.float32)

    def experts(
        self, h_TD: torch.Tensor, ids_TK: torch.Tensor, gates_TK: torch.Tensor, gate_up_X2FD: torch.Tensor, down_XDF: torch.Tensor
    ) -> torch.Tensor:
        return _grouped_experts(self, h_TD, ids_TK, gates_TK, gate_up_X2FD, down_XDF)

    def attend_packed(self, q_THE: torch.Tensor, k_TKE: torch.Tensor, v_TKE: torch.Tensor, seq_lens: Sequence[int]) -> torch.Tensor:
        return _fused_packed(q_THE, k_TKE, v_TKE, seq_lens)


class FreeTorchOps(TorchOps):
    """Everything from torch."""

    profile = "torch"

    def linear_fp32(self, x_TD: torch.Tensor, weight_ND: torch.Tensor) -> torch.Tensor:
        return torch.mm(x_TD, weight_ND.t(), out_dtype=torch.float32)

    def experts(
        self, h_TD: torch.Tensor, ids_TK: torch.Tensor, gates_TK: torch.Tensor, gate_up_X2FD: torch.Tensor, down_XDF: torch.Tensor
    ) -> torch.Tensor:
        return _grouped_experts(self, h_TD, ids_TK, gates_TK, gate_up_X2FD, down_XDF)

    def attend_packed(self, q_THE: torch.Tensor, k_TKE: torch.Tensor, v_TKE: torch.Tensor, seq_lens: Sequence[int]) -> torch.Tensor:
        return _fused_packed(q_THE, k_TKE, v_TKE, seq_lens)

    def pick(self, logits_NV: torch.Tensor, uniform_N: torch.Tensor) -> torch.Tensor:
        # The usual trick of fast samplers: no running sum over the vocabulary.
        return (logits_NV.softmax(-1) / torch.empty_like(logits_NV).exponential_()).argmax(-1)

    def score(self, logits_NV: torch.Tensor, ids_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # No entropy, which a sampler does not need; ours comes with it.
        logprobs_N = logits_NV.gather(1, ids_N[:, None])[:, 0] - logits_NV.logsumexp(-1)
        return logprobs_N, logprobs_N


class DensePages:
    """The memory of exact pages, attended by torch's fused kernel; every sequence owns a run of pages of one length."""

    def __init__(self, pages: CudaPages) -> None:
        self._pages, self.num_pages = pages, pages.num_pages
        self._new: tuple[torch.Tensor, torch.Tensor] | None = None

    def write(self, layer: int, k_TKE: torch.Tensor, v_TKE: torch.Tensor, spans: Spans) -> None:
        self._pages.write(layer, k_TKE, v_TKE, spans)
        self._new = (k_TKE, v_TKE)

    def attend(self, layer: int, q_THE: torch.Tensor, spans: Spans) -> torch.Tensor:
        assert self._new is not None
        if spans.longest_new > 1:
            return _fused_packed(q_THE, *self._new, (len(q_THE),))
        num_seqs, width = spans.table_BP.shape
        _, _, _, num_heads, _, dim = self._pages.memory_L2PKSE.shape
        k_BKLE, v_BKLE = (
            x[: num_seqs * width].view(num_seqs, num_heads, width * PAGE, dim)[:, :, : spans.longest]
            for x in self._pages.memory_L2PKSE[layer]
        )
        return F.scaled_dot_product_attention(q_THE[:, :, None], k_BKLE, v_BKLE, enable_gqa=True)[:, :, 0]
