"""What of the live weights changes on the way to another version, as patches; pure but for reading packs, touches no weight."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollmill.weights import chunk
from rollmill.weights.encode import cell_bytes
from rollmill.weights.errors import CorruptSnapshot
from rollmill.weights.live import TensorPatch
from rollmill.weights.pack import Entry
from rollmill.weights.proof import cell_part, seeds_of, words_of, words_per_element
from rollmill.weights.reader import Damaged, TensorWork, advance
from rollmill.weights.schema import Cell, positions_in_tensor
from rollmill.weights.shard import Held

_CODE = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.uint64}
Payload = bytes | memoryview


def patch_of(work: TensorWork, live: np.ndarray, *, fresh: bool) -> TensorPatch:
    """The change of one tensor through all hops, read off the live bytes (of the base, or of anything when the hops start `fresh`)."""
    held = work.held
    if not fresh and all(len(steps) == 1 for _, _, steps in work.cells):
        return _direct(work, live)
    data = np.zeros(held.num_bytes, np.uint8) if fresh else np.array(live)
    advance(work, data)
    return difference(held, live, data)


def difference(held: Held, old: np.ndarray, new: np.ndarray) -> TensorPatch:
    code = _CODE[held.spec.item_bytes]
    before, after = old.view(code), new.view(code)
    positions = np.flatnonzero(before != after)
    return TensorPatch(held=held, positions=positions, codes=after[positions], before=before[positions])


def bad_cells(held: Held, live: np.ndarray, latest: dict[int, Entry], grid: Sequence[Cell]) -> list[int]:
    """Cells whose live bytes are not what the newest entry of each promises."""
    spec = held.spec
    seeds, per_element = seeds_of(spec.name, spec.dtype, spec.shape), words_per_element(spec.item_bytes)
    found = []
    for at, entry in latest.items():
        if (local := held.local(grid[at])) is None:
            continue
        words = words_of(cell_bytes(live, local, spec.item_bytes), spec.item_bytes)
        if cell_part(words, grid[at], seeds, per_element=per_element)[0] != entry.proof:
            found.append(at)
    return found


def _direct(work: TensorWork, live: np.ndarray) -> TensorPatch:
    """One hop: positions and values straight from the payloads, without a second copy of the tensor."""
    spec = work.held.spec
    positions, codes, before = [], [], []
    code = _CODE[spec.item_bytes]
    per_element = max(1, spec.item_bytes // 8)
    for _, local, steps in work.cells:
        ((key, _, payload),) = steps
        old = cell_bytes(live, local, spec.item_bytes)
        try:
            patch = chunk.decode_patch(payload, num_bytes=old.nbytes, dtype=spec.dtype, old=old)
        except CorruptSnapshot as error:
            raise Damaged(key, str(error)) from error
        inside = patch.positions.astype(np.int64)
        at = positions_in_tensor(local, inside // per_element) * per_element + inside % per_element
        positions.append(at)
        codes.append(patch.codes)
        before.append(old.view(code)[inside])
    if not positions:
        empty = np.empty(0, code)
        return TensorPatch(held=work.held, positions=np.empty(0, np.int64), codes=empty, before=empty)
    where = np.concatenate(positions)
    order = slice(None) if len(work.cells) == 1 or bool((np.diff(where) > 0).all()) else np.argsort(where, kind="stable")
    return TensorPatch(
        held=work.held, positions=where[order], codes=np.concatenate(codes).view(code)[order], before=np.concatenate(before)[order]
    )
