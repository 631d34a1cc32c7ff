"""Causal attention whose sums have one order: keys in tiles of a page, tiles in splits, splits merged one after the other.

Within a split the softmax runs online over its tiles from a fresh state; then the split's state is merged into the row's. A decode step
computes splits side by side, and the last to end merges them; a prefill walks them in one program: the same additions either way. What
is added across threads is added in pairs, since any other sum would follow the layout of the tile over threads.
Shapes: T new tokens, B sequences, H and K query and key/value heads, G = H / K, E head size, S splits; a tile's rows are (token, g) pairs.
"""

# Kernel arguments are pointers and numbers on the device; they have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from rollmill.ops.base import PAGE, Spans
from rollmill.ops.cuda.room import roomy

SPLIT = 1024
"""Keys of a split; part of what the bits depend on, like PAGE."""


class Walk(NamedTuple):
    """How attention is cut: rows of a tile, warps, loads in flight. Speed only."""

    rows: int
    warps: int
    stages: int


PREFILL = Walk(64, 4, 3)
"""Two tiles fit a multiprocessor: one's softmax hides behind the other's products."""
DECODE_FEW, DECODE_MANY = Walk(16, 2, 5), Walk(16, 2, 3)
"""More loads in flight, or more programs on a multiprocessor once there are enough of them."""
FEW_PAIRS = 128
"""Pairs of sequence and key head up to which a decode step counts as few."""


@triton.jit
def _row_sum(p):
    """Sums of rows of 64, halving six times: a sum of two has no order, so it is the same in any layout over threads."""
    p = tl.reshape(p, (p.shape[0], 2, 2, 2, 2, 2, 2))
    p = tl.sum(tl.sum(tl.sum(p, 1), 1), 1)
    return tl.sum(tl.sum(tl.sum(p, 3), 2), 1)


@triton.jit
def _step(q, k_ES, v_SE, acc, weight, level, visible, scale, MASKED: tl.constexpr):
    """One tile of keys into a split's state; `level` is the highest score so far as a power of two, already rounded.

    A tile that a row does not see leaves its state alone: the level stays, so it fades by exactly 1, and adds zeros.
    """
    score = tl.dot(q, k_ES)
    if MASKED:
        score = tl.where(visible, score, float("-inf"))
    top = tl.maximum(level, tl.max(score, 1) * scale)
    # A row that has seen no key yet has no level: any finite number keeps its weights at 2^-inf = 0.
    finite = tl.where(top == float("-inf"), 0.0, top)
    p = tl.math.exp2(tl.fma(score, scale, -finite[:, None]))
    fade = tl.math.exp2(level - finite)
    weight = weight * fade + _row_sum(p)
    acc = tl.dot(p.to(v_SE.dtype), v_SE, acc * fade[:, None])
    return acc, weight, top


@triton.jit
def _merge(acc, weight, level, acc_s, weight_s, level_s):
    """A split's state into its row's; a split without visible keys changes nothing."""
    top = tl.maximum(level, level_s)
    finite = tl.where(top == float("-inf"), 0.0, top)
    old = tl.math.exp2(level - finite)
    new = tl.math.exp2(level_s - finite)
    return tl.fma(acc_s, new[:, None], acc * old[:, None]), weight * old + weight_s * new, top


@triton.jit
def _whole(keys, table, tile, first, head, page_rows, SIZE: tl.constexpr, E: tl.constexpr, PAGED: tl.constexpr):
    """Keys or values [SIZE, E] of a tile that lies wholly inside the sequence, by the copy engine: no addresses in registers."""
    if PAGED:
        tile_SE = keys.load([tl.load(table + tile) * page_rows + head * SIZE, 0])
    else:
        tile_SE = keys.load([first + tile * SIZE, head * E])
    return tile_SE


@triton.jit
def _partial(
    base, table, tile, first, head, length, page_stride, head_stride, token_stride,
    SIZE: tl.constexpr, E: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    """The same near the end of the sequence; what lies behind it is not read, a page may hold anything there."""
    offset = tl.arange(0, SIZE)
    if PAGED:
        row = tl.load(table + tile).to(tl.int64) * page_stride + offset * token_stride
    else:
        row = (first + tile * SIZE + offset).to(tl.int64) * token_stride
    at = base + (row + head * head_stride)[:, None] + tl.arange(0, E)[None, :]
    return tl.load(at, mask=(tile * SIZE + offset < length)[:, None], other=0.0)


@triton.jit
def _prefill(
    q, keys, values, k, v, out, table, starts, lens, scale, num_groups,
    q_token, q_head, page_stride, head_stride, token_stride, table_stride,
    E: tl.constexpr, SIZE: tl.constexpr, PER_SPLIT: tl.constexpr, BM: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(2), tl.program_id(1)
    first = tl.load(starts + sequence)
    num_new = tl.load(starts + sequence + 1) - first
    length = tl.load(lens + sequence)
    # The last rows see the most keys: they start first, so that no long one is left over at the end.
    begin = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    if begin >= num_new * num_groups:
        return
    row = begin + tl.arange(0, BM)
    token, group = row // num_groups, row % num_groups
    real = (token < num_new)[:, None]
    position = length - num_new + token
    column = tl.arange(0, E)[None, :]
    q_row = (first + token).to(tl.int64) * q_token + (head * num_groups + group) * q_head
    query = tl.load(q + q_row[:, None] + column, mask=real, other=0.0)
    table += sequence * table_stride
    num_tiles = tl.cdiv(length - num_new + min((begin + BM - 1) // num_groups, num_new - 1) + 1, SIZE)
    num_whole = (length - num_new + begin // num_groups + 1) // SIZE
    level = tl.full((BM,), float("-inf"), tl.float32)
    weight = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, E), tl.float32)
    for split in range(tl.cdiv(num_tiles, PER_SPLIT)):
        level_s = tl.full((BM,), float("-inf"), tl.float32)
        weight_s = tl.zeros((BM,), tl.float32)
        acc_s = tl.zeros((BM, E), tl.float32)
        end = min((split + 1) * PER_SPLIT, num_tiles)
        whole = max(min(end, num_whole), split * PER_SPLIT)
        for tile in range(split * PER_SPLIT, whole):
            k_SE = _whole(keys, table, tile, first, head, page_stride // E, SIZE, E, PAGED)
            v_SE = _whole(values, table, tile, first, head, page_stride // E, SIZE, E, PAGED)
            acc_s, weight_s, level_s = _step(query, k_SE.T, v_SE, acc_s, weight_s, level_s, real, scale, False)
        # One or two tiles: not worth the memory that loads in flight would take from the loop above.
        for tile in tl.range(whole, end, num_stages=1):
            k_SE = _partial(k, table, tile, first, head, length, page_stride, head_stride, token_stride, SIZE, E, PAGED)
            v_SE = _partial(v, table, tile, first, head, length, page_stride, head_stride, token_stride, SIZE, E, PAGED)
            visible = (tile * SIZE + tl.arange(0, SIZE))[None, :] <= position[:, None]
            acc_s, weight_s, level_s = _step(query, k_SE.T, v_SE, acc_s, weight_s, level_s, visible, scale, True)
        acc, weight, level = _merge(acc, weight, level, acc_s, weight_s, level_s)
    result = acc / weight[:, None]
    to = (first + token).to(tl.int64) * (tl.num_programs(1) * num_groups) + head * num_groups + group
    tl.store(out + to[:, None] * E + column, result.to(out.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["num_splits"])
def _decode(
    q, keys, values, k, v, out, table, starts, lens, acc_s, weight_s, level_s, done, scale, num_groups, num_splits,
    q_token, q_head, page_stride, head_stride, token_stride, table_stride,
    E: tl.constexpr, SIZE: tl.constexpr, PER_SPLIT: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """One split of one sequence and key head. Rows are the heads that share the keys. Whichever split ends last merges all, in order."""
    # Heads of a page lie side by side: programs that run at once read neighbouring memory.
    head, split, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lens + sequence)
    if split * (PER_SPLIT * SIZE) >= length:
        return
    first = tl.load(starts + sequence).to(tl.int64)
    group = tl.arange(0, BM)
    real = (group < num_groups)[:, None]
    column = tl.arange(0, E)[None, :]
    query = tl.load(q + first * q_token + ((head * num_groups + group) * q_head)[:, None] + column, mask=real, other=0.0)
    table += sequence * table_stride
    level = tl.full((BM,), float("-inf"), tl.float32)
    weight = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, E), tl.float32)
    end = min((split + 1) * PER_SPLIT, tl.cdiv(length, SIZE))
    for tile in range(split * PER_SPLIT, min(end, length // SIZE)):
        k_SE = _whole(keys, table, tile, first, head, page_stride // E, SIZE, E, True)
        v_SE = _whole(values, table, tile, first, head, page_stride // E, SIZE, E, True)
        acc, weight, level = _step(query, k_SE.T, v_SE, acc, weight, level, real, scale, False)
    if end * SIZE > length:
        k_SE = _partial(k, table, end - 1, first, head, length, page_stride, head_stride, token_stride, SIZE, E, True)
        v_SE = _partial(v, table, end - 1, first, head, length, page_stride, head_stride, token_stride, SIZE, E, True)
        visible = ((end - 1) * SIZE + tl.arange(0, SIZE) < length)[None, :]
        acc, weight, level = _step(query, k_SE.T, v_SE, acc, weight, level, visible, scale, True)
    used = tl.cdiv(length, PER_SPLIT * SIZE)
    pair = sequence * tl.num_programs(0) + head
    to = out + ((first * tl.num_programs(0) + head) * num_groups + group)[:, None] * E + column
    mine = pair.to(tl.int64) * num_splits * BM + group
    none = tl.full((BM,), float("-inf"), tl.float32)
    if used == 1:
        # Merged into nothing, as a prefill does it.
        acc, weight, level = _merge(tl.zeros((BM, E), tl.float32), tl.zeros((BM,), tl.float32), none, acc, weight, level)
        tl.store(to, (acc / weight[:, None]).to(out.dtype.element_ty), mask=real)
        return
    tl.store(acc_s + (mine + split * BM)[:, None] * E + column, acc, mask=real)
    tl.store(weight_s + mine + split * BM, weight)
    tl.store(level_s + mine + split * BM, level)
    tl.debug_barrier()
    if tl.atomic_add(done + pair, 1, sem="acq_rel") < used - 1:
        return
    tl.debug_barrier()
    level, weight, acc = none, tl.zeros((BM,), tl.float32), tl.zeros((BM, E), tl.float32)
    for other in range(used):
        their_acc = tl.load(acc_s + (mine + other * BM)[:, None] * E + column, mask=real, other=0.0, cache_modifier=".cg")
        their_weight = tl.load(weight_s + mine + other * BM, cache_modifier=".cg")
        their_level = tl.load(level_s + mine + other * BM, cache_modifier=".cg")
        acc, weight, level = _merge(acc, weight, level, their_acc, their_weight, their_level)
    tl.store(to, (acc / weight[:, None]).to(out.dtype.element_ty), mask=real)
    tl.store(done + pair, 0)


@triton.jit
def _write(k, v, k_pages, v_pages, slots, k_token, k_head, v_token, v_head, page_stride, head_stride, token_stride,
           heads, E: tl.constexpr, SIZE: tl.constexpr, HEADS: tl.constexpr):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    head = tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, E)[None, :]
    real = (head < heads) & (column < E)
    to = slot // SIZE * page_stride + slot % SIZE * token_stride + head * head_stride + column
    tl.store(k_pages + to, tl.load(k + token * k_token + head * k_head + column, mask=real), mask=real)
    tl.store(v_pages + to, tl.load(v + token * v_token + head * v_head + column, mask=real), mask=real)


def log2_scale(head_dim: int) -> float:
    """Scores are scaled by 1/sqrt(E) and counted in powers of two."""
    return math.log2(math.e) / math.sqrt(head_dim)


def check_head(head_dim: int) -> None:
    if head_dim not in (16, 32, 64, 128, 256):
        raise ValueError(
            f"head size {head_dim} is not served by the CUDA kernels, which need 16, 32, 64, 128 or 256; choose the numerics profile 'fast'"
        )


def write(k_TKE: torch.Tensor, v_TKE: torch.Tensor, k_PKSE: torch.Tensor, v_PKSE: torch.Tensor, slots_T: torch.Tensor) -> None:
    tokens, heads, size = k_TKE.shape
    assert k_TKE.stride(2) == v_TKE.stride(2) == 1
    if tokens:
        _write[(tokens,)](
            k_TKE, v_TKE, k_PKSE, v_PKSE, slots_T, k_TKE.stride(0), k_TKE.stride(1), v_TKE.stride(0), v_TKE.stride(1),
            *k_PKSE.stride()[:3], heads, E=size, SIZE=PAGE, HEADS=triton.next_power_of_2(heads), num_warps=4,
        )  # fmt: skip


def _tiles(rows_RE: torch.Tensor, size: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(rows_RE, [PAGE, size])


def attend_pages(
    q_THE: torch.Tensor, k_PKSE: torch.Tensor, v_PKSE: torch.Tensor, spans: Spans, done_N: torch.Tensor,
    *, split: int = SPLIT, prefill: Walk = PREFILL, decode: Walk | None = None,
) -> torch.Tensor:  # fmt: skip
    """Of the host's numbers only `longest_new == 1` and an upper bound of `longest` matter: a captured step serves any lengths below it.

    `done_N` (int32, zero between calls) counts the finished splits of at least B * K pairs of sequence and key head.
    """
    tokens, heads, size = q_THE.shape
    kv_heads, batch = k_PKSE.shape[1], len(spans.lens_B)
    groups, scale = heads // kv_heads, log2_scale(size)
    assert q_THE.stride(2) == 1
    out_THE = roomy(tokens, heads, size, dtype=q_THE.dtype, device=q_THE.device)
    at = (spans.table_BP, spans.starts_B1, spans.lens_B)
    assert k_PKSE.is_contiguous() and v_PKSE.is_contiguous()
    tensors = (_tiles(k_PKSE.view(-1, size), size), _tiles(v_PKSE.view(-1, size), size), k_PKSE, v_PKSE)
    strides = (q_THE.stride(0), q_THE.stride(1), *k_PKSE.stride()[:3], spans.table_BP.stride(0))
    sizes = {"E": size, "SIZE": PAGE, "PER_SPLIT": split // PAGE, "enable_fp_fusion": False}
    if spans.longest_new > 1:
        grid = (triton.cdiv(spans.longest_new * groups, prefill.rows), kv_heads, batch)
        _prefill[grid](
            q_THE, *tensors, out_THE, *at, scale, groups, *strides,
            BM=prefill.rows, PAGED=True, num_warps=prefill.warps, num_stages=prefill.stages, **sizes,
        )  # fmt: skip
        return out_THE
    assert len(done_N) >= batch * kv_heads
    decode = decode or (DECODE_FEW if batch * kv_heads <= FEW_PAIRS else DECODE_MANY)
    splits, rows = triton.cdiv(spans.longest, split), max(decode.rows, triton.next_power_of_2(groups))
    states = batch * kv_heads * splits * rows
    acc_s = torch.empty((states, size), dtype=torch.float32, device=q_THE.device)
    weight_s, level_s = torch.empty((2, states), dtype=torch.float32, device=q_THE.device)
    _decode[(kv_heads, splits, batch)](
        q_THE, *tensors, out_THE, *at, acc_s, weight_s, level_s, done_N, scale, groups, splits, *strides,
        BM=rows, num_warps=decode.warps, num_stages=decode.stages, **sizes,
    )  # fmt: skip
    return out_THE


def attend_packed(
    q_THE: torch.Tensor, k_TKE: torch.Tensor, v_TKE: torch.Tensor, starts_B1: torch.Tensor, lens_B: torch.Tensor, longest: int,
    *, split: int = SPLIT, prefill: Walk = PREFILL,
) -> torch.Tensor:  # fmt: skip
    """The same walk over keys that lie packed instead of in pages."""
    tokens, heads, size = q_THE.shape
    kv_heads = k_TKE.shape[1]
    groups = heads // kv_heads
    assert q_THE.stride(2) == k_TKE.stride(2) == 1 and k_TKE.stride() == v_TKE.stride() and k_TKE.stride(1) == size
    flat = (len(k_TKE), kv_heads * size), (k_TKE.stride(0), 1)
    tensors = (_tiles(k_TKE.as_strided(*flat), size), _tiles(v_TKE.as_strided(*flat), size), k_TKE, v_TKE)
    out_THE = roomy(tokens, heads, size, dtype=q_THE.dtype, device=q_THE.device)
    grid = (triton.cdiv(longest * groups, prefill.rows), kv_heads, len(lens_B))
    _prefill[grid](
        q_THE, *tensors, out_THE, starts_B1, starts_B1, lens_B, log2_scale(size), groups, q_THE.stride(0), q_THE.stride(1),
        0, k_TKE.stride(1), k_TKE.stride(0), 0, E=size, SIZE=PAGE, PER_SPLIT=split // PAGE, BM=prefill.rows, PAGED=False,
        num_warps=prefill.warps, num_stages=prefill.stages, enable_fp_fusion=False,
    )  # fmt: skip
    return out_THE
