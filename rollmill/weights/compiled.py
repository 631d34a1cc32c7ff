"""Whether loops are compiled here (numba) or run as numpy; both give the same bytes."""

from __future__ import annotations

import functools
import importlib.util
import os


@functools.cache
def has_numba() -> bool:
    """True when numba can be imported and ROLLMILL_NUMBA is not 0."""
    return os.environ.get("ROLLMILL_NUMBA", "1") != "0" and importlib.util.find_spec("numba") is not None
