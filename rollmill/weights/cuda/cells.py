"""Cells of tensors on a CUDA device, coded there against their old values; a trainer's side of the delta, no weight leaves the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rollmill.weights.chunk import Codec, elements_of
from rollmill.weights.cuda.classes import LiveChunk
from rollmill.weights.cuda.encode import encode_chunks
from rollmill.weights.cuda.place import Box, box_of, pieces_of
from rollmill.weights.schema import CHUNK_ELEMENTS, Cell
from rollmill.weights.shard import Held


@dataclass(frozen=True, kw_only=True)
class CodedCell:
    """One cell of a delta as it is stored, e.g. 1,048,576 bfloat16 of which 12,000 changed in about 10,600 bytes."""

    name: str
    cell: Cell
    """In the global tensor."""
    payload: bytes | memoryview
    """Codec byte and body, as docs/formats/chunk.md has them."""
    num_changed: int = 0


def encode_cells(
    old: Mapping[str, torch.Tensor],
    new: Mapping[str, torch.Tensor],
    *,
    held: Mapping[str, Held] | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> list[CodedCell]:
    """The CGR payloads of all cells that differ, byte for byte those of the host's encoder. Dtypes of 8 and 16 bits only.

    Where a payload is more than a quarter of the cell, another codec may be smaller; ask `rollmill.weights.chunk.encode` for those.
    """
    olds, news = pieces_of(old, held), pieces_of(new, held)
    groups: dict[str, list[tuple[str, Cell, LiveChunk, LiveChunk]]] = {}
    for before, after in zip(olds, news, strict=True):
        spec = before.held.spec
        elements = elements_of(spec.dtype)
        if before.held != after.held or before.tensor.device != after.tensor.device:
            raise ValueError(f"{spec.name}: old and new differ in dtype, shape or device; a delta is between two states of one tensor")
        if not elements.has_cgr or elements.bits == 4:
            raise ValueError(f"{spec.name}: {spec.dtype} is not coded on the device; code it with rollmill.weights.chunk.encode")
        boxes = box_of(before, in_words=False), box_of(after, in_words=False)
        for cell in spec.cells(chunk_elements):
            if before.held.local(cell) is not None:
                first, second = (live_chunk(box, before.held, cell) for box in boxes)
                groups.setdefault(spec.dtype, []).append((spec.name, cell, first, second))
    found = []
    for dtype, group in groups.items():
        coded = encode_chunks([row[2] for row in group], [row[3] for row in group], elements_of(dtype), olds[0].tensor.device)
        for (name, cell, _, _), (body, num_changed) in zip(group, coded, strict=True):
            if num_changed:
                found.append(CodedCell(name=name, cell=cell, payload=bytes([Codec.CGR]) + body, num_changed=num_changed))
    return found


def local_cell(held: Held, cell: Cell) -> Cell:
    local = held.local(cell)
    if local is None:
        raise ValueError(f"{held.spec.name}: cell {cell} lies outside of what is held here; fetch only the cells of this shard")
    return local


def live_chunk(box: Box, held: Held, cell: Cell, *, key: int = 0, slot: int = 0) -> LiveChunk:
    """Where a cell of the global tensor lies in a live tensor that holds it."""
    local = local_cell(held, cell)
    if box.rows > 1 and box.width != local.stride:
        raise ValueError(
            f"{held.spec.name}: rows of {box.width} in memory against {local.stride} in the shard; make the live tensor contiguous"
        )
    row, col = divmod(local.start, box.width)
    address = box.address + (row * box.memory_stride + col) * box.unit_bytes
    memory_stride = local.stride if box.rows == 1 else box.memory_stride
    is_one_run = cell.is_contiguous and (memory_stride == cell.width or cell.rows == 1)
    width = cell.num_elements if is_one_run else cell.width
    return LiveChunk(num_codes=cell.num_elements, segment=(address, memory_stride, max(1, width), cell.start, cell.stride, key, slot))
