"""Which kernel computes a linear layer, and the proof that the choice does not show in the bits.

Every sum runs over K in ascending order in float32: by the Triton kernel at any tile, and by cuBLASLt once it may not split K. cuBLASLt
gets whole blocks of rows; few rows of wide weights go to a tile. Each choice is compared with the reference tile on the device before it is
trusted: a tile once per weight shape, cuBLASLt, which picks its own algorithm, once per weight shape and number of blocks. A choice that
fails is replaced by the reference tile; if that fails against itself at another row position, the device is refused.
Shapes: M rows, N outputs, K inner.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch

from rollmill.ops.cuda.matmul import REFERENCE, Tile, product
from rollmill.ops.cuda.room import blocks, in_blocks

log = logging.getLogger(__name__)
# Its first use warns: a product that differs is found by its proof.
warnings.filterwarnings("ignore", message="torch.backends.cuda.preferred_blas_library is an experimental feature")

PROOF_ROWS = (1, 2, 7, 8, 16, 31, 64, 257, 2048)
"""Row counts of `Linear.prove`."""


def choose(m: int, n: int, k: int) -> Tile | None:
    """The tile for m rows; None is cuBLASLt. Borders as measured on an H200: only few rows of wide weights gain from a tile."""
    if m <= 16 and n >= 6144:
        return Tile(16, 32, 256, 4, 3) if k < 4096 and n < 24576 else Tile(16, 64, 128, 4, 4)
    if m <= 32 and n >= 100_000:
        return Tile(32, 64, 128, 4, 5)
    return None


class WholeSums:
    """While entered, torch's products go through cuBLASLt and may not split K. Entered for each product: the switches are the process's."""

    def __enter__(self) -> None:
        self.library = torch.backends.cuda.preferred_blas_library()
        matmul = torch.backends.cuda.matmul
        self.reduction = matmul.allow_bf16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction_split_k
        torch.backends.cuda.preferred_blas_library("cublaslt")
        matmul.allow_bf16_reduced_precision_reduction = (False, False)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        torch.backends.cuda.preferred_blas_library(self.library)
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = self.reduction


def vendor(x_MK: torch.Tensor, w_NK: torch.Tensor, bias_N: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
    """cuBLASLt without splitting K, on whole blocks of rows."""
    rows, x_MK = len(x_MK), in_blocks(x_MK)
    with WholeSums():
        if bias_N is not None:
            y_MN = torch.addmm(bias_N, x_MK, w_NK.t())
        elif out_dtype == x_MK.dtype:
            y_MN = torch.mm(x_MK, w_NK.t())
        else:
            y_MN = torch.mm(x_MK, w_NK.t(), out_dtype=out_dtype)
    return y_MN[:rows]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Also where both hold no number."""
    view = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.shape == b.shape and bool(torch.equal(a.contiguous().view(view), b.contiguous().view(view)))


Shape = tuple[int, int, torch.dtype, bool]
"""N, K, dtype of the output, whether there is a bias."""


class Linear:
    """The choices made so far."""

    def __init__(self) -> None:
        self.trusted: set[tuple[Shape, Tile | int]] = set()
        """Weight shape with a tile, or with the rows of whole blocks for cuBLASLt."""
        self.refused: dict[tuple[Shape, Tile | int], str] = {}
        """What failed its proof, and where: these run on the reference tile."""

    def __call__(self, x_MK: torch.Tensor, w_NK: torch.Tensor, bias_N: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
        m, (n, k) = len(x_MK), w_NK.shape
        tile = choose(m, n, k)
        shape = (n, k, out_dtype, bias_N is not None)
        key = (shape, blocks(m) if tile is None else tile)
        if m and key not in self.trusted:
            tile = self._proven(key, tile, m, w_NK, bias_N)
        if tile is None:
            return vendor(x_MK, w_NK, bias_N, out_dtype)
        return product(x_MK, w_NK, bias_N, tile, out_dtype)

    def _proven(
        self, key: tuple[Shape, Tile | int], tile: Tile | None, m: int, w_NK: torch.Tensor, bias_N: torch.Tensor | None
    ) -> Tile | None:
        """The tile if it may be trusted, else the reference."""
        if key in self.refused:
            return REFERENCE
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"a linear layer {tuple(w_NK.shape)} was captured at {m} rows before its kernel was proven; "
                "run the step once before capturing it"
            )
        (n, k, out_dtype, _), device = key[0], w_NK.device
        m = blocks(m) if tile is None else m
        rng = torch.Generator(device).manual_seed(m)
        x_MK = torch.randn(m, k, device=device, generator=rng).to(w_NK.dtype)
        rows_R = _sample(m, device)
        # The same rows in other places of a larger batch: both the choice and the reference must not notice.
        want = product(x_MK[rows_R], w_NK, bias_N, REFERENCE, out_dtype)
        moved = product(torch.cat([x_MK[rows_R[:1]].expand(65, -1), x_MK[rows_R]]), w_NK, bias_N, REFERENCE, out_dtype)[65:]
        if not same_bits(want, moved):
            raise RuntimeError(
                f"the reference matrix kernel gives other bits at another row position (weights {n} x {k}, "
                f"{torch.cuda.get_device_name(device)}): the exact profile cannot be served here; choose the numerics profile 'fast'"
            )
        got = vendor(x_MK, w_NK, bias_N, out_dtype) if tile is None else product(x_MK, w_NK, bias_N, tile, out_dtype)
        if not same_bits(got[rows_R], want):
            name = f"cuBLASLt at {m} rows" if tile is None else f"{tile}"
            self.refused[key] = name
            log.warning("%s differs from the reference for weights %d x %d: the reference kernel serves it, slower", name, n, k)
            return REFERENCE
        # Weights not loaded yet prove nothing.
        if bool((want != 0).float().mean() > 0.5) and bool(want.isfinite().all()):
            self.trusted.add(key)
        return tile

    def prove(self, w_NK: torch.Tensor, *, rows: Iterable[int] = PROOF_ROWS, out_dtype: torch.dtype | None = None) -> None:
        """Run every row count once, so that a step of that size can be captured."""
        for m in rows:
            self(torch.zeros(m, w_NK.shape[1], dtype=w_NK.dtype, device=w_NK.device), w_NK, None, out_dtype or w_NK.dtype)


def _sample(m: int, device: torch.device) -> torch.Tensor:
    """Rows to compare: both ends, and some everywhere between."""
    if m <= 256:
        return torch.arange(m, device=device)
    return torch.cat([torch.arange(64), torch.linspace(64, m - 65, 128).long(), torch.arange(m - 64, m)]).to(device)


class LinearFunction(torch.autograd.Function):
    """Backward through cuBLAS as it comes: gradients need no fixed order."""

    @staticmethod
    def forward(
        ctx: Any, linear: Linear, x_MK: torch.Tensor, w_NK: torch.Tensor, bias_N: torch.Tensor | None, out_dtype: torch.dtype
    ) -> torch.Tensor:
        ctx.save_for_backward(x_MK, w_NK)
        ctx.bias_dtype = None if bias_N is None else bias_N.dtype
        return linear(x_MK, w_NK, bias_N, out_dtype)

    @staticmethod
    def backward(ctx: Any, g_MN: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_MK, w_NK = ctx.saved_tensors
        bias_g = None if ctx.bias_dtype is None else g_MN.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        g_MN = g_MN.to(w_NK.dtype)
        return None, g_MN @ w_NK if ctx.needs_input_grad[1] else None, g_MN.t() @ x_MK if ctx.needs_input_grad[2] else None, bias_g, None
