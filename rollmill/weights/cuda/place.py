"""Where the words of live CUDA tensors lie in memory and in their global tensors, as tables for kernels; launches nothing.

A box is `rows` runs of `width` words, `stride` apart in the global tensor and `memory_stride` apart in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rollmill.weights.bits import dtype_name
from rollmill.weights.proof import COLS, GOLDEN, KEYS, MASK, mix, seeds_of, words_per_element
from rollmill.weights.schema import TensorSpec
from rollmill.weights.shard import Held, whole

# Kernels divide by a width in 32 bits.
MAX_RUN = 1 << 31


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """A live tensor and the part of a global tensor that it holds."""

    held: Held
    tensor: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Box:
    """A piece in words of at most 32 bits, or in elements; one row when it is contiguous both in memory and in the global tensor."""

    address: int
    rows: int
    width: int
    memory_stride: int
    start: int
    stride: int
    unit_bytes: int

    @property
    def count(self) -> int:
        return self.rows * self.width


def pieces_of(tensors: Mapping[str, torch.Tensor], held: Mapping[str, Held] | None = None) -> list[Piece]:
    """Live tensors by name; each is a whole tensor unless `held` says which part it is."""
    pieces = []
    for name, tensor in tensors.items():
        spec = TensorSpec(name=name, dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape))
        pieces.append(Piece(held=whole(spec) if held is None else held[name], tensor=tensor))
    return pieces


def box_of(piece: Piece, *, in_words: bool) -> Box:
    """In words of the fingerprint, or in elements as patches count them."""
    tensor, spec, cell = piece.tensor, piece.held.spec, piece.held.region
    item = spec.item_bytes
    if tensor.element_size() != item or tensor.numel() != cell.num_elements:
        raise ValueError(
            f"{spec.name}: a live tensor of {tensor.numel()} elements of {tensor.element_size()} bytes cannot hold "
            f"{cell.num_elements} of {spec.dtype}; say which part of the tensor it holds"
        )
    run, memory_stride = _runs(spec.name, tensor)
    if cell.is_contiguous:
        width, stride = run, run
    else:
        width, stride = cell.width, cell.stride
        if run == tensor.numel():
            memory_stride = width
        elif run != width:
            raise ValueError(f"{spec.name}: rows of {run} in memory against {width} in the shard; make the live tensor contiguous")
    # A patch counts 16-byte elements in halves, as the chunk format does.
    per = words_per_element(item) if in_words else max(1, item // 8)
    rows = cell.num_elements // width if width else 0
    return Box(
        address=tensor.data_ptr(),
        rows=rows,
        width=width * per,
        memory_stride=memory_stride * per,
        start=cell.start * per,
        stride=stride * per,
        unit_bytes=item // per,
    )


def _runs(name: str, tensor: torch.Tensor) -> tuple[int, int]:
    """(elements that lie together, elements from one such run to the next)."""
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        raise ValueError(f"{name}: only plain strided tensors can be served in place; resolve views and sparse layouts first")
    merged: list[tuple[int, int]] = []
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    if tensor.numel() < 2 or not merged:
        return tensor.numel(), tensor.numel()
    if merged[-1][1] != 1 or len(merged) > 2:
        raise ValueError(f"{name}: strides {tensor.stride()} are no rows of words; make the live tensor contiguous")
    return merged[-1][0], merged[0][1] if len(merged) == 2 else merged[-1][0]


class Keys:
    """The row keys A of a set of pieces, 16 bytes for 4096 words, and the column keys B, on the device.

    Kept rather than computed where they are used: a key costs a thread as many instructions as the words of a row.
    """

    def __init__(self, pieces: Sequence[Piece], device: torch.device) -> None:
        self.offsets: list[int] = []
        """Per piece: the place in `rows` of the key of global row 0, which itself may lie before the table."""
        parts, filled = [], 0
        for piece in pieces:
            spec, cell = piece.held.spec, piece.held.region
            seeds, per = seeds_of(spec.name, spec.dtype, spec.shape), words_per_element(spec.item_bytes)
            first = cell.start * per // COLS
            end = (cell.start + (cell.rows - 1) * cell.stride + cell.width) * per if cell.num_elements else first * COLS
            count = -(-end // COLS) - first
            row = torch.arange(first, first + count, dtype=torch.int64, device=device)
            parts.append(torch.stack([_row_keys(row, seed) for seed in seeds], dim=1))
            self.offsets.append(filled - first)
            filled += count
        self.rows = torch.cat(parts) if parts else torch.empty(0, 2, dtype=torch.int64, device=device)
        """int64[rows, 2], as bits."""
        columns = np.array([[(mix(key + col * GOLDEN) >> 32) | 1 for col in range(COLS)] for key in KEYS], np.uint32)
        self.columns = torch.from_numpy(columns.view(np.int32)).to(device)
        """int32[2, 4096], as bits."""


def _row_keys(row: torch.Tensor, seed: int) -> torch.Tensor:
    # int64 wraps like uint64; only the shifts need the sign bits masked off.
    x = row * _signed(GOLDEN) + _signed(seed)
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return (x ^ _shifted(x, 31)) | 1


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    value &= MASK
    return value - (1 << 64) if value >> 63 else value
