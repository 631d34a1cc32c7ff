"""From bytes of shards to packs, routes and versions: the one way in which anything is published.

Cells are coded by threads (the loops release the interpreter lock) in order and a few ahead, so that memory stays small.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import msgspec
import numpy as np

from rollmill.weights import chunk
from rollmill.weights.manifest import Kind, PackRef, Route, Version, pack_key
from rollmill.weights.pack import Coded, PackWriter
from rollmill.weights.proof import Lanes, add, base_value, cell_part, combine, seeds_of, to_hex, words_of, words_per_element
from rollmill.weights.schema import Cell, Schema, take
from rollmill.weights.shard import Held
from rollmill.weights.store import WeightStore

# A thread takes about 0.1 ms to start; this is some 4 ms of coding.
_BYTES_PER_WORKER = 4 << 20
# A bucket takes 10,000 parts of 8 MiB in one object.
MAX_PACK_BYTES = 64 << 30
Item = TypeVar("Item")
Result = TypeVar("Result")
Bytes = Mapping[str, np.ndarray]
"""name -> uint8, the bytes of the held box."""
Done = tuple[str, int, Lanes, Coded | None]
"""(name of the tensor, elements of the cell, the cell's part of its fingerprint, the cell as stored; None when it did not change)."""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank contributes to a version; small, to be gathered by whatever joins the ranks."""

    rank: int
    packs: tuple[PackRef, ...]
    """One, and more where one would grow too large for a bucket."""
    lanes: dict[str, Lanes]
    """name -> sum over the rank's own cells of the new bytes."""
    num_changed: int
    num_elements: int
    """Of the rank's own cells, changed or not."""
    encode_s: float

    @property
    def num_bytes(self) -> int:
        return sum(pack.num_bytes for pack in self.packs)


def num_workers(num_bytes: int) -> int:
    """Threads worth starting for so many bytes of weights: one per processor, and each with milliseconds of work."""
    return max(
        1, min(num_bytes // _BYTES_PER_WORKER, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    )


def in_order(work: Callable[[Item], Result], items: Iterable[Item], *, workers: int) -> Generator[Result, None, None]:
    """`map` over threads, results in order, at most two items a thread in flight."""
    if workers == 1:
        yield from map(work, items)
        return
    with ThreadPoolExecutor(workers, thread_name_prefix="weights") as pool:
        flying: deque[Future[Result]] = deque()
        try:
            for item in items:
                flying.append(pool.submit(work, item))
                if len(flying) > 2 * workers:
                    yield flying.popleft().result()
            while flying:
                yield flying.popleft().result()
        finally:
            for left in flying:
                left.cancel()


def write_part(
    store: WeightStore,
    schema: Schema,
    *,
    kind: Kind,
    version: int,
    base: int | None,
    held: Mapping[str, Held],
    new: Bytes,
    old: Bytes | None,
    rank: int = 0,
    workers: int | None = None,
) -> Part:
    """Code what `held` of the new bytes differs from the old (everything without old) and put it into the store."""
    assert (base is None) == (old is None)

    def code(item: Work) -> Done:
        return code_cell(item, new[item.name], None if old is None else old[item.name])

    threads = workers or num_workers(sum(array.nbytes for array in new.values()))
    done = in_order(code, list(works_of(schema, held)), workers=threads)
    return write_cells(store, schema, done, kind=kind, version=version, base=base, rank=rank)


def write_cells(
    store: WeightStore,
    schema: Schema,
    cells: Iterable[Done],
    *,
    kind: Kind,
    version: int,
    base: int | None,
    rank: int = 0,
    max_pack_bytes: int = MAX_PACK_BYTES,
) -> Part:
    """Put coded cells, as they come, into packs. Cells that did not change are told too: their sums belong to the fingerprint."""
    start = time.monotonic()
    sums: dict[str, Lanes] = {}
    num_elements = num_changed = 0

    def changed() -> Iterator[Coded]:
        nonlocal num_elements
        for name, size, lanes, coded in cells:
            num_elements += size
            sums[name] = add(sums.get(name, (0, 0)), lanes)
            if coded is not None:
                yield coded

    coming, packs, left = changed(), list[PackRef](), list[Coded]()
    while left or not packs:
        key = pack_key(version, kind, base=base, rank=rank, number=len(packs))
        writer = PackWriter(key=key, version=version, base=base, schema=schema.digest)
        packs.append(store.put_pack(writer, _up_to(coming, left, max_pack_bytes)))
        num_changed += writer.num_changed
    return Part(
        rank=rank, packs=tuple(packs), lanes=sums, num_changed=num_changed, num_elements=num_elements, encode_s=time.monotonic() - start
    )


def _up_to(coming: Iterator[Coded], left: list[Coded], max_bytes: int) -> Iterator[Coded]:
    """What was left over and what comes, until the next cell would be too much; that one is left over then."""
    num_bytes = 0
    for cell in itertools.chain([left.pop()] if left else [], coming):
        if num_bytes and num_bytes + len(cell.payload) > max_bytes:
            left.append(cell)
            return
        num_bytes += len(cell.payload)
        yield cell


def commit(
    store: WeightStore,
    schema: Schema,
    parts: Sequence[Part],
    *,
    kind: Kind,
    version: int,
    base: int | None,
    expected: int | None,
    step: int,
    run_id: str,
    writer: str,
    epoch: int = 0,
    note: str = "",
) -> Version:
    """Join the ranks' parts into a version and point `latest` at it. The parts' packs are durable already."""
    covered, wanted = sum(part.num_elements for part in parts), sum(spec.num_elements for spec in schema.tensors)
    if covered != wanted:
        raise ValueError(
            f"the {len(parts)} ranks hold {covered} elements, the tensors have {wanted}; each cell must be written by exactly one rank "
            f"(leave replicated shards to one of them)"
        )
    now = time.time()
    sums: dict[str, Lanes] = {}
    for part in parts:
        for name, lanes in part.lanes.items():
            sums[name] = add(sums.get(name, (0, 0)), lanes)
    proof = combine({s.name: to_hex(add(base_value(seeds_of(s.name, s.dtype, s.shape)), sums.get(s.name, (0, 0)))) for s in schema.tensors})
    record = Version(
        version=version, previous=expected, epoch=epoch, schema=schema.digest, fingerprint=proof.total,
        tensors=tuple(proof.tensors[spec.name] for spec in schema.tensors), num_changed=sum(part.num_changed for part in parts),
        raw_bytes=schema.num_bytes, step=step, run_id=run_id, writer=writer, created=now, note=note,
    )  # fmt: skip
    packs = tuple(pack for part in sorted(parts, key=lambda part: part.rank) for pack in part.packs)
    store.put_schema(schema)
    store.add_route(Route(kind=kind, version=version, base=base, schema=schema.digest, packs=packs, writer=writer, created=now))
    store.publish(record, expected=expected)
    return record


class Work(msgspec.Struct, frozen=True):
    """One cell to be coded: where it stands in the schema, in its tensor and in what is held."""

    name: str
    tensor: int
    place: int
    cell: Cell
    local: Cell
    dtype: str
    item_bytes: int
    seeds: Lanes


def works_of(schema: Schema, held: Mapping[str, Held]) -> Iterator[Work]:
    """The held cells in schema order."""
    for tensor, spec in enumerate(schema.tensors):
        if (part := held.get(spec.name)) is None:
            continue
        seeds = seeds_of(spec.name, spec.dtype, spec.shape)
        for place, cell in enumerate(spec.cells(schema.chunk_elements)):
            if (local := part.local(cell)) is not None:
                yield Work(spec.name, tensor, place, cell, local, spec.dtype, spec.item_bytes, seeds)


def code_cell(item: Work, new: np.ndarray, old: np.ndarray | None) -> Done:
    """From the bytes of the held boxes."""
    size = item.item_bytes
    now = cell_bytes(new, item.local, size)
    lanes = cell_part(words_of(now, size), item.cell, item.seeds, per_element=words_per_element(size))
    before = None if old is None else cell_bytes(old, item.local, size)
    if before is not None and np.array_equal(now, before):
        return item.name, item.cell.num_elements, lanes, None
    encoded = chunk.encode(now, before, item.dtype)
    return item.name, item.cell.num_elements, lanes, Coded(item.tensor, item.place, encoded.data, encoded.num_changed, lanes[0])


def cell_bytes(flat: np.ndarray, cell: Cell, item_bytes: int) -> np.ndarray:
    """The bytes of a cell out of a box's bytes; shares memory when they lie together."""
    scaled = Cell(cell.start * item_bytes, cell.rows, cell.width * item_bytes, cell.stride * item_bytes)
    return take(flat, scaled)
