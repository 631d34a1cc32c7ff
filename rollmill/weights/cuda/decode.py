"""CGR chunks decoded against the live weights on the device: bodies in, positions and new codes out, and nothing is written into a weight.

`_headers`: one lane a chunk. `_parse`: one lane a class stream (a whole chunk where streams have no length), giving for each
change its number within its class and its step. `_count` and `_prefix`: how many elements of each class lie before each block of 1024, and
in each of its eight sub-blocks of 128. `_locate` and `_select`: each change finds its sub-block by these counts, then its element in it.
A chunk that breaks a rule is reported; what it would have changed is never used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from rollmill.weights.chunk import Elements, Order
from rollmill.weights.cuda import bitstring
from rollmill.weights.cuda.patch import BLOCK, Changes, tiles_of
from rollmill.weights.errors import CorruptSnapshot

_CODE = {8: tl.uint8, 16: tl.uint16}
_TORCH = {8: torch.uint8, 16: torch.int16}
_MIN_SIZED = 2048
_BLOCK = 1024
# Chunks whose counts are held at one time: 1024 of 2^20 elements take 0.4 GB beside 2 GB of weights.
_BATCH = 1024


@dataclass(frozen=True, kw_only=True, eq=False)
class LiveChunk:
    """One coded chunk and the live memory that it changes."""

    body: bytes | memoryview
    """CGR, without the codec byte."""
    num_codes: int
    segment: tuple[int, int, int, int, int, int, int]
    """As in `Changes.segments`: address, memory stride, width, start, stride, key offset, slot."""

    @property
    def is_plain(self) -> bool:
        """One run of memory in whole, aligned vectors of eight."""
        return self.segment[0] % 16 == 0 and self.segment[2] >= self.num_codes and self.num_codes % 8 == 0


@triton.jit
def _headers(words, last_word, starts, num_codes, num_chunks, counts, params, lengths, bases, ends, errors, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Fills counts, params (kg | mode << 8) and stream lengths in bits, all int32[chunks, 32]; `ends` is where the streams begin."""
    chunk = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = chunk < num_chunks
    at = tl.load(starts + chunk, mask=real, other=0)
    limit = tl.load(num_codes + chunk, mask=real, other=0)
    bits = bitstring.window(words, at, last_word)
    sized = (bits & 1).to(tl.int32)
    span = ((bits >> 9) & 31).to(tl.int32) + 1
    tl.store(bases + chunk, ((bits >> 1) & 255).to(tl.int32), mask=real)
    at += 14
    width = tl.zeros((BLOCK,), dtype=tl.int32)
    kg = tl.zeros((BLOCK,), dtype=tl.int32)
    mode = tl.zeros((BLOCK,), dtype=tl.int32) + 7
    total = tl.zeros((BLOCK,), dtype=tl.int32)
    bad = total > 0
    for index in range(32):
        count, width, at, refused = bitstring.natural(words, at, last_word, width, real & (index < span) & ~bad)
        bad = bad | refused | (count > limit - total)
        count = tl.where(bad, 0, count)
        total += count
        some = count > 0
        more, length, refused = bitstring.signed(bitstring.window(words, at, last_word))
        at = tl.where(some, at + length, at)
        kg = tl.where(some, kg + more, kg)
        bad = bad | (some & refused)
        more, length, refused = bitstring.signed(bitstring.window(words, at, last_word))
        at = tl.where(some, at + length, at)
        mode = tl.where(some, mode + more, mode)
        bad = bad | (some & (refused | (kg < 0) | (kg > 21) | (mode < 0) | (mode > 20)))
        excess, _, at, refused = bitstring.natural(words, at, last_word, width, some & (sized == 1) & ~bad)
        bad = bad | refused
        # Lengths past 2^30 bits cannot be: a chunk has at most 2^21 changes of at most 169 bits.
        bad = bad | (excess > (1 << 29))
        tl.store(counts + chunk * 32 + index, count, mask=real)
        tl.store(params + chunk * 32 + index, kg | (mode << 8), mask=real)
        tl.store(lengths + chunk * 32 + index, tl.where(some & (sized == 1), count * (kg + 2) + excess, 0), mask=real)
    bad = bad | ((sized == 1) != (total >= 2048))
    tl.store(ends + chunk, at, mask=real)
    tl.store(errors + chunk, bad.to(tl.int32), mask=real)


@triton.jit
def _parse(words, last_word, jobs, entries, num_jobs, counts, params, num_codes, packed, steps, ends, errors, BITS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # fmt: skip # noqa: E501
    """One lane a job: `jobs` int64[n, 3] are first bit, bit after it (0: not known) and first output; `entries` int32[n, 2] are entry and changes."""
    job = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = job < num_jobs
    at = tl.load(jobs + job * 3, mask=real, other=0)
    known_end = tl.load(jobs + job * 3 + 1, mask=real, other=0)
    out = tl.load(jobs + job * 3 + 2, mask=real, other=0)
    entry = tl.load(entries + job * 2, mask=real, other=1) - 1
    todo = tl.load(entries + job * 2 + 1, mask=real, other=0)
    chunk = (entry + 1) // 32
    limit = tl.load(num_codes + chunk, mask=real, other=0)
    left = tl.zeros((BLOCK,), dtype=tl.int32)
    kg = tl.zeros((BLOCK,), dtype=tl.int32)
    mode = tl.zeros((BLOCK,), dtype=tl.int32)
    number = tl.zeros((BLOCK,), dtype=tl.int32)
    run = tl.zeros((BLOCK,), dtype=tl.int32)
    bad = left > 0
    # A class without changes costs a lane one turn; a stream of its own has none before it.
    turns = tl.max(tl.where(real, todo + tl.where(known_end > 0, 0, 32), 0), axis=0)
    for _ in range(turns):
        fresh = (left == 0) & (todo > 0)
        entry = tl.where(fresh, entry + 1, entry)
        param = tl.load(params + entry, mask=fresh, other=0)
        left = tl.where(fresh, tl.load(counts + entry, mask=fresh, other=0), left)
        kg = tl.where(fresh, param & 255, kg)
        mode = tl.where(fresh, param >> 8, mode)
        number = tl.where(fresh, -1, number)
        run = tl.where(fresh, 0, run)
        take = (left > 0) & (todo > 0)
        in_runs = (mode > 0) & (mode < 5)
        begins = take & in_runs & (run == 0)
        bits = bitstring.window(words, at, last_word)
        value, length = bitstring.rice(bits, tl.where(in_runs, 12 - 3 * mode, 0))
        bad = bad | (begins & (value > left))
        run = tl.where(begins, value + 1, run)
        at = tl.where(begins, at + length, at)
        bits = bitstring.window_if(words, at, last_word, begins, bits)
        gap, length = bitstring.rice(bits, kg)
        negative = ((bits >> length.to(tl.uint64)) & 1) == 1
        at = tl.where(take, at + length + 1, at)
        number = tl.minimum(number + 1 + gap, bitstring.TOO_MUCH)
        run -= 1
        exceptional = in_runs & (run == 0)
        has_size = take & ((mode >= 5) | exceptional)
        value, length = bitstring.rice(bitstring.window_if(words, at, last_word, has_size, bits), tl.where(mode >= 5, mode - 5, 0))
        at = tl.where(has_size, at + length, at)
        size = 1 + tl.where(mode >= 5, value, tl.where(exceptional, value + 1, 0))
        bad = bad | (take & ((number >= limit) | (size > (1 << (BITS - 1)))))
        entry_class = entry % 32
        tl.store(packed + out, (number & 0x1FFFFF) | (entry_class << 21), mask=take)
        tl.store(steps + out, tl.where(negative, -size, size).to(steps.dtype.element_ty), mask=take)
        out += take.to(tl.int64)
        left -= take.to(tl.int32)
        todo -= take.to(tl.int32)
    bad = bad | (todo > 0) | ((known_end > 0) & (at != known_end))
    tl.store(ends + chunk, at, mask=real & (known_end == 0))
    tl.store(errors + chunk, 2, mask=real & bad)


@triton.jit
def _class_of(code, base, SHIFT: tl.constexpr, MASK: tl.constexpr):  # type: ignore[no-untyped-def]
    raw = (code.to(tl.int32) >> SHIFT) & MASK
    return tl.minimum(tl.maximum(raw - base, 0), 31)


@triton.jit
def _place(element, width, memory_stride, PLAIN: tl.constexpr):  # type: ignore[no-untyped-def]
    if PLAIN:
        return element.to(tl.int64)
    run = element.to(tl.uint32) // width
    return run.to(tl.int64) * memory_stride + (element.to(tl.uint32) - run * width).to(tl.int64)


@triton.jit
def _count(chunks, segments, num_codes, bases, blocks, tiles, counted, total_subs, CODE: tl.constexpr, SHIFT: tl.constexpr, MASK: tl.constexpr, WORDS: tl.constexpr, PLAIN: tl.constexpr, SUBS: tl.constexpr):  # type: ignore[no-untyped-def] # fmt: skip # noqa: E501
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
        code = tl.load(live + _place(element, width, memory_stride, PLAIN), mask=inside, other=0)
        kind = _class_of(code, base, SHIFT, MASK)
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


@triton.jit
def _prefix(blocks, counted, total_subs, prefix, totals, WORDS: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """prefix: int32[blocks before the chunk * classes + class * its blocks + block], elements of the class before the block."""
    slot, word = tl.program_id(0), tl.program_id(1)
    begin = tl.load(blocks + slot)
    num_blocks = tl.load(blocks + slot + 1) - begin
    for byte in tl.static_range(8):
        carry = tl.zeros((1,), dtype=tl.int32)
        out = prefix + begin * (8 * WORDS) + (word * 8 + byte) * num_blocks
        for first in range(0, num_blocks, TILE):
            block = first + tl.arange(0, TILE)
            inside = (block < num_blocks)[:, None]
            at = counted + word * total_subs + (begin + block)[:, None] * 8 + tl.arange(0, 8)[None, :]
            counts = tl.load(at, mask=inside, other=0).to(tl.uint64, bitcast=True)
            count = tl.sum(((counts >> (8 * byte)) & 255).to(tl.int32), axis=1)
            through = tl.cumsum(count, axis=0)
            tl.store(out + block, carry + through - count, mask=block < num_blocks)
            carry += tl.sum(count, axis=0)
        tl.store(totals + slot * 32 + word * 8 + byte + tl.arange(0, 1), carry)


@triton.jit
def _locate(tiles, slots, blocks, counted, total_subs, prefix, totals, packed, errors, chunks, WORDS: tl.constexpr, SEARCH: tl.constexpr, LANES: tl.constexpr):  # type: ignore[no-untyped-def] # fmt: skip # noqa: E501
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
def _select(tiles, slots, chunks, segments, num_codes, bases, packed, steps, CODE: tl.constexpr, BITS: tl.constexpr, SHIFT: tl.constexpr, MASK: tl.constexpr, FLOAT: tl.constexpr, PLAIN: tl.constexpr, LANES: tl.constexpr):  # type: ignore[no-untyped-def] # fmt: skip # noqa: E501
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
    offset = tl.arange(0, 128)
    for at in range(0, count, LANES):
        lane = at + tl.arange(0, LANES)
        inside = lane < count
        change = tl.load(packed + first + lane, mask=inside, other=0)
        begin = (change >> 12) * 128
        element = begin[:, None] + offset[None, :]
        there = element < limit
        code = tl.load(live + _place(element, width, memory_stride, PLAIN), mask=there, other=0)
        same = (there & (_class_of(code, base, SHIFT, MASK) == (change & 31)[:, None])).to(tl.int32)
        found = (same == 1) & (tl.cumsum(same, axis=1) == ((change >> 5) & 127)[:, None] + 1)
        both = tl.sum(tl.where(found, offset[None, :] | (code.to(tl.int32) << 7), 0), axis=1)
        top: tl.constexpr = 1 << (BITS - 1)
        full: tl.constexpr = (1 << BITS) - 1
        new = both >> 7
        if FLOAT:
            new = tl.where(new < top, new | top, ~new & full)
        new = (new + tl.load(steps + first + lane, mask=inside, other=0).to(tl.int32)) & full
        if FLOAT:
            new = tl.where(new >= top, new ^ top, ~new & full)
        tl.store(packed + first + lane, begin + (both & 127), mask=inside)
        tl.store(steps + first + lane, new.to(steps.dtype.element_ty), mask=inside)


class ChunkDecoder:
    """Decodes the CGR chunks of one dtype. `parse` needs only their bytes, `select` the live weights."""

    def __init__(self, chunks: Sequence[LiveChunk], elements: Elements, device: torch.device) -> None:
        assert elements.bits in (8, 16) and elements.has_cgr
        self.chunks, self.elements, self.device = list(chunks), elements, device
        lengths = np.array([len(chunk.body) for chunk in chunks], np.int64)
        offsets = np.cumsum(lengths) - lengths
        payload = np.zeros((int(lengths.sum()) + 31) // 8 * 8, np.uint8)
        for chunk, offset in zip(chunks, offsets.tolist(), strict=True):
            payload[offset : offset + len(chunk.body)] = np.frombuffer(chunk.body, np.uint8)
        self._words = self._put(payload.view(np.int64))
        self._last_word = len(self._words) - 2
        self._starts = self._put(offsets * 8)
        self._limits = self._put((offsets + lengths) * 8)
        self._num_codes = self._put(np.array([chunk.num_codes for chunk in chunks], np.int32))
        self._segments = self._put(np.array([chunk.segment for chunk in chunks], np.int64).reshape(-1, 7))
        self._bases = self._zeros(len(chunks))
        self._errors = self._zeros(len(chunks))

    def decode(self) -> Changes:
        """Waits once for the headers and once for the verdict; raises before anything can be applied."""
        changes = self._parse()
        self._select(changes)
        self._judge()
        return changes

    def _parse(self) -> Changes:
        num_chunks, bits = len(self.chunks), self.elements.bits
        counts, params, lengths = (self._zeros(num_chunks, 32) for _ in range(3))
        ends = self._zeros(num_chunks, dtype=torch.int64)
        grid = (triton.cdiv(num_chunks, 64),)
        _headers[grid](
            self._words, self._last_word, self._starts, self._num_codes, num_chunks, counts, params, lengths, self._bases, ends, self._errors,
            BLOCK=64, num_warps=2,
        )  # fmt: skip
        # A chunk whose header is refused has no streams.
        counts.masked_fill_((self._errors != 0)[:, None], 0)
        total = counts.sum(1)
        first_change = counts.view(-1).cumsum(0).view(num_chunks, 32) - counts
        stream = ends[:, None] + lengths.cumsum(1) - lengths
        sized = total >= _MIN_SIZED
        begins = torch.where(sized[:, None], counts > 0, (counts > 0) & (counts.cumsum(1) == counts))
        entry = torch.nonzero(begins.view(-1)).view(-1)
        is_sized = sized[entry // 32]
        todo = torch.where(is_sized, counts.view(-1)[entry], total[entry // 32])
        # Long streams first and beside each other: lanes of a warp end together, and the last warps are short.
        todo, order = todo.sort(descending=True)
        entry, is_sized = entry[order], is_sized[order]
        known_end = torch.where(is_sized, (stream + lengths).view(-1)[entry], 0)
        jobs = torch.stack([stream.view(-1)[entry], known_end, first_change.view(-1)[entry]], dim=1).contiguous()
        entries = torch.stack([entry, todo], dim=1).to(torch.int32).contiguous()
        ends.copy_(torch.where(sized, ends + lengths.sum(1), ends))
        self._spans = (torch.arange(1, 33, device=self.device) * (counts > 0)).amax(1)
        per_chunk = total.cpu().numpy().astype(np.int64)
        packed = torch.empty(int(per_chunk.sum()), dtype=torch.int32, device=self.device)
        steps = torch.empty(len(packed), dtype=_TORCH[bits], device=self.device)
        if len(entry):
            _parse[(triton.cdiv(len(entry), 64),)](
                self._words, self._last_word, jobs, entries, len(entry), counts, params, self._num_codes, packed, steps, ends, self._errors,
                BITS=bits, BLOCK=64, num_warps=2,
            )  # fmt: skip
        self._check_ends(ends)
        return Changes(
            unit_bytes=bits // 8, segments=self._segments, tiles=self._put(tiles_of(per_chunk)), positions=packed, codes=steps
        )

    def _check_ends(self, ends: torch.Tensor) -> None:
        """The streams end in the last byte of the body, and the bits after them are zero."""
        left = self._limits - ends
        last = self._words.view(torch.uint8)[(self._limits - 1).clamp(min=0) // 8].to(torch.int32)
        padding = last >> (8 - left.clamp(0, 7)).to(torch.int32)
        self._errors.masked_fill_((left < 0) | (left > 7) | ((left > 0) & (padding != 0)), 4)

    def _select(self, changes: Changes) -> None:
        plain = np.array([chunk.is_plain for chunk in self.chunks], bool)
        tile_chunks = changes.tiles[:, 0]
        words = max(1, -(-int(self._spans.max()) // 8)) if self.chunks else 1
        for is_plain in (True, False):
            members = np.flatnonzero(plain == is_plain)
            for begin in range(0, len(members), _BATCH):
                batch = members[begin : begin + _BATCH]
                slot_of = torch.full((len(self.chunks),), -1, dtype=torch.int32, device=self.device)
                slot_of[self._put(batch)] = torch.arange(len(batch), dtype=torch.int32, device=self.device)
                slots = slot_of[tile_chunks]
                mine = torch.nonzero(slots >= 0).view(-1)
                if len(mine):
                    self._select_batch(changes, batch, changes.tiles[mine].contiguous(), slots[mine].contiguous(), words, bool(is_plain))

    def _select_batch(
        self, changes: Changes, batch: np.ndarray, tiles: torch.Tensor, slots: torch.Tensor, words: int, is_plain: bool
    ) -> None:
        num_codes = np.array([self.chunks[at].num_codes for at in batch], np.int64)
        per_chunk = -(-num_codes // _BLOCK)
        blocks = self._put(np.concatenate([[0], np.cumsum(per_chunk)]).astype(np.int32))
        total = int(per_chunk.sum())
        counted = torch.empty(words, total * 8, dtype=torch.int64, device=self.device)
        prefix = self._zeros(total * 8 * words)
        totals = self._zeros(len(batch), 32)
        chunks = self._put(batch.astype(np.int32))
        per_tile = -(-per_chunk * 8 // 128)
        slot = np.repeat(np.arange(len(batch)), per_tile)
        first = (np.arange(len(slot)) - np.repeat(np.cumsum(per_tile) - per_tile, per_tile)) * 128
        count_tiles = self._put(np.stack([slot, first], axis=1).astype(np.int32))
        e = self.elements
        common = {"CODE": _CODE[e.bits], "SHIFT": e.shift, "MASK": e.mask, "PLAIN": is_plain}
        _count[(len(count_tiles),)](
            chunks, self._segments, self._num_codes, self._bases, blocks, count_tiles, counted, total * 8,
            WORDS=words, SUBS=128, num_warps=4, **common,
        )  # fmt: skip
        _prefix[(len(batch), words)](blocks, counted, total * 8, prefix, totals, WORDS=words, TILE=128, num_warps=4)
        _locate[(len(tiles),)](
            tiles, slots, blocks, counted, total * 8, prefix, totals, changes.positions, self._errors, chunks,
            WORDS=words, SEARCH=int(per_chunk.max()).bit_length(), LANES=BLOCK, num_warps=4,
        )  # fmt: skip
        _select[(len(tiles),)](
            tiles, slots, chunks, self._segments, self._num_codes, self._bases, changes.positions, changes.codes,
            BITS=e.bits, FLOAT=e.order is Order.SIGN_MAGNITUDE, LANES=32, num_warps=4, **common,
        )  # fmt: skip

    def _judge(self) -> None:
        errors = self._errors.cpu().numpy()
        if errors.any():
            at = int(np.flatnonzero(errors)[0])
            why = {1: "its header", 2: "a stream", 3: "a number past the end of its class", 4: "its length or padding"}[int(errors[at])]
            raise CorruptSnapshot(f"{np.count_nonzero(errors)} of {len(errors)} chunks are damaged, first chunk {at}: {why}")

    def _put(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)
