"""Which implementation of the bit coders runs: the compiled one where numba can be had, else the numpy one; both write the same bytes."""

from __future__ import annotations

import functools
import importlib
import logging
from typing import Protocol, cast

import numpy as np

from rollmill.weights.chunk import reference
from rollmill.weights.chunk.elements import Elements, elements_of
from rollmill.weights.compiled import has_numba

log = logging.getLogger("rollmill.weights")


class Backend(Protocol):
    """The five functions of `reference`, whose docstrings are theirs."""

    def encode_cgr(self, new: np.ndarray, old: np.ndarray, elements: Elements) -> tuple[bytes, int]: ...

    def decode_cgr(self, body: bytes | memoryview, old: np.ndarray, elements: Elements) -> tuple[np.ndarray, np.ndarray]: ...

    def apply_cgr(self, body: bytes | memoryview, codes: np.ndarray, elements: Elements) -> int: ...

    def encode_gaps(self, positions: np.ndarray) -> bytes: ...

    def decode_gaps(self, body: bytes | memoryview, num_codes: int) -> tuple[np.ndarray, int]: ...


@functools.cache
def backend() -> Backend:
    """Decided at first use, because importing numba takes half a second that readers of manifests need not pay."""
    if has_numba():
        why = _compiled_fails()
        if not why:
            return cast(Backend, importlib.import_module("rollmill.weights.chunk.compiled"))
        log.warning("weight deltas are coded in numpy, tens of times slower: %s", why)
    return cast(Backend, reference)


def _compiled_fails() -> str:
    """Why the compiled coders cannot be trusted here; empty when they can.

    They lean on what numba and LLVM make of this machine, which may be one that nobody has tried: a sample must come out as in numpy.
    """
    rng = np.random.default_rng(5)
    old = rng.integers(0, 1 << 16, 300, dtype=np.uint16)
    new = np.where(rng.random(300) < 0.2, old + rng.integers(1, 9, 300, dtype=np.uint16), old)
    elements = elements_of("bfloat16")
    body, count = reference.encode_cgr(new, old, elements)
    try:
        compiled = cast(Backend, importlib.import_module("rollmill.weights.chunk.compiled"))
        if compiled.encode_cgr(new, old, elements) != (body, count):
            return "the compiled encoder gives other bytes"
        found, expected = compiled.decode_cgr(body, old, elements), reference.decode_cgr(body, old, elements)
        is_same = all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))
        return "" if is_same else "the compiled decoder gives other values"
    except Exception as error:  # noqa: BLE001 - whatever a foreign compiler raises, numpy does the work and the reason is logged
        return f"numba cannot be used: {error}"
