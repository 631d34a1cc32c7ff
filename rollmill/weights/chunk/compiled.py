"""The bit coders over the compiled kernels: shapes arrays for them and turns their refusals into errors; same functions as `reference`."""

from __future__ import annotations

import numpy as np

from rollmill.weights.chunk import bitstrings, kernels
from rollmill.weights.chunk.elements import Elements, Order
from rollmill.weights.chunk.reference import MAX_CLASSES
from rollmill.weights.errors import CorruptSnapshot

_REFUSALS = {
    bitstrings.PAST_END: "the bits end within a symbol",
    bitstrings.BAD_HEADER: "the header breaks its own bounds",
    bitstrings.BAD_RUN: "a run is longer than the changes left",
    bitstrings.BAD_CHANGE: "a change lies outside the chunk or steps too far",
    bitstrings.BAD_LENGTH: "a stream does not end where the header says",
    bitstrings.BAD_PADDING: "the body does not end in zero bits after the last stream",
}


def encode_cgr(new: np.ndarray, old: np.ndarray, elements: Elements) -> tuple[bytes, int]:
    base, counts, gaps, steps = kernels.collect_changes(new, old, elements.bits, elements.shift, elements.mask, _flip(elements))
    words, num_bits = bitstrings.write_changes(base, counts, gaps, steps)
    return words.view(np.uint8)[: (num_bits + 7) // 8].tobytes(), len(gaps)


def decode_cgr(body: bytes | memoryview, old: np.ndarray, elements: Elements) -> tuple[np.ndarray, np.ndarray]:
    base, counts, gaps, steps = _parse(body, len(old), elements)
    reached, positions, codes = kernels.place_changes(
        _frozen(old), elements.bits, elements.shift, elements.mask, _flip(elements), base, counts, gaps, steps
    )
    _check_reached(reached, len(gaps))
    return positions, codes


def apply_cgr(body: bytes | memoryview, codes: np.ndarray, elements: Elements) -> int:
    base, counts, gaps, steps = _parse(body, len(codes), elements)
    reached = kernels.apply_changes(codes, elements.bits, elements.shift, elements.mask, _flip(elements), base, counts, gaps, steps)
    _check_reached(reached, len(gaps))
    return len(gaps)


def _parse(body: bytes | memoryview, num_codes: int, elements: Elements) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
    counts = np.zeros(MAX_CLASSES, np.int64)
    status, base, gaps, steps = bitstrings.parse_changes(_payload(body), 8 * len(body), num_codes, elements.bits, counts)
    if status != bitstrings.OK:
        raise CorruptSnapshot(f"a chunk of {len(body)} bytes: {_REFUSALS[status]}")
    return base, counts, gaps, steps


def _check_reached(reached: int, total: int) -> None:
    if reached != total:
        raise CorruptSnapshot(f"{reached} of {total} changes find their place in the old codes")


def encode_gaps(positions: np.ndarray) -> bytes:
    words, num_bits = bitstrings.write_gaps(_frozen(positions))
    return words.view(np.uint8)[: (num_bits + 7) // 8].tobytes()


def decode_gaps(body: bytes | memoryview, num_codes: int) -> tuple[np.ndarray, int]:
    positions = np.empty(num_codes, np.uint32)
    status, count, end = bitstrings.parse_gaps(_payload(body), 8 * len(body), num_codes, positions)
    if status != bitstrings.OK:
        raise CorruptSnapshot(f"positions in {len(body)} bytes: {_REFUSALS[status]}")
    return positions[:count].copy(), end // 8


def _frozen(codes: np.ndarray) -> np.ndarray:
    """To numba a read-only array is another type; as all are read-only here, each kernel is compiled once for a width."""
    view = codes.view()
    view.flags.writeable = False
    return view


def _flip(elements: Elements) -> int:
    return 1 << (elements.bits - 1) if elements.order is Order.SIGN_MAGNITUDE else 0


def _payload(body: bytes | memoryview) -> np.ndarray:
    """The bytes as words with three of zeros behind, so that a window may be read at any position up to the end."""
    words = np.zeros(len(body) // 8 + 3, np.uint64)
    words.view(np.uint8)[: len(body)] = np.frombuffer(body, np.uint8)
    return words
