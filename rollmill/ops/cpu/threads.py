"""Shares rows of a compiled loop out among threads; which thread takes a row changes no bit of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch

SPLIT_WORK = 2_000_000
"""Operations below which handing rows to another thread costs more than it saves."""


@cache
def _pool(pid: int) -> ThreadPoolExecutor:
    # By process: threads do not survive a fork.
    return ThreadPoolExecutor(max(1, (os.cpu_count() or 1) - 1), thread_name_prefix="rows")


def share_rows(loop: Callable[..., None], *args: Any, num_rows: int, work: int, work_T: np.ndarray | None = None) -> None:
    """Run `loop(*args, first, last)` over all rows; it must let go of the interpreter.

    `work` counts the operations of all rows, `work_T` each row's share in any unit where rows differ.
    """
    parts = min(torch.get_num_threads(), work // SPLIT_WORK, num_rows)
    if parts <= 1:
        loop(*args, 0, num_rows)
        return
    if work_T is None:
        edges = [num_rows * i // parts for i in range(parts + 1)]
    else:
        done_T = np.cumsum(work_T, dtype=np.int64)
        edges = [0, *(np.searchsorted(done_T, done_T[-1] * np.arange(1, parts) / parts) + 1).tolist(), num_rows]
    first, *rest = [(a, b) for a, b in pairwise(edges) if a < b]
    others = [_pool(os.getpid()).submit(loop, *args, a, b) for a, b in rest]
    loop(*args, *first)
    for other in others:
        other.result()
