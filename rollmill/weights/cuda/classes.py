"""How many elements of each class lie before every block of 1024 and in its sub-blocks of 128, for chunks in live memory."""

# Kernel arguments are pointers and numbers on the device; they have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from rollmill.weights.chunk import Elements

CODE = {8: tl.uint8, 16: tl.uint16}
BLOCK_ELEMENTS = 1024
# Chunks whose counts are held at one time: 1024 of 2^20 elements take 0.4 GB beside 2 GB of weights.
BATCH_CHUNKS = 1024
_TILE_SUBS = 128


@dataclass(frozen=True, kw_only=True, eq=False)
class Chunks:
    """Where chunks of one dtype lie in live memory."""

    num_codes: np.ndarray
    """int64[n]."""
    segments: np.ndarray
    """int64[n, 7], as in `Changes`: address, memory stride, width, start, stride, key offset, slot."""

    @property
    def is_plain(self) -> np.ndarray:
        """bool[n]: one run of memory in whole, aligned vectors of eight."""
        return (self.segments[:, 0] % 16 == 0) & (self.segments[:, 2] >= self.num_codes) & (self.num_codes % 8 == 0)

    def take(self, rows: np.ndarray) -> Chunks:
        return Chunks(num_codes=self.num_codes[rows], segments=self.segments[rows])

    def to(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Numbers of codes as int32, and segments."""
        return torch.from_numpy(self.num_codes.astype(np.int32)).to(device), torch.from_numpy(self.segments).to(device)


@triton.jit
def class_of(code, base, SHIFT: tl.constexpr, MASK: tl.constexpr):
    raw = (code.to(tl.int32) >> SHIFT) & MASK
    return tl.minimum(tl.maximum(raw - base, 0), 31)


@triton.jit
def place_of(element, width, memory_stride, PLAIN: tl.constexpr):
    if PLAIN:
        return element.to(tl.int64)
    run = element.to(tl.uint32) // width
    return run.to(tl.int64) * memory_stride + (element.to(tl.uint32) - run * width).to(tl.int64)


@triton.jit
def popcount(x):
    x -= (x >> 1) & 0x55555555
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    return ((((x + (x >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _matches(
    live,
    first,
    limit,
    low,
    extent,
    width,
    memory_stride,
    SHIFT: tl.constexpr,
    MASK: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """Bit i: element `first` + i, of 32, has a raw class from `low` to `low` + `extent`. A lane looks at elements of its own."""
    found = tl.zeros_like(first).to(tl.uint32)
    offset = tl.arange(0, 8)
    # Unrolled, so that all loads of a lane are in flight together: a rolled loop took 1.8 times as long.
    for part in tl.static_range(4):
        element = (first + part * 8)[:, None] + offset[None, :]
        there = element < limit
        code = tl.load(live + place_of(element, width, memory_stride, PLAIN), mask=there, other=0).to(tl.int32)
        away = (((code >> SHIFT) & MASK) - low[:, None]).to(tl.uint32, bitcast=True)
        same = there & (away <= extent[:, None])
        found |= tl.sum(tl.where(same, (1 << (part * 8 + offset))[None, :], 0), axis=1).to(tl.uint32, bitcast=True)
    return found


@triton.jit
def class_matches(
    live,
    first,
    limit,
    kind,
    base,
    width,
    memory_stride,
    SHIFT: tl.constexpr,
    MASK: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """Which of the 128 elements from `first` on are of class `kind`: four words of 32 bits."""
    # The lowest and the highest class take in every raw class beyond them.
    low = tl.where(kind == 0, 0, kind + base)
    extent = (tl.where(kind == 31, MASK, kind + base) - low).to(tl.uint32)
    word0 = _matches(live, first, limit, low, extent, width, memory_stride, SHIFT, MASK, PLAIN)
    word1 = _matches(live, first + 32, limit, low, extent, width, memory_stride, SHIFT, MASK, PLAIN)
    word2 = _matches(live, first + 64, limit, low, extent, width, memory_stride, SHIFT, MASK, PLAIN)
    word3 = _matches(live, first + 96, limit, low, extent, width, memory_stride, SHIFT, MASK, PLAIN)
    return word0, word1, word2, word3


@triton.jit
def _pass_word(number, at, word, next_word, PLACE: tl.constexpr):
    count = popcount(word)
    passed = (at == PLACE) & (number >= count)
    return tl.where(passed, number - count, number), tl.where(passed, PLACE + 1, at), tl.where(passed, next_word, word)


@triton.jit
def select_bit(number, word0, word1, word2, word3):
    """The place of the one bit before which `number` one bits stand."""
    at = tl.zeros_like(number)
    number, at, word = _pass_word(number, at, word0, word1, 0)
    number, at, word = _pass_word(number, at, word, word2, 1)
    number, at, word = _pass_word(number, at, word, word3, 2)
    at *= 32
    bit = tl.zeros_like(number)
    for power in tl.static_range(5):
        count = popcount((word >> bit.to(tl.uint32)) & ((1 << (16 >> power)) - 1))
        passed = number >= count
        number = tl.where(passed, number - count, number)
        bit = tl.where(passed, bit + (16 >> power), bit)
    return at + bit


@triton.jit(do_not_specialize=["total_subs"])
def _count(
    chunks,
    segments,
    num_codes,
    bases,
    blocks,
    tiles,
    counted,
    total_subs,
    CODE: tl.constexpr,
    SHIFT: tl.constexpr,
    MASK: tl.constexpr,
    WORDS: tl.constexpr,
    PLAIN: tl.constexpr,
    SUBS: tl.constexpr,
):
    """Byte c of the words of a sub-block counts its elements of class c, for classes under 8 * WORDS."""
    tile = tiles + tl.program_id(0) * 2
    slot = tl.load(tile)
    first = tl.load(tile + 1)
    chunk = tl.load(chunks + slot)
    segment = segments + chunk * 7
    live = tl.load(segment).to(tl.pointer_type(CODE))
    if PLAIN:
        live = tl.multiple_of(live, 16)
    memory_stride, width = tl.load(segment + 1), tl.load(segment + 2).to(tl.uint32)
    limit = tl.load(num_codes + chunk)
    if PLAIN:
        limit = tl.multiple_of(limit, 8)
    base = tl.load(bases + chunk)
    sub = first + tl.arange(0, SUBS)
    word0 = tl.zeros((SUBS,), dtype=tl.uint64)
    word1 = tl.zeros((SUBS,), dtype=tl.uint64)
    word2 = tl.zeros((SUBS,), dtype=tl.uint64)
    word3 = tl.zeros((SUBS,), dtype=tl.uint64)
    for part in range(16):
        element = sub[:, None] * 128 + part * 8 + tl.arange(0, 8)[None, :]
        inside = element < limit
        code = tl.load(live + place_of(element, width, memory_stride, PLAIN), mask=inside, other=0)
        kind = class_of(code, base, SHIFT, MASK)
        one = tl.where(inside, 1, 0).to(tl.uint64) << ((kind & 7) * 8).to(tl.uint64)
        which = kind >> 3
        word0 += tl.sum(tl.where(which == 0, one, 0), axis=1)
        if WORDS > 1:
            word1 += tl.sum(tl.where(which == 1, one, 0), axis=1)
        if WORDS > 2:
            word2 += tl.sum(tl.where(which == 2, one, 0), axis=1)
        if WORDS > 3:
            word3 += tl.sum(tl.where(which == 3, one, 0), axis=1)
    # Blocks of a chunk are whole: sub-blocks past its end are there and empty.
    real = sub < (tl.load(blocks + slot + 1) - tl.load(blocks + slot)) * 8
    out = counted + tl.load(blocks + slot) * 8 + sub
    tl.store(out, word0.to(tl.int64, bitcast=True), mask=real)
    if WORDS > 1:
        tl.store(out + total_subs, word1.to(tl.int64, bitcast=True), mask=real)
    if WORDS > 2:
        tl.store(out + 2 * total_subs, word2.to(tl.int64, bitcast=True), mask=real)
    if WORDS > 3:
        tl.store(out + 3 * total_subs, word3.to(tl.int64, bitcast=True), mask=real)


@triton.jit(do_not_specialize=["total_subs"])
def _prefix(blocks, counted, total_subs, prefix, totals, WORDS: tl.constexpr, TILE: tl.constexpr):
    """prefix: int32[blocks before the chunk * classes + class * its blocks + block], elements of the class before the block."""
    slot, kind = tl.program_id(0), tl.program_id(1)
    begin = tl.load(blocks + slot)
    num_blocks = tl.load(blocks + slot + 1) - begin
    carry = tl.zeros((1,), dtype=tl.int32)
    out = prefix + begin * (8 * WORDS) + kind * num_blocks
    shift = ((kind % 8) * 8).to(tl.uint64)
    for first in range(0, num_blocks, TILE):
        block = first + tl.arange(0, TILE)
        at = counted + (kind // 8) * total_subs + (begin + block)[:, None] * 8 + tl.arange(0, 8)[None, :]
        counts = tl.load(at, mask=(block < num_blocks)[:, None], other=0).to(tl.uint64, bitcast=True)
        count = tl.sum(((counts >> shift) & 255).to(tl.int32), axis=1)
        tl.store(out + block, carry + tl.cumsum(count, axis=0) - count, mask=block < num_blocks)
        carry += tl.sum(count, axis=0)
    tl.store(totals + slot * 32 + kind + tl.arange(0, 1), carry)


@dataclass(frozen=True, kw_only=True, eq=False)
class ClassCounts:
    """Tables of one batch. A slot is a place in the batch."""

    chunks: torch.Tensor
    """int32[slots]: places in the list of all chunks."""
    blocks: torch.Tensor
    """int32[slots + 1]: blocks of the batch before the slot's first."""
    counted: torch.Tensor
    """int64[words, sub-blocks], as bits: byte c of a sub-block's words counts its elements of class c."""
    prefix: torch.Tensor
    """int32: at (blocks before the slot) * classes + class * (its blocks) + block, the elements of the class before the block."""
    totals: torch.Tensor
    """int32[slots, 32]."""
    num_words: int


def count_classes(
    batch: np.ndarray, sizes: np.ndarray, segments: torch.Tensor, num_codes: torch.Tensor, bases: torch.Tensor,
    elements: Elements, *, num_classes: int, is_plain: bool,
) -> ClassCounts:  # fmt: skip
    """Of the chunks at places `batch`, which have `sizes` codes; the other tables hold all chunks."""
    device = segments.device
    num_words = -(-num_classes // 8)
    per_chunk = -(-sizes // BLOCK_ELEMENTS)
    blocks = torch.from_numpy(np.concatenate([[0], np.cumsum(per_chunk)]).astype(np.int32)).to(device)
    total = int(per_chunk.sum())
    counted = torch.empty(num_words, total * 8, dtype=torch.int64, device=device)
    prefix = torch.empty(total * 8 * num_words, dtype=torch.int32, device=device)
    totals = torch.zeros(len(batch), 32, dtype=torch.int32, device=device)
    members = torch.from_numpy(batch.astype(np.int32)).to(device)
    per_tile = -(-per_chunk * 8 // _TILE_SUBS)
    slot = np.repeat(np.arange(len(batch)), per_tile)
    first = (np.arange(len(slot)) - np.repeat(np.cumsum(per_tile) - per_tile, per_tile)) * _TILE_SUBS
    tiles = torch.from_numpy(np.stack([slot, first], axis=1).astype(np.int32)).to(device)
    _count[(len(tiles),)](
        members, segments, num_codes, bases, blocks, tiles, counted, total * 8,
        CODE=CODE[elements.bits], SHIFT=elements.shift, MASK=elements.mask, WORDS=num_words, PLAIN=is_plain, SUBS=_TILE_SUBS, num_warps=4,
    )  # fmt: skip
    _prefix[(len(batch), 8 * num_words)](blocks, counted, total * 8, prefix, totals, WORDS=num_words, TILE=128, num_warps=4)
    return ClassCounts(
        chunks=members, blocks=blocks, counted=counted, prefix=prefix, totals=totals, num_words=num_words,
    )  # fmt: skip
