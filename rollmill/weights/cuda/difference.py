"""What differs between two sets of chunks in live memory, as class, number within the class and step of every change; writes no bits.

This is `decode` backwards: the same counts of `classes` turn a position into a number.
"""

# Kernel arguments are pointers and numbers on the device; they have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from rollmill.weights.chunk import Elements
from rollmill.weights.cuda.classes import CODE, Chunks, class_matches, class_of, count_classes, place_of, popcount
from rollmill.weights.cuda.patch import tiles_of

_TILE = 2048
_MIN_IN_LOWEST = 8


@triton.jit
def _find(
    tiles,
    old_segments,
    new_segments,
    num_codes,
    offsets,
    counts,
    positions,
    codes,
    CODE: tl.constexpr,
    PLAIN: tl.constexpr,
    TILE: tl.constexpr,
    WRITE: tl.constexpr,
):
    """Counts the changes of a tile or, knowing how many lie before it, writes their positions and codes (old | new << 16)."""
    tile = tl.program_id(0)
    chunk, first = tl.load(tiles + tile * 2), tl.load(tiles + tile * 2 + 1)
    limit = tl.load(num_codes + chunk)
    old_segment, new_segment = old_segments + chunk * 7, new_segments + chunk * 7
    old_live = tl.load(old_segment).to(tl.pointer_type(CODE))
    new_live = tl.load(new_segment).to(tl.pointer_type(CODE))
    if PLAIN:
        old_live, new_live, limit = tl.multiple_of(old_live, 16), tl.multiple_of(new_live, 16), tl.multiple_of(limit, 8)
        first = tl.multiple_of(first, TILE)
    element = first + tl.arange(0, TILE)
    inside = element < limit
    old_at = place_of(element, tl.load(old_segment + 2).to(tl.uint32), tl.load(old_segment + 1), PLAIN)
    new_at = place_of(element, tl.load(new_segment + 2).to(tl.uint32), tl.load(new_segment + 1), PLAIN)
    old = tl.load(old_live + old_at, mask=inside, other=0).to(tl.int32)
    new = tl.load(new_live + new_at, mask=inside, other=0).to(tl.int32)
    changed = (old != new).to(tl.int32)
    if WRITE:
        out = tl.load(offsets + tile) + tl.cumsum(changed, axis=0) - 1
        tl.store(positions + out, element, mask=changed == 1)
        tl.store(codes + out, old | (new << 16), mask=changed == 1)
    else:
        tl.store(counts + tile, tl.sum(changed, axis=0))


@triton.jit
def _histogram(starts, codes, histogram, SHIFT: tl.constexpr, MASK: tl.constexpr, LANES: tl.constexpr):
    """How many changes of a chunk have each raw class."""
    chunk = tl.program_id(0)
    begin, end = tl.load(starts + chunk), tl.load(starts + chunk + 1)
    total = tl.zeros((256,), dtype=tl.int32)
    for first in range(begin, end, LANES):
        at = first + tl.arange(0, LANES)
        raw = (tl.load(codes + at, mask=at < end, other=0) >> SHIFT) & MASK
        total += tl.histogram(raw, 256, mask=at < end)
    tl.store(histogram + chunk * 256 + tl.arange(0, 256), total)


@triton.jit
def _before(word, at):
    """One bits of a word before bit `at`, which may lie before or after the word."""
    inside = tl.minimum(tl.maximum(at, 0), 31)
    low = word & ((tl.zeros_like(word) + 1 << inside.to(tl.uint32)) - 1)
    return tl.where(at >= 32, popcount(word), tl.where(at > 0, popcount(low), 0))


@triton.jit(do_not_specialize=["total_subs"])
def _number(
    tiles,
    segments,
    num_codes,
    bases,
    blocks,
    counted,
    total_subs,
    prefix,
    positions,
    codes,
    keys,
    CODE: tl.constexpr,
    SHIFT: tl.constexpr,
    MASK: tl.constexpr,
    WORDS: tl.constexpr,
    PLAIN: tl.constexpr,
    LANES: tl.constexpr,
):
    """Positions become numbers within the class, where they stand; keys become chunk * 32 + class."""
    tile = tiles + tl.program_id(0) * 3
    chunk, begin_change, count = tl.load(tile).to(tl.int32), tl.load(tile + 1), tl.load(tile + 2)
    segment = segments + chunk * 7
    live = tl.load(segment).to(tl.pointer_type(CODE))
    limit = tl.load(num_codes + chunk)
    if PLAIN:
        live, limit = tl.multiple_of(live, 16), tl.multiple_of(limit, 8)
    memory_stride, width = tl.load(segment + 1), tl.load(segment + 2).to(tl.uint32)
    base, begin = tl.load(bases + chunk), tl.load(blocks + chunk)
    num_blocks = tl.load(blocks + chunk + 1) - begin
    for first in range(0, count, LANES):
        lane = first + tl.arange(0, LANES)
        inside = lane < count
        position = tl.load(positions + begin_change + lane, mask=inside, other=0)
        kind = class_of(tl.load(codes + begin_change + lane, mask=inside, other=0) & 0xFFFF, base, SHIFT, MASK)
        sub, block = position >> 7, position >> 10
        number = tl.load(prefix + begin * (8 * WORDS) + kind * num_blocks + block, mask=inside, other=0)
        at_subs = counted + (kind >> 3) * total_subs + (begin + block) * 8
        shift = ((kind & 7) * 8).to(tl.uint64)
        for before in tl.static_range(7):
            words = tl.load(at_subs + before, mask=inside & (before < (sub & 7)), other=0).to(tl.uint64, bitcast=True)
            number += ((words >> shift) & 255).to(tl.int32)
        word0, word1, word2, word3 = class_matches(live, sub * 128, limit, kind, base, width, memory_stride, SHIFT, MASK, PLAIN)
        at = position & 127
        number += _before(word0, at) + _before(word1, at - 32) + _before(word2, at - 64) + _before(word3, at - 96)
        tl.store(positions + begin_change + lane, number, mask=inside)
        tl.store(keys + begin_change + lane, chunk * 32 + kind, mask=inside)


@dataclass(frozen=True, kw_only=True, eq=False)
class Difference:
    """The changes of a batch of chunks, by chunk, class and number."""

    starts: torch.Tensor
    """int64[chunks * 32 + 1]: where the changes of each class begin."""
    bases: torch.Tensor
    """int32[chunks]: the raw class that is class 0."""
    entries: torch.Tensor
    """int32 per change: chunk * 32 + class."""
    numbers: torch.Tensor
    """int32 per change."""
    codes: torch.Tensor
    """int32 per change: old | new << 16, as bits."""


def difference(old: Chunks, new: Chunks, elements: Elements, *, is_plain: bool, device: torch.device) -> Difference:
    """Waits twice: for the number of changes and for the highest class."""
    sizes, num_chunks = old.num_codes, len(old.num_codes)
    (num_codes, old_segments), (_, new_segments) = old.to(device), new.to(device)
    per_chunk = -(-sizes // _TILE)
    chunk = np.repeat(np.arange(num_chunks), per_chunk)
    first = (np.arange(len(chunk)) - np.repeat(np.cumsum(per_chunk) - per_chunk, per_chunk)) * _TILE
    tiles = torch.from_numpy(np.stack([chunk, first], axis=1).astype(np.int32)).to(device)
    in_tile = torch.zeros(len(tiles), dtype=torch.int32, device=device)
    common = {"CODE": CODE[elements.bits], "PLAIN": is_plain, "TILE": _TILE, "num_warps": 4}
    args = (tiles, old_segments, new_segments, num_codes)
    _find[(len(tiles),)](*args, in_tile, in_tile, in_tile, in_tile, WRITE=False, **common)
    through = in_tile.cumsum(0)
    ends = torch.cat([torch.zeros(1, dtype=torch.int64, device=device), through])[torch.from_numpy(np.cumsum(per_chunk)).to(device)]
    changes = np.diff(ends.cpu().numpy(), prepend=0)
    total = int(changes.sum())
    positions, codes, keys = torch.empty(3, total, dtype=torch.int32, device=device)
    _find[(len(tiles),)](*args, through - in_tile, in_tile, positions, codes, WRITE=True, **common)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64, device=device), ends])
    histogram = torch.empty(num_chunks, 256, dtype=torch.int32, device=device)
    _histogram[(num_chunks,)](starts, codes, histogram, SHIFT=elements.shift, MASK=elements.mask, LANES=1024, num_warps=4)
    bases, num_classes = _bases(histogram)
    if total:
        counts = count_classes(
            np.arange(num_chunks), sizes, old_segments, num_codes, bases, elements, num_classes=num_classes, is_plain=is_plain
        )  # fmt: skip
        change_tiles = torch.from_numpy(tiles_of(changes)).to(device)
        _number[(len(change_tiles),)](
            change_tiles, old_segments, num_codes, bases, counts.blocks, counts.counted, counts.counted.shape[1], counts.prefix,
            positions, codes, keys,
            CODE=CODE[elements.bits], SHIFT=elements.shift, MASK=elements.mask, WORDS=counts.num_words, PLAIN=is_plain,
            LANES=128, num_warps=4,
        )  # fmt: skip
    entries, order = keys.sort(stable=True)
    borders = torch.searchsorted(entries, torch.arange(num_chunks * 32 + 1, dtype=torch.int32, device=device))
    return Difference(
        starts=borders,
        bases=bases,
        entries=entries,
        numbers=positions[order],
        codes=codes[order],
    )


def _bases(histogram: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The encoder's rule of docs/formats/chunk.md, and the number of classes up to the highest that changes."""
    device = histogram.device
    through = histogram.cumsum(1)
    total = through[:, -1:]
    lowest = (through < total.clamp(max=_MIN_IN_LOWEST)).sum(1, keepdim=True)
    raw = torch.arange(256, device=device)
    before = torch.nn.functional.pad(through, (1, 0))
    covered = before[:, (raw + 32).clamp(max=256)] - before[:, raw]
    rank = torch.where(raw >= lowest, covered * 256 + raw, -1)
    bases = torch.where(total[:, 0] > 0, rank.argmax(1), 0)
    highest = ((histogram > 0) * raw).amax(1) - bases
    return bases.to(torch.int32), min(int(highest.max()), 31) + 1
