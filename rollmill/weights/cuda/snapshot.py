"""A copy of the weights on their CUDA device, coded there against the copy before it: only the small delta comes to the host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch

from rollmill.weights import chunk
from rollmill.weights.bits import host_bytes
from rollmill.weights.chunk import elements_of
from rollmill.weights.cuda.cells import CellEncoder
from rollmill.weights.encode import Done, Part, Work, cell_bytes, code_cell, works_of, write_cells, write_part
from rollmill.weights.manifest import Kind
from rollmill.weights.pack import Coded
from rollmill.weights.schema import Schema
from rollmill.weights.shard import all_of
from rollmill.weights.snapshot import Snapshot
from rollmill.weights.store import WeightStore

# As on the host: above this share of the raw bytes another codec may be smaller, and the host chooses.
_DELTA_IS_GOOD = 0.25


class CudaSnapshot:
    """Clones on the device. Tensors of 8 and 16 bits are coded there, the few others on the host."""

    def __init__(self, schema: Schema, tensors: Mapping[str, torch.Tensor]) -> None:
        self.schema = schema
        self.tensors = {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
        self._device = next(iter(self.tensors.values())).device
        self._copied = torch.cuda.Event()
        self._copied.record(torch.cuda.current_stream(self._device))

    def host_bytes(self) -> Mapping[str, np.ndarray]:
        self._copied.synchronize()
        return {name: host_bytes(tensor) for name, tensor in self.tensors.items()}

    def write(self, store: WeightStore, *, version: int, base: int | None, old: Snapshot | None) -> Part:
        if not isinstance(old, CudaSnapshot):
            return write_part(
                store, self.schema, kind=Kind.FULL if old is None else Kind.DELTA, version=version, base=base,
                held=all_of(self.schema), new=self.host_bytes(), old=None if old is None else old.host_bytes(),
            )  # fmt: skip
        return write_cells(store, self.schema, self._coded(old), kind=Kind.DELTA, version=version, base=base)

    def _coded(self, old: CudaSnapshot) -> Iterator[Done]:
        held = all_of(self.schema)
        on_device = [
            s.name for s in self.schema.tensors if elements_of(s.dtype).has_cgr and elements_of(s.dtype).bits != 4 and s.num_elements
        ]
        found: dict[tuple[str, int], tuple[bytes | memoryview, int]] = {}
        sums = {}
        if on_device:
            # A stream of its own, so that a trainer's kernels and these share the device.
            stream = torch.cuda.Stream(self._device)
            stream.wait_event(self._copied)
            with torch.cuda.device(self._device), torch.cuda.stream(stream):
                encoder = CellEncoder(
                    {name: old.tensors[name] for name in on_device},
                    {name: self.tensors[name] for name in on_device},
                    held={name: held[name] for name in on_device},
                    chunk_elements=self.schema.chunk_elements,
                )
                found = {(c.name, c.cell.start): (c.payload, c.num_changed) for c in encoder.encode()}
                sums = {(name, cell.start): lanes for name, cell, lanes in encoder.lanes()}
        others = {name: (host_bytes(self.tensors[name]), host_bytes(old.tensors[name])) for name in held if name not in on_device}
        for work in works_of(self.schema, held):
            if work.name in others:
                yield code_cell(work, *others[work.name])
                continue
            at = (work.name, work.cell.start)
            coded = None
            if at in found:
                payload, num_changed = found[at]
                if len(payload) > _DELTA_IS_GOOD * work.cell.num_elements * work.item_bytes:
                    payload = self._on_host(work, old)
                coded = Coded(work.tensor, work.place, payload, num_changed, sums[at][0])
            yield work.name, sums[at], coded

    def _on_host(self, work: Work, old: CudaSnapshot) -> bytes:
        new_bytes, old_bytes = (cell_bytes(host_bytes(side.tensors[work.name]), work.local, work.item_bytes) for side in (self, old))
        return chunk.encode(new_bytes, old_bytes, work.dtype).data
