"""Copies of the weights on their CUDA device, each coded there against the one before it: only the small delta comes to the host.

Buffers are used again, because the tables for coding hold addresses and take longer to make than to use.
"""

from __future__ import annotations

import threading
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
Buffers = dict[str, torch.Tensor]


class CudaPool:
    """The buffers of one schema on one device: at most as many as snapshots live at once, which a publisher keeps to three."""

    def __init__(self, schema: Schema, device: torch.device) -> None:
        self.schema, self.device = schema, device
        self.on_device = tuple(s.name for s in schema.tensors if _is_coded_here(s.dtype) and s.num_elements)
        self.stream = torch.cuda.Stream(device)
        self._free: list[Buffers] = []
        self._encoders: dict[tuple[int, int], CellEncoder] = {}
        self._lock = threading.Lock()

    def take(self, tensors: Mapping[str, torch.Tensor]) -> CudaSnapshot:
        """Copies on the current stream; the caller may go on writing into the tensors in that stream's order."""
        with self._lock:
            buffers = (
                self._free.pop()
                if self._free
                else {name: torch.empty_like(t, memory_format=torch.contiguous_format) for name, t in tensors.items()}
            )
        with torch.no_grad():
            for name, tensor in tensors.items():
                buffers[name].copy_(tensor.detach())
        return CudaSnapshot(self, buffers)

    def give_back(self, buffers: Buffers) -> None:
        with self._lock:
            self._free.append(buffers)

    def encoder(self, old: Buffers, new: Buffers) -> CellEncoder:
        """Of two sets of buffers, whose addresses never change."""
        key = (id(old), id(new))
        if key not in self._encoders:
            held = all_of(self.schema)
            self._encoders[key] = CellEncoder(
                {name: old[name] for name in self.on_device},
                {name: new[name] for name in self.on_device},
                held={name: held[name] for name in self.on_device},
                chunk_elements=self.schema.chunk_elements,
            )
        return self._encoders[key]


class CudaSnapshot:
    """One version's weights. Tensors of 8 and 16 bits are coded on the device, the few others on the host."""

    def __init__(self, pool: CudaPool, buffers: Buffers) -> None:
        self._pool, self.tensors = pool, buffers
        self._copied = torch.cuda.Event()
        self._copied.record(torch.cuda.current_stream(pool.device))

    @property
    def schema(self) -> Schema:
        return self._pool.schema

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

    def release(self) -> None:
        self._pool.give_back(self.tensors)

    def _coded(self, old: CudaSnapshot) -> Iterator[Done]:
        pool = self._pool
        payloads: dict[tuple[str, int], tuple[bytes | memoryview, int]] = {}
        sums = {}
        if pool.on_device:
            # Beside the trainer's kernels, on a stream of its own.
            pool.stream.wait_event(self._copied)
            with torch.cuda.device(pool.device), torch.cuda.stream(pool.stream):
                encoder = pool.encoder(old.tensors, self.tensors)
                payloads = {(c.name, c.cell.start): (c.payload, c.num_changed) for c in encoder.encode()}
                sums = {(name, cell.start): lanes for name, cell, lanes in encoder.lanes()}
        held = all_of(self.schema)
        others = {n: (host_bytes(self.tensors[n]), host_bytes(old.tensors[n])) for n in held if n not in pool.on_device}
        for work in works_of(self.schema, held):
            if work.name in others:
                yield code_cell(work, *others[work.name])
                continue
            at = (work.name, work.cell.start)
            coded = None
            if at in payloads:
                payload, num_changed = payloads[at]
                if len(payload) > _DELTA_IS_GOOD * work.cell.num_elements * work.item_bytes:
                    payload = self._on_host(work, old)
                coded = Coded(work.tensor, work.place, payload, num_changed, sums[at][0])
            yield work.name, work.cell.num_elements, sums[at], coded

    def _on_host(self, work: Work, old: CudaSnapshot) -> bytes:
        new_bytes, old_bytes = (cell_bytes(host_bytes(side.tensors[work.name]), work.local, work.item_bytes) for side in (self, old))
        return chunk.encode(new_bytes, old_bytes, work.dtype).data


def _is_coded_here(dtype: str) -> bool:
    elements = elements_of(dtype)
    return elements.has_cgr and elements.bits != 4
