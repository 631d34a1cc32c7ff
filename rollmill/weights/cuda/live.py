"""The live weights of one CUDA device: patches are swapped into them in place and their fingerprint is read off them; knows no store.

Pointers never change, so graphs that were captured over the weights stay valid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from rollmill.weights.cuda.fingerprint import FingerprintPlan
from rollmill.weights.cuda.patch import SparsePatch, StagedPatch, Upload, stage, swap
from rollmill.weights.cuda.place import Keys, Piece, box_of, whole
from rollmill.weights.proof import Lanes


class CudaWeights:
    """Live tensors by name.

    stage(patches) -> [pause the engine] -> apply(staged) -> fingerprint() as published? -> [resume] : revert(staged) -> [resume]
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor] | Sequence[Piece]) -> None:
        self.pieces = whole(tensors) if isinstance(tensors, Mapping) else list(tensors)
        if not self.pieces:
            raise ValueError("no live tensors were given; pass the parameters that the engine serves")
        devices = {piece.tensor.device for piece in self.pieces}
        if len(devices) != 1:
            raise ValueError(f"live tensors lie on {sorted(map(str, devices))}; make one CudaWeights per device")
        (self.device,) = devices
        self.keys = Keys(self.pieces, self.device)
        self._by_name = {piece.name: at for at, piece in enumerate(self.pieces)}
        if len(self._by_name) != len(self.pieces):
            raise ValueError("two live tensors have the same name; give each tensor its own")
        self._boxes = [box_of(piece, in_words=False) for piece in self.pieces]
        self._plan = FingerprintPlan(self.pieces, self.device, keys=self.keys)
        self._plan.launch()
        self._tracked = self._plan.sums.clone()
        self._upload = Upload(self.device)

    def stage(self, patches: Sequence[SparsePatch]) -> StagedPatch:
        """Brings patches to the device on a side stream; the weights are not touched and the engine need not pause."""
        unknown = [patch.name for patch in patches if patch.name not in self._by_name]
        if unknown:
            raise ValueError(f"no live tensor is called {unknown[0]!r}; known names begin {sorted(self._by_name)[:3]}")
        if len({patch.name for patch in patches}) != len(patches):
            raise ValueError("two patches are for the same tensor; merge them, so that positions are unique")
        rows = []
        for patch in patches:
            at = self._by_name[patch.name]
            rows.append((patch, self._boxes[at], self.keys.offsets[at], self.keys.slots[at]))
        changes = stage(rows, self._upload)
        staged = StagedPatch(changes=changes, ready=self._upload.event(), keep=self._upload.pinned)
        self._upload.pinned = []
        return staged

    def apply(self, staged: StagedPatch) -> None:
        """Swaps the changes in, on the current stream; returns before the device has finished."""
        if staged.applied:
            raise ValueError("this patch is applied already; revert it first")
        self._swap(staged)

    def revert(self, staged: StagedPatch) -> None:
        """Puts every replaced code back."""
        if not staged.applied:
            raise ValueError("this patch is not applied; nothing to revert")
        self._swap(staged)

    def fingerprint(self) -> dict[str, Lanes]:
        """Recomputed over the live memory: one pass. Shards of a tensor add up lane by lane, mod 2^64."""
        self._plan.launch()
        return self._plan.read()

    def tracked_fingerprint(self) -> dict[str, Lanes]:
        """What the fingerprint must be after the swaps so far, from the changes alone: O(changes). Equal unless memory was damaged."""
        return self._plan.read(self._tracked)

    def _swap(self, staged: StagedPatch) -> None:
        if staged.ready is not None:
            staged.ready.wait()
        for changes in staged.changes:
            swap(changes, self.keys, self._tracked)
        staged.applied = not staged.applied
