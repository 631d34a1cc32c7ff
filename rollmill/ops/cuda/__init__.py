"""The exact profile on a CUDA device; needs Triton, part of torch's CUDA builds, and loads nothing of it before it is asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollmill.ops.cuda.ops import CudaOps
    from rollmill.ops.cuda.pages import CudaPages

_HOME = {"CudaOps": "ops", "CudaPages": "pages"}
__all__ = ["CudaOps", "CudaPages"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
