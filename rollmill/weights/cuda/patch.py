"""Sparse changes staged beside the live weights and swapped with them in place; applying twice restores every bit, and knows no version.

A change is a position and a code. The kernel exchanges codes between the patch and the weights, so a patch that was applied is its own
inverse and needs no second buffer. Positions are unique, which makes the order of the exchange irrelevant.
"""

# Kernel arguments are pointers and numbers on the device; they have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from rollmill.weights.cuda.place import MAX_RUN, Box, Keys
from rollmill.weights.live import TensorPatch

_CODE = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64}
BLOCK = 1024


@dataclass(kw_only=True, eq=False)
class Changes:
    """Changes of elements of one width on the device, ready to be swapped."""

    unit_bytes: int
    segments: torch.Tensor
    """int64[n, 7]: address, memory stride, width, start, stride, key offset, slot."""
    tiles: torch.Tensor
    """int64[n, 3]: segment, first change, number of changes (at most `BLOCK`)."""
    positions: torch.Tensor
    """int32 as bits of uint32, relative to the segment."""
    codes: torch.Tensor
    """The new codes before a swap, the replaced ones after it."""


@dataclass(kw_only=True, eq=False)
class StagedPatch:
    """Changes on the device. `applied` says on which side of the swap the weights are."""

    changes: list[Changes]
    ready: torch.cuda.Event
    """Reached when everything is on the device."""
    keep: list[torch.Tensor]
    """Memory on the host that must live until `ready`."""
    applied: bool = False

    @property
    def num_changes(self) -> int:
        return sum(len(part.positions) for part in self.changes)


@triton.jit
def _swap(segments, tiles, positions, codes, keys, columns, sums, CODE: tl.constexpr, BYTES: tl.constexpr, BLOCK: tl.constexpr):
    """Exchanges one tile's codes with the weights and adds what that changes to the tensor's sums."""
    tile = tiles + tl.program_id(0).to(tl.int64) * 3
    segment = segments + tl.load(tile) * 7
    first, count = tl.load(tile + 1), tl.load(tile + 2)
    memory_stride, width = tl.load(segment + 1), tl.load(segment + 2).to(tl.uint32)
    start, stride, key, slot = tl.load(segment + 3), tl.load(segment + 4), tl.load(segment + 5), tl.load(segment + 6)
    lane = tl.arange(0, BLOCK)
    inside = lane < count
    position = tl.load(positions + first + lane, mask=inside, other=0).to(tl.uint32, bitcast=True)
    run = position // width
    into = (position - run * width).to(tl.int64)
    live = tl.load(segment).to(tl.pointer_type(CODE)) + (run.to(tl.int64) * memory_stride + into)
    staged = codes + first + lane
    old = tl.load(live, mask=inside, other=0)
    new = tl.load(staged, mask=inside, other=0).to(CODE, bitcast=True)
    tl.store(live, new, mask=inside)
    tl.store(staged, old.to(codes.dtype.element_ty, bitcast=True), mask=inside)
    index = start + run.to(tl.int64) * stride + into
    total0 = tl.zeros((BLOCK,), dtype=tl.uint64)
    total1 = tl.zeros((BLOCK,), dtype=tl.uint64)
    WORDS: tl.constexpr = 2 if BYTES == 8 else 1
    for half in tl.static_range(WORDS):
        word = index * WORDS + half
        if WORDS == 2:
            step = ((new >> (32 * half)) & 0xFFFFFFFF) - ((old >> (32 * half)) & 0xFFFFFFFF)
        else:
            step = new.to(tl.uint64) - old.to(tl.uint64)
        row = keys + (key + (word >> 12)) * 2
        column = columns + (word & 4095)
        b0 = tl.load(column).to(tl.uint32, bitcast=True).to(tl.uint64)
        b1 = tl.load(column + 4096).to(tl.uint32, bitcast=True).to(tl.uint64)
        total0 += tl.load(row, mask=inside, other=0).to(tl.uint64, bitcast=True) * (b0 * step)
        total1 += tl.load(row + 1, mask=inside, other=0).to(tl.uint64, bitcast=True) * (b1 * step)
    tl.atomic_add(sums + slot * 2, tl.sum(total0, axis=0).to(tl.int64, bitcast=True), sem="relaxed")
    tl.atomic_add(sums + slot * 2 + 1, tl.sum(total1, axis=0).to(tl.int64, bitcast=True), sem="relaxed")


def swap(changes: Changes, keys: Keys, sums: torch.Tensor) -> None:
    """On the current stream: exchanges the codes and brings `sums`, the fingerprint without base values, along."""
    if len(changes.tiles):
        _swap[(len(changes.tiles),)](*_arguments(changes, keys, sums), **_settings(changes))


def compile_swap(changes: Changes, keys: Keys, sums: torch.Tensor) -> None:
    """Makes the kernel ready, so that no compiler runs while an engine is paused."""
    _swap.warmup(*_arguments(changes, keys, sums), grid=(1,), **_settings(changes))


def _arguments(changes: Changes, keys: Keys, sums: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return changes.segments, changes.tiles, changes.positions, changes.codes, keys.rows, keys.columns, sums


def _settings(changes: Changes) -> dict[str, Any]:
    return {"CODE": _CODE[changes.unit_bytes], "BYTES": changes.unit_bytes, "BLOCK": BLOCK, "num_warps": 4}


def stage(patches: Sequence[tuple[TensorPatch, Box, int, int]], upload: Upload) -> list[Changes]:
    """Patches with the box of their live tensor in elements, its key offset and its slot, brought to the device."""
    found = []
    for unit_bytes in sorted({box.unit_bytes for _, box, _, _ in patches}):
        segments: list[tuple[int, ...]] = []
        counts: list[int] = []
        positions: list[np.ndarray] = []
        codes: list[np.ndarray] = []
        for patch, box, key, slot in patches:
            if box.unit_bytes == unit_bytes and len(patch.positions):
                _check(patch, box)
                for first, end, segment in _segments(patch, box, key, slot):
                    segments.append(segment)
                    counts.append(end - first)
                    positions.append((patch.positions[first:end] - patch.positions.dtype.type(_origin(segment, box))).astype(np.uint32))
                    codes.append(patch.codes[first:end])
        if segments:
            where = np.concatenate(positions).view(np.int32)
            what = np.concatenate(codes).view(f"i{unit_bytes}" if unit_bytes > 1 else "u1")
            found.append(
                Changes(
                    unit_bytes=unit_bytes,
                    segments=upload(np.array(segments, np.int64)),
                    tiles=upload(tiles_of(np.array(counts, np.int64))),
                    positions=upload(where),
                    codes=upload(what),
                )
            )
    return found


def tiles_of(counts: np.ndarray) -> np.ndarray:
    """The tile table of segments with these numbers of changes, one after the other."""
    per_segment = -(-counts // BLOCK)
    segment = np.repeat(np.arange(len(counts)), per_segment)
    into = (np.arange(len(segment)) - np.repeat(np.cumsum(per_segment) - per_segment, per_segment)) * BLOCK
    first = (np.cumsum(counts) - counts)[segment] + into
    return np.stack([segment, first, np.minimum(counts[segment] - into, BLOCK)], axis=1).astype(np.int64)


class Upload:
    """Copies arrays to a device through pinned memory on its own stream; `event` marks the end of what was asked so far."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.pinned: list[torch.Tensor] = []

    def __call__(self, array: np.ndarray) -> torch.Tensor:
        source = torch.from_numpy(np.ascontiguousarray(array)).pin_memory()
        self.pinned.append(source)
        with torch.cuda.stream(self.stream):
            return source.to(self.device, non_blocking=True)

    def event(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self.stream)
        return event


def _origin(segment: tuple[int, ...], box: Box) -> int:
    return (segment[0] - box.address) // box.unit_bytes if box.rows == 1 else 0


def _segments(patch: TensorPatch, box: Box, key: int, slot: int) -> list[tuple[int, int, tuple[int, ...]]]:
    """(first change, end, table row): one segment, but for contiguous tensors whose positions do not fit 32 bits."""
    if box.rows > 1 and box.count > MAX_RUN:
        raise ValueError(
            f"{patch.held.spec.name}: a strided live tensor of {box.count} elements is too large to patch; split it into several pieces"
        )
    step = box.count if box.rows > 1 else MAX_RUN
    found: list[tuple[int, int, tuple[int, ...]]] = []
    for begin in range(0, box.count, step):
        first, end = (int(at) for at in np.searchsorted(patch.positions, [begin, begin + step]))
        if first < end:
            address, start = box.address + begin * box.unit_bytes, box.start + begin
            found.append((first, end, (address, box.memory_stride, min(box.width, MAX_RUN), start, box.stride, key, slot)))
    return found


def _check(patch: TensorPatch, box: Box) -> None:
    positions, codes = patch.positions, patch.codes
    if len(positions) != len(codes) or codes.dtype.kind != "u" or codes.dtype.itemsize != box.unit_bytes:
        raise ValueError(
            f"{patch.held.spec.name}: {len(positions)} positions against {len(codes)} codes of {codes.dtype}; "
            f"give one unsigned code of {box.unit_bytes} bytes per position"
        )
    if positions.dtype.kind not in "ui" or not (positions[1:] > positions[:-1]).all() or positions[0] < 0 or positions[-1] >= box.count:
        raise ValueError(f"{patch.held.spec.name}: positions must ascend strictly from 0 to at most {box.count - 1}")
