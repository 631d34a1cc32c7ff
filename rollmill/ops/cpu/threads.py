"""Shares rows of a compiled loop out among threads; which thread takes a row changes no bit of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise

import numpy as np
import torch

SPLIT_WORK = 2_000_000
"""Operations below which handing rows to another thread costs more than it saves."""


@cache
def _pool(pid: int) -> ThreadPoolExecutor:
    # By process: threads do not survive a fork.
    return ThreadPoolExecutor(max(1, (os.cpu_count() or 1) - 1), thread_name_prefix="rows")


def _cuts(work_T: np.ndarray) -> list[tuple[int, int]]:
    """Runs of rows of about equal work, one for each thread that is worth it."""
    done_T = np.cumsum(work_T, dtype=np.int64)
    parts = int(min(torch.get_num_threads(), max(1, done_T[-1] // SPLIT_WORK), len(work_T)))
    borders = np.searchsorted(done_T, done_T[-1] * np.arange(1, parts) / parts, side="left") + 1
    return [(a, b) for a, b in pairwise([0, *borders.tolist(), len(work_T)]) if a < b]


def share_rows(loop: Callable[[int, int], None], work_T: np.ndarray) -> None:
    """Run `loop(first, last)` over all rows; it must let go of the interpreter. `work_T` counts each row's operations."""
    if not len(work_T):
        return
    first, *rest = _cuts(work_T)
    others = [_pool(os.getpid()).submit(loop, *cut) for cut in rest]
    loop(*first)
    for other in others:
        other.result()
