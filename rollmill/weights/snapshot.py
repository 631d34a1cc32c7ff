"""A private copy of the weights of one version, kept where the weights lie; it codes itself against the copy before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from rollmill.weights.bits import copied_bytes
from rollmill.weights.encode import Part, write_part
from rollmill.weights.manifest import Kind
from rollmill.weights.schema import Schema
from rollmill.weights.shard import all_of
from rollmill.weights.store import WeightStore

if TYPE_CHECKING:
    from rollmill.weights.cuda.snapshot import CudaPool


class Snapshot(Protocol):
    """What a publisher keeps of a version until the next one is out."""

    @property
    def schema(self) -> Schema: ...

    def host_bytes(self) -> Mapping[str, np.ndarray]:
        """name -> the tensor's bytes in host memory."""

    def write(self, store: WeightStore, *, version: int, base: int | None, old: Snapshot | None) -> Part:
        """Put what differs from `old` (everything without it) into the store."""

    def release(self) -> None:
        """Nobody asks this snapshot for anything any more: its memory may hold another."""


class HostSnapshot:
    """Bytes in host memory, coded by the compiled loops."""

    def __init__(self, schema: Schema, data: Mapping[str, np.ndarray]) -> None:
        self.schema, self._data = schema, data

    def host_bytes(self) -> Mapping[str, np.ndarray]:
        return self._data

    def write(self, store: WeightStore, *, version: int, base: int | None, old: Snapshot | None) -> Part:
        return write_part(
            store, self.schema, kind=Kind.FULL if old is None else Kind.DELTA, version=version, base=base,
            held=all_of(self.schema), new=self._data, old=None if old is None else old.host_bytes(),
        )  # fmt: skip

    def release(self) -> None:
        self._data = {}


class SnapshotTaker:
    """Copies weights where they are: on one CUDA device they stay there, else they are brought into host memory."""

    def __init__(self) -> None:
        self._pools: dict[tuple[str, torch.device], CudaPool] = {}

    def take(self, schema: Schema, tensors: Mapping[str, torch.Tensor]) -> Snapshot:
        devices = {tensor.device for tensor in tensors.values()}
        if len(devices) == 1 and (device := devices.pop()).type == "cuda":
            from rollmill.weights.cuda.snapshot import CudaPool

            key = (schema.digest, device)
            if key not in self._pools:
                self._pools = {key: CudaPool(schema, device)}
            return self._pools[key].take(tensors)
        return HostSnapshot(schema, {name: copied_bytes(tensor) for name, tensor in tensors.items()})
