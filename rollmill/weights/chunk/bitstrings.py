"""Writing and parsing CGR and gap bit strings, compiled; every read and every count is checked, and a refusal is returned, not raised."""

from __future__ import annotations

import numpy as np

from rollmill.weights.chunk.jit import Int, compiled, ctz, inlined
from rollmill.weights.chunk.reference import (
    ESCAPE_BITS,
    ESCAPE_ZEROS,
    FIRST_MODE,
    FIRST_RICE_MODE,
    MAX_CLASSES,
    MAX_KG,
    MAX_MODE,
    MAX_SIGNED_ZEROS,
    MIN_SIZED,
)

OK = 0
"""What a parser returns first when it accepts; anything else is one of the refusals below."""
PAST_END, BAD_HEADER, BAD_RUN, BAD_CHANGE, BAD_LENGTH, BAD_PADDING = range(1, 7)

_ONE = np.uint64(1)


@inlined
def _signed_bits(x: Int) -> Int:
    return 2 * x if x > 0 else 1 - 2 * x


@inlined
def _bit_length(x: Int) -> Int:
    width = 0
    while x > 0:
        x >>= 1
        width += 1
    return width


@inlined
def _rice_bits(values: np.ndarray, start: Int, end: Int, k: Int) -> Int:
    total = 0
    for i in range(start, end):
        q = values[i] >> k
        total += q + (1 + k) if q < ESCAPE_ZEROS else ESCAPE_BITS
    return total


@inlined
def _best_rice(values: np.ndarray, start: Int, end: Int, previous: Int, offset: Int, highest: Int) -> tuple[Int, Int]:
    total = np.int64(0)
    for i in range(start, end):
        total += values[i]
    k = min(_bit_length(total // (end - start)), highest)
    bits = _rice_bits(values, start, end, k) + _signed_bits(k + offset - previous)
    while k > 0:
        lower = _rice_bits(values, start, end, k - 1) + _signed_bits(k - 1 + offset - previous)
        if lower > bits:
            break
        k -= 1
        bits = lower
    return k, bits


@inlined
def _rice_field(value: Int, k: Int) -> tuple[Int, Int]:
    v = np.uint64(value)
    q = v >> np.uint64(k)
    if q < np.uint64(ESCAPE_ZEROS):
        low = v & ((_ONE << np.uint64(k)) - _ONE)
        return (_ONE << q) | (low << (q + _ONE)), np.int64(q) + 1 + k
    return v << np.uint64(ESCAPE_ZEROS), ESCAPE_BITS


@inlined
def _put(words: np.ndarray, at: Int, value: Int, width: Int) -> Int:
    """`words` holds zeros from bit `at` on and has a spare word, so nothing is carried between calls but the position."""
    word, shift = at >> 6, np.uint64(at & 63)
    words[word] |= value << shift
    words[word + 1] |= (value >> _ONE) >> (np.uint64(63) - shift)
    return at + width


@inlined
def _put_signed(words: np.ndarray, at: Int, x: Int) -> Int:
    zeros = _signed_bits(x) - 1
    return _put(words, at, _ONE << np.uint64(zeros), zeros + 1)


@inlined
def _put_natural(words: np.ndarray, at: Int, value: Int, width: Int, predicted_width: Int) -> Int:
    at = _put_signed(words, at, width - predicted_width)
    if width > 1:
        at = _put(words, at, np.uint64(value - (1 << (width - 1))), width - 1)
    return at


@compiled
def write_changes(base: Int, counts: np.ndarray, gaps: np.ndarray, steps: np.ndarray) -> tuple[np.ndarray, Int]:
    """The CGR bit string as words, and its length in bits."""
    num_changes = len(gaps)
    starts = np.zeros(MAX_CLASSES + 1, np.int64)
    span = 1
    for c in range(MAX_CLASSES):
        starts[c + 1] = starts[c] + counts[c]
        if counts[c]:
            span = c + 1
    sizes = np.empty(num_changes, np.int32)
    for i in range(num_changes):
        sizes[i] = abs(steps[i]) - 1
    sized = num_changes >= MIN_SIZED
    kgs, modes, lengths = np.zeros(MAX_CLASSES, np.int64), np.zeros(MAX_CLASSES, np.int64), np.zeros(MAX_CLASSES, np.int64)
    runs = np.empty(num_changes + 1, np.int32)
    kg, mode, total = 0, FIRST_MODE, 0
    for c in range(span):
        if counts[c]:
            last_kg, last_mode = kg, mode
            kg, bits = _best_rice(gaps, starts[c], starts[c + 1], last_kg, 0, MAX_KG)
            mode, size_bits = _choose_mode(sizes, starts[c], starts[c + 1], last_mode, runs)
            lengths[c] = bits - _signed_bits(kg - last_kg) + size_bits - _signed_bits(mode - last_mode) + counts[c]
            kgs[c], modes[c] = kg, mode
            total += lengths[c]
    # A header field is at most 48 bits, and a class has four with two of up to 31 more.
    words = np.zeros((total + 14 + MAX_CLASSES * (4 * 48 + 2 * 31)) // 64 + 3, np.uint64)
    at = _put(words, 0, np.uint64(np.int64(sized) | base << 1 | (span - 1) << 9), 14)
    width, kg, mode = 0, 0, FIRST_MODE
    for c in range(span):
        previous_width = width
        width = _bit_length(counts[c])
        at = _put_natural(words, at, counts[c], width, previous_width)
        if counts[c]:
            at = _put_signed(words, at, kgs[c] - kg)
            at = _put_signed(words, at, modes[c] - mode)
            kg, mode = kgs[c], modes[c]
            if sized:
                excess = lengths[c] - counts[c] * (kg + 2)
                at = _put_natural(words, at, excess, _bit_length(excess), width)
    for c in range(span):
        if counts[c]:
            at = _write_stream(words, at, gaps, sizes, steps, starts[c], starts[c + 1], kgs[c], modes[c])
    return words, at


@inlined
def _choose_mode(sizes: np.ndarray, start: Int, end: Int, previous: Int, runs: np.ndarray) -> tuple[Int, Int]:
    num_runs, run, tail = 0, 0, 0
    for i in range(start, end):
        if sizes[i]:
            runs[num_runs] = run
            num_runs += 1
            run = 0
            tail += sizes[i] if sizes[i] - 1 < ESCAPE_ZEROS else ESCAPE_BITS
        else:
            run += 1
    k, best = _best_rice(sizes, start, end, previous, FIRST_RICE_MODE, MAX_MODE - FIRST_RICE_MODE)
    mode = FIRST_RICE_MODE + k
    if num_runs:
        if run:
            runs[num_runs] = run
            num_runs += 1
        for candidate in range(4, 0, -1):
            bits = _rice_bits(runs, 0, num_runs, 12 - 3 * candidate) + tail + _signed_bits(candidate - previous)
            if bits <= best:
                mode, best = candidate, bits
    elif _signed_bits(0 - previous) <= best:
        mode, best = 0, _signed_bits(0 - previous)
    return mode, best


@inlined
def _write_stream(
    words: np.ndarray, at: Int, gaps: np.ndarray, sizes: np.ndarray, steps: np.ndarray, start: Int, end: Int, kg: Int, mode: Int
) -> Int:
    is_rice = mode >= FIRST_RICE_MODE
    has_runs = 0 < mode < FIRST_RICE_MODE
    at_head = True
    for i in range(start, end):
        if has_runs and at_head:
            run = 0
            while i + run < end and sizes[i + run] == 0:
                run += 1
            value, width = _rice_field(run, 12 - 3 * mode)
            at = _put(words, at, value, width)
            at_head = False
        value, width = _rice_field(gaps[i], kg)
        at = _put(words, at, value | np.uint64(steps[i] < 0) << np.uint64(width), width + 1)
        if is_rice:
            value, width = _rice_field(sizes[i], mode - FIRST_RICE_MODE)
            at = _put(words, at, value, width)
        elif has_runs and sizes[i]:
            value, width = _rice_field(sizes[i] - 1, 0)
            at = _put(words, at, value, width)
            at_head = True
    return at


@compiled
def write_gaps(positions: np.ndarray) -> tuple[np.ndarray, Int]:
    """The SPARSE bit string as words, and its length in bits."""
    count = len(positions)
    gaps = np.empty(count, np.int32)
    previous = np.int32(-1)
    for i in range(count):
        gaps[i] = np.int32(positions[i]) - previous - 1
        previous = np.int32(positions[i])
    kg, bits = 0, 1
    if count:
        kg, bits = _best_rice(gaps, 0, count, 0, 0, MAX_KG)
    words = np.zeros((22 + bits) // 64 + 3, np.uint64)
    at = _put(words, 0, np.uint64(count), 22)
    at = _put_signed(words, at, kg)
    for i in range(count):
        value, width = _rice_field(gaps[i], kg)
        at = _put(words, at, value, width)
    return words, at


@inlined
def _window(words: np.ndarray, at: Int) -> Int:
    """64 bits from bit `at`; `at` is at most the end of the payload, and two zero words stand behind that."""
    word, shift = at >> 6, np.uint64(at & 63)
    return (words[word] >> shift) | ((words[word + 1] << _ONE) << (np.uint64(63) - shift))


@inlined
def _rice(window: Int, k: Int) -> tuple[Int, Int]:
    """The value of `R(k)` at the bottom of a window, and its length."""
    zeros = ctz(window)
    if zeros < np.uint64(ESCAPE_ZEROS):
        low = (window >> (zeros + _ONE)) & ((_ONE << np.uint64(k)) - _ONE)
        return np.int64((zeros << np.uint64(k)) | low), np.int64(zeros) + 1 + k
    return np.int64((window >> np.uint64(ESCAPE_ZEROS)) & np.uint64(0xFFFFFFFF)), ESCAPE_BITS


@inlined
def _take_signed(words: np.ndarray, at: Int, end: Int) -> tuple[Int, Int]:
    """The value and the position after it; a position past the end stands for a refusal."""
    zeros = np.int64(ctz(_window(words, at)))
    if zeros > MAX_SIGNED_ZEROS:
        return 0, end + 1
    return (zeros + 1) // 2 if zeros & 1 else -(zeros // 2), at + zeros + 1


@inlined
def _take_natural(words: np.ndarray, at: Int, end: Int, predicted_width: Int) -> tuple[Int, Int]:
    x, at = _take_signed(words, at, end)
    width = predicted_width + x
    if at > end or width < 0 or width > 31:
        return 0, end + 1
    if width == 0:
        return 0, at
    low = np.int64(_window(words, at) & ((_ONE << np.uint64(width - 1)) - _ONE))
    return (np.int64(1) << (width - 1)) + low, at + width - 1


@compiled
def parse_changes(words: np.ndarray, end: Int, num_codes: Int, bits: Int, counts: np.ndarray) -> tuple[Int, Int, np.ndarray, np.ndarray]:
    """Status, base, gaps and steps of all changes in class order; `counts[c]` becomes the number of changes of class c."""
    empty = np.empty(0, np.int32)
    window = _window(words, 0)
    sized = window & _ONE
    base = np.int64((window >> _ONE) & np.uint64(255))
    span = np.int64((window >> np.uint64(9)) & np.uint64(31)) + 1
    at = np.int64(14)
    kgs, modes, lengths = np.zeros(MAX_CLASSES, np.int64), np.zeros(MAX_CLASSES, np.int64), np.zeros(MAX_CLASSES, np.int64)
    width, kg, mode, total = 0, 0, FIRST_MODE, 0
    if at > end:
        return PAST_END, base, empty, empty
    for c in range(span):
        count, at = _take_natural(words, at, end, width)
        if at > end:
            return PAST_END, base, empty, empty
        width = _bit_length(count)
        counts[c] = count
        if count:
            total += count
            x, at = _take_signed(words, at, end)
            kg += x
            if at > end:
                return PAST_END, base, empty, empty
            x, at = _take_signed(words, at, end)
            mode += x
            if at > end or total > num_codes or kg < 0 or kg > MAX_KG or mode < 0 or mode > MAX_MODE:
                return BAD_HEADER, base, empty, empty
            if sized:
                excess, at = _take_natural(words, at, end, width)
                if at > end:
                    return PAST_END, base, empty, empty
                lengths[c] = count * (kg + 2) + excess
            kgs[c], modes[c] = kg, mode
    if (sized != 0) != (total >= MIN_SIZED):
        return BAD_HEADER, base, empty, empty
    gaps, steps = np.empty(total, np.int32), np.empty(total, np.int32)
    first = 0
    for c in range(span):
        count = counts[c]
        if count:
            start = at
            status, at = _parse_stream(
                words, at, end, num_codes, bits, kgs[c], modes[c], gaps[first : first + count], steps[first : first + count]
            )
            if status != OK:
                return status, base, empty, empty
            if sized and at - start != lengths[c]:
                return BAD_LENGTH, base, empty, empty
            first += count
    padding = -at & 7
    if at + padding != end or _window(words, at) & ((_ONE << np.uint64(padding)) - _ONE):
        return BAD_PADDING, base, empty, empty
    return OK, base, gaps, steps


@inlined
def _parse_stream(
    words: np.ndarray, at: Int, end: Int, num_codes: Int, bits: Int, kg: Int, mode: Int, gaps: np.ndarray, steps: np.ndarray
) -> tuple[Int, Int]:
    is_rice = mode >= FIRST_RICE_MODE
    has_runs = 0 < mode < FIRST_RICE_MODE
    count = len(gaps)
    number, run = np.int64(-1), np.int64(0)
    highest = np.int64(1) << (bits - 1)
    for i in range(count):
        if has_runs and run == 0:
            run, width = _rice(_window(words, at), 12 - 3 * mode)
            at += width
            if at > end:
                return PAST_END, at
            if run > count - i:
                return BAD_RUN, at
            run += 1
        window = _window(words, at)
        gap, width = _rice(window, kg)
        number += 1 + gap
        negative = (window >> np.uint64(width)) & _ONE
        at += width + 1
        size = np.int64(1)
        if at > end:
            return PAST_END, at
        if is_rice:
            size, width = _rice(_window(words, at), mode - FIRST_RICE_MODE)
            size += 1
            at += width
        elif has_runs:
            run -= 1
            if run == 0:
                size, width = _rice(_window(words, at), 0)
                size += 2
                at += width
        if at > end:
            return PAST_END, at
        if number >= num_codes or size > highest:
            return BAD_CHANGE, at
        gaps[i] = gap
        steps[i] = -size if negative else size
    return OK, at


@compiled
def parse_gaps(words: np.ndarray, end: Int, num_codes: Int, positions: np.ndarray) -> tuple[Int, Int, Int]:
    """Status, number of positions and the bit after the padding; `positions` has room for `num_codes`."""
    count = np.int64(_window(words, 0) & np.uint64((1 << 22) - 1))
    if end < 22:
        return PAST_END, 0, 0
    kg, at = _take_signed(words, 22, end)
    if at > end or count > num_codes or kg < 0 or kg > MAX_KG:
        return BAD_HEADER, 0, 0
    number = np.int64(-1)
    for i in range(count):
        gap, width = _rice(_window(words, at), kg)
        number += 1 + gap
        at += width
        if at > end:
            return PAST_END, 0, 0
        if number >= num_codes:
            return BAD_CHANGE, 0, 0
        positions[i] = number
    padding = -at & 7
    if _window(words, at) & ((_ONE << np.uint64(padding)) - _ONE):
        return BAD_PADDING, 0, 0
    return OK, count, at + padding
