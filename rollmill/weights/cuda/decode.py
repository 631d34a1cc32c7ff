"""CGR chunks decoded against the live weights on the device: bodies in, positions and new codes out, and no weight is written.

Every change knows its class and its number within it; the counts of `classes` say in which sub-block that element lies, and one thread
walks the sub-block. A chunk that breaks a rule is reported; what it would have changed is never used.
"""

# Kernel arguments are pointers and numbers on the device; they have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from rollmill.weights.chunk import MAX_ELEMENTS, Elements, Order
from rollmill.weights.cuda.classes import (
    BATCH_CHUNKS,
    BLOCK_ELEMENTS,
    CODE,
    Chunks,
    ClassCounts,
    class_matches,
    count_classes,
    place_of,
    select_bit,
)
from rollmill.weights.cuda.parse import parse
from rollmill.weights.cuda.patch import BLOCK, Changes, tiles_of
from rollmill.weights.errors import CorruptSnapshot

# Halvings among the blocks of the largest chunk.
_SEARCH = (MAX_ELEMENTS // BLOCK_ELEMENTS - 1).bit_length()
_RULES = {1: "its header", 2: "a stream", 3: "a number past the end of its class", 4: "its length or padding"}


@triton.jit(do_not_specialize=["total_subs"])
def _locate(
    tiles,
    slots,
    blocks,
    counted,
    total_subs,
    prefix,
    totals,
    packed,
    errors,
    chunks,
    WORDS: tl.constexpr,
    SEARCH: tl.constexpr,
    LANES: tl.constexpr,
):
    """Turns (class, number in the class) into (sub-block, number in it, class), where they stand."""
    first, count = tl.load(tiles + tl.program_id(0) * 3 + 1), tl.load(tiles + tl.program_id(0) * 3 + 2)
    slot = tl.load(slots + tl.program_id(0))
    begin = tl.load(blocks + slot)
    num_blocks = tl.load(blocks + slot + 1) - begin
    lane = tl.arange(0, LANES)
    inside = lane < count
    change = tl.load(packed + first + lane, mask=inside, other=0)
    kind, number = change >> 21, change & 0x1FFFFF
    missing = inside & (number >= tl.load(totals + slot * 32 + kind))
    before = prefix + begin * (8 * WORDS) + kind * num_blocks
    block = tl.zeros((LANES,), dtype=tl.int32)
    for power in tl.static_range(SEARCH):
        later = block + (1 << (SEARCH - 1 - power))
        reached = later < num_blocks
        block = tl.where(reached & (tl.load(before + later, mask=reached, other=0) <= number), later, block)
    number -= tl.load(before + block)
    at_subs = counted + (kind >> 3) * total_subs + (begin + block) * 8
    shift = ((kind & 7) * 8).to(tl.uint64)
    sub = block * 8
    for at in tl.static_range(7):
        in_sub = ((tl.load(at_subs + at).to(tl.uint64, bitcast=True) >> shift) & 255).to(tl.int32)
        passed = (sub == block * 8 + at) & (number >= in_sub)
        number = tl.where(passed, number - in_sub, number)
        sub = tl.where(passed, sub + 1, sub)
    tl.store(packed + first + lane, (sub << 12) | ((number & 127) << 5) | kind, mask=inside)
    tl.store(errors + tl.load(chunks + slot) + tl.zeros((LANES,), dtype=tl.int32), 3, mask=missing)


@triton.jit
def _select(
    tiles,
    slots,
    chunks,
    segments,
    num_codes,
    bases,
    packed,
    steps,
    CODE: tl.constexpr,
    BITS: tl.constexpr,
    SHIFT: tl.constexpr,
    MASK: tl.constexpr,
    FLOAT: tl.constexpr,
    PLAIN: tl.constexpr,
    LANES: tl.constexpr,
):
    """Turns (sub-block, number in it, class) into positions and steps into new codes, where they stand."""
    first, count = tl.load(tiles + tl.program_id(0) * 3 + 1), tl.load(tiles + tl.program_id(0) * 3 + 2)
    chunk = tl.load(chunks + tl.load(slots + tl.program_id(0)))
    segment = segments + chunk * 7
    live = tl.load(segment).to(tl.pointer_type(CODE))
    limit = tl.load(num_codes + chunk)
    if PLAIN:
        live = tl.multiple_of(live, 16)
        limit = tl.multiple_of(limit, 8)
    memory_stride, width = tl.load(segment + 1), tl.load(segment + 2).to(tl.uint32)
    base = tl.load(bases + chunk)
    for at in range(0, count, LANES):
        lane = at + tl.arange(0, LANES)
        inside = lane < count
        change = tl.load(packed + first + lane, mask=inside, other=0)
        begin, number, kind = (change >> 12) * 128, (change >> 5) & 127, change & 31
        # One thread a change: it looks at all of the sub-block and needs no word from its neighbours.
        word0, word1, word2, word3 = class_matches(live, begin, limit, kind, base, width, memory_stride, SHIFT, MASK, PLAIN)
        position = tl.minimum(begin + select_bit(number, word0, word1, word2, word3), limit - 1)
        new = tl.load(live + place_of(position, width, memory_stride, PLAIN), mask=inside, other=0).to(tl.int32)
        top: tl.constexpr = 1 << (BITS - 1)
        full: tl.constexpr = (1 << BITS) - 1
        if FLOAT:
            new = tl.where(new < top, new | top, ~new & full)
        new = (new + tl.load(steps + first + lane, mask=inside, other=0).to(tl.int32)) & full
        if FLOAT:
            new = tl.where(new >= top, new ^ top, ~new & full)
        tl.store(packed + first + lane, position, mask=inside)
        tl.store(steps + first + lane, new.to(steps.dtype.element_ty), mask=inside)


def decode_chunks(bodies: Sequence[bytes | memoryview], chunks: Chunks, elements: Elements, device: torch.device) -> Changes:
    """What CGR bodies (without their codec byte) change; waits for the verdict, so a damaged chunk raises before anything is applied."""
    assert elements.has_cgr and elements.bits in (8, 16) and bodies
    num_codes, segments = chunks.to(device)
    parsed = parse(bodies, num_codes, bits=elements.bits)
    tiles = torch.from_numpy(tiles_of(parsed.per_chunk)).to(device)
    changes = Changes(unit_bytes=elements.bits // 8, segments=segments, tiles=tiles, positions=parsed.packed, codes=parsed.steps)
    for is_plain in (True, False):
        members = np.flatnonzero((chunks.is_plain == is_plain) & (parsed.per_chunk > 0))
        for begin in range(0, len(members), BATCH_CHUNKS):
            batch = members[begin : begin + BATCH_CHUNKS]
            counts = count_classes(
                batch, chunks.num_codes[batch], segments, num_codes, parsed.bases, elements,
                num_classes=parsed.num_classes, is_plain=is_plain,
            )  # fmt: skip
            _find(changes, counts, num_codes, parsed.bases, parsed.errors, elements, is_plain=is_plain)
    errors = parsed.errors.cpu().numpy()
    if errors.any():
        at = int(np.flatnonzero(errors)[0])
        raise CorruptSnapshot(
            f"{np.count_nonzero(errors)} of {len(errors)} chunks are damaged, first chunk {at}: {_RULES[int(errors[at])]}"
        )
    return changes


def _find(
    changes: Changes,
    counts: ClassCounts,
    num_codes: torch.Tensor,
    bases: torch.Tensor,
    errors: torch.Tensor,
    elements: Elements,
    *,
    is_plain: bool,
) -> None:
    """The tiles of one batch: numbers become positions, steps become codes."""
    slot_of = torch.full((len(num_codes),), -1, dtype=torch.int32, device=num_codes.device)
    slot_of[counts.chunks] = torch.arange(len(counts.chunks), dtype=torch.int32, device=num_codes.device)
    slots = slot_of[changes.tiles[:, 0]]
    mine = torch.nonzero(slots >= 0).view(-1)
    tiles, slots = changes.tiles[mine].contiguous(), slots[mine].contiguous()
    _locate[(len(tiles),)](
        tiles, slots, counts.blocks, counts.counted, counts.counted.shape[1], counts.prefix, counts.totals,
        changes.positions, errors, counts.chunks,
        WORDS=counts.num_words, SEARCH=_SEARCH, LANES=BLOCK, num_warps=4,
    )  # fmt: skip
    _select[(len(tiles),)](
        tiles, slots, counts.chunks, changes.segments, num_codes, bases, changes.positions, changes.codes,
        CODE=CODE[elements.bits], BITS=elements.bits, SHIFT=elements.shift, MASK=elements.mask,
        FLOAT=elements.order is Order.SIGN_MAGNITUDE, PLAIN=is_plain, LANES=128, num_warps=4,
    )  # fmt: skip
