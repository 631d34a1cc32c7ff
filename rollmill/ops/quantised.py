"""Profiles in which linear layers and experts multiply quantised operands, on both sides alike, over the operations of an exact profile.

Weights are quantised by `rollmill.weights.quant`, once for every change of theirs, activations token by token. Head, router, norms,
embeddings and attention are left alone. An exact product of exact rows is exact, so these profiles promise what the one below does.
Backward is straight through: the gradient of the product of the dequantised operands, in the precision of the profile below.
Shapes: T packed tokens, D inputs, N outputs, K experts of a token, X experts, F inner size, M = T * K rows by expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from rollmill.ops.activations import fp8_rows, nvfp4_rows
from rollmill.ops.base import Ops, Pages
from rollmill.ops.derived import Derived, Tensors
from rollmill.ops.torch_ops import combine
from rollmill.weights.quant import Scheme, dequantise, quantise

Rounding = Callable[[torch.Tensor], torch.Tensor]

QUANTISED: dict[str, tuple[Scheme, Rounding]] = {"fp8": (Scheme.FP8_BLOCK, fp8_rows), "nvfp4": (Scheme.NVFP4, nvfp4_rows)}
"""Profile -> how its weights and its activations are quantised."""


class NativeLinear(Protocol):
    """A device's own product: rounds x as the profile does, multiplies the codes, rows independent; no bias, no gradient."""

    def __call__(self, x_TD: torch.Tensor, weight_codes: torch.Tensor, weight_scales: torch.Tensor, /) -> torch.Tensor: ...


class Operand(NamedTuple):
    """One weight as a product takes it."""

    live_ND: torch.Tensor
    """Where the gradient goes; in emulation already the dequantised values."""
    codes: torch.Tensor | None = None
    scales: torch.Tensor | None = None


class Products(Protocol):
    """How quantised operands are multiplied."""

    weights: Derived

    def rounded(self, x_TD: torch.Tensor) -> torch.Tensor: ...

    def operands(self, weight: torch.Tensor) -> list[Operand]:
        """Of a matrix, or one for each expert of a stack."""
        ...

    def __call__(self, x_TD: torch.Tensor, operand: Operand, bias_N: torch.Tensor | None = None) -> torch.Tensor: ...


class Emulated:
    """Both operands quantised and dequantised, then the exact product below.

    The values are exact in the dtype that computes, bfloat16 included, and a product of two of them has at most twelve bits, so it is exact
    in float32: only the sum rounds.
    """

    def __init__(self, below: Ops, scheme: Scheme, rounding: Rounding) -> None:
        self._below, self._rounding = below, rounding
        self.weights = Derived(lambda weight: (_values(weight, scheme),))

    def rounded(self, x_TD: torch.Tensor) -> torch.Tensor:
        return _through(x_TD, self._rounding(x_TD.detach()))

    def operands(self, weight: torch.Tensor) -> list[Operand]:
        values = _through(weight, self.weights.of(weight)[0])
        # Unbound once: indexing each expert would make autograd fill a gradient as large as all of them, once per expert.
        return [Operand(values)] if values.dim() == 2 else [Operand(v) for v in values.unbind()]

    def __call__(self, x_TD: torch.Tensor, operand: Operand, bias_N: torch.Tensor | None = None) -> torch.Tensor:
        return self._below.linear(x_TD, operand.live_ND, bias_N)


class Native:
    """The device multiplies codes; dequantised operands are made for a backward only."""

    def __init__(self, linear: NativeLinear, scheme: Scheme, rounding: Rounding) -> None:
        self._linear, self._rounding, self._scheme = linear, rounding, scheme
        self.weights = Derived(lambda weight: _codes(weight, scheme))

    def rounded(self, x_TD: torch.Tensor) -> torch.Tensor:
        return x_TD

    def operands(self, weight: torch.Tensor) -> list[Operand]:
        codes, scales = self.weights.of(weight)
        if weight.dim() == 2:
            return [Operand(weight, codes, scales)]
        return [Operand(*parts) for parts in zip(weight.unbind(), codes.unbind(), scales.unbind(), strict=True)]

    def __call__(self, x_TD: torch.Tensor, operand: Operand, bias_N: torch.Tensor | None = None) -> torch.Tensor:
        y_TN: torch.Tensor = _NativeProduct.apply(self, x_TD, *operand)
        return y_TN if bias_N is None else y_TN + bias_N

    def forward(self, x_TD: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return self._linear(x_TD, codes, scales)

    def dequantised(self, x_TD: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._rounding(x_TD), dequantise("w", {"w": codes, "w_scale_inv": scales}, self._scheme, dtype=x_TD.dtype)


class QuantisedOps:
    """An exact profile whose linear layers and experts are quantised."""

    def __init__(self, profile: str, below: Ops, *, native: NativeLinear | None = None) -> None:
        """`native` multiplies fp8 codes where the device can; without it the product is emulated."""
        scheme, rounding = QUANTISED[profile]
        assert native is None or scheme is Scheme.FP8_BLOCK, "only fp8 has a product of its own on a device"
        self.profile, self.is_exact, self._below = profile, below.is_exact, below
        self._product: Products = Native(native, scheme, rounding) if native else Emulated(below, scheme, rounding)

    def linear(self, x_TD: torch.Tensor, weight_ND: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
        return self._product(self._product.rounded(x_TD), self._product.operands(weight_ND)[0], bias_N)

    def experts(
        self, h_TD: torch.Tensor, ids_TK: torch.Tensor, gates_TK: torch.Tensor, gate_up_X2FD: torch.Tensor, down_XDF: torch.Tensor
    ) -> torch.Tensor:
        num_tokens, k = ids_TK.shape
        order_M = ids_TK.flatten().argsort(stable=True)
        counts_X = torch.bincount(ids_TK.flatten(), minlength=len(gate_up_X2FD)).tolist()
        # Every (token, slot) is read once, so the backward writes each place once: no atomics there either.
        h_MD = self._product.rounded(h_TD)[:, None].expand(-1, k, -1)[order_M // k, order_M % k]
        inner_MF = self._below.swiglu(self._by_expert(h_MD, counts_X, gate_up_X2FD))
        y_MD = self._by_expert(self._product.rounded(inner_MF), counts_X, down_XDF)
        place_M = torch.empty_like(order_M).scatter_(0, order_M, torch.arange(len(order_M), device=order_M.device))
        return combine(y_MD[place_M].view(num_tokens, k, -1), gates_TK)

    def _by_expert(self, x_MD: torch.Tensor, counts_X: Sequence[int], weight_XND: torch.Tensor) -> torch.Tensor:
        runs = zip(x_MD.split(counts_X), self._product.operands(weight_XND), strict=True)
        return torch.cat([self._product(rows, operand) for rows, operand in runs if len(rows)])

    def refresh(self) -> None:
        self._product.weights.refresh()
        self._below.refresh()

    def rms_norm(self, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        return self._below.rms_norm(x_TD, weight_D, eps)

    def add_rms_norm(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._below.add_rms_norm(x_TD, residual_TD, weight_D, eps)

    def sigmoid(self, x_TX: torch.Tensor) -> torch.Tensor:
        return self._below.sigmoid(x_TX)

    def top_ids(self, scores_TX: torch.Tensor, k: int) -> torch.Tensor:
        return self._below.top_ids(scores_TX, k)

    def linear_fp32(self, x_TD: torch.Tensor, weight_ND: torch.Tensor) -> torch.Tensor:
        return self._below.linear_fp32(x_TD, weight_ND)

    def rotate(self, x_THE: torch.Tensor, cos_T1E: torch.Tensor, sin_T1E: torch.Tensor) -> torch.Tensor:
        return self._below.rotate(x_THE, cos_T1E, sin_T1E)

    def swiglu(self, gate_up_T2F: torch.Tensor) -> torch.Tensor:
        return self._below.swiglu(gate_up_T2F)

    def attend_packed(self, q_THE: torch.Tensor, k_TKE: torch.Tensor, v_TKE: torch.Tensor, seq_lens: Sequence[int]) -> torch.Tensor:
        return self._below.attend_packed(q_THE, k_TKE, v_TKE, seq_lens)

    def score(self, logits_NV: torch.Tensor, ids_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._below.score(logits_NV, ids_N)

    def pick(self, logits_NV: torch.Tensor, uniform_N: torch.Tensor) -> torch.Tensor:
        return self._below.pick(logits_NV, uniform_N)

    def new_pages(self, num_pages: int, *, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> Pages:
        return self._below.new_pages(num_pages, num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype)


class _Through(torch.autograd.Function):
    """The values in place of what they were made from, as if nothing had happened."""

    @staticmethod
    def forward(ctx: Any, live: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def _through(live: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return _Through.apply(live, values) if live.requires_grad and torch.is_grad_enabled() else values


class _NativeProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, product: Native, x_TD: torch.Tensor, live_ND: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor
    ) -> torch.Tensor:
        ctx.product = product
        ctx.save_for_backward(x_TD, codes, scales)
        return product.forward(x_TD, codes, scales)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_TD, weight_ND = ctx.product.dequantised(*ctx.saved_tensors)
        g_TN = grads[0].to(x_TD.dtype)
        return None, g_TN @ weight_ND if ctx.needs_input_grad[1] else None, g_TN.T @ x_TD if ctx.needs_input_grad[2] else None, None, None


def _matrices(weight: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Each matrix with a name for whoever must find it; an expert is a matrix of its own."""
    what = " x ".join(map(str, weight.shape[-2:]))
    if weight.dim() == 2:
        return [(f"a weight of {what}", weight)]
    return [(f"expert {x}'s weight of {what}", matrix) for x, matrix in enumerate(weight.unbind())]


def _values(weight: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    values = torch.empty_like(weight, memory_format=torch.contiguous_format)
    for (name, matrix), out in zip(_matrices(weight), values.view(-1, *weight.shape[-2:]), strict=True):
        out.copy_(dequantise(name, quantise(name, matrix, scheme), scheme, dtype=weight.dtype))
    return values


def _codes(weight: torch.Tensor, scheme: Scheme) -> Tensors:
    parts = [tuple(quantise(name, matrix, scheme).values()) for name, matrix in _matrices(weight)]
    return parts[0] if weight.dim() == 2 else tuple(map(torch.stack, zip(*parts, strict=True)))
