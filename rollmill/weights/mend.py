"""Live weights that are no longer those of their version: finds the bad cells and fetches only them; changes no weight itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rollmill.weights.errors import CorruptSnapshot
from rollmill.weights.live import LiveWeights, TensorPatch
from rollmill.weights.manifest import Version
from rollmill.weights.pack import Entry
from rollmill.weights.reader import OpenRoute, advance, find_path, work_of
from rollmill.weights.schema import Schema
from rollmill.weights.shard import Held, on_grid_of
from rollmill.weights.stage import bad_cells, difference
from rollmill.weights.store import WeightStore


@dataclass(frozen=True, kw_only=True)
class Mended:
    """What brings live weights back to their version."""

    patches: list[TensorPatch]
    num_bad: int
    """Cells that had to be fetched."""
    bytes_read: int
    num_packs: int


def mend(
    store: WeightStore, live: LiveWeights, record: Version, schema: Schema, names: Sequence[str], *, refused: Mapping[str, str]
) -> Mended:
    """Patches of the tensors `names`, from the cheapest full route and what follows it; raises CorruptSnapshot when there is none."""
    assert schema.digest == record.schema
    path = find_path(store, record.version, held=None, refused=refused, schema=record.schema)
    if path is None:
        raise CorruptSnapshot(f"version {record.version} cannot be rebuilt from {store}: no route leads to it")
    hops = [OpenRoute(store, route, whole_bytes=0) for route in path if route.packs]
    parts, patches, num_bad = live.held(), [], 0
    for tensor, spec in enumerate(schema.tensors):
        # Of a sharded replica the tensor may be bad on another rank only.
        if spec.name not in names or spec.name not in parts:
            continue
        part = on_grid_of(spec, parts[spec.name])
        newest: dict[int, Entry] = {entry.cell: entry for hop in hops for entry in hop.entries(tensor)}
        bad = bad_cells(part, live.read(spec.name), newest, spec.cells(schema.chunk_elements))
        num_bad += len(bad)
        patches.append(_patch(hops, tensor, part, live.read(spec.name), schema.chunk_elements, set(bad)))
    return Mended(patches=patches, num_bad=num_bad, bytes_read=sum(hop.bytes_read for hop in hops), num_packs=len(hops))


def _patch(hops: Sequence[OpenRoute], tensor: int, held: Held, live: np.ndarray, chunk_elements: int, bad: set[int]) -> TensorPatch:
    now = np.array(live)
    mended = np.array(now)
    advance(work_of(hops, tensor, held, chunk_elements, only=bad), mended)
    return difference(held, now, mended)
