"""The weights a replica really runs, as the follower sees them: readable, patched in place, reversible, and provable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from rollmill.weights.proof import Lanes, change
from rollmill.weights.schema import Cell, positions_in_tensor
from rollmill.weights.shard import Held

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class TensorPatch:
    """The elements of one tensor's held box that change. Absolute values, so applying it twice is applying it once."""

    held: Held
    positions: np.ndarray
    """int64, ascending, in elements of the box; 16-byte elements count as two of 8."""
    codes: np.ndarray
    """Unsigned integers of the element's width."""
    before: np.ndarray
    """What stands there now."""

    def lanes(self, seeds: Lanes) -> Lanes:
        """What the patch adds to the tensor's fingerprint."""
        size, region = self.codes.itemsize, self.held.region
        per_element = max(1, self.held.spec.item_bytes // 8)
        at = self.positions
        if not region.is_contiguous:
            at = positions_in_tensor(region, at // per_element) * per_element + at % per_element
        else:
            at = at + region.start * per_element
        if size < 8:
            return change(at, self.before, self.codes, seeds)
        halves = np.stack([2 * at, 2 * at + 1], axis=1).reshape(-1)
        return change(halves, self.before.view(np.uint32), self.codes.view(np.uint32), seeds)


class LiveWeights(Protocol):
    """What a replica must offer. `read`, `load` and `stage` run beside serving; `apply`, `revert` and `lanes` inside the pause."""

    def held(self) -> Mapping[str, Held]:
        """What of each tensor is here, in global coordinates."""

    def read(self, name: str) -> np.ndarray:
        """The bytes of a tensor's held box (uint8) as they are served; may share memory, nobody writes into it."""

    def load(self, name: str, data: np.ndarray) -> None:
        """Replace a tensor's held box; only while nothing is served."""

    def stage(self, patches: Sequence[TensorPatch]) -> Any:
        """Bring patches to where the weights live."""

    def apply(self, staged: Any) -> None:
        """Write the staged values in place; pointers stay."""

    def revert(self, staged: Any) -> None:
        """Put back what `apply` replaced."""

    def lanes(self) -> dict[str, Lanes]:
        """The held part of every tensor's fingerprint, recomputed from the live memory."""


@dataclass(frozen=True, kw_only=True)
class CodedCell:
    """One cell of a delta as it is stored, e.g. 1,048,576 bfloat16 of which 12,000 changed in about 10,600 bytes."""

    name: str
    cell: Cell
    """In the global tensor."""
    payload: bytes | memoryview
    """Codec byte and body, as docs/formats/chunk.md has them."""
    num_changed: int = 0


@runtime_checkable
class CellStager(LiveWeights, Protocol):
    """Live weights that decode a delta where they lie."""

    def stage_cells(self, cells: Sequence[CodedCell]) -> Any:
        """As `stage`, from coded cells of one delta on the live weights; raises CorruptSnapshot when they do not fit, touching nothing."""


class HostWeights:
    """Live weights in host memory: plain torch tensors in the serving dtype, patched in place."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], held: Mapping[str, Held] | None = None) -> None:
        from rollmill.weights.bits import dtype_name, host_bytes
        from rollmill.weights.schema import TensorSpec
        from rollmill.weights.shard import check_sizes, whole

        for name, tensor in tensors.items():
            # A conjugated or negated view is read through a copy, and a patch of the copy would be proved and never served.
            if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
                raise ValueError(f"{name} must be a contiguous plain tensor in host memory, to be patched in place")
        self.tensors = dict(tensors)
        self._held = held or {
            name: whole(TensorSpec(name=name, dtype=dtype_name(t.dtype), shape=tuple(t.shape))) for name, t in tensors.items()
        }
        self._bytes = {name: host_bytes(tensor.detach()) for name, tensor in tensors.items()}
        check_sizes(self._held, self._bytes)

    def held(self) -> Mapping[str, Held]:
        return self._held

    def read(self, name: str) -> np.ndarray:
        return self._bytes[name]

    def load(self, name: str, data: np.ndarray) -> None:
        self._bytes[name][:] = data

    def stage(self, patches: Sequence[TensorPatch]) -> list[TensorPatch]:
        return list(patches)

    def apply(self, staged: Sequence[TensorPatch]) -> None:
        for patch in staged:
            self._bytes[patch.held.spec.name].view(patch.codes.dtype)[patch.positions] = patch.codes

    def revert(self, staged: Sequence[TensorPatch]) -> None:
        for patch in staged:
            self._bytes[patch.held.spec.name].view(patch.before.dtype)[patch.positions] = patch.before

    def lanes(self) -> dict[str, Lanes]:
        return {name: part.lanes(self._bytes[name]) for name, part in self._held.items()}
