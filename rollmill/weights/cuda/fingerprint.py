"""The fingerprint of many live CUDA tensors, two launches per word width over fixed tables, so that a CUDA graph can hold it.

The definition is that of `rollmill.weights.proof`. Whole rows of 4096 words take the fast kernel, which keeps the column keys in
registers and multiplies by the row key once per thread and row; heads, tails and boxes take the general one, which does so per word.
"""

# Kernel arguments are pointers and numbers on the device; they have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from rollmill.weights.bits import dtype_name, words_of
from rollmill.weights.cuda.place import Box, Keys, Piece, box_of
from rollmill.weights.proof import COLS, MASK, Lanes, add, base_value, seeds_of
from rollmill.weights.schema import TensorSpec
from rollmill.weights.shard import whole

# 64 rows of bf16 are half a megabyte: enough to hide a program's start, few enough that 1 GB still fills every multiprocessor.
_TILE_ROWS = 64
_TILE_WORDS = 1 << 15
_WORD = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32}
_WARPS = 8
# Rows in flight per thread, by word width: the fastest of 1, 2, 4 and 8 on an H200.
_ROWS_AHEAD = {1: 2, 2: 8, 4: 2}


@triton.jit
def _whole_rows(tiles, keys, columns, sums, WORD: tl.constexpr, VECTOR: tl.constexpr, ROWS: tl.constexpr, THREADS: tl.constexpr):
    """Adds a tile of whole rows, 16-byte aligned, to the sums of its tensor."""
    tile = tiles + tl.program_id(0).to(tl.int64) * 4
    address, key, num_rows, slot = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    words = tl.multiple_of(address.to(tl.pointer_type(WORD)), 16)
    GROUPS: tl.constexpr = 4096 // VECTOR
    column = tl.arange(0, GROUPS)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    b0 = tl.load(columns + column).to(tl.uint32, bitcast=True).to(tl.uint64)
    b1 = tl.load(columns + 4096 + column).to(tl.uint32, bitcast=True).to(tl.uint64)
    total0 = tl.zeros((THREADS,), dtype=tl.uint64)
    total1 = tl.zeros((THREADS,), dtype=tl.uint64)
    for first in range(0, num_rows, ROWS):
        for ahead in tl.static_range(ROWS):
            row = first + ahead
            inside = row < num_rows
            a0 = tl.load(keys + (key + row) * 2, mask=inside, other=0).to(tl.uint64, bitcast=True)
            a1 = tl.load(keys + (key + row) * 2 + 1, mask=inside, other=0).to(tl.uint64, bitcast=True)
            word = tl.load(words + row * 4096 + column, mask=inside, other=0).to(tl.uint32).to(tl.uint64)
            # Both sums stay inside a thread: a 32 x 32 bit multiply-add per word and lane, then one multiplication by the row key.
            part0 = tl.sum(tl.reshape(tl.sum(b0 * word, axis=1), (GROUPS // THREADS, THREADS)), axis=0)
            part1 = tl.sum(tl.reshape(tl.sum(b1 * word, axis=1), (GROUPS // THREADS, THREADS)), axis=0)
            total0 += a0 * part0
            total1 += a1 * part1
    tl.atomic_add(sums + slot * 2, tl.sum(total0, axis=0).to(tl.int64, bitcast=True), sem="relaxed")
    tl.atomic_add(sums + slot * 2 + 1, tl.sum(total1, axis=0).to(tl.int64, bitcast=True), sem="relaxed")


@triton.jit
def _any_words(tiles, keys, columns, sums, WORD: tl.constexpr, BLOCK: tl.constexpr):
    """Adds a tile of any box, word by word, to the sums of its tensor."""
    tile = tiles + tl.program_id(0).to(tl.int64) * 9
    words = tl.load(tile).to(tl.pointer_type(WORD))
    memory_stride, width = tl.load(tile + 1), tl.load(tile + 2).to(tl.uint32)
    start, stride, key, slot = tl.load(tile + 3), tl.load(tile + 4), tl.load(tile + 5), tl.load(tile + 6)
    first, count = tl.load(tile + 7), tl.load(tile + 8)
    total0 = tl.zeros((BLOCK,), dtype=tl.uint64)
    total1 = tl.zeros((BLOCK,), dtype=tl.uint64)
    for at in range(0, count, BLOCK):
        lane = at + tl.arange(0, BLOCK)
        inside = lane < count
        position = (first + lane).to(tl.uint32)
        run = position // width
        into = (position - run * width).to(tl.int64)
        word = tl.load(words + run.to(tl.int64) * memory_stride + into, mask=inside, other=0).to(tl.uint32).to(tl.uint64)
        index = start + run.to(tl.int64) * stride + into
        row = keys + (key + (index >> 12)) * 2
        column = columns + (index & 4095)
        b0 = tl.load(column).to(tl.uint32, bitcast=True).to(tl.uint64)
        b1 = tl.load(column + 4096).to(tl.uint32, bitcast=True).to(tl.uint64)
        total0 += tl.load(row, mask=inside, other=0).to(tl.uint64, bitcast=True) * (b0 * word)
        total1 += tl.load(row + 1, mask=inside, other=0).to(tl.uint64, bitcast=True) * (b1 * word)
    tl.atomic_add(sums + slot * 2, tl.sum(total0, axis=0).to(tl.int64, bitcast=True), sem="relaxed")
    tl.atomic_add(sums + slot * 2 + 1, tl.sum(total1, axis=0).to(tl.int64, bitcast=True), sem="relaxed")


class FingerprintPlan:
    """The fingerprint of fixed live tensors: tables made once, then `launch` as often as wanted, then `read`."""

    def __init__(self, pieces: Sequence[Piece], device: torch.device, *, keys: Keys | None = None) -> None:
        self.keys = keys or Keys(pieces, device)
        self.sums = torch.zeros(len(pieces), 2, dtype=torch.int64, device=device)
        """int64[pieces, 2], as bits, without the tensors' base values."""
        whole_rows: dict[int, list[np.ndarray]] = {1: [], 2: [], 4: []}
        any_words: dict[int, list[np.ndarray]] = {1: [], 2: [], 4: []}
        for slot, (piece, key) in enumerate(zip(pieces, self.keys.offsets, strict=True)):
            if not piece.tensor.numel():
                continue
            box = box_of(piece, in_words=True)
            fast, rest = _split(box)
            for part in fast:
                whole_rows[box.unit_bytes].append(_row_tiles(part, key, slot))
            for part in rest:
                any_words[box.unit_bytes].append(_word_tiles(part, key, slot))
        self._whole_rows = {width: _table(parts, device) for width, parts in whole_rows.items() if parts}
        self._any_words = {width: _table(parts, device) for width, parts in any_words.items() if parts}
        self._host = torch.empty(self.sums.shape, dtype=torch.int64, pin_memory=device.type == "cuda")

    def launch(self) -> None:
        """Fills `sums` on the current stream."""
        self.sums.zero_()
        rows, columns = self.keys.rows, self.keys.columns
        for width, tiles in self._whole_rows.items():
            _whole_rows[(len(tiles),)](
                tiles,
                rows,
                columns,
                self.sums,
                WORD=_WORD[width],
                VECTOR=16 // width,
                ROWS=_ROWS_AHEAD[width],
                THREADS=32 * _WARPS,
                num_warps=_WARPS,
            )
        for width, tiles in self._any_words.items():
            _any_words[(len(tiles),)](tiles, rows, columns, self.sums, WORD=_WORD[width], BLOCK=1024, num_warps=_WARPS)

    def read(self, sums: torch.Tensor | None = None) -> list[Lanes]:
        """Per piece, the sums of the last launch (or others over the same pieces) on the host; waits for the current stream."""
        self._host.copy_(self.sums if sums is None else sums, non_blocking=True)
        if self.sums.is_cuda:
            torch.cuda.current_stream(self.sums.device).synchronize()
        return [(low & MASK, high & MASK) for low, high in self._host.tolist()]


def fingerprint_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, Lanes]:
    """The values of whole tensors on CUDA devices; a tensor whose memory has no rows is copied first."""
    found: dict[str, Lanes] = {}
    for device in {tensor.device for tensor in tensors.values()}:
        pieces = [_flat(name, tensor) for name, tensor in tensors.items() if tensor.device == device]
        with torch.cuda.device(device):
            plan = FingerprintPlan(pieces, device)
            plan.launch()
            sums = plan.read()
        for piece, lanes in zip(pieces, sums, strict=True):
            spec = piece.held.spec
            found[spec.name] = add(lanes, base_value(seeds_of(spec.name, spec.dtype, spec.shape)))
    return {name: found[name] for name in tensors}


def _flat(name: str, tensor: torch.Tensor) -> Piece:
    flat = words_of(tensor)
    if tensor.element_size() == 16:
        flat = flat.view(torch.complex128)
    return Piece(held=whole(TensorSpec(name=name, dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape))), tensor=flat)


def _split(box: Box) -> tuple[list[Box], list[Box]]:
    """Whole aligned rows, and everything else."""
    head = -box.start % COLS
    num_rows = max(0, box.width - head) // COLS
    if box.rows != 1 or not num_rows or (box.address + head * box.unit_bytes) % 16:
        return [], [box]
    cuts = (0, head, head + num_rows * COLS, box.width)
    parts = [_run(box, begin, end) for begin, end in itertools.pairwise(cuts)]
    return [parts[1]], [part for part in (parts[0], parts[2]) if part.width]


def _run(box: Box, begin: int, end: int) -> Box:
    width = end - begin
    return Box(
        address=box.address + begin * box.unit_bytes,
        rows=1,
        width=width,
        memory_stride=width,
        start=box.start + begin,
        stride=width,
        unit_bytes=box.unit_bytes,
    )


def _row_tiles(box: Box, key: int, slot: int) -> np.ndarray:
    num_rows = box.width // COLS
    first = np.arange(0, num_rows, _TILE_ROWS)
    table = np.empty((len(first), 4), np.int64)
    table[:, 0] = box.address + first * (COLS * box.unit_bytes)
    table[:, 1] = key + box.start // COLS + first
    table[:, 2] = np.minimum(num_rows - first, _TILE_ROWS)
    table[:, 3] = slot
    return table


def _word_tiles(box: Box, key: int, slot: int) -> np.ndarray:
    at = np.arange(0, box.count, _TILE_WORDS)
    # Origins move with the tile, so that positions inside it fit 32 bits whatever the size of the tensor.
    run, into = (np.zeros_like(at), at) if box.rows == 1 else (at // box.width, at % box.width)
    origin = at if box.rows == 1 else np.zeros_like(at)
    table = np.empty((len(at), 9), np.int64)
    table[:, 0] = box.address + (run * box.memory_stride + origin) * box.unit_bytes
    table[:, 1] = box.memory_stride
    table[:, 2] = min(box.width, (1 << 32) - 1)
    table[:, 3] = box.start + run * box.stride + origin
    table[:, 4] = box.stride
    table[:, 5] = key
    table[:, 6] = slot
    table[:, 7] = into - origin
    table[:, 8] = np.minimum(box.count - at, _TILE_WORDS)
    return table


def _table(parts: Iterable[np.ndarray], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(list(parts))).to(device)
