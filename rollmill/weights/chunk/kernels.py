"""The hot loops of CGR and gap bit strings, compiled by numba without the GIL; every read and every index is checked, nothing here raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.extending import intrinsic

from rollmill.weights.chunk.reference import (
    ESCAPE_BITS,
    ESCAPE_ZEROS,
    FIRST_MODE,
    FIRST_RICE_MODE,
    MAX_CLASSES,
    MAX_KG,
    MAX_MODE,
    MAX_SIGNED_ZEROS,
    MIN_IN_LOWEST,
    MIN_SIZED,
)

OK = 0
"""What a kernel that can refuse returns first; anything else is the line of the refusal, named in `compiled`."""
PAST_END, BAD_HEADER, BAD_RUN, BAD_CHANGE, BAD_LENGTH, BAD_PADDING, TOO_FEW = range(1, 8)

_ONE = np.uint64(1)
_BLOCK = 64
"""Codes looked at together: one bit each in a word."""
_TILE_BLOCKS = 64
"""Blocks whose classes are kept at a time: they stay in the first cache, and one comparison of 64 items finds a block."""
_TILE = _BLOCK * _TILE_BLOCKS
_NO_CLASS = 255
"""Stands behind the last code."""


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    try:
        return numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:
        # No folder for the cache can be written (a read-only install without a home): compile anew in each process.
        return numba.njit(nogil=True)(function)


@intrinsic
def _ctz(typingctx: Any, value: Any) -> Any:
    """Zero bits under the lowest one bit of a uint64; 64 for 0."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], context.get_constant(numba.types.boolean, 0))

    return numba.types.uint64(numba.types.uint64), codegen


@intrinsic
def _popcount(typingctx: Any, value: Any) -> Any:
    """One bits of a uint64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return numba.types.uint64(numba.types.uint64), codegen


def _vector(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> tuple[Any, Any]:
    """A pointer to 64 items from `index` on, and their vector type. LLVM cuts such a vector into what the machine has."""
    data = context.make_array(array_type)(context, builder, array).data
    vector_type = ir.VectorType(ir.IntType(array_type.dtype.bitwidth), _BLOCK)
    return builder.bitcast(builder.gep(data, [index]), vector_type.as_pointer()), vector_type


def _splat(vector_type: Any, value: int) -> Any:
    return ir.Constant(vector_type, [value] * _BLOCK)


def _broadcast(builder: Any, vector_type: Any, value: Any) -> Any:
    lane = value if value.type == vector_type.element else builder.trunc(value, vector_type.element)
    single = builder.insert_element(ir.Constant(vector_type, ir.Undefined), lane, ir.IntType(32)(0))
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), _BLOCK), [0] * _BLOCK)
    return builder.shuffle_vector(single, ir.Constant(vector_type, ir.Undefined), lanes)


@intrinsic
def _differ(typingctx: Any, left: Any, right: Any, index: Any) -> Any:
    """Bit j says whether `left[index + j]` and `right[index + j]` differ, for 64 items."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointers = [_vector(context, builder, signature.args[i], args[i], args[2])[0] for i in range(2)]
        different = builder.icmp_unsigned("!=", *(builder.load(pointer, align=1) for pointer in pointers))
        return builder.bitcast(different, ir.IntType(64))

    return numba.types.uint64(left, right, numba.types.int64), codegen


def _compare(relation: str) -> Callable[..., Any]:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer, vector_type = _vector(context, builder, signature.args[0], args[0], args[1])
        result = builder.icmp_unsigned(relation, builder.load(pointer, align=1), _broadcast(builder, vector_type, args[2]))
        return builder.bitcast(result, ir.IntType(64))

    return codegen


@intrinsic
def _equals(typingctx: Any, items: Any, index: Any, value: Any) -> Any:
    """Bit j says whether `items[index + j]` is `value`, for 64 items."""
    return numba.types.uint64(items, numba.types.int64, numba.types.int64), _compare("==")


@intrinsic
def _at_most(typingctx: Any, items: Any, index: Any, value: Any) -> Any:
    """Bit j says whether `items[index + j]` is not more than `value`, for 64 items."""
    return numba.types.uint64(items, numba.types.int64, numba.types.int64), _compare("<=")


@intrinsic
def _classify(typingctx: Any, codes: Any, index: Any, shift: Any, mask: Any, base: Any, classes: Any, to: Any) -> Any:
    """`classes[to + j]` becomes the class of `codes[index + j]`, for 64 items."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer, vector_type = _vector(context, builder, signature.args[0], args[0], args[1])
        target, class_type = _vector(context, builder, signature.args[5], args[5], args[6])
        shift, mask, base = (_broadcast(builder, vector_type, args[i]) for i in (2, 3, 4))
        raw = builder.and_(builder.lshr(builder.load(pointer, align=1), shift), mask)
        above = builder.select(builder.icmp_unsigned(">", raw, base), builder.sub(raw, base), _splat(vector_type, 0))
        highest = _splat(vector_type, MAX_CLASSES - 1)
        clamped = builder.select(builder.icmp_unsigned("<", above, highest), above, highest)
        builder.store(clamped if vector_type == class_type else builder.trunc(clamped, class_type), target, align=1)
        return context.get_dummy_value()

    word = numba.types.int64
    return numba.types.void(codes, word, word, word, word, classes, word), codegen


@numba.njit(nogil=True, inline="always")
def _signed_bits(x: int) -> int:
    return 2 * x if x > 0 else 1 - 2 * x


@numba.njit(nogil=True, inline="always")
def _bit_length(x: int) -> int:
    width = 0
    while x > 0:
        x >>= 1
        width += 1
    return width


@numba.njit(nogil=True, inline="always")
def _rice_bits(values: np.ndarray, start: int, end: int, k: int) -> int:
    total = 0
    for i in range(start, end):
        q = values[i] >> k
        total += q + (1 + k) if q < ESCAPE_ZEROS else ESCAPE_BITS
    return total


@numba.njit(nogil=True)
def _best_rice(values: np.ndarray, start: int, end: int, previous: int, offset: int, highest: int) -> tuple[int, int]:
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


@numba.njit(nogil=True, inline="always")
def _rice_field(value: int, k: int) -> tuple[np.uint64, int]:
    v = np.uint64(value)
    q = v >> np.uint64(k)
    if q < np.uint64(ESCAPE_ZEROS):
        low = v & ((_ONE << np.uint64(k)) - _ONE)
        return (_ONE << q) | (low << (q + _ONE)), np.int64(q) + 1 + k
    return v << np.uint64(ESCAPE_ZEROS), ESCAPE_BITS


@numba.njit(nogil=True, inline="always")
def _put(words: np.ndarray, at: int, value: np.uint64, width: int) -> int:
    """`words` holds zeros from bit `at` on and has a spare word, so nothing is carried between calls but the position."""
    word, shift = at >> 6, np.uint64(at & 63)
    words[word] |= value << shift
    words[word + 1] |= (value >> _ONE) >> (np.uint64(63) - shift)
    return at + width


@numba.njit(nogil=True, inline="always")
def _put_signed(words: np.ndarray, at: int, x: int) -> int:
    zeros = _signed_bits(x) - 1
    return _put(words, at, _ONE << np.uint64(zeros), zeros + 1)


@numba.njit(nogil=True, inline="always")
def _put_natural(words: np.ndarray, at: int, value: int, width: int, predicted_width: int) -> int:
    at = _put_signed(words, at, width - predicted_width)
    if width > 1:
        at = _put(words, at, np.uint64(value - (1 << (width - 1))), width - 1)
    return at


@numba.njit(nogil=True, inline="always")
def _classify_tile(codes: np.ndarray, first: int, num_codes: int, shift: int, mask: int, base: int, classes: np.ndarray) -> int:
    """The classes of up to a tile of codes from `first` on; the number of blocks they fill."""
    size = min(num_codes - first, _TILE)
    whole = size & -_BLOCK
    for i in range(0, whole, _BLOCK):
        _classify(codes, first + i, shift, mask, base, classes, i)
    if whole == size:
        return size // _BLOCK
    for i in range(whole, size):
        classes[i] = min(max(((np.int64(codes[first + i]) >> shift) & mask) - base, 0), MAX_CLASSES - 1)
    for i in range(size, whole + _BLOCK):
        classes[i] = _NO_CLASS
    return whole // _BLOCK + 1


@numba.njit(nogil=True, inline="always")
def _ordered(code: int, bits: int, flip: int) -> int:
    """`flip` is the sign bit for sign-magnitude and 0 for plain codes; without a branch, because signs cannot be predicted."""
    return code ^ (flip | (-(code >> (bits - 1)) & (flip - (flip > 0))))


@numba.njit(nogil=True, inline="always")
def _unordered(value: int, bits: int, flip: int) -> int:
    return value ^ (flip | (((value >> (bits - 1)) - 1) & (flip - (flip > 0))))


@numba.njit(nogil=True)
def _choose_base(raw_counts: np.ndarray, total: int) -> int:
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


@_compile
def collect_changes(
    new: np.ndarray, old: np.ndarray, bits: int, shift: int, mask: int, flip: int
) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
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
        # No branch here depends on the weights, which no processor could predict.
        while j < total and positions[j] < first + _TILE:
            position = np.int64(positions[j])
            i = position - first
            c = np.int64(classes[i])
            below = (_ONE << np.uint64(i & (_BLOCK - 1))) - _ONE
            rank = before[c, i // _BLOCK] + np.int32(_popcount(_equals(classes, i & -_BLOCK, c) & below))
            was, now = _ordered(np.int64(old[position]), bits, flip), _ordered(np.int64(new[position]), bits, flip)
            to = at[c]
            at[c] = to + 1
            steps[to] = ((now - was + half) & (2 * half - 1)) - half
            gaps[to] = rank - previous[c] - 1
            previous[c] = rank
            j += 1
    return base, counts, gaps, steps


@numba.njit(nogil=True)
def _find_changes(new: np.ndarray, old: np.ndarray) -> np.ndarray:
    """Positions of the codes that differ."""
    num_codes = len(new)
    whole = num_codes & -_BLOCK
    changed = np.empty(whole // _BLOCK, np.uint64)
    total = 0
    for block in range(whole // _BLOCK):
        changed[block] = _differ(new, old, block * _BLOCK)
        total += np.int64(_popcount(changed[block]))
    for i in range(whole, num_codes):
        total += new[i] != old[i]
    positions = np.empty(total, np.uint32)
    j = 0
    for block in range(whole // _BLOCK):
        left = changed[block]
        while left:
            positions[j] = block * _BLOCK + np.int64(_ctz(left))
            left &= left - _ONE
            j += 1
    for i in range(whole, num_codes):
        if new[i] != old[i]:
            positions[j] = i
            j += 1
    return positions


@numba.njit(nogil=True, inline="always")
def _count_members(classes: np.ndarray, num_blocks: int, c: int, number: int, before: np.ndarray) -> int:
    """`before[b]` becomes the number of members of class c before block b; returns their number after the tile."""
    for block in range(num_blocks):
        before[block] = number
        number += np.int64(_popcount(_equals(classes, block * _BLOCK, c)))
    return number


@_compile
def write_changes(base: int, counts: np.ndarray, gaps: np.ndarray, steps: np.ndarray) -> tuple[np.ndarray, int]:
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


@numba.njit(nogil=True)
def _choose_mode(sizes: np.ndarray, start: int, end: int, previous: int, runs: np.ndarray) -> tuple[int, int]:
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


@numba.njit(nogil=True)
def _write_stream(
    words: np.ndarray, at: int, gaps: np.ndarray, sizes: np.ndarray, steps: np.ndarray, start: int, end: int, kg: int, mode: int
) -> int:
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


@_compile
def write_gaps(positions: np.ndarray) -> tuple[np.ndarray, int]:
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


@numba.njit(nogil=True, inline="always")
def _window(words: np.ndarray, at: int) -> np.uint64:
    """64 bits from bit `at`; `at` is at most the end of the payload, and two zero words stand behind that."""
    word, shift = at >> 6, np.uint64(at & 63)
    return (words[word] >> shift) | ((words[word + 1] << _ONE) << (np.uint64(63) - shift))


@numba.njit(nogil=True, inline="always")
def _rice(window: np.uint64, k: int) -> tuple[int, int]:
    """The value of `R(k)` at the bottom of a window, and its length."""
    zeros = _ctz(window)
    if zeros < np.uint64(ESCAPE_ZEROS):
        low = (window >> (zeros + _ONE)) & ((_ONE << np.uint64(k)) - _ONE)
        return np.int64((zeros << np.uint64(k)) | low), np.int64(zeros) + 1 + k
    return np.int64((window >> np.uint64(ESCAPE_ZEROS)) & np.uint64(0xFFFFFFFF)), ESCAPE_BITS


@numba.njit(nogil=True)
def _take_signed(words: np.ndarray, at: int, end: int) -> tuple[int, int]:
    """The value and the position after it; a position past the end stands for a refusal."""
    zeros = np.int64(_ctz(_window(words, at)))
    if zeros > MAX_SIGNED_ZEROS:
        return 0, end + 1
    return (zeros + 1) // 2 if zeros & 1 else -(zeros // 2), at + zeros + 1


@numba.njit(nogil=True)
def _take_natural(words: np.ndarray, at: int, end: int, predicted_width: int) -> tuple[int, int]:
    x, at = _take_signed(words, at, end)
    width = predicted_width + x
    if at > end or width < 0 or width > 31:
        return 0, end + 1
    if width == 0:
        return 0, at
    low = np.int64(_window(words, at) & ((_ONE << np.uint64(width - 1)) - _ONE))
    return (np.int64(1) << (width - 1)) + low, at + width - 1


@_compile
def parse_changes(words: np.ndarray, end: int, num_codes: int, bits: int, counts: np.ndarray) -> tuple[int, int, np.ndarray, np.ndarray]:
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
            status, at = _parse_stream(words, at, end, num_codes, bits, kgs[c], modes[c], gaps[first : first + count], steps[first : first + count])
            if status != OK:
                return status, base, empty, empty
            if sized and at - start != lengths[c]:
                return BAD_LENGTH, base, empty, empty
            first += count
    padding = -at & 7
    if at + padding != end or _window(words, at) & ((_ONE << np.uint64(padding)) - _ONE):
        return BAD_PADDING, base, empty, empty
    return OK, base, gaps, steps


@numba.njit(nogil=True)
def _parse_stream(
    words: np.ndarray, at: int, end: int, num_codes: int, bits: int, kg: int, mode: int, gaps: np.ndarray, steps: np.ndarray
) -> tuple[int, int]:
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


@numba.njit(nogil=True, inline="always")
def _select(members: np.uint64, index: int) -> int:
    """The place of the one bit with `index` one bits under it."""
    place = np.uint64(0)
    for log_half in range(5, -1, -1):
        low = (_ONE << np.uint64(1 << log_half)) - _ONE
        under = np.int64(_popcount((members >> place) & low))
        is_above = np.int64(index >= under)
        index -= is_above * under
        place += np.uint64(is_above << log_half)
    return np.int64(place)


@_compile
def place_changes(
    old: np.ndarray, bits: int, shift: int, mask: int, flip: int, base: int, counts: np.ndarray, gaps: np.ndarray, steps: np.ndarray
) -> tuple[int, np.ndarray, np.ndarray]:
    """How many changes find their place, their positions (ascending) and new codes; `gaps` and `steps` in class order."""
    num_codes, total = len(old), len(gaps)
    changed = np.zeros((num_codes + _BLOCK - 1) // _BLOCK, np.uint64)
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
                block = np.int64(_popcount(_at_most(before, 0, number))) - 1
                lane = _select(_equals(classes, block * _BLOCK, c), number - before[block])
                i = first + block * _BLOCK + lane
                places[j] = i
                new_codes[j] = _unordered((_ordered(np.int64(old[i]), bits, flip) + steps[j]) & all_ones, bits, flip)
                changed[first // _BLOCK + block] |= _ONE << np.uint64(lane)
                reached += 1
                j += 1
                if j == end:
                    break
                number += 1 + gaps[j]
            at[c], wanted[c] = j, number
    positions, codes = np.empty(total, np.uint32), np.empty(total, old.dtype)
    if reached < total:
        return reached, positions, codes
    before_block = np.empty(len(changed), np.int32)
    count = 0
    for block in range(len(changed)):
        before_block[block] = count
        count += np.int64(_popcount(changed[block]))
    for j in range(total):
        i = np.int64(places[j])
        to = before_block[i // _BLOCK] + np.int64(_popcount(changed[i // _BLOCK] & ((_ONE << np.uint64(i & (_BLOCK - 1))) - _ONE)))
        positions[to] = i
        codes[to] = new_codes[j]
    return reached, positions, codes


@_compile
def parse_gaps(words: np.ndarray, end: int, num_codes: int, positions: np.ndarray) -> tuple[int, int, int]:
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
