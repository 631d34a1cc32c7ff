"""Whether loops are compiled here (numba) or run as numpy; both give the same bytes."""

from __future__ import annotations

import functools
import importlib
import logging
import os

log = logging.getLogger("rollmill.weights")


@functools.cache
def has_numba() -> bool:
    """True when numba can be imported and ROLLMILL_NUMBA is not 0; takes half a second, so ask when a loop is about to run."""
    if os.environ.get("ROLLMILL_NUMBA", "1") == "0":
        return False
    try:
        importlib.import_module("numba")
    except ImportError as error:
        log.warning("weight loops run in numpy, tens of times slower, because numba cannot be imported: %s", error)
        return False
    return True
