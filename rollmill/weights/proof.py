"""A commutative fingerprint of live weights, equal for equal values whatever their layout, device, order or sharding.

Two lanes of 64 bits; for word w_i at global row-major index i = 4096 * row + col, all mod 2^64,

    value_l = mix(seed_l) + sum_i A_l[row] * B_l[col] * w_i

with odd pseudo-random keys A (64 bits, per tensor and row) and B (32 bits, fixed). Odd keys make any single change visible; two
changes cancel with odds of about 2^-62. It is a sum: shards add up, and a change adds A * B * (new - old). Not cryptographic.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from blake3 import blake3

from rollmill.weights.compiled import has_numba
from rollmill.weights.schema import Cell, item_bytes_of

if TYPE_CHECKING:
    import torch

Lanes = tuple[int, int]
COLS = 4096
KEYS = (0x243F6A8885A308D3, 0x13198A2E03707344)
GOLDEN = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1
_WORD = {1: np.uint8, 2: np.uint16, 4: np.uint32}
_ROWS_AT_ONCE = 64


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """What a set of weights is, in 128 bits in all and 128 bits per tensor.

    >>> import torch
    >>> fingerprint({"w": torch.zeros(2)}).total == fingerprint({"w": torch.zeros(2, 2)[0]}).total
    True
    """

    total: str
    """32 hex digits: the lane-wise sum of the tensors' values."""
    tensors: dict[str, str]
    """name -> 32 hex digits."""

    def differing(self, other: Fingerprint) -> tuple[str, ...]:
        """Names whose value differs, or that only one side has."""
        names = sorted(self.tensors.keys() | other.tensors.keys())
        return tuple(name for name in names if self.tensors.get(name) != other.tensors.get(name))


def fingerprint(tensors: Mapping[str, torch.Tensor]) -> Fingerprint:
    """Of torch tensors on any device; on CUDA one pass over their memory."""
    on_cuda = {name: tensor for name, tensor in tensors.items() if tensor.is_cuda}
    values: dict[str, str] = {}
    if on_cuda:
        from rollmill.weights.cuda import fingerprint_tensors

        values = {name: to_hex(lanes) for name, lanes in fingerprint_tensors(on_cuda).items()}
    for name in tensors.keys() - on_cuda.keys():
        values[name] = to_hex(_tensor_lanes(name, tensors[name]))
    return combine(values)


def fingerprint_bytes(name: str, dtype: str, shape: tuple[int, ...], data: np.ndarray) -> str:
    """Of a tensor's bytes (uint8, row-major) on the host."""
    seeds = seeds_of(name, dtype, shape)
    return to_hex(add(base_value(seeds), part(words_of(data, item_bytes_of(dtype)), 0, seeds)))


def combine(values: Mapping[str, str]) -> Fingerprint:
    """The fingerprint of a set whose tensors' values are known."""
    total = functools.reduce(add, map(from_hex, values.values()), (0, 0))
    return Fingerprint(total=to_hex(total), tensors=dict(values))


@functools.lru_cache(maxsize=1 << 17)
def seeds_of(name: str, dtype: str, shape: tuple[int, ...]) -> Lanes:
    # The shape belongs to the identity: the same bytes in another shape are other weights.
    digest = blake3(json.dumps([name, dtype, list(shape)], separators=(",", ":")).encode()).digest(length=16)
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def base_value(seeds: Lanes) -> Lanes:
    """The value of a tensor of zeros."""
    return mix(seeds[0]), mix(seeds[1])


def mix(x: int) -> int:
    x &= MASK
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def words_of(data: np.ndarray, item_bytes: int) -> np.ndarray:
    """Bytes (uint8) as the words that are summed: elements of up to 32 bits, wider ones as 32-bit halves, low first."""
    return data.view(_WORD[min(4, max(1, item_bytes))])


def words_per_element(item_bytes: int) -> int:
    return max(1, item_bytes // 4)


def part(words: np.ndarray, first: int, seeds: Lanes) -> Lanes:
    """The sum over a run of words that begins at global index `first`, without the tensor's base value."""
    if not words.size:
        return 0, 0
    compiled = _compiled()
    if compiled is not None:
        low, high = compiled(np.ascontiguousarray(words), np.uint64(first), *_u64(seeds), *_columns())
        return int(low), int(high)
    return _part_numpy(words, first, seeds)


def cell_part(words: np.ndarray, cell: Cell, seeds: Lanes, *, per_element: int = 1) -> Lanes:
    """The sum over a cell whose words (flat, in cell order) are given."""
    if not words.size:
        return 0, 0
    if cell.is_contiguous:
        return part(words, cell.start * per_element, seeds)
    width = cell.width * per_element
    if has_numba():
        from rollmill.weights.proof_kernels import box

        first, stride = np.uint64(cell.start * per_element), np.uint64(cell.stride * per_element)
        low, high = box(np.ascontiguousarray(words), np.int64(width), first, stride, *_u64(seeds), *_columns())
        return int(low), int(high)
    runs = words.reshape(cell.rows, width)
    sums = (part(run, (cell.start + at * cell.stride) * per_element, seeds) for at, run in enumerate(runs))
    return functools.reduce(add, sums, (0, 0))


def change(positions: np.ndarray, old: np.ndarray, new: np.ndarray, seeds: Lanes) -> Lanes:
    """What changing words at these global indices from `old` to `new` adds to the value: O(changes)."""
    if not positions.size:
        return 0, 0
    found = []
    row, col = (positions >> 12).astype(np.uint64), (positions & (COLS - 1)).astype(np.int64)
    with np.errstate(over="ignore"):
        step = new.astype(np.uint64) - old.astype(np.uint64)
        for seed, keys in zip(seeds, _columns(), strict=True):
            found.append(int((_row_keys(row, seed) * keys[col] * step).sum(dtype=np.uint64)))
    return found[0], found[1]


def add(a: Lanes, b: Lanes) -> Lanes:
    return (a[0] + b[0]) & MASK, (a[1] + b[1]) & MASK


def to_hex(lanes: Lanes) -> str:
    return f"{lanes[0]:016x}{lanes[1]:016x}"


def from_hex(text: str) -> Lanes:
    return int(text[:16], 16), int(text[16:], 16)


@functools.cache
def _columns() -> tuple[np.ndarray, np.ndarray]:
    """B, both lanes, as uint64."""
    tables = [np.array([(mix(key + col * GOLDEN) >> 32) | 1 for col in range(COLS)], np.uint64) for key in KEYS]
    return tables[0], tables[1]


def _row_keys(row: np.ndarray, seed: int) -> np.ndarray:
    x = np.uint64(seed) + row * np.uint64(GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) | np.uint64(1)


def _part_numpy(words: np.ndarray, first: int, seeds: Lanes) -> Lanes:
    sums = [0, 0]
    at = 0
    while at < words.size:
        index = first + at
        col = index % COLS
        # A ragged head up to the next row, then whole rows together, then a ragged tail.
        rows = 1 if col or words.size - at < COLS else min(_ROWS_AT_ONCE, (words.size - at) // COLS)
        count = min(COLS - col, words.size - at) if rows == 1 else rows * COLS
        block = words[at : at + count].astype(np.uint64).reshape(rows, -1)
        row = np.arange(index // COLS, index // COLS + rows, dtype=np.uint64)
        with np.errstate(over="ignore"):
            for lane in (0, 1):
                inner = (block * _columns()[lane][col : col + block.shape[1]]).sum(axis=1, dtype=np.uint64)
                sums[lane] += int((inner * _row_keys(row, seeds[lane])).sum(dtype=np.uint64))
        at += count
    return sums[0] & MASK, sums[1] & MASK


def _tensor_lanes(name: str, tensor: torch.Tensor) -> Lanes:
    from rollmill.weights.bits import dtype_name, host_bytes

    seeds = seeds_of(name, dtype_name(tensor.dtype), tuple(tensor.shape))
    return add(base_value(seeds), part(words_of(host_bytes(tensor), tensor.dtype.itemsize), 0, seeds))


def _u64(seeds: Lanes) -> tuple[np.uint64, np.uint64]:
    return np.uint64(seeds[0]), np.uint64(seeds[1])


@functools.cache
def _compiled() -> Callable[..., Any] | None:
    if not has_numba():
        return None
    from rollmill.weights.proof_kernels import run

    return run
