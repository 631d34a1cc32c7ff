"""Cells of tensors on a CUDA device, coded there against their old values; a trainer's side of the delta, no weight leaves the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from rollmill.weights.chunk import elements_of
from rollmill.weights.cuda.classes import Chunks
from rollmill.weights.cuda.encode import encode_chunks
from rollmill.weights.cuda.fingerprint import FingerprintPlan
from rollmill.weights.cuda.place import Box, Piece, box_of, pieces_of
from rollmill.weights.live import CodedCell
from rollmill.weights.proof import Lanes
from rollmill.weights.schema import CHUNK_ELEMENTS, Cell
from rollmill.weights.shard import Held


class CellEncoder:
    """Codes what differs between two sets of tensors whose memory stays where it is, e.g. the last published and the live weights."""

    def __init__(
        self,
        old: Mapping[str, torch.Tensor],
        new: Mapping[str, torch.Tensor],
        *,
        held: Mapping[str, Held] | None = None,
        chunk_elements: int = CHUNK_ELEMENTS,
    ) -> None:
        """Dtypes of 8 and 16 bits only."""
        self._keep = (dict(old), dict(new))
        self._cells: dict[str, list[tuple[str, Cell]]] = {}
        rows: dict[str, tuple[list[Chunks], list[Chunks]]] = {}
        parts: list[Piece] = []
        for before, after in zip(pieces_of(old, held), pieces_of(new, held), strict=True):
            spec = before.held.spec
            elements = elements_of(spec.dtype)
            self._device = before.tensor.device
            if before.held != after.held or before.tensor.device != after.tensor.device:
                raise ValueError(f"{spec.name}: old and new differ in dtype, shape or device; a delta is between two states of one tensor")
            if not elements.has_cgr or elements.bits == 4:
                raise ValueError(f"{spec.name}: {spec.dtype} is not coded on the device; code it with rollmill.weights.chunk.encode")
            cells = [cell for cell in spec.cells(chunk_elements) if before.held.local(cell) is not None]
            self._cells.setdefault(spec.dtype, []).extend((spec.name, cell) for cell in cells)
            for side, piece in zip(rows.setdefault(spec.dtype, ([], [])), (before, after), strict=True):
                side.append(chunks_of(box_of(piece, in_words=False), piece.held, cells))
            parts += [_part(after, cell) for cell in cells]
        self._chunks = {dtype: (joined(olds), joined(news)) for dtype, (olds, news) in rows.items()}
        self._parts, self._plan = parts, FingerprintPlan(parts, self._device)

    def encode(self) -> list[CodedCell]:
        """The CGR payloads of all cells that differ now, byte for byte those of the host's encoder.

        Where a payload is more than a quarter of the cell, another codec may be smaller; ask `rollmill.weights.chunk.encode` for those.
        """
        found = []
        for dtype, (old, new) in self._chunks.items():
            with torch.cuda.device(self._device):
                coded = encode_chunks(old, new, elements_of(dtype), self._device)
            for (name, cell), (payload, num_changed) in zip(self._cells[dtype], coded, strict=True):
                if num_changed:
                    found.append(CodedCell(name=name, cell=cell, payload=payload, num_changed=num_changed))
        return found

    def lanes(self) -> list[tuple[str, Cell, Lanes]]:
        """What every cell of the new tensors, changed or not, adds to the fingerprint of its tensor."""
        with torch.cuda.device(self._device):
            self._plan.launch()
        cells = ((piece.held.spec.name, piece.held.region) for piece in self._parts)
        return [(name, cell, lanes) for (name, cell), lanes in zip(cells, self._plan.read(), strict=True)]


def _part(piece: Piece, cell: Cell) -> Piece:
    """A cell of a live tensor as a piece of its own."""
    local, tensor = local_cell(piece.held, cell), piece.tensor
    if not tensor.is_contiguous():
        raise ValueError(f"{piece.held.spec.name}: only contiguous tensors are coded on the device; make it contiguous")
    offset = tensor.storage_offset() + local.start
    view = tensor.as_strided((cell.rows, cell.width), (local.stride, 1), offset)
    return Piece(held=Held(spec=piece.held.spec, region=cell), tensor=view)


def local_cell(held: Held, cell: Cell) -> Cell:
    local = held.local(cell)
    if local is None:
        raise ValueError(f"{held.spec.name}: cell {cell} lies outside of what is held here; fetch only the cells of this shard")
    return local


def chunks_of(box: Box, held: Held, cells: Sequence[Cell], *, key: int = 0, slot: int = 0) -> Chunks:
    """Where cells of the global tensor lie in a live tensor that holds them."""
    segments = np.empty((len(cells), 7), np.int64)
    for at, cell in enumerate(cells):
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
        segments[at] = (address, memory_stride, width, cell.start, cell.stride, key, slot)
    return Chunks(num_codes=np.array([cell.num_elements for cell in cells], np.int64), segments=segments)


def joined(parts: Sequence[Chunks]) -> Chunks:
    return Chunks(num_codes=np.concatenate([part.num_codes for part in parts]), segments=np.concatenate([part.segments for part in parts]))
