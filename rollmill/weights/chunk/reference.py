"""CGR and gap bit strings in numpy, the meaning of docs/formats/chunk.md; writes and refuses what the compiled kernels write and refuse."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rollmill.weights.chunk.elements import Elements, Order
from rollmill.weights.errors import CorruptSnapshot

MAX_CLASSES = 32
MAX_KG = 21
MAX_MODE = 20
FIRST_MODE = 7
"""What the mode of the first class is coded against: sizes of about four steps, as in the smallest exponents of real deltas."""
FIRST_RICE_MODE = 5
MIN_SIZED = 2048
"""Changes from which parsing classes in parallel pays for storing the lengths of their streams."""
ESCAPE_ZEROS = 24
ESCAPE_BITS = 56
MAX_SIGNED_ZEROS = 47
MIN_IN_LOWEST = 8
"""Changes in the lowest class: under this a class costs more header than its exponent saves (measured 4 to 32 alike)."""
RUN_RICE = (9, 6, 3, 0)
"""The Rice parameter of run lengths for modes 1 to 4."""


def signed_bits(x: int) -> int:
    """Length of `S(x)`."""
    return 2 * x if x > 0 else 1 - 2 * x


def rice_bits(values: np.ndarray, k: int) -> int:
    """Total length of `R(k)` over `values`."""
    q = values >> k
    return int(np.where(q < ESCAPE_ZEROS, q + (1 + k), ESCAPE_BITS).sum())


def best_rice(values: np.ndarray, previous: int, offset: int, highest: int) -> tuple[int, int]:
    """`(k, bits)` of `values` plus what `S` of `k + offset - previous` costs: down from the mean's width until it gets dearer."""
    k = min(int(int(values.sum()) // len(values)).bit_length(), highest)
    bits = rice_bits(values, k) + signed_bits(k + offset - previous)
    while k > 0 and (lower := rice_bits(values, k - 1) + signed_bits(k - 1 + offset - previous)) <= bits:
        k, bits = k - 1, lower
    return k, bits


def choose_base(raw_changed: np.ndarray) -> int:
    """The raw class that becomes class 0 (see the format page)."""
    counts = np.bincount(raw_changed, minlength=256)
    cumulative = np.concatenate([[0], np.cumsum(counts)])
    total = int(cumulative[-1])
    lowest = int(np.argmax(cumulative[1:] >= min(MIN_IN_LOWEST, total)))
    covered = [int(cumulative[min(b + MAX_CLASSES, 256)] - cumulative[b]) for b in range(lowest, 256)]
    return lowest + max(range(len(covered)), key=lambda i: (covered[i], i))


@dataclass
class BitWriter:
    """Fields of at most 56 bits, gathered in arrays and joined at the end."""

    values: list[np.ndarray] = field(default_factory=list)
    widths: list[np.ndarray] = field(default_factory=list)

    def put(self, value: int, width: int) -> None:
        self.put_all(np.array([value], np.uint64), np.array([width], np.int64))

    def put_signed(self, x: int) -> None:
        zeros = signed_bits(x) - 1
        assert zeros <= MAX_SIGNED_ZEROS
        self.put(1 << zeros, zeros + 1)

    def put_natural(self, value: int, predicted_width: int) -> None:
        width = value.bit_length()
        self.put_signed(width - predicted_width)
        if width > 1:
            self.put(value - (1 << (width - 1)), width - 1)

    def put_all(self, values: np.ndarray, widths: np.ndarray) -> None:
        self.values.append(values)
        self.widths.append(widths)

    def to_bytes(self) -> bytes:
        values, widths = np.concatenate(self.values), np.concatenate(self.widths)
        values, widths = values[widths > 0], widths[widths > 0]
        ends = np.cumsum(widths)
        starts = ends - widths
        num_bits = int(ends[-1])
        words = np.zeros(num_bits // 64 + 2, np.uint64)
        word, shift = starts >> 6, (starts & 63).astype(np.uint64)
        # Two shifts, because one by 64 is undefined.
        for index, part in ((word, values << shift), (word + 1, values >> np.uint64(1) >> (np.uint64(63) - shift))):
            first = np.flatnonzero(np.diff(index, prepend=-1))
            words[index[first]] |= np.bitwise_or.reduceat(part, first)
        return words.astype("<u8").tobytes()[: (num_bits + 7) // 8]


def rice_fields(values: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """`R(k)` of each value as a field and its width."""
    v = values.astype(np.uint64)
    q = v >> np.uint64(k)
    small = q < ESCAPE_ZEROS
    q = np.minimum(q, np.uint64(ESCAPE_ZEROS - 1))
    low = v & np.uint64((1 << k) - 1)
    coded = (np.uint64(1) << q) | (low << (q + np.uint64(1)))
    return np.where(small, coded, v << np.uint64(ESCAPE_ZEROS)), np.where(small, q.astype(np.int64) + (1 + k), ESCAPE_BITS)


class BitReader:
    """Reads one bit string; past its end stand zeros, and `check` refuses a position there."""

    def __init__(self, data: bytes | memoryview) -> None:
        self.end = 8 * len(data)
        self.at = 0
        padded = np.zeros(len(data) // 8 + 3, "<u8")
        padded.view(np.uint8)[: len(data)] = np.frombuffer(data, np.uint8)
        self._words: list[int] = padded.tolist()

    def _window(self) -> int:
        word, shift = divmod(self.at, 64)
        return ((self._words[word] | self._words[word + 1] << 64) >> shift) & 0xFFFF_FFFF_FFFF_FFFF

    def _advance(self, num_bits: int) -> None:
        self.at += num_bits
        if self.at > self.end:
            raise CorruptSnapshot(f"a symbol ends at bit {self.at} of {self.end}")

    def take(self, num_bits: int) -> int:
        value = self._window() & ((1 << num_bits) - 1)
        self._advance(num_bits)
        return value

    def take_signed(self) -> int:
        window = self._window()
        zeros = (window & -window).bit_length() - 1 if window else 64
        if zeros > MAX_SIGNED_ZEROS:
            raise CorruptSnapshot(f"a header field at bit {self.at} has {zeros} zeros")
        self._advance(zeros + 1)
        return (zeros + 1) // 2 if zeros % 2 else -(zeros // 2)

    def take_natural(self, predicted_width: int) -> int:
        width = predicted_width + self.take_signed()
        if not 0 <= width <= 31:
            raise CorruptSnapshot(f"a header number of {width} bits at bit {self.at}")
        return (1 << (width - 1)) + self.take(width - 1) if width else 0

    def take_rice(self, k: int) -> int:
        window = self._window()
        zeros = (window & -window).bit_length() - 1 if window else 64
        if zeros >= ESCAPE_ZEROS:
            self._advance(ESCAPE_BITS)
            return (window >> ESCAPE_ZEROS) & 0xFFFF_FFFF
        self._advance(zeros + 1 + k)
        return zeros << k | (window >> (zeros + 1)) & ((1 << k) - 1)

    def finish(self) -> int:
        """Skip the padding, which must be zero; the number of bytes read."""
        if self.take(-self.at % 8):
            raise CorruptSnapshot("padding bits are not zero")
        return self.at // 8


def ordered(codes: np.ndarray, elements: Elements) -> np.ndarray:
    """Ordered codes as int64 in 0 .. 2^bits - 1."""
    wide = codes.astype(np.int64)
    if elements.order is Order.PLAIN:
        return wide
    msb = 1 << (elements.bits - 1)
    return np.where(wide < msb, wide | msb, ~wide & (2 * msb - 1))


def unordered(values: np.ndarray, elements: Elements) -> np.ndarray:
    """The inverse of `ordered`, in the element's unsigned type."""
    if elements.order is Order.SIGN_MAGNITUDE:
        msb = 1 << (elements.bits - 1)
        values = np.where(values >= msb, values ^ msb, ~values & (2 * msb - 1))
    return values.astype(f"u{elements.code_bytes}")


def classes_of(old: np.ndarray, base: int, elements: Elements) -> np.ndarray:
    """The class of every code, uint8."""
    raw = (old >> elements.shift) & elements.mask
    return np.clip(raw.astype(np.int16) - base, 0, MAX_CLASSES - 1).astype(np.uint8)


def encode_cgr(new: np.ndarray, old: np.ndarray, elements: Elements) -> tuple[bytes, int]:
    """The CGR body and the number of changed codes; `new` and `old` hold one code an item."""
    changed = new != old
    num_changes = int(np.count_nonzero(changed))
    header, streams = BitWriter(), BitWriter()
    sized = num_changes >= MIN_SIZED
    raw_changed = (old[changed] >> elements.shift) & elements.mask
    base = choose_base(raw_changed) if num_changes else 0
    classes = classes_of(old, base, elements)
    by_class = np.argsort(classes, kind="stable")
    where = np.flatnonzero(changed[by_class])
    positions = by_class[where]
    class_of_change = classes[positions]
    counts = np.bincount(class_of_change, minlength=MAX_CLASSES)
    starts = np.concatenate([[0], np.cumsum(np.bincount(classes, minlength=MAX_CLASSES))])
    half = 1 << (elements.bits - 1)
    steps = ((ordered(new[positions], elements) - ordered(old[positions], elements) + half) & (2 * half - 1)) - half
    span = int(class_of_change[-1]) + 1 if num_changes else 1
    header.put(int(sized), 1)
    header.put(base, 8)
    header.put(span - 1, 5)
    width = kg = at = 0
    mode = FIRST_MODE
    for c in range(span):
        count = int(counts[c])
        header.put_natural(count, width)
        width = count.bit_length()
        if not count:
            continue
        chosen = slice(at, at + count)
        at += count
        gaps = np.diff(where[chosen] - starts[c], prepend=-1) - 1
        next_kg, _ = best_rice(gaps, kg, 0, MAX_KG)
        header.put_signed(next_kg - kg)
        kg = next_kg
        next_mode = choose_mode(np.abs(steps[chosen]) - 1, mode)
        header.put_signed(next_mode - mode)
        mode = next_mode
        num_bits = put_stream(streams, gaps, steps[chosen], kg, mode)
        if sized:
            header.put_natural(num_bits - count * (kg + 2), width)
    header.values += streams.values
    header.widths += streams.widths
    return header.to_bytes(), num_changes


def choose_mode(sizes: np.ndarray, previous: int) -> int:
    """The cheapest mode for `sizes` (|d| - 1) with what its header field costs; the lowest on a tie."""
    exceptions = np.flatnonzero(sizes)
    costs: list[tuple[int, int]] = []
    if not len(exceptions):
        costs.append((signed_bits(0 - previous), 0))
    else:
        runs = np.diff(np.append(exceptions, len(sizes)), prepend=-1) - 1
        if runs[-1] == 0:
            runs = runs[:-1]
        tail = rice_bits(sizes[exceptions] - 1, 0)
        costs += [(rice_bits(runs, r) + tail + signed_bits(mode - previous), mode) for mode, r in enumerate(RUN_RICE, 1)]
    k, bits = best_rice(sizes, previous, FIRST_RICE_MODE, MAX_MODE - FIRST_RICE_MODE)
    costs.append((bits, FIRST_RICE_MODE + k))
    return min(costs)[1]


def put_stream(streams: BitWriter, gaps: np.ndarray, steps: np.ndarray, kg: int, mode: int) -> int:
    """Write the changes of one class; the number of bits. Each change is four fields: run, gap, sign, size."""
    count = len(gaps)
    values, widths = np.zeros((count, 4), np.uint64), np.zeros((count, 4), np.int64)
    sizes = np.abs(steps) - 1
    values[:, 1], widths[:, 1] = rice_fields(gaps, kg)
    values[:, 2], widths[:, 2] = steps < 0, 1
    if mode >= FIRST_RICE_MODE:
        values[:, 3], widths[:, 3] = rice_fields(sizes, mode - FIRST_RICE_MODE)
    elif mode:
        exceptions = np.flatnonzero(sizes)
        heads = np.append(0, exceptions + 1)
        heads = heads[heads < count]
        runs = np.append(exceptions, count)[: len(heads)] - heads
        values[heads, 0], widths[heads, 0] = rice_fields(runs, RUN_RICE[mode - 1])
        values[exceptions, 3], widths[exceptions, 3] = rice_fields(sizes[exceptions] - 1, 0)
    streams.put_all(values.reshape(-1), widths.reshape(-1))
    return int(widths.sum())


@dataclass(frozen=True, kw_only=True)
class ClassHeader:
    """What the header says of one class that changes."""

    index: int
    count: int
    kg: int
    mode: int
    num_bits: int | None
    """Of its stream; None where the chunk is not sized."""


def parse_header(reader: BitReader, num_codes: int) -> tuple[int, list[ClassHeader]]:
    """The base and the classes that change."""
    sized, base, span = reader.take(1), reader.take(8), reader.take(5) + 1
    classes: list[ClassHeader] = []
    width = kg = total = 0
    mode = FIRST_MODE
    for index in range(span):
        count = reader.take_natural(width)
        width = count.bit_length()
        if not count:
            continue
        total += count
        kg += reader.take_signed()
        mode += reader.take_signed()
        if total > num_codes or not 0 <= kg <= MAX_KG or not 0 <= mode <= MAX_MODE:
            raise CorruptSnapshot(f"class {index}: {total} changes in {num_codes} codes, kg {kg}, mode {mode}")
        num_bits = count * (kg + 2) + reader.take_natural(width) if sized else None
        classes.append(ClassHeader(index=index, count=count, kg=kg, mode=mode, num_bits=num_bits))
    if sized != (total >= MIN_SIZED):
        raise CorruptSnapshot(f"sized is {sized} with {total} changes")
    return base, classes


def parse_stream(reader: BitReader, head: ClassHeader, num_codes: int, bits: int) -> tuple[list[int], list[int]]:
    """Numbers within the class, ascending, and steps."""
    start, number, run = reader.at, -1, 0
    numbers: list[int] = []
    steps: list[int] = []
    for left in range(head.count, 0, -1):
        if 0 < head.mode < FIRST_RICE_MODE and run == 0:
            run = reader.take_rice(RUN_RICE[head.mode - 1]) + 1
            if run > left + 1:
                raise CorruptSnapshot(f"a run of {run - 1} with {left} changes left")
        number += 1 + reader.take_rice(head.kg)
        negative = reader.take(1)
        size = 1
        if head.mode >= FIRST_RICE_MODE:
            size += reader.take_rice(head.mode - FIRST_RICE_MODE)
        elif head.mode:
            run -= 1
            if run == 0:
                size += 1 + reader.take_rice(0)
        if number >= num_codes or size > 1 << (bits - 1):
            raise CorruptSnapshot(f"class {head.index}: a step of {size} at number {number}")
        numbers.append(number)
        steps.append(-size if negative else size)
    if head.num_bits is not None and reader.at - start != head.num_bits:
        raise CorruptSnapshot(f"class {head.index} has {reader.at - start} bits, its header says {head.num_bits}")
    return numbers, steps


def decode_cgr(body: bytes | memoryview, old: np.ndarray, elements: Elements) -> tuple[np.ndarray, np.ndarray]:
    """Positions (uint32, ascending) and new codes of what changed; `old` is only read."""
    reader = BitReader(body)
    base, heads = parse_header(reader, len(old))
    parsed = [(head, *parse_stream(reader, head, len(old), elements.bits)) for head in heads]
    if reader.finish() != len(body):
        raise CorruptSnapshot(f"{len(body)} bytes where the streams end at {reader.at // 8}")
    classes = classes_of(old, base, elements)
    by_class = np.argsort(classes, kind="stable")
    sizes = np.bincount(classes, minlength=MAX_CLASSES)
    starts = np.cumsum(sizes) - sizes
    for head, numbers, _ in parsed:
        if numbers[-1] >= sizes[head.index]:
            raise CorruptSnapshot(f"class {head.index} changes number {numbers[-1]} of {sizes[head.index]}")
    where = np.array([starts[head.index] + number for head, numbers, _ in parsed for number in numbers], np.int64)
    steps = np.array([step for _, _, of_class in parsed for step in of_class], np.int64)
    positions = by_class[where]
    order = np.argsort(positions)
    positions, steps = positions[order], steps[order]
    codes = unordered((ordered(old[positions], elements) + steps) & ((1 << elements.bits) - 1), elements)
    return positions.astype(np.uint32), codes


def apply_cgr(body: bytes | memoryview, codes: np.ndarray, elements: Elements) -> int:
    """Turn the old codes into the new ones; their number. An error leaves them as they were."""
    positions, new_codes = decode_cgr(body, codes, elements)
    codes[positions] = new_codes
    return len(positions)


def encode_gaps(positions: np.ndarray) -> bytes:
    """The bit string of ascending positions."""
    writer = BitWriter()
    writer.put(len(positions), 22)
    gaps = np.diff(positions.astype(np.int64), prepend=-1) - 1
    kg = best_rice(gaps, 0, 0, MAX_KG)[0] if len(gaps) else 0
    writer.put_signed(kg)
    writer.put_all(*rice_fields(gaps, kg))
    return writer.to_bytes()


def decode_gaps(body: bytes | memoryview, num_codes: int) -> tuple[np.ndarray, int]:
    """Positions (uint32, ascending) and the number of bytes that held them."""
    reader = BitReader(body)
    count, kg = reader.take(22), reader.take_signed()
    if count > num_codes or not 0 <= kg <= MAX_KG:
        raise CorruptSnapshot(f"{count} positions in {num_codes} codes, kg {kg}")
    positions: list[int] = []
    at = -1
    for _ in range(count):
        at += 1 + reader.take_rice(kg)
        if at >= num_codes:
            raise CorruptSnapshot(f"position {at} in {num_codes} codes")
        positions.append(at)
    return np.array(positions, np.uint32), reader.finish()
