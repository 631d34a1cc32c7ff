"""The loops of CGR that look at old codes, compiled: which codes changed and their numbers within their classes, and back; knows no bits.

A class is searched 64 codes at a time; no branch depends on which weights change, because no processor can predict that.
"""

from __future__ import annotations

import numpy as np

from rollmill.weights.chunk.jit import (
    BLOCK,
    HAS_DEPOSIT,
    Int,
    at_most,
    classify,
    compiled,
    ctz,
    deposit,
    differ,
    equals,
    inlined,
    popcount,
    prefetch,
)
from rollmill.weights.chunk.reference import MAX_CLASSES, MIN_IN_LOWEST

_ONE = np.uint64(1)
_TILE_BLOCKS = 64
"""Blocks whose classes are kept at a time: they stay in the first cache, and one comparison of 64 items finds a block."""
_TILE = BLOCK * _TILE_BLOCKS
_NO_CLASS = 255
"""Stands behind the last code."""


@inlined
def _classify_tile(codes: np.ndarray, first: Int, num_codes: Int, shift: Int, mask: Int, base: Int, classes: np.ndarray) -> Int:
    """The classes of up to a tile of codes from `first` on; the number of blocks they fill."""
    size = min(num_codes - first, _TILE)
    whole = size & -BLOCK
    for i in range(0, whole, BLOCK):
        # The next tile comes from memory while this one is worked on.
        prefetch(codes, first + i + _TILE)
        prefetch(codes, first + i + _TILE + BLOCK // 2)
        classify(codes, first + i, shift, mask, base, classes, i)
    if whole == size:
        return size // BLOCK
    for i in range(whole, size):
        classes[i] = min(max(((np.int64(codes[first + i]) >> shift) & mask) - base, 0), MAX_CLASSES - 1)
    for i in range(size, whole + BLOCK):
        classes[i] = _NO_CLASS
    return whole // BLOCK + 1


@inlined
def _ordered(code: Int, bits: Int, flip: Int) -> Int:
    """`flip` is the sign bit for sign-magnitude and 0 for plain codes; without a branch, because signs cannot be predicted."""
    return code ^ (flip | (-(code >> (bits - 1)) & (flip - (flip > 0))))


@inlined
def _unordered(value: Int, bits: Int, flip: Int) -> Int:
    return value ^ (flip | (((value >> (bits - 1)) - 1) & (flip - (flip > 0))))


@inlined
def _choose_base(raw_counts: np.ndarray, total: Int) -> Int:
    lowest, below = 0, raw_counts[0]
    while below < min(MIN_IN_LOWEST, total):
        lowest += 1
        below += raw_counts[lowest]
    base, most = lowest, -1
    for b in range(lowest, 256):
        covered = 0
        for raw in range(b, min(b + MAX_CLASSES, 256)):
            covered += raw_counts[raw]
        if covered >= most:
            base, most = b, covered
    return base


@compiled
def collect_changes(
    new: np.ndarray, old: np.ndarray, bits: Int, shift: Int, mask: Int, flip: Int
) -> tuple[Int, np.ndarray, np.ndarray, np.ndarray]:
    """Base, number of changes by class, and the gaps and steps of all changes in class order."""
    num_codes = len(new)
    positions = _find_changes(new, old)
    total = len(positions)
    raw_counts = np.zeros(256, np.int64)
    for j in range(total):
        raw_counts[(np.int64(old[positions[j]]) >> shift) & mask] += 1
    base = _choose_base(raw_counts, total) if total else 0
    counts = np.zeros(MAX_CLASSES, np.int64)
    for raw in range(256):
        counts[min(max(raw - base, 0), MAX_CLASSES - 1)] += raw_counts[raw]
    at = np.zeros(MAX_CLASSES, np.int64)
    for c in range(MAX_CLASSES - 1):
        at[c + 1] = at[c] + counts[c]
    gaps, steps = np.empty(total, np.int32), np.empty(total, np.int32)
    seen, previous = np.zeros(MAX_CLASSES, np.int32), np.full(MAX_CLASSES, -1, np.int32)
    classes, before = np.empty(_TILE, np.uint8), np.empty((MAX_CLASSES, _TILE_BLOCKS), np.int32)
    half = np.int64(1) << (bits - 1)
    j = 0
    for first in range(0, num_codes, _TILE):
        num_blocks = _classify_tile(old, first, num_codes, shift, mask, base, classes)
        for c in range(MAX_CLASSES):
            if counts[c]:
                seen[c] = _count_members(classes, num_blocks, c, seen[c], before[c])
        while j < total and positions[j] < first + _TILE:
            position = np.int64(positions[j])
            i = position - first
            own = classes[i]
            below = (_ONE << np.uint64(i & (BLOCK - 1))) - _ONE
            rank = before[own, i // BLOCK] + np.int32(popcount(equals(classes, i & -BLOCK, own) & below))
            was, now = _ordered(np.int64(old[position]), bits, flip), _ordered(np.int64(new[position]), bits, flip)
            to = at[own]
            at[own] = to + 1
            steps[to] = ((now - was + half) & (2 * half - 1)) - half
            gaps[to] = rank - previous[own] - 1
            previous[own] = rank
            j += 1
    return base, counts, gaps, steps


@inlined
def _find_changes(new: np.ndarray, old: np.ndarray) -> np.ndarray:
    """Positions of the codes that differ."""
    num_codes = len(new)
    whole = num_codes & -BLOCK
    changed = np.empty(whole // BLOCK, np.uint64)
    total: Int = 0
    for block in range(whole // BLOCK):
        changed[block] = differ(new, old, block * BLOCK)
        total += np.int64(popcount(changed[block]))
    for i in range(whole, num_codes):
        total += new[i] != old[i]
    positions = np.empty(total, np.uint32)
    j = 0
    for block in range(whole // BLOCK):
        left = changed[block]
        while left:
            positions[j] = block * BLOCK + np.int64(ctz(left))
            left &= left - _ONE
            j += 1
    for i in range(whole, num_codes):
        if new[i] != old[i]:
            positions[j] = i
            j += 1
    return positions


@inlined
def _count_members(classes: np.ndarray, num_blocks: Int, c: Int, number: Int, before: np.ndarray) -> Int:
    """`before[b]` becomes the number of members of class c before block b; returns their number after the tile."""
    for block in range(num_blocks):
        before[block] = number
        number += np.int64(popcount(equals(classes, block * BLOCK, c)))
    return number


@inlined
def _select(members: Int, index: Int) -> Int:
    """The place of the one bit with `index` one bits under it."""
    if HAS_DEPOSIT:
        return np.int64(ctz(deposit(_ONE << np.uint64(index), members)))
    place = np.uint64(0)
    for log_half in range(5, -1, -1):
        low = (_ONE << np.uint64(1 << log_half)) - _ONE
        under = np.int64(popcount((members >> place) & low))
        is_above = np.int64(index >= under)
        index -= is_above * under
        place += np.uint64(is_above << log_half)
    return np.int64(place)


@compiled
def place_changes(
    old: np.ndarray, bits: Int, shift: Int, mask: Int, flip: Int, base: Int, counts: np.ndarray, gaps: np.ndarray, steps: np.ndarray
) -> tuple[Int, np.ndarray, np.ndarray]:
    """How many changes find their place, their positions (ascending) and new codes; `gaps` and `steps` in class order."""
    total = len(gaps)
    positions, codes = np.empty(total, np.uint32), np.empty(total, old.dtype)
    reached, places, new_codes = _find_places(old, bits, shift, mask, flip, base, counts, gaps, steps)
    if reached < total:
        return reached, positions, codes
    changed = np.zeros((len(old) + BLOCK - 1) // BLOCK, np.uint64)
    for j in range(total):
        i = np.int64(places[j])
        changed[i // BLOCK] |= _ONE << np.uint64(i & (BLOCK - 1))
    before_block = np.empty(len(changed), np.int32)
    count: Int = 0
    for block in range(len(changed)):
        before_block[block] = count
        count += np.int64(popcount(changed[block]))
    for j in range(total):
        i = np.int64(places[j])
        to = before_block[i // BLOCK] + np.int64(popcount(changed[i // BLOCK] & ((_ONE << np.uint64(i & (BLOCK - 1))) - _ONE)))
        positions[to] = i
        codes[to] = new_codes[j]
    return reached, positions, codes


@compiled
def apply_changes(
    codes: np.ndarray, bits: Int, shift: Int, mask: Int, flip: Int, base: Int, counts: np.ndarray, gaps: np.ndarray, steps: np.ndarray
) -> Int:
    """How many changes find their place; when all do, the old codes have become the new ones, else nothing has."""
    reached, places, new_codes = _find_places(codes, bits, shift, mask, flip, base, counts, gaps, steps)
    if reached == len(gaps):
        for j in range(reached):
            codes[places[j]] = new_codes[j]
    return reached


@inlined
def _find_places(
    old: np.ndarray, bits: Int, shift: Int, mask: Int, flip: Int, base: Int, counts: np.ndarray, gaps: np.ndarray, steps: np.ndarray
) -> tuple[Int, np.ndarray, np.ndarray]:
    """How many changes find their place, their positions and new codes in class order."""
    num_codes, total = len(old), len(gaps)
    places, new_codes = np.empty(total, np.int32), np.empty(total, old.dtype)
    at, ends, wanted = np.zeros(MAX_CLASSES, np.int64), np.zeros(MAX_CLASSES, np.int64), np.zeros(MAX_CLASSES, np.int64)
    reached = 0
    for c in range(MAX_CLASSES):
        at[c] = reached
        reached += counts[c]
        ends[c] = reached
        if counts[c]:
            wanted[c] = gaps[at[c]]
    seen = np.zeros(MAX_CLASSES, np.int64)
    classes, before = np.empty(_TILE, np.uint8), np.empty(_TILE_BLOCKS, np.int32)
    all_ones = (np.int64(1) << bits) - 1
    reached = 0
    for first in range(0, num_codes, _TILE):
        if reached == total:
            break
        num_blocks = _classify_tile(old, first, num_codes, shift, mask, base, classes)
        for c in range(MAX_CLASSES):
            j, end, number = at[c], ends[c], wanted[c]
            if j == end:
                continue
            seen[c] = _count_members(classes, num_blocks, c, seen[c], before)
            for block in range(num_blocks, _TILE_BLOCKS):
                before[block] = seen[c]
            while number < seen[c]:
                here = np.int64(popcount(at_most(before, 0, number))) - 1
                lane = _select(equals(classes, here * BLOCK, c), number - before[here])
                i = first + here * BLOCK + lane
                places[j] = i
                new_codes[j] = _unordered((_ordered(np.int64(old[i]), bits, flip) + steps[j]) & all_ones, bits, flip)
                reached += 1
                j += 1
                if j == end:
                    break
                number += 1 + gaps[j]
            at[c], wanted[c] = j, number
    return reached, places, new_codes
