"""The rate of this machine's time-stamp counter, measured: an emulated guest that must find it out by itself hangs when the host is busy.

QEMU without hardware help passes the host's counter through to the guest. The guest's kernel calibrates it against a timer that QEMU
emulates, gives up when the two readings of a loop lie more than tenfold apart, and then waits for a clock that never comes.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import time
from collections.abc import Callable
from functools import lru_cache

_READ_COUNTER = bytes.fromhex("0f31 48c1e220 4809d0 c3")
"""rdtsc; shl rdx, 32; or rax, rdx; ret."""
_SPAN_S = 0.02
_NUM_TRIES = 7
"""The reading with the least time around it counts: the others were interrupted."""


@lru_cache(maxsize=1)
def counter_khz() -> int | None:
    """None where the counter cannot be read: another kind of processor, or no memory that may be executed."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return None
    try:
        code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except OSError:
        return None
    code.write(_READ_COUNTER)
    page = ctypes.c_char.from_buffer(code)
    read = ctypes.CFUNCTYPE(ctypes.c_uint64)(ctypes.addressof(page))
    begin_ns, begin = _reading(read)
    time.sleep(_SPAN_S)
    end_ns, end = _reading(read)
    del read, page  # a page that is looked at cannot be closed
    code.close()
    return round((end - begin) * 1e6 / (end_ns - begin_ns))


def _reading(read: Callable[[], int]) -> tuple[float, int]:
    tries = []
    for _ in range(_NUM_TRIES):
        before = time.perf_counter_ns()
        ticks = read()
        after = time.perf_counter_ns()
        tries.append((after - before, (before + after) / 2, ticks))
    _, at_ns, ticks = min(tries)
    return at_ns, ticks
