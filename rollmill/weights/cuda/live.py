"""The live weights of one CUDA device: patches are swapped into them in place and their fingerprint is read off them; knows no store.

Pointers never change, so graphs that were captured over the weights stay valid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from rollmill.weights import chunk
from rollmill.weights.bits import host_bytes
from rollmill.weights.chunk import Codec, elements_of
from rollmill.weights.cuda.cells import chunks_of, joined, local_cell
from rollmill.weights.cuda.classes import Chunks
from rollmill.weights.cuda.decode import decode_chunks
from rollmill.weights.cuda.fingerprint import FingerprintPlan
from rollmill.weights.cuda.patch import Changes, StagedPatch, Upload, compile_swap, stage, swap
from rollmill.weights.cuda.place import Keys, box_of, pieces_of
from rollmill.weights.encode import cell_bytes
from rollmill.weights.live import CodedCell, TensorPatch
from rollmill.weights.proof import Lanes
from rollmill.weights.schema import Cell, positions_in_tensor
from rollmill.weights.shard import Held

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class CudaWeights:
    """Live tensors by name, as `LiveWeights` wants them.

    stage(patches) or stage_cells(cells) -> [pause] -> apply(staged) -> lanes() as published? -> [resume] : revert(staged) -> [resume]
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], held: Mapping[str, Held] | None = None) -> None:
        if not tensors:
            raise ValueError("no live tensors were given; pass the parameters that the engine serves")
        devices = {tensor.device for tensor in tensors.values()}
        if len(devices) != 1:
            raise ValueError(f"live tensors lie on {sorted(map(str, devices))}; make one CudaWeights per device")
        (self.device,) = devices
        self.tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        pieces = pieces_of(self.tensors, held)
        self.keys = Keys(pieces, self.device)
        self._held = {piece.held.spec.name: piece.held for piece in pieces}
        elements = {name: elements_of(part.spec.dtype) for name, part in self._held.items()}
        self._on_device = {name: one.dtype for name, one in elements.items() if one.has_cgr and one.bits != 4}
        self._slots = {name: at for at, name in enumerate(self._held)}
        self._boxes = [box_of(piece, in_words=False) for piece in pieces]
        self._plan = FingerprintPlan(pieces, self.device, keys=self.keys)
        self._tracked = torch.zeros_like(self._plan.sums)
        self._is_tracked = False
        self._upload = Upload(self.device)
        self._rows: dict[tuple[str, Cell], int] = {}
        self._chunks = Chunks(num_codes=np.empty(0, np.int64), segments=np.empty((0, 7), np.int64))
        with torch.cuda.device(self.device):
            self._track()

    def held(self) -> Mapping[str, Held]:
        return self._held

    def read(self, name: str) -> np.ndarray:
        """A copy on the host; the CUDA path itself needs none."""
        return host_bytes(self.tensors[name])

    def load(self, name: str, data: np.ndarray) -> None:
        """Replace a tensor's bytes; only while nothing is served."""
        tensor = self.tensors[name]
        target = torch.view_as_real(tensor) if tensor.element_size() == 16 else tensor
        # As integers: a copy of floats may rewrite a payload.
        integers = target.view(_INTEGER[target.element_size()])
        integers.copy_(torch.from_numpy(np.array(data)).view(integers.dtype).view(integers.shape))
        self._is_tracked = False

    def stage(self, patches: Sequence[TensorPatch]) -> StagedPatch:
        """Brings patches to the device on a side stream; the weights are not touched and the engine need not pause."""
        return self._staged([], patches)

    def stage_cells(self, cells: Sequence[CodedCell]) -> StagedPatch:
        """Decodes one delta's cells against the live weights, on the device; raises `CorruptSnapshot` before anything can be applied.

        Cells that are not CGR of 8 or 16 bits are decoded on the host, for which their old bytes are fetched.
        """
        groups: dict[str, list[CodedCell]] = {}
        others: dict[str, list[CodedCell]] = {}
        for coded in cells:
            self._known(coded.name)
            dtype = self._on_device.get(coded.name)
            if dtype is not None and len(coded.payload) and coded.payload[0] == Codec.CGR:
                groups.setdefault(dtype, []).append(coded)
            else:
                others.setdefault(coded.name, []).append(coded)
        stream = self._upload.stream
        # Beside the engine, but after the last swap: what is decoded is decoded against the weights as they are now.
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            changes = [self._decode(dtype, group) for dtype, group in groups.items()]
        return self._staged(changes, [self._on_host(name, coded) for name, coded in others.items()])

    def apply(self, staged: StagedPatch) -> None:
        """Swaps the changes in, on the current stream; returns before the device has finished. Twice is once."""
        if not staged.applied:
            self._swap(staged)

    def revert(self, staged: StagedPatch) -> None:
        """Puts every replaced code back; nothing to do when the patch is not applied."""
        if staged.applied:
            self._swap(staged)

    def lanes(self) -> dict[str, Lanes]:
        """The held part of every tensor's fingerprint, recomputed from the live memory in one pass."""
        with torch.cuda.device(self.device):
            self._plan.launch()
            return dict(zip(self._held, self._plan.read(), strict=True))

    def tracked_lanes(self) -> dict[str, Lanes]:
        """What `lanes` must be after the swaps so far, from the changes alone: O(changes). Equal unless memory was damaged."""
        with torch.cuda.device(self.device):
            self._track()
            return dict(zip(self._held, self._plan.read(self._tracked), strict=True))

    def _decode(self, dtype: str, cells: Sequence[CodedCell]) -> Changes:
        bodies = [memoryview(coded.payload)[1:] for coded in cells]
        new = {(coded.name, coded.cell) for coded in cells} - self._rows.keys()
        for name in {name for name, _ in new}:
            self._remember(name, [cell for other, cell in new if other == name])
        rows = [self._rows[coded.name, coded.cell] for coded in cells]
        return decode_chunks(bodies, self._chunks.take(np.array(rows)), elements_of(dtype), self.device)

    def _remember(self, name: str, cells: list[Cell]) -> None:
        """Cells come back with every delta; where they lie is worked out once."""
        slot = self._slots[name]
        first = len(self._rows)
        found = chunks_of(self._boxes[slot], self._held[name], cells, key=self.keys.offsets[slot], slot=slot)
        self._rows.update(((name, cell), first + at) for at, cell in enumerate(cells))
        self._chunks = joined([self._chunks, found])

    def _swap(self, staged: StagedPatch) -> None:
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(staged.ready)
        with torch.cuda.device(self.device):
            self._track()
            for changes in staged.changes:
                for used in (changes.segments, changes.tiles, changes.positions, changes.codes):
                    used.record_stream(stream)
                swap(changes, self.keys, self._tracked)
        staged.applied = not staged.applied

    def _track(self) -> None:
        """The sums that swaps bring along begin with one full pass over what was loaded."""
        if not self._is_tracked:
            self._plan.launch()
            self._tracked.copy_(self._plan.sums)
            self._is_tracked = True

    def _staged(self, changes: list[Changes], patches: Sequence[TensorPatch]) -> StagedPatch:
        rows = []
        for patch in patches:
            slot = self._known(patch.held.spec.name)
            rows.append((patch, self._boxes[slot], self.keys.offsets[slot], slot))
        if len({slot for _, _, _, slot in rows}) != len(rows):
            raise ValueError("two patches are for the same tensor; merge them, so that positions are unique")
        with torch.cuda.device(self.device):
            changes = changes + stage(rows, self._upload)
            for part in changes:
                compile_swap(part, self.keys, self._tracked)
            self._track()
        staged = StagedPatch(changes=changes, ready=self._upload.event(), keep=self._upload.pinned)
        self._upload.pinned = []
        return staged

    def _known(self, name: str) -> int:
        if name not in self._slots:
            raise ValueError(f"no live tensor is called {name!r}; known names begin {sorted(self._slots)[:3]}")
        return self._slots[name]

    def _on_host(self, name: str, cells: Sequence[CodedCell]) -> TensorPatch:
        held = self._held[name]
        spec = held.spec
        live, per = self.read(name), max(1, spec.item_bytes // 8)
        positions, codes, before = [], [], []
        for coded in cells:
            local = local_cell(held, coded.cell)
            old = cell_bytes(live, local, spec.item_bytes)
            patch = chunk.decode_patch(coded.payload, num_bytes=old.nbytes, dtype=spec.dtype, old=old)
            inside = patch.positions.astype(np.int64)
            positions.append(positions_in_tensor(local, inside // per) * per + inside % per)
            codes.append(patch.codes)
            before.append(old.view(patch.codes.dtype)[inside])
        where = np.concatenate(positions)
        order = np.argsort(where, kind="stable")
        return TensorPatch(held=held, positions=where[order], codes=np.concatenate(codes)[order], before=np.concatenate(before)[order])
