"""The exact profile of the CPU: strict matrix products, each shape proved before its first use, and compiled loops for the rest."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import ModuleType

import torch
import torch.nn.functional as F

from rollmill.ops.base import Pages
from rollmill.ops.cpu.strict import ask_for_strict, blocked_linear, is_invariant, log
from rollmill.ops.torch_ops import TorchOps


@cache
def _rowwise() -> ModuleType:
    # Imported late: numba takes half a second, and a machine that computes on a GPU may not have it.
    from rollmill.ops.cpu import rowwise

    return rowwise


@cache
def _logits() -> ModuleType:
    from rollmill.ops.cpu import logits

    return logits


class CpuOps(TorchOps):
    profile = "exact"
    is_exact = True

    def __init__(self) -> None:
        super().__init__("cpu")
        self._is_strict = ask_for_strict()
        self._is_direct: dict[tuple[int, int, int], bool] = {}

    def linear(self, x_TD: torch.Tensor, weight_ND: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
        if x_TD.dtype != torch.float32 or weight_ND.dtype != torch.float32:
            raise ValueError(
                f"the exact profile of the CPU computes in float32, not {x_TD.dtype} x {weight_ND.dtype}: load the model with "
                "compute_dtype=torch.float32 (bfloat16 weights lose nothing by it), or choose the numerics profile 'fast'"
            )
        shape = (*weight_ND.shape, torch.get_num_threads())
        is_direct = self._is_direct.get(shape)
        if is_direct is None:
            is_direct = self._is_direct[shape] = self._prove(*shape)
        return F.linear(x_TD, weight_ND, bias_N) if is_direct else blocked_linear(x_TD, weight_ND, bias_N)

    def _prove(self, num_outputs: int, num_inputs: int, num_threads: int) -> bool:
        if is_invariant(num_outputs, num_inputs, num_threads, is_blocked=False):
            return True
        what = f"{num_inputs} x {num_outputs} products with {num_threads} threads"
        if not is_invariant(num_outputs, num_inputs, num_threads, is_blocked=True):
            raise ValueError(
                f"on this machine {what} give a row other bits when its neighbours change, even in blocks of one shape; "
                "set the environment variable MKL_CBWR=AVX2,STRICT, run with one thread, or choose the numerics profile 'fast'"
            )
        log.warning(
            "%s run in padded blocks, several times slower for few rows: %s",
            what,
            "its strict mode does not make them exact here"
            if self._is_strict
            else "the matrix library has no strict mode, or multiplied before rollmill.ops was imported",
        )
        return False

    def rms_norm(self, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        return _rowwise().rms_norm(x_TD, weight_D, eps)

    def add_rms_norm(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return _rowwise().add_rms_norm(x_TD, residual_TD, weight_D, eps)

    def rotate(self, x_THE: torch.Tensor, cos_T1E: torch.Tensor, sin_T1E: torch.Tensor) -> torch.Tensor:
        return _rowwise().rotate(x_THE, cos_T1E, sin_T1E)

    def swiglu(self, gate_up_T2F: torch.Tensor) -> torch.Tensor:
        return _rowwise().swiglu(gate_up_T2F)

    def sigmoid(self, x_TX: torch.Tensor) -> torch.Tensor:
        return _rowwise().sigmoid(x_TX)

    def score(self, logits_NV: torch.Tensor, ids_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _logits().score(logits_NV, ids_N)

    def pick(self, logits_NV: torch.Tensor, uniform_N: torch.Tensor) -> torch.Tensor:
        return _logits().pick(logits_NV, uniform_N)

    def attend_packed(self, q_THE: torch.Tensor, k_TKE: torch.Tensor, v_TKE: torch.Tensor, seq_lens: Sequence[int]) -> torch.Tensor:
        from rollmill.ops.cpu.pages import attend_packed

        return attend_packed(q_THE, k_TKE, v_TKE, tuple(seq_lens))

    def new_pages(self, num_pages: int, *, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> Pages:
        from rollmill.ops.cpu.pages import CpuPages

        return CpuPages(num_pages, num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim)
