"""Norm, activation and rotary positions: one pass over a row, float32 inside, rounded once; a row knows no other.

Each kernel's cut of a row is fixed by the row's width, never by the number of rows, and products are not contracted into sums, so the
bits are those of the formula. Shapes: T tokens, D hidden, F inner size, N heads, E head size.
"""

# Kernel arguments are pointers and numbers on the device; they have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from rollmill.ops.cuda.room import roomy

_TILE = 2048
"""Elements of a program that holds several short rows."""


@triton.jit(do_not_specialize=["num_rows"])
def _norm(
    x, residual, weight, y, total, num_rows, heads, token_stride, head_stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < num_rows)[:, None] & (column < WIDTH)[None, :]
    at = (row // heads * token_stride + row % heads * head_stride)[:, None] + column[None, :]
    dense = row[:, None] * WIDTH + column[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        # The stream is kept in the dtype of the model: what is normed is what later layers will read.
        rounded = (value + tl.load(residual + dense, mask=inside, other=0.0).to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + dense, rounded, mask=inside)
        value = rounded.to(tl.float32)
    mean = tl.sum(value * value, axis=1) / WIDTH
    scaled = value * tl.rsqrt(mean + eps)[:, None]
    w = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    tl.store(y + dense, (scaled * w[None, :]).to(y.dtype.element_ty), mask=inside)


def _launch_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    width = x.shape[-1]
    x_TNE = x if x.dim() == 3 else x.view(-1, 1, width)
    assert x_TNE.stride(-1) == 1 and (residual is None or residual.is_contiguous())
    tokens, heads, _ = x_TNE.shape
    y = roomy(*x.shape, dtype=x.dtype, device=x.device)
    total = None if residual is None else torch.empty_like(y)
    block = triton.next_power_of_2(width)
    rows = max(1, _TILE // block) if block <= 512 else 1
    grid = (triton.cdiv(tokens * heads, rows),)
    if tokens:
        _norm[grid](
            x_TNE, residual, weight, y, total, tokens * heads, heads, x_TNE.stride(0), x_TNE.stride(1), eps,
            WIDTH=width, BLOCK=block, ROWS=rows, ADD=residual is not None, num_warps=4 if block <= 4096 else 8, enable_fp_fusion=False,
        )  # fmt: skip
    return y, total


def _norm_grads(g: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    x32, g32 = x.float(), g.float()
    scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    normed = x32 * scale
    weighted = g32 * weight.float()
    grad_x = scale * (weighted - normed * (weighted * normed).mean(-1, keepdim=True))
    grad_w = (g32 * normed).flatten(0, -2).sum(0)
    return grad_x.to(x.dtype), grad_w.to(weight.dtype)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return _launch_norm(x, None, weight, eps)[0]

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return *_norm_grads(g, x, weight, ctx.eps), None


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        y, total = _launch_norm(x, residual, weight, eps)
        assert total is not None
        ctx.save_for_backward(total, weight)
        ctx.eps = eps
        return y, total

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor, g_total: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        total, weight = ctx.saved_tensors
        grad_x, grad_w = _norm_grads(g, total, weight, ctx.eps)
        grad_x = grad_x + g_total
        return grad_x, grad_x, grad_w, None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Over the last axis of [T, D] or [T, N, E]; the latter may be a slice of heads."""
    return _Norm.apply(x, weight, eps)


def add_rms_norm(x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm of the sum, the sum): the sum is rounded to the dtype of the stream before it is normed, as in two steps."""
    return _AddNorm.apply(x_TD, residual_TD, weight_D, eps)


@triton.jit
def _swiglu(x, y, x_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(y + row * WIDTH + column, value.to(y.dtype.element_ty), mask=inside)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_T2F: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x_T2F)
        assert x_T2F.stride(1) == 1
        width = x_T2F.shape[1] // 2
        y_TF = roomy(len(x_T2F), width, dtype=x_T2F.dtype, device=x_T2F.device)
        if len(x_T2F):
            block = min(1024, triton.next_power_of_2(width))
            grid = (len(x_T2F), triton.cdiv(width, block))
            _swiglu[grid](x_T2F, y_TF, x_T2F.stride(0), WIDTH=width, BLOCK=block, num_warps=4, enable_fp_fusion=False)
        return y_TF

    @staticmethod
    def backward(ctx: Any, g_TF: torch.Tensor) -> torch.Tensor:
        (x_T2F,) = ctx.saved_tensors
        gate, up = (part.float() for part in x_T2F.chunk(2, -1))
        g = g_TF.float()
        sigmoid = gate.sigmoid()
        grad = torch.cat([g * up * sigmoid * (1 + gate * (1 - sigmoid)), g * gate * sigmoid], -1)
        return grad.to(x_T2F.dtype)


def swiglu(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    """silu(first half) * second half."""
    return _SwiGLU.apply(gate_up_T2F)


@triton.jit
def _rotate(
    x, cos, sin, y, heads, token_stride, head_stride, angle_stride,
    HALF: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, BLOCK)
    inside = (head < heads)[:, None] & (column < HALF)[None, :]
    at = x + token * token_stride + (head * head_stride)[:, None] + column[None, :]
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    angle = token * angle_stride + column
    real = column < HALF
    c1 = tl.load(cos + angle, mask=real, other=0.0).to(tl.float32)[None, :]
    c2 = tl.load(cos + angle + HALF, mask=real, other=0.0).to(tl.float32)[None, :]
    s1 = tl.load(sin + angle, mask=real, other=0.0).to(tl.float32)[None, :]
    s2 = tl.load(sin + angle + HALF, mask=real, other=0.0).to(tl.float32)[None, :]
    if BACK:
        one = first * c1 + second * s2
        two = second * c2 - first * s1
    else:
        one = first * c1 - second * s1
        two = second * c2 + first * s2
    to = y + (token * heads + head)[:, None] * (2 * HALF) + column[None, :]
    tl.store(to, one.to(y.dtype.element_ty), mask=inside)
    tl.store(to + HALF, two.to(y.dtype.element_ty), mask=inside)


def _launch_rotate(x_TNE: torch.Tensor, cos_T1E: torch.Tensor, sin_T1E: torch.Tensor, is_back: bool) -> torch.Tensor:
    tokens, heads, size = x_TNE.shape
    assert x_TNE.stride(2) == 1 and cos_T1E.stride() == sin_T1E.stride() and cos_T1E.stride(-1) == 1
    y_TNE = torch.empty((tokens, heads, size), dtype=x_TNE.dtype, device=x_TNE.device)
    block = triton.next_power_of_2(size // 2)
    per = min(triton.next_power_of_2(heads), max(1, _TILE // block))
    if tokens:
        _rotate[(tokens, triton.cdiv(heads, per))](
            x_TNE, cos_T1E, sin_T1E, y_TNE, heads, x_TNE.stride(0), x_TNE.stride(1), cos_T1E.stride(0),
            HALF=size // 2, BLOCK=block, HEADS=per, BACK=is_back, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return y_TNE


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TNE: torch.Tensor, cos_T1E: torch.Tensor, sin_T1E: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos_T1E, sin_T1E)
        return _launch_rotate(x_TNE, cos_T1E, sin_T1E, False)

    @staticmethod
    def backward(ctx: Any, g_TNE: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos_T1E, sin_T1E = ctx.saved_tensors
        return _launch_rotate(g_TNE.contiguous(), cos_T1E, sin_T1E, True), None, None


def rotate(x_TNE: torch.Tensor, cos_T1E: torch.Tensor, sin_T1E: torch.Tensor) -> torch.Tensor:
    """Turns the pairs (e, e + E/2) of each head by the token's angles, which carry no gradient."""
    return _Rotate.apply(x_TNE, cos_T1E, sin_T1E)
