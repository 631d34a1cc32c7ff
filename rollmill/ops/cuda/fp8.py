"""A linear layer in e4m3: weights with a power of two for each 128 x 128 block, activations with one for each 128 columns of a token.

Each block of 128 along K is a sum of its own on the tensor cores, which keep fewer bits than float32 there; blocks are scaled, which is
exact, and added in float32 in ascending order. Every tile walks the same steps, so a row's bits are its own. Codes and scales are those of
`rollmill.weights.quant` and `rollmill.ops.activations`. Shapes: M rows, N outputs, K inner, B blocks of K.
"""

# Kernel arguments are pointers and numbers on the device; they have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rollmill.ops.cuda.matmul import GROUP, Tile

BLOCK = 128


@triton.jit
def _quantise(x, codes, scales, K, num_blocks, x_stride, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    value = tl.load(x + row * x_stride + column, mask=column < K, other=0.0).to(tl.float32)
    # The least e with largest * 2^-e <= 464, which still rounds to 448; read off the bits: 464 = 1.8125 * 2^8.
    bits = tl.max(tl.abs(value), 1).to(tl.int32, bitcast=True)
    exponent = tl.maximum((bits >> 23) - 135 + ((bits & 0x7FFFFF) > 0x680000).to(tl.int32), -100)
    shrink = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    # What is no number, or infinite, must not turn into the largest one.
    is_finite = tl.abs(value) < float("inf")
    scaled = tl.where(is_finite, tl.minimum(tl.maximum(value * shrink[:, None], -448.0), 448.0), float("nan"))
    tl.store(codes + row * K + column, scaled.to(codes.dtype.element_ty), mask=column < K)
    tl.store(scales + row * num_blocks + block, ((exponent + 127) << 23).to(tl.float32, bitcast=True), mask=block < num_blocks)


@triton.jit(do_not_specialize=["M"])
def _scaled_product(
    x, x_scales, w, w_scales, y, M, N, K, num_blocks,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    num_m, num_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    group = pid // (GROUP * num_n)
    rows_in_group = min(num_m - group * GROUP, GROUP)
    within = pid % (GROUP * num_n)
    row = (group * GROUP + within % rows_in_group) * BM + tl.arange(0, BM)
    first = (within // rows_in_group) * BN
    column = first + tl.arange(0, BN)
    k = tl.arange(0, BLOCK)
    x_at = x + row.to(tl.int64)[:, None] * K + k[None, :]
    w_at = w + column.to(tl.int64)[:, None] * K + k[None, :]
    scale_at = x_scales + row.to(tl.int64) * num_blocks
    w_scales += first // BLOCK * num_blocks
    acc = tl.zeros((BM, BN), tl.float32)
    # Scales are fetched one block ahead: they are too narrow for the copies that run ahead by themselves.
    scale = tl.load(scale_at, mask=row < M, other=0.0) * tl.load(w_scales)
    for block in range(num_blocks):
        is_last = block + 1 == num_blocks
        next_x = tl.load(scale_at + block + 1, mask=(row < M) & (not is_last), other=0.0)
        next_w = tl.load(w_scales + block + 1, mask=not is_last, other=0.0)
        inside = (k < K - block * BLOCK)[None, :]
        a = tl.load(x_at + block * BLOCK, mask=(row < M)[:, None] & inside, other=0.0)
        b = tl.load(w_at + block * BLOCK, mask=(column < N)[:, None] & inside, other=0.0)
        acc += tl.dot(a, b.T) * scale[:, None]
        scale = next_x * next_w
    y_at = y + row.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(y_at, acc.to(y.dtype.element_ty), mask=(row < M)[:, None] & (column < N)[None, :])


def quantise_rows(x_MK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 codes, float32 scales [M, B])."""
    (m, k), device = x_MK.shape, x_MK.device
    assert x_MK.stride(1) == 1
    num_blocks = triton.cdiv(k, BLOCK)
    codes_MK = torch.empty((m, k), dtype=torch.float8_e4m3fn, device=device)
    scales_MB = torch.empty((m, num_blocks), dtype=torch.float32, device=device)
    if m:
        per = min(8, triton.next_power_of_2(num_blocks))
        grid = (m, triton.cdiv(num_blocks, per))
        _quantise[grid](
            x_MK, codes_MK, scales_MB, k, num_blocks, x_MK.stride(0), BLOCK=BLOCK, BLOCKS=per, num_warps=4, enable_fp_fusion=False
        )
    return codes_MK, scales_MB


def choose(m: int, n: int) -> Tile:
    """Every tile is tall enough for the same matrix instruction; the rest is speed."""
    if m > 256 or n > 8192:
        return Tile(64, 128, BLOCK, 4, 4)
    return Tile(64, 16, BLOCK, 4, 6) if m <= 64 else Tile(64, 64, BLOCK, 4, 5)


def linear_fp8(x_MK: torch.Tensor, weight_codes_NK: torch.Tensor, weight_scales: torch.Tensor, *, tile: Tile | None = None) -> torch.Tensor:
    """x rounded to e4m3 token by token, times the codes; out in the dtype of x. Weight scales are [ceil(N / 128), ceil(K / 128)]."""
    (m, k), n = x_MK.shape, len(weight_codes_NK)
    assert weight_codes_NK.is_contiguous() and weight_scales.is_contiguous()
    if k % 16:
        raise ValueError(f"e4m3 products need a multiple of 16 inputs, not {k}; choose the numerics profile 'exact' for this model")
    codes_MK, scales_MB = quantise_rows(x_MK)
    y_MN = torch.empty((m, n), dtype=x_MK.dtype, device=x_MK.device)
    if m:
        tile = tile or choose(m, n)
        grid = (triton.cdiv(m, tile.rows) * triton.cdiv(n, tile.columns),)
        _scaled_product[grid](
            codes_MK, scales_MB, weight_codes_NK, weight_scales, y_MN, m, n, k, scales_MB.shape[1],
            GROUP=GROUP, BLOCK=BLOCK, BM=tile.rows, BN=tile.columns, num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
        )  # fmt: skip
    return y_MN
