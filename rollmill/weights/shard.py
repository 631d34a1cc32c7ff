"""Which part of each tensor somebody holds, in global coordinates; a shard is a box, and cells lie inside it or outside."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from rollmill.weights.proof import Lanes, cell_part, seeds_of, words_of, words_per_element
from rollmill.weights.schema import Cell, Schema, TensorSpec


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor's spec and the box of it that is held; the bytes of the box lie row by row."""

    spec: TensorSpec
    region: Cell

    def local(self, cell: Cell) -> Cell | None:
        """Where a cell lies in the box, or None when it lies outside. A cell on the border is a mistake in the schema."""
        stride = self.spec.matrix[1]
        if not stride or not self.region.num_elements:
            return None
        top, left = divmod(self.region.start, stride)
        row, col = divmod(cell.start, stride)
        bottom, right = top + self.region.rows, left + self.region.width
        if row >= bottom or row + cell.rows <= top or col >= right or col + cell.width <= left:
            return None
        if row < top or row + cell.rows > bottom or col < left or col + cell.width > right:
            raise ValueError(
                f"{self.spec.name}: the shard of rows {top} to {bottom}, columns {left} to {right} cuts through a cell; "
                f"give the publisher row_cuts and col_cuts at the borders of all shards"
            )
        width = self.region.width
        return Cell((row - top) * width + (col - left), cell.rows, cell.width, width)

    @property
    def num_bytes(self) -> int:
        return self.region.num_elements * self.spec.item_bytes

    def lanes(self, data: np.ndarray) -> Lanes:
        """The held part of the tensor's fingerprint (without the base value) for these bytes of the box."""
        per_element = words_per_element(self.spec.item_bytes)
        seeds = seeds_of(self.spec.name, self.spec.dtype, self.spec.shape)
        return cell_part(words_of(data, self.spec.item_bytes), self.region, seeds, per_element=per_element)


def whole(spec: TensorSpec) -> Held:
    rows, cols = spec.matrix
    return Held(spec=spec, region=Cell(0, rows, cols, cols))


def rows_of(spec: TensorSpec, start: int, stop: int) -> Held:
    """A shard of whole rows, as FSDP makes them."""
    cols = spec.matrix[1]
    if not 0 <= start <= stop <= spec.matrix[0]:
        raise ValueError(f"{spec.name} has rows 0 to {spec.matrix[0]}, not {start} to {stop}")
    return Held(spec=spec, region=Cell(start * cols, stop - start, cols, cols))


def columns_of(spec: TensorSpec, start: int, stop: int) -> Held:
    """A shard of columns, as a row-parallel linear layer holds them."""
    rows, cols = spec.matrix
    if not 0 <= start <= stop <= cols:
        raise ValueError(f"{spec.name} has columns 0 to {cols}, not {start} to {stop}")
    return Held(spec=spec, region=Cell(start, rows, stop - start, cols))


def on_grid_of(spec: TensorSpec, held: Held) -> Held:
    """The same box with the cuts of a published spec: a replica need not know where the publisher cut its tensors."""
    return Held(spec=spec, region=held.region)


def all_of(schema: Schema) -> dict[str, Held]:
    return {spec.name: whole(spec) for spec in schema.tensors}


def check_sizes(held: Mapping[str, Held], data: Mapping[str, np.ndarray]) -> None:
    for name, part in held.items():
        if name not in data or data[name].nbytes != part.num_bytes:
            got = "nothing" if name not in data else f"{data[name].nbytes} bytes"
            raise ValueError(f"{name}: the shard needs {part.num_bytes} bytes, {got} given")
