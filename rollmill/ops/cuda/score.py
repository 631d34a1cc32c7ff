"""What a row of logits says: log-probability and entropy of a token, and the token at a point of the cumulative distribution.

The vocabulary is cut into fixed chunks; each leaves its peak and its sums in float64, and a second kernel adds the chunks in order. Every
row takes the same path, so neither the number of rows nor a row's place matters. Shapes: N rows, V vocabulary, C chunks.
"""

# Kernel arguments are pointers and numbers on the device; they have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

CHUNK = 8192


@triton.jit
def _sums(logits, peaks, masses, moments, row_stride, V, num_chunks, CHUNK: tl.constexpr):
    """Peak of the chunk, sum of exp(x - peak), and sum of (x - peak) exp(x - peak)."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * row_stride + column, mask=column < V, other=float("-inf"))
    peak = tl.max(x, 0)
    shifted = x - tl.where(peak == float("-inf"), 0.0, peak)
    p = tl.exp(shifted)
    at = row * num_chunks + chunk
    tl.store(peaks + at, peak)
    tl.store(masses + at, tl.sum(p.to(tl.float64), 0))
    # A token that cannot be drawn adds nothing; its product would be infinity times zero.
    tl.store(moments + at, tl.sum(tl.where(p > 0.0, shifted * p, 0.0).to(tl.float64), 0))


@triton.jit
def _finish(logits, peaks, masses, moments, ids, logprobs, entropies, norms, row_stride, num_chunks, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK)
    real = chunk < num_chunks
    at = row * num_chunks + chunk
    peak_C = tl.load(peaks + at, mask=real, other=float("-inf"))
    peak = tl.max(peak_C, 0)
    shift = tl.where(peak_C == float("-inf"), 0.0, peak_C - peak).to(tl.float64)
    scale = tl.where(peak_C == float("-inf"), 0.0, tl.exp(shift))
    mass_C = tl.load(masses + at, mask=real, other=0.0) * scale
    moment_C = tl.load(moments + at, mask=real, other=0.0) * scale + shift * mass_C
    mass, moment = tl.sum(mass_C, 0), tl.sum(moment_C, 0)
    log_mass = tl.log(mass)
    x = tl.load(logits + row * row_stride + tl.load(ids + row)).to(tl.float64)
    tl.store(logprobs + row, (x - peak.to(tl.float64) - log_mass).to(tl.float32))
    tl.store(entropies + row, (log_mass - moment / mass).to(tl.float32))
    tl.store(norms + row, peak.to(tl.float64) + log_mass)


@triton.jit
def _grad(logits, ids, norms, g, out, row_stride, V, CHUNK: tl.constexpr):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * row_stride + column, mask=column < V, other=float("-inf"))
    p = tl.exp(x - tl.load(norms + row).to(tl.float32))
    hit = tl.where(column == tl.load(ids + row), 1.0, 0.0)
    tl.store(out + row * V + column, tl.load(g + row) * (hit - p), mask=column < V)


@triton.jit
def _pick(logits, peaks, masses, uniforms, picked, row_stride, V, num_chunks, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """First the chunk in which the cumulative mass passes u * total, then the token in it."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK)
    at = row * num_chunks + chunk
    peak_C = tl.load(peaks + at, mask=chunk < num_chunks, other=float("-inf"))
    peak = tl.max(peak_C, 0)
    scale = tl.where(peak_C == float("-inf"), 0.0, tl.exp((peak_C - peak).to(tl.float64)))
    mass_C = tl.load(masses + at, mask=chunk < num_chunks, other=0.0) * scale
    upto_C = tl.cumsum(mass_C, 0)
    # A float64 product can round up to the total itself; the last token that can be drawn is then the one.
    target = tl.load(uniforms + row) * tl.max(upto_C, 0)
    last = tl.max(tl.where(mass_C > 0.0, chunk, 0), 0)
    found = tl.minimum(tl.min(tl.where((upto_C > target) & (mass_C > 0.0), chunk, BLOCK), 0), last)
    own_peak = tl.max(tl.where(chunk == found, peak_C, float("-inf")), 0)
    before = tl.max(tl.where(chunk < found, upto_C, 0.0), 0)
    own_scale = tl.max(tl.where(chunk == found, scale, 0.0), 0)
    column = found * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * row_stride + column, mask=column < V, other=float("-inf"))
    p = tl.exp(x - own_peak).to(tl.float64)
    upto_V = tl.cumsum(p, 0)
    wanted = (target - before) / own_scale
    last_token = tl.max(tl.where(p > 0.0, column, 0), 0)
    token = tl.min(tl.where((upto_V > wanted) & (p > 0.0), column, 2147483647), 0)
    tl.store(picked + row, tl.minimum(token, last_token).to(tl.int64))


def _stats(logits_NV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    assert logits_NV.dtype == torch.float32 and logits_NV.stride(1) == 1, "logits are float32 rows"
    n, v = logits_NV.shape
    chunks = triton.cdiv(v, CHUNK)
    peaks = torch.empty((n, chunks), dtype=torch.float32, device=logits_NV.device)
    masses, moments = torch.empty((2, n, chunks), dtype=torch.float64, device=logits_NV.device)
    if n:
        _sums[(n, chunks)](
            logits_NV, peaks, masses, moments, logits_NV.stride(0), v, chunks, CHUNK=CHUNK, num_warps=8, enable_fp_fusion=False
        )
    return peaks, masses, moments


class _Score(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: torch.Tensor, ids_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sums = _stats(logits_NV)
        n, chunks = sums[0].shape
        logprobs_N, entropies_N = torch.empty((2, n), dtype=torch.float32, device=logits_NV.device)
        norms_N = torch.empty(n, dtype=torch.float64, device=logits_NV.device)
        if n:
            _finish[(n,)](
                logits_NV, *sums, ids_N, logprobs_N, entropies_N, norms_N, logits_NV.stride(0), chunks,
                BLOCK=triton.next_power_of_2(chunks), num_warps=1, enable_fp_fusion=False,
            )  # fmt: skip
        ctx.save_for_backward(logits_NV, ids_N, norms_N)
        ctx.mark_non_differentiable(entropies_N)
        return logprobs_N, entropies_N

    @staticmethod
    def backward(ctx: Any, g_N: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits_NV, ids_N, norms_N = ctx.saved_tensors
        n, v = logits_NV.shape
        grad_NV = torch.empty((n, v), dtype=torch.float32, device=logits_NV.device)
        if n:
            _grad[(n, triton.cdiv(v, CHUNK))](
                logits_NV,
                ids_N,
                norms_N,
                g_N.contiguous(),
                grad_NV,
                logits_NV.stride(0),
                v,
                CHUNK=CHUNK,
                num_warps=8,
                enable_fp_fusion=False,
            )
        return grad_NV, None


def score(logits_NV: torch.Tensor, ids_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-softmax at the ids, entropy), float32; the entropy has no gradient."""
    return _Score.apply(logits_NV, ids_N)


def pick(logits_NV: torch.Tensor, uniform_N: torch.Tensor) -> torch.Tensor:
    """int64[N]: the first token up to which the distribution holds more than `uniform_N` (float64)."""
    peaks, masses, _ = _stats(logits_NV)
    n, chunks = peaks.shape
    picked_N = torch.empty(n, dtype=torch.int64, device=logits_NV.device)
    if n:
        _pick[(n,)](
            logits_NV, peaks, masses, uniform_N, picked_N, logits_NV.stride(0), logits_NV.shape[1], chunks,
            CHUNK=CHUNK, BLOCK=triton.next_power_of_2(chunks), num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
    return picked_N
