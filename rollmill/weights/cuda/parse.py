"""CGR bodies taken apart on the device: for every change its class, its number within the class and its step; needs no weights."""

# Kernel arguments are pointers and numbers on the device; they have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from rollmill.weights.cuda import bitstring

_MIN_SIZED = 2048


@triton.jit(do_not_specialize=["last_word", "num_chunks"])
def _headers(words, last_word, starts, num_codes, num_chunks, counts, settings, lengths, bases, ends, errors, BLOCK: tl.constexpr):
    """Fills counts, settings (kg | mode << 8) and stream lengths in bits, all int32[chunks, 32]; `ends` is where the streams begin."""
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
        tl.store(settings + chunk * 32 + index, kg | (mode << 8), mask=real)
        tl.store(lengths + chunk * 32 + index, tl.where(some & (sized == 1), count * (kg + 2) + excess, 0), mask=real)
    bad = bad | ((sized == 1) != (total >= 2048))
    tl.store(ends + chunk, at, mask=real)
    tl.store(errors + chunk, bad.to(tl.int32), mask=real)


@triton.jit(do_not_specialize=["last_word", "num_jobs"])
def _parse(
    words,
    last_word,
    jobs,
    entries,
    num_jobs,
    counts,
    settings,
    num_codes,
    packed,
    steps,
    ends,
    errors,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One lane a job: `jobs` int64[n, 3] are first bit, end (0: unknown), first output; `entries` int32[n, 2] are entry and changes."""
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
        param = tl.load(settings + entry, mask=fresh, other=0)
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


@dataclass(frozen=True, kw_only=True, eq=False)
class Parsed:
    """The changes of many chunks, chunk by chunk, class by class, ascending."""

    per_chunk: np.ndarray
    """int64[chunks]: numbers of changes."""
    packed: torch.Tensor
    """int32: class << 21 | number within the class."""
    steps: torch.Tensor
    """The step modulo the width of a code."""
    bases: torch.Tensor
    """int32[chunks]: the raw class that is class 0."""
    num_classes: int
    """No change has a class from here on."""
    errors: torch.Tensor
    """int32[chunks]: 0, or which rule was broken."""


def parse(bodies: Sequence[bytes | memoryview], num_codes: torch.Tensor, *, bits: int) -> Parsed:
    """Waits once, for the numbers of changes. A chunk with an error has arbitrary changes, but as many as it claims."""
    device, num_chunks = num_codes.device, len(bodies)
    lengths_in_bytes = np.array([len(body) for body in bodies], np.int64)
    offsets = np.cumsum(lengths_in_bytes) - lengths_in_bytes
    # Two words of padding: a reader looks at the word of its bit and at the next.
    pinned = torch.zeros((int(lengths_in_bytes.sum()) + 7) // 8 + 2, dtype=torch.int64, pin_memory=device.type == "cuda")
    target = pinned.view(torch.uint8).numpy().data
    for body, at, size in zip(bodies, offsets.tolist(), lengths_in_bytes.tolist(), strict=True):
        target[at : at + size] = body
    words = pinned.to(device, non_blocking=True)
    starts, limits = (torch.from_numpy(at * 8).to(device) for at in (offsets, offsets + lengths_in_bytes))
    counts, settings, lengths = torch.zeros(3, num_chunks, 32, dtype=torch.int32, device=device)
    bases, errors = torch.zeros(2, num_chunks, dtype=torch.int32, device=device)
    ends = torch.zeros(num_chunks, dtype=torch.int64, device=device)
    _headers[(triton.cdiv(num_chunks, 64),)](
        words, len(words) - 2, starts, num_codes, num_chunks, counts, settings, lengths, bases, ends, errors, BLOCK=64, num_warps=2
    )
    # A chunk whose header is refused has no streams.
    counts.masked_fill_((errors != 0)[:, None], 0)
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
    ends += torch.where(sized, lengths.sum(1), 0)
    highest = (torch.arange(1, 33, device=device) * (counts > 0)).amax()
    *per_chunk, num_classes = torch.cat([total, highest[None]]).tolist()
    packed = torch.empty(sum(per_chunk), dtype=torch.int32, device=device)
    steps = torch.empty(len(packed), dtype=torch.int16 if bits == 16 else torch.uint8, device=device)
    if len(entry):
        _parse[(triton.cdiv(len(entry), 64),)](
            words, len(words) - 2, jobs, entries, len(entry), counts, settings, num_codes, packed, steps, ends, errors,
            BITS=bits, BLOCK=64, num_warps=2,
        )  # fmt: skip
    # The streams end in the last byte of the body, and the bits after them are zero.
    left = limits - ends
    padding = words.view(torch.uint8)[(limits - 1).clamp(min=0) // 8].to(torch.int32) >> (8 - left.clamp(0, 7)).to(torch.int32)
    errors.masked_fill_((left < 0) | (left > 7) | ((left > 0) & (padding != 0)), 4)
    return Parsed(
        per_chunk=np.array(per_chunk, np.int64), packed=packed, steps=steps, bases=bases, num_classes=max(1, num_classes), errors=errors
    )
