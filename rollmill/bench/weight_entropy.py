"""How few bits a coder could spend that knows the old exponents and nothing else: the empirical entropy of places, signs and sizes."""

from __future__ import annotations

from collections import Counter

import numpy as np

from rollmill.bench.weight_states import State
from rollmill.weights.chunk import Elements, Order, elements_of


def codes_of(data: np.ndarray, elements: Elements) -> np.ndarray:
    """The elements as unsigned integers; two for each byte of a 4-bit dtype, low nibble first."""
    if elements.bits != 4:
        return data.view(f"<u{elements.code_bytes}")
    codes = np.empty(2 * data.size, np.uint8)
    codes[0::2], codes[1::2] = data & 15, data >> 4
    return codes


def bits_of_change(old: State, new: State) -> float | None:
    """Bits for all changes; None when an element changed whose dtype has no exponent to go by.

    One class for each dtype and raw class of the old code, over all tensors. A coder that adapts to single tensors may do a little better.
    """
    sizes: Counter[tuple[str, int]] = Counter()
    steps: dict[tuple[str, int], Counter[int]] = {}
    for name, tensor in new.items():
        elements = elements_of(tensor.dtype)
        before, after = codes_of(old[name].data, elements), codes_of(tensor.data, elements)
        at = np.flatnonzero(before != after)
        if not elements.has_cgr:
            if at.size:
                return None
            continue
        raw = (before >> elements.shift) & elements.mask
        sizes.update({(tensor.dtype, value): int(count) for value, count in enumerate(np.bincount(raw.reshape(-1))) if count})
        moved = _ordered(after[at], elements) - _ordered(before[at], elements)
        # A step is counted the short way round, as the codec does: modulo the width, signed.
        half = 1 << (elements.bits - 1)
        moved = (moved + half) % (2 * half) - half
        pairs, counts = np.unique(raw[at].astype(np.int64) << 20 | moved + half, return_counts=True)
        for pair, count in zip(pairs.tolist(), counts.tolist(), strict=True):
            steps.setdefault((tensor.dtype, pair >> 20), Counter())[(pair & 0xFFFFF) - half] += count
    total = 0.0
    for key, found in steps.items():
        num_changed = found.total()
        signs: Counter[int] = Counter()
        magnitudes: Counter[int] = Counter()
        for step, count in found.items():
            signs[step > 0] += count
            magnitudes[abs(step)] += count
        total += _entropy([num_changed, sizes[key] - num_changed]) + _entropy([*signs.values()]) + _entropy([*magnitudes.values()])
    return total


def _ordered(codes: np.ndarray, elements: Elements) -> np.ndarray:
    wide = codes.astype(np.int64)
    if elements.order is Order.PLAIN:
        return wide
    top = 1 << (elements.bits - 1)
    return np.where(wide < top, wide | top, ~wide & (2 * top - 1))


def _entropy(counts: list[int]) -> float:
    """Bits to tell which of several kinds each of sum(counts) things is."""
    found = np.array([count for count in counts if count], np.float64)
    return float((found * np.log2(found.sum() / found)).sum())
