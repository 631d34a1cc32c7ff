"""The exact profile on a CUDA device: the operations of a forward, each a kernel whose rows know nothing of one another.

Weights and activations are bfloat16, sums float32, logits and router scores float32. Shapes as in `rollmill.ops.base`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rollmill.ops.cuda import experts, pages, route, rows, score
from rollmill.ops.cuda.linear import Linear, LinearFunction


class CudaOps:
    """Kernels are compiled and proven as shapes come up: run a step once before capturing it in a graph."""

    profile = "exact"
    is_exact = True

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self.device = torch.device(device)
        self.products = Linear()

    def rms_norm(self, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        """Over the last axis; [T, N, E] may be a slice of heads."""
        return rows.rms_norm(x_TD, weight_D, eps)

    def add_rms_norm(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rms_norm(x + residual), x + residual), with the bits of the two steps."""
        return rows.add_rms_norm(x_TD, residual_TD, weight_D, eps)

    def linear(self, x_TD: torch.Tensor, weight_ND: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
        return self._product(x_TD, weight_ND, bias_N, weight_ND.dtype)

    def linear_fp32(self, x_TD: torch.Tensor, weight_ND: torch.Tensor) -> torch.Tensor:
        return self._product(x_TD, weight_ND, None, torch.float32)

    def _product(self, x_TD: torch.Tensor, weight_ND: torch.Tensor, bias_N: torch.Tensor | None, out: torch.dtype) -> torch.Tensor:
        if weight_ND.dtype != torch.bfloat16 or x_TD.dtype != torch.bfloat16:
            raise ValueError(
                f"the exact CUDA profile computes in bfloat16, not {x_TD.dtype} x {weight_ND.dtype}; load the model as bfloat16"
            )
        return LinearFunction.apply(self.products, x_TD, weight_ND, bias_N, out)

    def rotate(self, x_THE: torch.Tensor, cos_T1E: torch.Tensor, sin_T1E: torch.Tensor) -> torch.Tensor:
        return rows.rotate(x_THE, cos_T1E, sin_T1E)

    def swiglu(self, gate_up_T2F: torch.Tensor) -> torch.Tensor:
        return rows.swiglu(gate_up_T2F)

    def sigmoid(self, x_TX: torch.Tensor) -> torch.Tensor:
        """torch's own: on a GPU every element takes the same instructions."""
        return x_TX.sigmoid()

    def top_ids(self, scores_TX: torch.Tensor, k: int) -> torch.Tensor:
        """The k best experts of each token, ties to the lower id, in ascending id."""
        return route.top_ids(scores_TX, k)

    def experts(
        self, h_TD: torch.Tensor, ids_TK: torch.Tensor, gates_TK: torch.Tensor, gate_up_X2FD: torch.Tensor, down_XDF: torch.Tensor
    ) -> torch.Tensor:
        return experts.experts(h_TD, ids_TK, gates_TK, gate_up_X2FD, down_XDF)

    def attend_packed(self, q_THE: torch.Tensor, k_TKE: torch.Tensor, v_TKE: torch.Tensor, seq_lens: Sequence[int]) -> torch.Tensor:
        return pages.attend_packed(q_THE, k_TKE, v_TKE, seq_lens)

    def score(self, logits_NV: torch.Tensor, ids_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return score.score(logits_NV, ids_N)

    def pick(self, logits_NV: torch.Tensor, uniform_N: torch.Tensor) -> torch.Tensor:
        return score.pick(logits_NV, uniform_N)

    def new_pages(self, num_pages: int, *, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> pages.CudaPages:
        return pages.CudaPages(
            num_pages, num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype, device=self.device
        )

    def refresh(self) -> None:
        """Nothing is derived from weights: proofs speak of shapes."""
