"""The compiled sum of a run of words under the keys of `proof`; needs numba, knows no tensor."""

from __future__ import annotations

import numpy as np
from numba import njit, uint64

Word = np.uint64
Int = np.int64

_COLS = 4096
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MUL_1 = np.uint64(0xBF58476D1CE4E5B9)
_MUL_2 = np.uint64(0x94D049BB133111EB)


@njit(nogil=True, cache=True)
def _row_key(row: Word, seed: Word) -> Word:
    x = uint64(seed) + uint64(row) * _GOLDEN
    x = (x ^ (x >> uint64(30))) * _MUL_1
    x = (x ^ (x >> uint64(27))) * _MUL_2
    return (x ^ (x >> uint64(31))) | uint64(1)


@njit(nogil=True, cache=True)
def run(words: np.ndarray, first: Word, seed_0: Word, seed_1: Word, keys_0: np.ndarray, keys_1: np.ndarray) -> tuple[Word, Word]:
    sum_0, sum_1 = uint64(0), uint64(0)
    at, end = 0, words.size
    while at < end:
        index = uint64(first) + uint64(at)
        col = int(index & uint64(_COLS - 1))
        count = min(_COLS - col, end - at)
        # Views of one length let the compiler drop bounds and work on several words at once.
        piece, left, right = words[at : at + count], keys_0[col : col + count], keys_1[col : col + count]
        inner_0, inner_1 = uint64(0), uint64(0)
        for i in range(count):
            word = uint64(piece[i])
            inner_0 += word * left[i]
            inner_1 += word * right[i]
        row = index >> uint64(12)
        sum_0 += inner_0 * _row_key(row, seed_0)
        sum_1 += inner_1 * _row_key(row, seed_1)
        at += count
    return sum_0, sum_1


@njit(nogil=True, cache=True)
def box(
    words: np.ndarray, width: Int, first: Word, stride: Word, seed_0: Word, seed_1: Word, keys_0: np.ndarray, keys_1: np.ndarray
) -> tuple[Word, Word]:
    """Runs of `width` words that lie `stride` apart in the tensor, the first at `first`."""
    sum_0, sum_1 = uint64(0), uint64(0)
    for at in range(0, words.size, width):
        low, high = run(words[at : at + width], uint64(first), seed_0, seed_1, keys_0, keys_1)
        sum_0 += low
        sum_1 += high
        first += stride
    return sum_0, sum_1
