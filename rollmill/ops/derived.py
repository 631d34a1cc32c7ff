"""What is computed from a weight and kept while the weight stays as it is: never stale, without a call site that has to remember.

A weight is known by its tensor object, its memory and the counter that torch raises at every write in place, through whichever view.
Writes that torch does not count (a kernel's own, `.data`, numpy, optimizers with `fused=True`) need `refresh` or
`torch.autograd.graph.increment_version`. Knows nothing of what is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

Tensors = tuple[torch.Tensor, ...]


class _Held(NamedTuple):
    tensors: Tensors
    storage: StorageWeakRef
    """An address can be given out again, a storage watched like this cannot."""
    state: tuple[int, int, torch.Size]


class Derived:
    """Made at the first use. Remade into the same memory, which a captured graph goes on reading."""

    def __init__(self, make: Callable[[torch.Tensor], Tensors]) -> None:
        self._make = make
        self._held: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def of(self, weight: torch.Tensor) -> Tensors:
        if weight.is_inference():
            # Such a tensor counts no writes, so there is no telling whether it changed.
            return self._made(weight)
        held = self._held.get(weight)
        if held is None or held.state != _state(weight) or held.storage != StorageWeakRef(weight.untyped_storage()):
            held = self._renew(weight, held)
        return held.tensors

    def refresh(self) -> None:
        """Trust no counter: remake everything now, since a graph replay would not ask."""
        for weight, held in list(self._held.items()):
            self._renew(weight, held)

    def _renew(self, weight: torch.Tensor, old: _Held | None) -> _Held:
        state = _state(weight)
        tensors = self._made(weight)
        if old is not None and state[2] == old.state[2]:
            with torch.inference_mode(False), torch.no_grad():
                for kept, new in zip(old.tensors, tensors, strict=True):
                    kept.copy_(new)
            tensors = old.tensors
        held = self._held[weight] = _Held(tensors, StorageWeakRef(weight.untyped_storage()), state)
        return held

    def _made(self, weight: torch.Tensor) -> Tensors:
        # Tensors born in inference mode could not be saved for a backward later.
        with torch.inference_mode(False), torch.no_grad():
            return self._make(weight.detach())


def _state(weight: torch.Tensor) -> tuple[int, int, torch.Size]:
    return weight._version, weight.data_ptr(), weight.shape
