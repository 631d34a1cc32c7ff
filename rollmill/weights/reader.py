"""From packs back to bytes: opens routes, fetches the cells somebody holds, decodes them hop by hop and proves them.

Nothing is returned that its proof does not cover; damage names the object to blame.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from rollmill.weights import chunk
from rollmill.weights.encode import cell_bytes, in_order, num_workers
from rollmill.weights.errors import CorruptSnapshot, WrongBase
from rollmill.weights.manifest import PackRef, Route, Version
from rollmill.weights.objects import ObjectMissing
from rollmill.weights.pack import Entry, check_payload, check_whole, index_range, read_index
from rollmill.weights.plan import plan
from rollmill.weights.proof import cell_part, fingerprint_bytes, seeds_of, words_of, words_per_element
from rollmill.weights.schema import Cell, Schema, place
from rollmill.weights.shard import Held, all_of, on_grid_of, whole
from rollmill.weights.store import WeightStore

# A pack up to this size is read in one request and checked as a whole; from a larger one only what is needed is read.
WHOLE_BYTES = 64 << 20
# Requests in flight for ranges of larger packs: 20 ms each to a far store, so 800 tensors a second.
_FETCHERS = 16
Result = TypeVar("Result")


class Damaged(CorruptSnapshot):
    """Stored bytes that cannot be used, with the key of the object at fault."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"{key}: {reason}")
        self.key = key
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class _Pack:
    ref: PackRef
    entries: dict[int, list[Entry]]
    data: bytes | None


class OpenRoute:
    """The packs of one route with their indexes read and checked."""

    def __init__(self, store: WeightStore, route: Route, *, whole_bytes: int = WHOLE_BYTES) -> None:
        self.route, self._store = route, store
        self.bytes_read = 0
        self._lock = threading.Lock()
        self._packs = list(in_order(lambda ref: self._open(ref, whole_bytes), route.packs, workers=min(8, max(1, len(route.packs)))))

    @property
    def is_ranged(self) -> bool:
        """Payloads are fetched when they are asked for."""
        return any(pack.data is None for pack in self._packs)

    def tensors(self) -> set[int]:
        return {tensor for pack in self._packs for tensor in pack.entries}

    def entries(self, tensor: int) -> Iterator[Entry]:
        return (entry for pack in self._packs for entry in pack.entries.get(tensor, ()))

    def payloads(self, tensor: int, wanted: Callable[[int], bool]) -> Iterator[tuple[str, Entry, bytes | memoryview]]:
        """(key of the pack, entry, payload) of the tensor's cells for which `wanted(cell)`."""
        for pack in self._packs:
            entries = [entry for entry in pack.entries.get(tensor, ()) if wanted(entry.cell)]
            if not entries:
                continue
            if pack.data is not None:
                found: Sequence[bytes | memoryview] = [memoryview(pack.data)[entry.start : entry.stop] for entry in entries]
            else:
                found = self._ranges(pack.ref, [(entry.start, entry.stop) for entry in entries])
            for entry, payload in zip(entries, found, strict=True):
                yield pack.ref.key, entry, self._checked(pack, entry, payload)

    def _open(self, ref: PackRef, whole_bytes: int) -> _Pack:
        # A second read before the pack is blamed: the first may have met a bad cable.
        for last_try in (False, True):
            try:
                return self._open_once(ref, whole_bytes)
            except (CorruptSnapshot, ObjectMissing) as error:
                if last_try:
                    raise Damaged(ref.key, "it is missing" if isinstance(error, ObjectMissing) else str(error)) from error
        raise AssertionError("unreachable: the last try returns or raises")

    def _open_once(self, ref: PackRef, whole_bytes: int) -> _Pack:
        start, stop = index_range(ref)
        data = None
        if ref.num_bytes <= whole_bytes:
            data, _ = self._store.objects.get(ref.key)
            self._count(len(data))
            check_whole(data, ref)
            tail: bytes | memoryview = memoryview(data)[start:stop]
        else:
            (tail,) = self._ranges(ref, [(start, stop)])
        index = read_index(tail, ref)
        if (index.version, index.base, index.schema) != (self.route.version, self.route.base, self.route.schema):
            raise CorruptSnapshot(f"it holds version {index.version} on {index.base}, not what its route says")
        entries: dict[int, list[Entry]] = {}
        for entry in index.entries():
            entries.setdefault(entry.tensor, []).append(entry)
        return _Pack(ref=ref, entries=entries, data=data)

    def _checked(self, pack: _Pack, entry: Entry, payload: bytes | memoryview) -> bytes | memoryview:
        for last_try in (False, True):
            try:
                check_payload(payload, entry, pack.ref.key)
                return payload
            except CorruptSnapshot as error:
                if last_try or pack.data is not None:
                    raise Damaged(pack.ref.key, str(error)) from error
                (payload,) = self._ranges(pack.ref, [(entry.start, entry.stop)])
        raise AssertionError("unreachable: the last try returns or raises")

    def _ranges(self, ref: PackRef, ranges: list[tuple[int, int]]) -> list[bytes]:
        try:
            found = self._store.objects.get_ranges(ref.key, ranges)
        except ObjectMissing as missing:
            raise Damaged(ref.key, "it is missing") from missing
        self._count(sum(map(len, found)))
        return found

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self.bytes_read += num_bytes


@dataclass(frozen=True, kw_only=True)
class TensorWork:
    """One tensor's way through all hops: the payloads of each of its held cells, oldest first."""

    tensor: int
    held: Held
    cells: list[tuple[Cell, Cell, list[tuple[str, Entry, bytes | memoryview]]]]
    """(global cell, local cell, [(pack key, entry, payload), ...])."""


def each_tensor(
    hops: Sequence[OpenRoute], schema: Schema, held: Mapping[str, Held], do: Callable[[TensorWork], Result], *, workers: int
) -> Iterator[Result]:
    """`do` with every held tensor that the hops touch, in schema order. A thread fetches what it decodes, so that requests overlap."""
    _refuse_made_up_sizes(hops, schema, held)
    touched: set[int] = set().union(*(hop.tensors() for hop in hops)) if hops else set()
    items = []
    for tensor in sorted(touched):
        if not 0 <= tensor < len(schema.tensors):
            raise Damaged(hops[-1].route.name.key, f"it names tensor {tensor} of {len(schema.tensors)}")
        spec = schema.tensors[tensor]
        if (part := held.get(spec.name)) is not None:
            items.append((tensor, on_grid_of(spec, part)))

    def fetch_and_do(item: tuple[int, Held]) -> Result:
        return do(work_of(hops, *item, schema.chunk_elements))

    threads = max(workers, _FETCHERS) if any(hop.is_ranged for hop in hops) else workers
    return in_order(fetch_and_do, items, workers=threads)


def _refuse_made_up_sizes(hops: Sequence[OpenRoute], schema: Schema, held: Mapping[str, Held]) -> None:
    """A full route has every cell of every tensor; one of more cells than are there must not be given memory first."""
    if not hops or hops[0].route.base is not None:
        return
    for tensor, spec in enumerate(schema.tensors):
        if spec.name not in held:
            continue
        num_cells, num_there = spec.num_cells(schema.chunk_elements), len({entry.cell for entry in hops[0].entries(tensor)})
        if num_cells > num_there:
            what = f"{spec.name} is said to have the shape {list(spec.shape)}, {spec.num_bytes} bytes in {num_cells} cells"
            raise Damaged(hops[0].route.name.key, f"{what}; its packs hold {num_there} of them")


def work_of(hops: Sequence[OpenRoute], tensor: int, part: Held, chunk_elements: int, *, only: Container[int] | None = None) -> TensorWork:
    """The held cells of one tensor, or `only` some of them."""
    grid = part.spec.cells(chunk_elements)
    local = {at: inside for at, cell in enumerate(grid) if (only is None or at in only) and (inside := part.local(cell)) is not None}
    steps: dict[int, list[tuple[str, Entry, bytes | memoryview]]] = {}
    for hop in hops:
        for found in hop.payloads(tensor, local.__contains__):
            steps.setdefault(found[1].cell, []).append(found)
    return TensorWork(tensor=tensor, held=part, cells=[(grid[at], local[at], steps[at]) for at in sorted(steps)])


def advance(work: TensorWork, data: np.ndarray) -> None:
    """Move a tensor's held bytes through all hops, in place; on an error they are of no use any more."""
    spec = work.held.spec
    size, per_element = spec.item_bytes, words_per_element(spec.item_bytes)
    seeds = seeds_of(spec.name, spec.dtype, spec.shape)
    for cell, local, steps in work.cells:
        buffer = np.array(cell_bytes(data, local, size))
        key, entry = "", steps[-1][1]
        for key, _, payload in steps:
            try:
                chunk.decode_into(payload, dtype=spec.dtype, target=buffer)
            except CorruptSnapshot as error:
                raise Damaged(key, str(error)) from error
        if cell_part(words_of(buffer, size), cell, seeds, per_element=per_element)[0] != entry.proof:
            # Every payload was what was published, so the bytes it was applied to are not.
            raise WrongBase(f"{spec.name}: cell {entry.cell} does not become what {key} promises; the held bytes are not its base")
        place(data, Cell(local.start * size, local.rows, local.width * size, local.stride * size), buffer)


def find_path(store: WeightStore, target: int, *, held: int | None, refused: Mapping[str, str], schema: str) -> list[Route] | None:
    """The routes of the cheapest path that avoids what is refused, read and checked; None when there is none.

    `refused` maps keys of routes and packs to reasons. A route that uses a refused pack is refused with it.
    """
    names = store.routes(after=-1 if held is None else held)
    bad = set(refused)
    while True:
        path = plan(names, held=held, target=target, refused=bad)
        if path is None:
            return None
        routes = []
        for name in path:
            try:
                route = store.route(name)
            except CorruptSnapshot as error:
                if isinstance(error.__cause__, ObjectMissing):
                    # Collected since it was listed, which is nobody's damage.
                    bad.add(name.key)
                    break
                raise Damaged(name.key, str(error)) from error
            if any(pack.key in refused for pack in route.packs) or route.schema != schema:
                bad.add(name.key)
                break
            routes.append(route)
        else:
            return routes


def materialise(
    store: WeightStore,
    version: int,
    *,
    start: tuple[int, dict[str, np.ndarray]] | None = None,
    held: Mapping[str, Held] | None = None,
    refused: Mapping[str, str] | None = None,
    workers: int | None = None,
) -> tuple[Version, Schema, dict[str, np.ndarray]]:
    """The proved bytes of a version, from nothing or from the bytes of another version (which are consumed).

    Goes round damage as long as there is a way; raises CorruptSnapshot with every reason when there is none.
    """
    record = store.version(version)
    schema = store.schema(record.schema)
    parts = dict(held) if held is not None else all_of(schema)
    blamed = dict(refused or {}) | store.quarantined()
    while True:
        try:
            path = find_path(store, version, held=start[0] if start else None, refused=blamed, schema=record.schema)
            if path is None:
                why = "; ".join(f"{key}: {reason}" for key, reason in sorted(blamed.items())[-3:])
                raise CorruptSnapshot(f"version {version} cannot be rebuilt from {store}: {why or 'no route leads to it'}")
            data = _follow(store, path, schema, parts, start, workers or num_workers(schema.num_bytes))
            # A part of a tensor has no fingerprint of its own: who holds one proves it together with the others.
            wrong = _wrong(record, schema, {spec.name: data[spec.name] for spec in schema.tensors if parts.get(spec.name) == whole(spec)})
            if wrong and path and path[0].base is None:
                raise Damaged(path[-1].name.key, wrong)
            if wrong:
                raise WrongBase(f"the held bytes are not those of version {start[0] if start else None}: {wrong}")
            return record, schema, data
        except Damaged as damaged:
            blamed[damaged.key] = damaged.reason
        except WrongBase as error:
            if start is None:
                raise CorruptSnapshot(f"version {version} cannot be rebuilt from {store}: {error}") from error
            start = None


def replay(
    store: WeightStore, route: Route, record: Version | None, schema: Schema, base: dict[str, np.ndarray] | None
) -> dict[str, np.ndarray]:
    """What one route makes of its base's bytes, in place (None: of nothing, by a full route), proved to be the version.

    Without its record only each cell is proved. Raises Damaged or WrongBase; the bytes are of no use then.
    """
    assert (route.base is None) == (base is None)
    data = _through([OpenRoute(store, route)], schema, all_of(schema), base, num_workers(schema.num_bytes))
    if record is not None and (wrong := _wrong(record, schema, data)):
        raise Damaged(route.name.key, wrong)
    return data


def _follow(
    store: WeightStore,
    path: Sequence[Route],
    schema: Schema,
    held: Mapping[str, Held],
    start: tuple[int, dict[str, np.ndarray]] | None,
    workers: int,
) -> dict[str, np.ndarray]:
    fresh = bool(path) and path[0].base is None
    data = None if start is None or fresh else {name: np.array(start[1][name]) for name in held}
    return _through([OpenRoute(store, route) for route in path if route.packs], schema, held, data, workers)


def _through(
    hops: Sequence[OpenRoute], schema: Schema, held: Mapping[str, Held], data: dict[str, np.ndarray] | None, workers: int
) -> dict[str, np.ndarray]:
    if data is None:
        _refuse_made_up_sizes(hops, schema, held)
        data = {name: np.zeros(part.num_bytes, np.uint8) for name, part in held.items()}
    for name, part in held.items():
        if data[name].nbytes != part.num_bytes:
            raise WrongBase(f"{name} has {data[name].nbytes} bytes, in the version it has {part.num_bytes}")

    def move(work: TensorWork) -> None:
        advance(work, data[work.held.spec.name])

    for _ in each_tensor(hops, schema, held, move, workers=workers):
        pass
    return data


def _wrong(record: Version, schema: Schema, data: Mapping[str, np.ndarray]) -> str:
    """Which of these whole tensors are not those of the version; empty when all are."""
    expected = record.print_of(schema).tensors
    specs = (spec for spec in schema.tensors if spec.name in data)
    wrong = [s.name for s in specs if fingerprint_bytes(s.name, s.dtype, s.shape, data[s.name]) != expected[s.name]]
    return f"it gives other weights than version {record.version} promises: {', '.join(wrong[:3])}" if wrong else ""
