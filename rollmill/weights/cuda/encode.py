"""CGR bodies written on the device from two sets of chunks in live memory, the same bytes as `rollmill.weights.chunk` writes.

`_costs` finds what every setting of every class would cost, `_choose` walks the classes of a chunk and picks, `_emit` sets the bits.
"""

# Kernel arguments are pointers and numbers on the device; they have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from rollmill.weights.chunk import Codec, Elements, Order
from rollmill.weights.cuda import bitstring
from rollmill.weights.cuda.classes import BATCH_CHUNKS, Chunks
from rollmill.weights.cuda.difference import Difference, difference

_LANES = 1024
_CODEC = int(Codec.CGR)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _step(codes, BITS: tl.constexpr, FLOAT: tl.constexpr):
    """|d| - 1 and whether d < 0, of old | new << 16."""
    top: tl.constexpr = 1 << (BITS - 1)
    full: tl.constexpr = (1 << BITS) - 1
    old, new = codes & 0xFFFF, (codes >> 16) & 0xFFFF
    if FLOAT:
        old = tl.where(old < top, old | top, ~old & full)
        new = tl.where(new < top, new | top, ~new & full)
    step = ((new - old + top) & full) - top
    return tl.abs(step) - 1, step < 0


@triton.jit
def _costs(starts, numbers, codes, runs, costs, BITS: tl.constexpr, FLOAT: tl.constexpr, LANES: tl.constexpr):
    """One program a class. Costs, int32[entries, 64]: gaps by k from 0, sizes by k from 32, modes 1 to 4 from 48, then three facts.

    `runs` gets the run that stands before a change, where one stands.
    """
    entry = tl.program_id(0)
    begin, end = tl.load(starts + entry), tl.load(starts + entry + 1)
    if begin == end:
        return
    count = (end - begin).to(tl.int32)
    gap_k, size_k, run_mode = tl.arange(0, 32), tl.arange(0, 16), tl.arange(0, 4)
    run_k = 9 - 3 * run_mode
    gap_costs = tl.zeros((32,), dtype=tl.int32)
    size_costs = tl.zeros((16,), dtype=tl.int32)
    run_costs = tl.zeros((4,), dtype=tl.int32)
    size_sum = tl.zeros((1,), dtype=tl.int64)
    last = tl.zeros((1,), dtype=tl.int32) - 1
    for first in range(0, count, LANES):
        lane = first + tl.arange(0, LANES)
        inside = lane < count
        at = begin + lane
        follows = inside & (lane > 0)
        number = tl.load(numbers + at, mask=inside, other=0)
        gap = number - tl.load(numbers + at - 1, mask=follows, other=-1) - 1
        gap_bits = bitstring.rice_bits(gap[:, None], tl.minimum(gap_k, 21)[None, :])
        gap_costs += tl.sum(tl.where(inside[:, None], gap_bits, 0), axis=0)
        size, _ = _step(tl.load(codes + at, mask=inside, other=0), BITS, FLOAT)
        size = tl.where(inside, size, 0)
        size_bits = bitstring.rice_bits(size[:, None], size_k[None, :])
        size_costs += tl.sum(tl.where(inside[:, None], size_bits, 0), axis=0)
        size_sum += tl.sum(size.to(tl.int64), axis=0)
        size_before, _ = _step(tl.load(codes + at - 1, mask=follows, other=0), BITS, FLOAT)
        ended = tl.where(follows & (size_before > 0), lane - 1, -1)
        head = tl.maximum(tl.associative_scan(ended, 0, _larger), last) + 1
        exceptional = inside & (size > 0)
        run = lane - head
        tl.store(runs + begin + head, run, mask=exceptional)
        run_bits = bitstring.rice_bits(run[:, None], run_k[None, :]) + bitstring.rice_bits(tl.maximum(size - 1, 0), 0)[:, None]
        run_costs += tl.sum(tl.where(exceptional[:, None], run_bits, 0), axis=0)
        last = tl.maximum(last, tl.max(tl.where(exceptional, lane, -1), axis=0))
    head = last + 1
    rest = head < count
    tl.store(runs + begin + head, count - head, mask=rest)
    run_costs += tl.where(tl.max(rest.to(tl.int32), axis=0) == 1, bitstring.rice_bits(tl.max(count - head, axis=0), run_k), 0)
    out = costs + entry * 64
    tl.store(out + gap_k, gap_costs)
    tl.store(out + 32 + size_k, size_costs)
    tl.store(out + 48 + run_mode, run_costs)
    gap_sum = tl.load(numbers + end - 1) + 1 - count
    tl.store(out + 52, tl.minimum(bitstring.bit_length(gap_sum // count), 21))
    tl.store(out + 53 + tl.arange(0, 1), tl.minimum(bitstring.bit_length((size_sum // count).to(tl.int32)), 15))
    tl.store(out + 54 + tl.arange(0, 1), (last >= 0).to(tl.int32))


@triton.jit
def _cheapest(table, k, previous, wanted):
    """Down from k until it gets dearer: k and its cost with the header field."""
    bits = tl.load(table + k, mask=wanted, other=0) + bitstring.signed_bits(k - previous)
    active = wanted
    for _ in range(21):
        active = active & (k > 0)
        lower = tl.load(table + k - 1, mask=active, other=0) + bitstring.signed_bits(k - 1 - previous)
        active = active & (lower <= bits)
        k = tl.where(active, k - 1, k)
        bits = tl.where(active, lower, bits)
    return k, bits


@triton.jit(do_not_specialize=["num_chunks"])
def _choose(
    counts, bases, costs, num_chunks, words, places, settings, lengths, ends, CODEC: tl.constexpr, WRITE: tl.constexpr, BLOCK: tl.constexpr
):
    """One lane a chunk: settings (kg | mode << 8) and stream lengths in bits, int32[chunks, 32], codec byte and header."""
    chunk = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = chunk < num_chunks
    at = tl.load(places + chunk, mask=real, other=0)
    total = tl.zeros((BLOCK,), dtype=tl.int32)
    span = tl.zeros((BLOCK,), dtype=tl.int32)
    for index in range(32):
        count = tl.load(counts + chunk * 32 + index, mask=real, other=0)
        total += count
        span = tl.where(count > 0, index, span)
    sized = total >= 2048
    if WRITE:
        base = tl.load(bases + chunk, mask=real, other=0)
        bitstring.put(words, at, (CODEC | (sized.to(tl.int32) << 8) | (base << 9) | (span << 17)).to(tl.uint64), real)
    at += 22
    width = tl.zeros((BLOCK,), dtype=tl.int32)
    kg = tl.zeros((BLOCK,), dtype=tl.int32)
    mode = tl.zeros((BLOCK,), dtype=tl.int32) + 7
    for index in range(32):
        count = tl.load(counts + chunk * 32 + index, mask=real, other=0)
        named = real & (index <= span)
        at = bitstring.put_natural(words, at, count, width, named, WRITE)
        width = tl.where(named, bitstring.bit_length(count), width)
        some = real & (count > 0)
        table = costs + (chunk * 32 + index) * 64
        next_kg, _ = _cheapest(table, tl.load(table + 52, mask=some, other=0), kg, some)
        next_kg = tl.where(some, next_kg, kg)
        at = bitstring.put_signed(words, at, next_kg - kg, some, WRITE)
        kg = next_kg
        exceptional = some & (tl.load(table + 54, mask=some, other=0) == 1)
        best = tl.where(exceptional, 1 << 30, bitstring.signed_bits(-mode))
        next_mode = tl.zeros((BLOCK,), dtype=tl.int32)
        for run_mode in tl.static_range(1, 5):
            bits = tl.load(table + 47 + run_mode, mask=exceptional, other=0) + bitstring.signed_bits(run_mode - mode)
            better = exceptional & (bits < best)
            best = tl.where(better, bits, best)
            next_mode = tl.where(better, run_mode, next_mode)
        size_k, bits = _cheapest(table + 32, tl.load(table + 53, mask=some, other=0), mode - 5, some)
        next_mode = tl.where(some & (bits < best), size_k + 5, next_mode)
        next_mode = tl.where(some, next_mode, mode)
        at = bitstring.put_signed(words, at, next_mode - mode, some, WRITE)
        mode = next_mode
        in_table = tl.where(mode >= 5, 32 + mode - 5, 47 + mode)
        payload = tl.load(table + in_table, mask=some & (mode > 0), other=0)
        length = tl.where(some, tl.load(table + kg, mask=some, other=0) + count + payload, 0)
        at = bitstring.put_natural(words, at, length - count * (kg + 2), width, some & sized, WRITE)
        tl.store(settings + chunk * 32 + index, kg | (mode << 8), mask=real)
        tl.store(lengths + chunk * 32 + index, length, mask=real)
    tl.store(ends + chunk, at, mask=real)


@triton.jit(do_not_specialize=["total"])
def _emit(
    entries,
    starts,
    numbers,
    codes,
    runs,
    settings,
    total,
    widths,
    places,
    words,
    BITS: tl.constexpr,
    FLOAT: tl.constexpr,
    WRITE: tl.constexpr,
    LANES: tl.constexpr,
):
    """The width of every change or, knowing its place, its bits: run, gap, sign, size."""
    at = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    inside = at < total
    entry = tl.load(entries + at, mask=inside, other=0)
    setting = tl.load(settings + entry, mask=inside, other=0)
    kg, mode = setting & 255, setting >> 8
    follows = inside & (at > tl.load(starts + entry, mask=inside, other=0))
    gap = tl.load(numbers + at, mask=inside, other=0) - tl.load(numbers + at - 1, mask=follows, other=-1) - 1
    size, negative = _step(tl.load(codes + at, mask=inside, other=0), BITS, FLOAT)
    in_runs = (mode > 0) & (mode < 5)
    run = tl.load(runs + at, mask=inside & in_runs, other=-1)
    has_run = run >= 0
    has_size = inside & ((mode >= 5) | (in_runs & (size > 0)))
    run_k = tl.where(in_runs, 12 - 3 * mode, 0)
    size_k = tl.where(mode >= 5, mode - 5, 0)
    size = tl.maximum(tl.where(mode >= 5, size, size - 1), 0)
    run_width = tl.where(has_run, bitstring.rice_bits(tl.maximum(run, 0), run_k), 0)
    gap_width = bitstring.rice_bits(gap, kg)
    if WRITE:
        place = tl.load(places + at, mask=inside, other=0)
        bitstring.put(words, place, bitstring.rice_field(tl.maximum(run, 0), run_k), has_run)
        place += run_width
        field = bitstring.rice_field(gap, kg) | (negative.to(tl.uint64) << gap_width.to(tl.uint64))
        bitstring.put(words, place, field, inside)
        bitstring.put(words, place + gap_width + 1, bitstring.rice_field(size, size_k), has_size)
    else:
        tl.store(widths + at, run_width + gap_width + 1 + tl.where(has_size, bitstring.rice_bits(size, size_k), 0), mask=inside)


def encode_chunks(old: Chunks, new: Chunks, elements: Elements, device: torch.device) -> list[tuple[memoryview, int]]:
    """The CGR payload (with its codec byte) and the number of changes of every chunk."""
    assert elements.has_cgr and elements.bits in (8, 16) and len(old.num_codes) == len(new.num_codes)
    found: list[tuple[memoryview, int]] = [(memoryview(b""), 0)] * len(old.num_codes)
    plain = old.is_plain & new.is_plain
    for is_plain in (True, False):
        members = np.flatnonzero(plain == is_plain)
        for begin in range(0, len(members), BATCH_CHUNKS):
            batch = members[begin : begin + BATCH_CHUNKS]
            what = difference(old.take(batch), new.take(batch), elements, is_plain=is_plain, device=device)
            for at, coded in zip(batch.tolist(), _write(what, elements), strict=True):
                found[at] = coded
    return found


def _write(what: Difference, elements: Elements) -> list[tuple[memoryview, int]]:
    device, num_chunks, total = what.entries.device, len(what.bases), len(what.entries)
    kind = {"BITS": elements.bits, "FLOAT": elements.order is Order.SIGN_MAGNITUDE}
    starts = what.starts
    counts = starts.diff().to(torch.int32).view(num_chunks, 32)
    runs = torch.full((total,), -1, dtype=torch.int32, device=device)
    costs = torch.empty(num_chunks * 32, 64, dtype=torch.int32, device=device)
    _costs[(num_chunks * 32,)](starts, what.numbers, what.codes, runs, costs, LANES=64, num_warps=2, **kind)
    settings, lengths = torch.zeros(2, num_chunks, 32, dtype=torch.int32, device=device)
    ends, places = torch.zeros(2, num_chunks, dtype=torch.int64, device=device)
    grid = (triton.cdiv(num_chunks, 64),)
    choose = (counts, what.bases, costs, num_chunks)
    _choose[grid](*choose, places, places, settings, lengths, ends, CODEC=_CODEC, WRITE=False, BLOCK=64, num_warps=2)
    # Every body begins at a word of its own, and two words more are never written past.
    num_bits = ends + lengths.sum(1)
    num_words = (num_bits + 63) // 64 + 1
    first_word = num_words.cumsum(0) - num_words
    sizes = torch.stack([(num_bits + 7) // 8, first_word * 8, counts.sum(1)], dim=1).cpu().numpy()
    words = torch.zeros(int(num_words.sum()) + 1, dtype=torch.int64, device=device)
    places = first_word * 64
    _choose[grid](*choose, words, places, settings, lengths, ends, CODEC=_CODEC, WRITE=True, BLOCK=64, num_warps=2)
    if total:
        stream = (ends[:, None] + lengths.cumsum(1) - lengths).view(-1)
        widths = torch.empty(total, dtype=torch.int32, device=device)
        args = (what.entries, starts, what.numbers, what.codes, runs, settings, total, widths)
        grid = (triton.cdiv(total, _LANES),)
        _emit[grid](*args, widths, words, WRITE=False, LANES=_LANES, num_warps=4, **kind)
        before = widths.cumsum(0) - widths
        entry_first = before[starts[:-1].clamp(max=total - 1)]
        _emit[grid](*args, before + (stream - entry_first)[what.entries], words, WRITE=True, LANES=_LANES, num_warps=4, **kind)
    host = torch.empty(words.shape, dtype=torch.int64, pin_memory=device.type == "cuda")
    host.copy_(words)
    data = host.view(torch.uint8).numpy().data
    return [(data[at : at + size], changes) for size, at, changes in sizes.tolist()]
