"""Experts on their tokens: rows sorted by expert on the device, the linear layer's sum for each row, outputs added in ascending expert id.

Where the tiles of an expert start follows from counts that never leave the device, so a step can be captured. An expert's rows may come in
any number and order: a row's sums are its own. Shapes: T tokens, D hidden, K experts per token, X experts, F inner size, M = T * K entries
(token t's k-th expert is entry t * K + k), R entries sorted by expert.
"""

# Kernel arguments are pointers and numbers on the device; they have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from rollmill.ops.cuda.matmul import Tile

FEW_ROWS = 24
"""Up to so many rows an expert on average, small tiles read the weights fastest."""

UP = {True: Tile(16, 32, 128, 4, 4), False: Tile(128, 64, 64, 8, 3)}
DOWN = {True: Tile(16, 64, 128, 4, 4), False: Tile(128, 128, 64, 8, 3)}
"""Tiles by whether there are few rows; `columns` of UP counts gates, each with its up."""


@triton.jit(do_not_specialize=["M"])
def _sort(ids, entries, tile_expert, tile_first, tile_end, M, BLOCK: tl.constexpr, BM: tl.constexpr):
    """One program an expert: it counts the entries of lower experts, which is where its own begin, and lists its own in order.

    Its tiles take the places from begin // BM + expert on: floor(a) + ceil(b) <= floor(a + b) + 1, so runs of places never overlap, and
    the places it leaves before the next expert's are marked empty here.
    """
    expert = tl.program_id(0)
    begin = tl.zeros((), tl.int32)
    for start in range(0, M, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        begin += tl.sum((tl.load(ids + entry, mask=entry < M, other=1 << 30) < expert).to(tl.int32), 0)
    end = begin
    for start in range(0, M, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        own = (tl.load(ids + entry, mask=entry < M, other=1 << 30) == expert).to(tl.int32)
        tl.store(entries + end + tl.cumsum(own, 0) - 1, entry, mask=own > 0)
        end += tl.sum(own, 0)
    place = begin // BM + expert
    for at in range(place, end // BM + expert + 1):
        first = begin + (at - place) * BM
        tl.store(tile_expert + at, tl.where(first < end, expert, -1))
        tl.store(tile_first + at, first)
        tl.store(tile_end + at, end)


@triton.jit
def _gate_up(
    h, w, entries, tile_expert, tile_first, tile_end, out, D, F, num_k, h_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up of the tile's rows; gate and up are rounded as a linear layer's outputs before."""
    at = tl.program_id(1)
    expert = tl.load(tile_expert + at)
    if expert < 0:
        return
    row = tl.load(tile_first + at) + tl.arange(0, BM)
    real = row < tl.load(tile_end + at)
    token = tl.load(entries + row, mask=real, other=0) // num_k
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    h_at = h + token.to(tl.int64)[:, None] * h_stride + k[None, :]
    gate_at = w + (expert.to(tl.int64) * (2 * F) + column)[:, None] * D + k[None, :]
    up_at = gate_at + F.to(tl.int64) * D
    gate = tl.zeros((BM, BN), tl.float32)
    up = tl.zeros((BM, BN), tl.float32)
    for start in range(0, D, BK):
        inside = (k < D - start)[None, :]
        a = tl.load(h_at, mask=real[:, None] & inside, other=0.0)
        weights = (column < F)[:, None] & inside
        gate = tl.dot(a, tl.load(gate_at, mask=weights, other=0.0).T, gate)
        up = tl.dot(a, tl.load(up_at, mask=weights, other=0.0).T, up)
        h_at += BK
        gate_at += BK
        up_at += BK
    g, u = gate.to(h.dtype.element_ty).to(tl.float32), up.to(h.dtype.element_ty).to(tl.float32)
    value = g / (1.0 + tl.exp(-g)) * u
    tl.store(
        out + row.to(tl.int64)[:, None] * F + column[None, :], value.to(out.dtype.element_ty), mask=real[:, None] & (column < F)[None, :]
    )


@triton.jit
def _down(
    a_RF, w, entries, tile_expert, tile_first, tile_end, out, D, F,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The tile's rows, stored where their entries stand."""
    at = tl.program_id(1)
    expert = tl.load(tile_expert + at)
    if expert < 0:
        return
    row = tl.load(tile_first + at) + tl.arange(0, BM)
    real = row < tl.load(tile_end + at)
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    a_at = a_RF + row.to(tl.int64)[:, None] * F + k[None, :]
    w_at = w + (expert.to(tl.int64) * D + column)[:, None] * F + k[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, F, BK):
        inside = (k < F - start)[None, :]
        a = tl.load(a_at, mask=real[:, None] & inside, other=0.0)
        acc = tl.dot(a, tl.load(w_at, mask=(column < D)[:, None] & inside, other=0.0).T, acc)
        a_at += BK
        w_at += BK
    entry = tl.load(entries + row, mask=real, other=0)
    tl.store(
        out + entry.to(tl.int64)[:, None] * D + column[None, :], acc.to(out.dtype.element_ty), mask=real[:, None] & (column < D)[None, :]
    )


@triton.jit
def _combine(y, gates, out, D, num_k, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < D
    entry = token * num_k
    total = tl.load(y + entry * D + column, mask=inside, other=0.0).to(tl.float32) * tl.load(gates + entry)
    for k in range(1, num_k):
        total += tl.load(y + (entry + k) * D + column, mask=inside, other=0.0).to(tl.float32) * tl.load(gates + entry + k)
    tl.store(out + token * D + column, total.to(out.dtype.element_ty), mask=inside)


def _forward(
    h_TD: torch.Tensor, ids_TK: torch.Tensor, gates_TK: torch.Tensor, gate_up_X2FD: torch.Tensor, down_XDF: torch.Tensor
) -> torch.Tensor:
    tokens, num_k = ids_TK.shape
    num_experts, d, f = down_XDF.shape
    assert h_TD.stride(1) == 1 and gate_up_X2FD.is_contiguous() and down_XDF.is_contiguous()
    m, device = tokens * num_k, h_TD.device
    out_TD = torch.empty((tokens, d), dtype=h_TD.dtype, device=device)
    if not m:
        return out_TD
    few = m <= FEW_ROWS * num_experts
    up, down = UP[few], DOWN[few]
    places = m // up.rows + num_experts
    entries_R = torch.empty(m, dtype=torch.int32, device=device)
    tiles = torch.empty((3, places), dtype=torch.int32, device=device)
    _sort[(num_experts,)](ids_TK.contiguous(), entries_R, *tiles, m, BLOCK=min(1024, triton.next_power_of_2(m)), BM=up.rows, num_warps=4)
    a_RF = torch.empty((m, f), dtype=h_TD.dtype, device=device)
    _gate_up[(triton.cdiv(f, up.columns), places)](
        h_TD, gate_up_X2FD, entries_R, *tiles, a_RF, d, f, num_k, h_TD.stride(0),
        BM=up.rows, BN=up.columns, BK=up.step, num_warps=up.warps, num_stages=up.stages, enable_fp_fusion=False,
    )  # fmt: skip
    y_MD = torch.empty((m, d), dtype=h_TD.dtype, device=device)
    _down[(triton.cdiv(d, down.columns), places)](
        a_RF, down_XDF, entries_R, *tiles, y_MD, d, f,
        BM=down.rows, BN=down.columns, BK=down.step, num_warps=down.warps, num_stages=down.stages, enable_fp_fusion=False,
    )  # fmt: skip
    block = min(1024, triton.next_power_of_2(d))
    _combine[(tokens, triton.cdiv(d, block))](
        y_MD, gates_TK.float().contiguous(), out_TD, d, num_k, BLOCK=block, num_warps=4, enable_fp_fusion=False
    )
    return out_TD


def _through_torch(
    h_TD: torch.Tensor, ids_TK: torch.Tensor, gates_TK: torch.Tensor, gate_up_X2FD: torch.Tensor, down_XDF: torch.Tensor
) -> torch.Tensor:
    """The same function out of torch's operations, for its gradient."""
    tokens, num_k = ids_TK.shape
    order_R = ids_TK.flatten().argsort(stable=True)
    ends_X = torch.searchsorted(ids_TK.flatten()[order_R], torch.arange(len(down_XDF), device=h_TD.device), right=True).int()
    h_RD = h_TD[:, None].expand(-1, num_k, -1)[order_R // num_k, order_R % num_k]
    gate, up = torch._grouped_mm(h_RD, gate_up_X2FD.transpose(1, 2), offs=ends_X).chunk(2, -1)
    y_RD = torch._grouped_mm(F.silu(gate) * up, down_XDF.transpose(1, 2), offs=ends_X)
    place_R = torch.empty_like(order_R).scatter_(0, order_R, torch.arange(len(order_R), device=order_R.device))
    return (y_RD[place_R].view(tokens, num_k, -1).float() * gates_TK[..., None]).sum(1).to(h_TD.dtype)


class _Experts(torch.autograd.Function):
    """Backward computes the inner activations again, through torch's grouped products."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return _forward(*tensors)

    @staticmethod
    def backward(ctx: Any, g_TD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with torch.enable_grad():
            inputs = [t.detach().requires_grad_(need) for t, need in zip(ctx.saved_tensors, ctx.needs_input_grad, strict=True)]
            wanted = [t for t in inputs if t.requires_grad]
            found = iter(torch.autograd.grad(_through_torch(*inputs), wanted, g_TD))
        return tuple(next(found) if t.requires_grad else None for t in inputs)


def experts(
    h_TD: torch.Tensor, ids_TK: torch.Tensor, gates_TK: torch.Tensor, gate_up_X2FD: torch.Tensor, down_XDF: torch.Tensor
) -> torch.Tensor:
    """Each token through its experts (ids ascending); outputs weighted and added in that order in float32."""
    return _Experts.apply(h_TD, ids_TK, gates_TK, gate_up_X2FD, down_XDF)
