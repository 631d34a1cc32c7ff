"""Puts the CPU's matrix library into the mode in which a row's bits do not depend on the other rows, and proves it.

The library keeps its mode from its first product on, so `rollmill.ops` asks for it when it is imported.
Shapes: M rows, D inputs, N outputs.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F

log = logging.getLogger("rollmill.ops")
# Branch codes and flag of the library's conditional numerical reproducibility.
_AVX2, _AVX512, _STRICT = 10, 12, 0x10000
BLOCK = 64
"""Rows of every product where the strict mode is not to be had: one shape for all, padded."""
PROOF_ROWS = (1, 2, 3, 5, 7, 8, 9, 12, 16, 17, 31, 33, 48, 57, 64, 65, 96, 127, 129, 257)
WIDE, WIDE_ROWS = 8_000_000, (1, 2, 8, 17, 65)


@functools.cache
def ask_for_strict() -> bool:
    """True when the library took the mode; False when it is another library or has multiplied already."""
    if torch.backends.mkl.is_available():
        for path in glob.glob(torch.__path__[0] + "/lib/libtorch_cpu.*"):
            library = ctypes.CDLL(path)
            if hasattr(library, "mkl_serv_cbwr_set"):
                best = library.mkl_serv_cbwr_get_auto_branch()
                return library.mkl_serv_cbwr_set((_AVX512 if best >= _AVX512 else _AVX2) | _STRICT) == 0
    return False


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def blocked_linear(x_MD: torch.Tensor, weight_ND: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """The same product in blocks of one fixed shape, each by one thread: how many there are must not show either."""
    num_rows = len(x_MD)
    blocks = F.pad(x_MD, (0, 0, 0, -num_rows % BLOCK)).split(BLOCK)
    with one_thread():
        return torch.cat([F.linear(rows, weight_ND, bias_N) for rows in blocks])[:num_rows]


@functools.cache
def is_invariant(num_outputs: int, num_inputs: int, num_threads: int, *, is_blocked: bool) -> bool:
    """Whether `linear` of this shape gives every row the bits of one thread's product of all rows, at every count and place."""
    gen = torch.Generator().manual_seed(num_outputs * 1_000_003 + num_inputs)
    # A vocabulary is as wide as a hundred layers: fewer rows keep its proof below a second.
    counts = PROOF_ROWS if num_outputs * num_inputs <= WIDE else WIDE_ROWS
    x_MD = torch.randn(counts[-1] + 3, num_inputs, generator=gen)
    weight_ND = torch.randn(num_outputs, num_inputs, generator=gen)
    linear = blocked_linear if is_blocked else F.linear
    with torch.inference_mode():
        with one_thread():
            whole_MN = linear(x_MD, weight_ND)
        return all(torch.equal(linear(x_MD[at : at + m], weight_ND), whole_MN[at : at + m]) for m in counts for at in (0, 3))
