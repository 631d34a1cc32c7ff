"""Norm, rotation and SwiGLU on the CPU by compiled loops over rows, with gradients by torch.

Compiled, because torch's own split a row between threads and the tail of a part then takes another exponential, and because one
pass over the memory replaces three to six. Shapes: T packed tokens, D hidden, H heads, E head size, F inner size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rollmill.ops.cpu.kernels import add_rms_norm_rows, rms_norm_rows, rotate_rows, sigmoid_rows, swiglu_rows
from rollmill.ops.cpu.threads import share_rows

# Operations for one element: an exponential, a division and two products.
_SWIGLU_COST = 24


def _array(x: torch.Tensor) -> np.ndarray:
    return x.detach().float().contiguous().numpy()


def rms_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    if not (torch.is_grad_enabled() and (x_TD.requires_grad or weight_D.requires_grad)):
        return _rms_norm(x_TD, weight_D, eps)
    return RmsNorm.apply(x_TD, weight_D, eps)


def _rms_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    rows = _array(x_TD).reshape(-1, x_TD.shape[-1])
    out = np.empty_like(rows)
    share_rows(rms_norm_rows, rows, _array(weight_D), np.float32(eps), out, num_rows=len(rows), work=4 * rows.size)
    return torch.from_numpy(out).view(x_TD.shape).to(x_TD.dtype)


class RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        ctx.save_for_backward(x_TD, weight_D)
        ctx.eps = eps
        return _rms_norm(x_TD, weight_D, eps)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        factor = torch.rsqrt(x.square().mean(-1, keepdim=True) + ctx.eps)
        normed, by_normed = x * factor, grads[0] * weight
        by_x = factor * (by_normed - normed * (by_normed * normed).mean(-1, keepdim=True))
        return by_x, (grads[0] * normed).reshape(-1, weight.numel()).sum(0), None


def add_rms_norm(x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    if torch.is_grad_enabled() and (x_TD.requires_grad or residual_TD.requires_grad or weight_D.requires_grad):
        sum_TD = x_TD + residual_TD
        return rms_norm(sum_TD, weight_D, eps), sum_TD
    x, residual = _array(x_TD), _array(residual_TD)
    total, out = np.empty_like(x), np.empty_like(x)
    share_rows(add_rms_norm_rows, x, residual, _array(weight_D), np.float32(eps), total, out, num_rows=len(x), work=5 * x.size)
    return torch.from_numpy(out).to(x_TD.dtype), torch.from_numpy(total).to(x_TD.dtype)


def rotate(x_THE: torch.Tensor, cos_T1E: torch.Tensor, sin_T1E: torch.Tensor) -> torch.Tensor:
    if not (torch.is_grad_enabled() and x_THE.requires_grad):
        return _rotate(x_THE, cos_T1E, sin_T1E)
    return Rotate.apply(x_THE, cos_T1E, sin_T1E)


def _rotate(x_THE: torch.Tensor, cos_T1E: torch.Tensor, sin_T1E: torch.Tensor) -> torch.Tensor:
    x = _array(x_THE)
    shape = (len(x), x.shape[2])
    cos, sin = (_array(table.expand(len(x), 1, -1)).reshape(shape) for table in (cos_T1E, sin_T1E))
    out = np.empty_like(x)
    share_rows(rotate_rows, x, cos, sin, out, num_rows=len(x), work=4 * x.size)
    return torch.from_numpy(out).to(x_THE.dtype)


class Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_THE: torch.Tensor, cos_T1E: torch.Tensor, sin_T1E: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos_T1E, sin_T1E)
        return _rotate(x_THE, cos_T1E, sin_T1E)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        # The transpose: each half of the sine's share goes back to the other half.
        left, right = (grads[0] * sin).chunk(2, -1)
        return grads[0] * cos + torch.cat((right, -left), -1), None, None


def sigmoid(x_TX: torch.Tensor) -> torch.Tensor:
    if not (torch.is_grad_enabled() and x_TX.requires_grad):
        return _sigmoid(x_TX)
    return Sigmoid.apply(x_TX)


def _sigmoid(x_TX: torch.Tensor) -> torch.Tensor:
    rows = _array(x_TX)
    out = np.empty_like(rows)
    share_rows(sigmoid_rows, rows, out, num_rows=len(rows), work=_SWIGLU_COST * rows.size)
    return torch.from_numpy(out)


class Sigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TX: torch.Tensor) -> torch.Tensor:
        out_TX = _sigmoid(x_TX)
        ctx.save_for_backward(out_TX)
        return out_TX

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (out_TX,) = ctx.saved_tensors
        return grads[0] * out_TX * (1 - out_TX)


def swiglu(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    if not (torch.is_grad_enabled() and gate_up_T2F.requires_grad):
        return _swiglu(gate_up_T2F)
    return Swiglu.apply(gate_up_T2F)


def _swiglu(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    rows = _array(gate_up_T2F)
    out = np.empty((len(rows), rows.shape[1] // 2), np.float32)
    share_rows(swiglu_rows, rows, out, num_rows=len(rows), work=_SWIGLU_COST * out.size)
    return torch.from_numpy(out).to(gate_up_T2F.dtype)


class Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up_T2F: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate_up_T2F)
        return _swiglu(gate_up_T2F)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        gate, up = ctx.saved_tensors[0].chunk(2, -1)
        grad, sigmoid = grads[0], torch.sigmoid(gate)
        by_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
        return torch.cat((by_gate, grad * gate * sigmoid), -1)
