"""One matrix product on the tensor cores: every output is one float32 sum over K in ascending order, whatever tile computes it.

Tiles differ in speed only: they cut rows and columns, never the order of the sum. That a tile's sums have the bits of another tile's is
not taken on trust, `linear.py` proves it on the device. Shapes: M rows, N outputs, K inner.
"""

# Kernel arguments are pointers and numbers on the device; they have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl


class Tile(NamedTuple):
    """How a product is cut: rows, columns, the step along K, warps, and loads in flight."""

    rows: int
    columns: int
    step: int
    warps: int = 4
    stages: int = 4


REFERENCE = Tile(64, 128, 64, 4, 4)
"""The tile all others are compared with."""

GROUP = 8
"""Row tiles that share a run of weight columns, so that both stay in the cache."""


@triton.jit(do_not_specialize=["M"])
def _product(
    x, w, bias, y, M, N, K, x_stride, w_stride, y_stride,
    HAS_BIAS: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    num_m, num_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    group = pid // (GROUP * num_n)
    rows_in_group = min(num_m - group * GROUP, GROUP)
    within = pid % (GROUP * num_n)
    row = (group * GROUP + within % rows_in_group) * BM + tl.arange(0, BM)
    column = (within // rows_in_group) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    x_at = x + row.to(tl.int64)[:, None] * x_stride + k[None, :]
    w_at = w + column.to(tl.int64)[:, None] * w_stride + k[None, :]
    x_in, w_in = (row < M)[:, None], (column < N)[:, None]
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, K, BK):
        if EVEN_K:
            a = tl.load(x_at, mask=x_in, other=0.0)
            b = tl.load(w_at, mask=w_in, other=0.0)
        else:
            inside = (k < K - start)[None, :]
            a = tl.load(x_at, mask=x_in & inside, other=0.0)
            b = tl.load(w_at, mask=w_in & inside, other=0.0)
        acc = tl.dot(a, b.T, acc)
        x_at += BK
        w_at += BK
    if HAS_BIAS:
        acc += tl.load(bias + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    y_at = y + row.to(tl.int64)[:, None] * y_stride + column[None, :]
    tl.store(y_at, acc.to(y.dtype.element_ty), mask=x_in & (column < N)[None, :])


def product(
    x_MK: torch.Tensor, w_NK: torch.Tensor, bias_N: torch.Tensor | None, tile: Tile, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """x @ w.T + bias, summed in float32 and rounded once to `out_dtype` (that of x if not given)."""
    (m, k), n = x_MK.shape, len(w_NK)
    assert x_MK.stride(1) == 1 and w_NK.stride(1) == 1 and w_NK.shape[1] == k
    y_MN = x_MK.new_empty(m, n, dtype=out_dtype)
    if m == 0:
        return y_MN
    grid = (triton.cdiv(m, tile.rows) * triton.cdiv(n, tile.columns),)
    _product[grid](
        x_MK, w_NK, bias_N, y_MN, m, n, k, x_MK.stride(0), w_NK.stride(0), y_MN.stride(0),
        HAS_BIAS=bias_N is not None, GROUP=GROUP, BM=tile.rows, BN=tile.columns, BK=tile.step, EVEN_K=k % tile.step == 0,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
    )  # fmt: skip
    return y_MN
