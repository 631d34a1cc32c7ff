"""What the tensors of a run are and into which cells they are cut; every snapshot refers to one schema by digest.

A tensor is seen as a matrix, rows = first dimension, columns = all others. Row and column borders, which shards must not
cross, cut it into boxes, and boxes are cut into cells of at most `chunk_elements`. A cell is coded, fetched and repaired alone.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Annotated

import msgspec
import numpy as np
from blake3 import blake3

from rollmill.weights.errors import UnknownFormat

CHUNK_ELEMENTS = 1 << 20
_ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4, "uint64": 8, "int64": 8,
    "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "complex32": 4, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1, "packed_uint4": 1,
}  # fmt: skip


class Cell(msgspec.Struct, frozen=True):
    """A box of one tensor: `rows` runs of `width` elements, each `stride` after the one before, from element `start`."""

    start: int
    rows: int
    width: int
    stride: int

    @property
    def num_elements(self) -> int:
        return self.rows * self.width

    @property
    def is_contiguous(self) -> bool:
        return self.rows == 1 or self.width == self.stride


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tensor in global, unsharded coordinates.

    >>> [cell.num_elements for cell in TensorSpec(name="w", dtype="bfloat16", shape=(4, 6), col_cuts=(3,)).cells(6)]
    [6, 6, 6, 6]
    """

    name: str
    dtype: str
    """The torch dtype without its prefix, or `packed_uint4`: two codes a byte, whose bytes are then the elements."""
    shape: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    row_cuts: tuple[int, ...] = ()
    """Rows at which a new box begins, ascending, without 0 and the end."""
    col_cuts: tuple[int, ...] = ()

    @property
    def item_bytes(self) -> int:
        return item_bytes_of(self.dtype)

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.item_bytes

    @property
    def matrix(self) -> tuple[int, int]:
        """(rows, columns); a vector is one row."""
        if len(self.shape) < 2:
            return 1, self.num_elements
        return self.shape[0], math.prod(self.shape[1:])

    def cells(self, chunk_elements: int = CHUNK_ELEMENTS) -> tuple[Cell, ...]:
        return _cells(self.matrix, self.row_cuts, self.col_cuts, chunk_elements)

    def num_cells(self, chunk_elements: int = CHUNK_ELEMENTS) -> int:
        """`len(cells())` without making them, since a shape that somebody made up may have more of them than memory."""
        num_rows, num_cols = self.matrix
        heights = [max(0, bottom - top) for top, bottom in itertools.pairwise([0, *self.row_cuts, num_rows])]
        found = 0
        for left, right in itertools.pairwise([0, *self.col_cuts, num_cols]):
            num_whole, rest = divmod(max(0, right - left), chunk_elements)
            # Of a run as long as a chunk each row is a cell, of a shorter one as many rows as a chunk holds.
            found += num_whole * sum(heights)
            found += sum(-(-height // max(1, chunk_elements // rest)) for height in heights) if rest else 0
        return found


class Schema(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The tensor table of a snapshot. Two snapshots can be told apart by a delta only when they share one."""

    format: int = 1
    tensors: tuple[TensorSpec, ...]
    chunk_elements: Annotated[int, msgspec.Meta(ge=1, le=CHUNK_ELEMENTS)] = CHUNK_ELEMENTS
    quantiser: str = ""
    """Name and version of the function that made quantised tensors, e.g. `fp8_block128_pow2/1`; empty: plain casts."""

    @property
    def digest(self) -> str:
        return blake3(msgspec.json.encode(self)).hexdigest()[:32]

    @property
    def num_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.tensors)

    def index(self) -> dict[str, int]:
        return {spec.name: at for at, spec in enumerate(self.tensors)}


def item_bytes_of(dtype: str) -> int:
    if dtype not in _ITEM_BYTES:
        raise UnknownFormat(f"dtype {dtype!r} is not one of {', '.join(_ITEM_BYTES)}; read this store with the Rollmill that wrote it")
    return _ITEM_BYTES[dtype]


def make_schema(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]],
    *,
    row_cuts: Mapping[str, tuple[int, ...]] | None = None,
    col_cuts: Mapping[str, tuple[int, ...]] | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
    quantiser: str = "",
) -> Schema:
    """A schema of (name, dtype, shape) triples, sorted by name so that insertion order is no part of it."""
    specs = []
    for name, dtype, shape in sorted(tensors):
        rows, cols = (row_cuts or {}).get(name, ()), (col_cuts or {}).get(name, ())
        spec = TensorSpec(name=name, dtype=dtype, shape=tuple(shape), row_cuts=tuple(rows), col_cuts=tuple(cols))
        for cuts, end, what in ((spec.row_cuts, spec.matrix[0], "row"), (spec.col_cuts, spec.matrix[1], "column")):
            if list(cuts) != sorted(set(cuts)) or any(not 0 < cut < end for cut in cuts):
                raise ValueError(f"{name}: {what} borders {cuts} must ascend between 1 and {end - 1}")
        item_bytes_of(dtype)
        specs.append(spec)
    if len({spec.name for spec in specs}) != len(specs):
        raise ValueError("two tensors have the same name; give each tensor its own")
    return Schema(tensors=tuple(specs), chunk_elements=chunk_elements, quantiser=quantiser)


def take(flat: np.ndarray, cell: Cell) -> np.ndarray:
    """The elements of a cell out of a tensor's flat elements: a view when they lie together, else a copy."""
    if cell.is_contiguous:
        return flat[cell.start : cell.start + cell.num_elements]
    return np.ascontiguousarray(_box(flat, cell)).reshape(-1)


def place(flat: np.ndarray, cell: Cell, values: np.ndarray) -> None:
    if cell.is_contiguous:
        flat[cell.start : cell.start + cell.num_elements] = values
    else:
        _box(flat, cell)[...] = values.reshape(cell.rows, cell.width)


def positions_in_tensor(cell: Cell, positions: np.ndarray) -> np.ndarray:
    """Element positions inside a cell as positions in its tensor, int64."""
    inside = positions.astype(np.int64)
    if cell.is_contiguous:
        return inside + cell.start
    return cell.start + (inside // cell.width) * cell.stride + inside % cell.width


def _box(flat: np.ndarray, cell: Cell) -> np.ndarray:
    step = flat.strides[0]
    end = cell.start + (cell.rows - 1) * cell.stride + cell.width
    return np.lib.stride_tricks.as_strided(flat[cell.start : end], (cell.rows, cell.width), (cell.stride * step, step))


@functools.lru_cache(maxsize=65536)
def _cells(matrix: tuple[int, int], row_cuts: tuple[int, ...], col_cuts: tuple[int, ...], chunk: int) -> tuple[Cell, ...]:
    num_rows, num_cols = matrix
    if not num_rows * num_cols:
        return ()
    found = []
    rows, cols = [0, *row_cuts, num_rows], [0, *col_cuts, num_cols]
    for top, bottom in itertools.pairwise(rows):
        for left, right in itertools.pairwise(cols):
            # Runs longer than a chunk are cut too, so that a vector of any length has cells of one size.
            for begin in range(left, right, chunk):
                width = min(right - begin, chunk)
                height = max(1, chunk // width)
                for first in range(top, bottom, height):
                    count = min(height, bottom - first)
                    found.append(Cell(first * num_cols + begin, count, width, num_cols))
    return tuple(found)
