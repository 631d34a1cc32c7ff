"""The weight store on a CUDA device: fingerprint, patch, decode and encode of live weights where they lie, with no copy on the host.

It needs a CUDA device and Triton, which comes with torch's CUDA builds; nothing of it is loaded before it is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollmill.weights.cuda.cells import CellEncoder
    from rollmill.weights.cuda.fingerprint import FingerprintPlan, fingerprint_tensors
    from rollmill.weights.cuda.live import CudaWeights
    from rollmill.weights.cuda.patch import StagedPatch

_HOME = {
    "CudaWeights": "live",
    "FingerprintPlan": "fingerprint",
    "StagedPatch": "patch",
    "CellEncoder": "cells",
    "fingerprint_tensors": "fingerprint",
}
__all__ = ["CellEncoder", "CudaWeights", "FingerprintPlan", "StagedPatch", "fingerprint_tensors"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
