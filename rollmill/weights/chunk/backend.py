"""Which implementation of the bit coders runs: the compiled one where numba can be had, else the numpy one; both write the same bytes."""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Protocol, cast

import numpy as np

from rollmill.weights.chunk.elements import Elements


class Backend(Protocol):
    """The four functions of `reference`, whose docstrings are theirs."""

    def encode_cgr(self, new: np.ndarray, old: np.ndarray, elements: Elements) -> tuple[bytes, int]: ...

    def decode_cgr(self, body: bytes | memoryview, old: np.ndarray, elements: Elements) -> tuple[np.ndarray, np.ndarray]: ...

    def encode_gaps(self, positions: np.ndarray) -> bytes: ...

    def decode_gaps(self, body: bytes | memoryview, num_codes: int) -> tuple[np.ndarray, int]: ...


@functools.cache
def backend() -> Backend:
    """Decided at first use, because importing numba takes half a second that readers of manifests need not pay."""
    if os.environ.get("ROLLMILL_NUMBA", "1") != "0" and importlib.util.find_spec("numba") is not None:
        from rollmill.weights.chunk import compiled

        return cast(Backend, compiled)
    from rollmill.weights.chunk import reference

    return cast(Backend, reference)
