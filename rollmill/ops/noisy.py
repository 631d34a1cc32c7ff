"""The noisy profile: sums split by the number of rows and rounded to bfloat16, as a fast engine does when nobody asks for equal bits.

Only for showing what replay and correction are worth; its error is that of bfloat16 accumulation, about 2**-9 of each output.
Shapes: T packed tokens, D inputs, N outputs, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rollmill.ops.base import Pages, Spans
from rollmill.ops.torch_ops import TorchOps


def _rounded(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16).to(x.dtype)


class NoisyOps(TorchOps):
    profile = "noisy"

    def rms_norm(self, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        return _rounded(super().rms_norm(x_TD, weight_D, eps))

    def add_rms_norm(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        sum_TD = _rounded(x_TD + residual_TD)
        return self.rms_norm(sum_TD, weight_D, eps), sum_TD

    def linear(self, x_TD: torch.Tensor, weight_ND: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
        """Two partial sums, cut where the number of rows says, each rounded before they are added."""
        width = x_TD.shape[1]
        cut = width * (2 + len(x_TD) % 5) // 8
        if cut == 0:
            return _rounded(F.linear(x_TD, weight_ND, bias_N))
        left = _rounded(F.linear(x_TD[:, :cut], weight_ND[:, :cut]))
        return _rounded(left + _rounded(F.linear(x_TD[:, cut:], weight_ND[:, cut:], bias_N)))

    def new_pages(self, num_pages: int, *, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> Pages:
        return _NoisyPages(super().new_pages(num_pages, num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype))


class _NoisyPages:
    """Keys, values and results of attention rounded to bfloat16."""

    def __init__(self, inner: Pages) -> None:
        self._inner, self.num_pages = inner, inner.num_pages

    def write(self, layer: int, k_TKE: torch.Tensor, v_TKE: torch.Tensor, spans: Spans) -> None:
        self._inner.write(layer, _rounded(k_TKE), _rounded(v_TKE), spans)

    def attend(self, layer: int, q_THE: torch.Tensor, spans: Spans) -> torch.Tensor:
        return _rounded(self._inner.attend(layer, q_THE, spans))
