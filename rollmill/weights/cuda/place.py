"""Where the words of live CUDA tensors lie in memory and in their global tensors, as tables for kernels; launches nothing.

A box is `rows` runs of `width` words, `stride` apart in the global tensor and `memory_stride` apart in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rollmill.weights.bits import dtype_name
from rollmill.weights.proof import COLS, GOLDEN, KEYS, MASK, Lanes, mix, seeds_of, words_per_element
from rollmill.weights.schema import Cell, item_bytes_of

# Kernels divide by a width in 32 bits.
MAX_RUN = 1 << 31


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """A live tensor and the part of a global tensor that it holds.

    The rank that holds columns 512.. of a [1024, 1024] weight: `Piece(name="w", dtype="bfloat16", shape=(1024, 1024),
    cell=Cell(512, 1024, 512, 1024), tensor=local)`.
    """

    name: str
    dtype: str
    """As in the schema: the torch dtype without its prefix, or `packed_uint4` over bytes."""
    shape: tuple[int, ...]
    """Of the global tensor."""
    cell: Cell
    """In elements of the global tensor."""
    tensor: torch.Tensor

    @property
    def holds_first(self) -> bool:
        """Whether the tensor's base value is counted here, so that the values of all shards add up."""
        return self.cell.start == 0


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


def whole(tensors: Mapping[str, torch.Tensor]) -> list[Piece]:
    """Unsharded tensors as pieces."""
    pieces = []
    for name, tensor in tensors.items():
        count = tensor.numel()
        cell = Cell(0, 1, count, count)
        pieces.append(Piece(name=name, dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape), cell=cell, tensor=tensor))
    return pieces


def box_of(piece: Piece, *, in_words: bool) -> Box:
    """In words of the fingerprint, or in elements as patches count them."""
    tensor, cell = piece.tensor, piece.cell
    item = item_bytes_of(piece.dtype)
    if tensor.element_size() != item or tensor.numel() != cell.num_elements:
        raise ValueError(
            f"{piece.name}: a live tensor of {tensor.numel()} elements of {tensor.element_size()} bytes cannot hold "
            f"{cell.num_elements} of {piece.dtype}; give the cell that this tensor really holds"
        )
    run, memory_stride = _runs(piece.name, tensor)
    if cell.is_contiguous:
        width, stride = run, run
    else:
        width, stride = cell.width, cell.stride
        if run == tensor.numel():
            memory_stride = width
        elif run != width:
            raise ValueError(f"{piece.name}: rows of {run} in memory against {width} in the cell; make the live tensor contiguous")
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
        raise ValueError(f"{name}: strides {tensor.stride()} of {tuple(tensor.shape)} are no rows of words; make the live tensor contiguous")
    return merged[-1][0], merged[0][1] if len(merged) == 2 else merged[-1][0]


class Keys:
    """The row keys A of a set of pieces, 16 bytes for 4096 words, and the column keys B, on the device.

    Kept rather than computed where they are used: a key costs a thread as many instructions as the words of a row.
    """

    def __init__(self, pieces: Sequence[Piece], device: torch.device) -> None:
        self.names = list(dict.fromkeys(piece.name for piece in pieces))
        slots = {name: at for at, name in enumerate(self.names)}
        self.slots = [slots[piece.name] for piece in pieces]
        self.bases: dict[str, Lanes] = dict.fromkeys(self.names, (0, 0))
        self.offsets: list[int] = []
        """Per piece: the place in `rows` of the key of global row 0, which itself may lie before the table."""
        parts, filled = [], 0
        for piece in pieces:
            seeds = seeds_of(piece.name, piece.dtype, piece.shape)
            if piece.holds_first:
                self.bases[piece.name] = (mix(seeds[0]), mix(seeds[1]))
            per, cell = words_per_element(item_bytes_of(piece.dtype)), piece.cell
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
