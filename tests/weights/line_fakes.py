"""A trainer without torch and a store in memory: a small model whose bytes at every step anybody can compute again."""

from __future__ import annotations

import bisect
import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from rollmill.weights.encode import commit, write_part
from rollmill.weights.errors import CorruptSnapshot
from rollmill.weights.manifest import Kind, Route, Version
from rollmill.weights.objects import ObjectMissing, SwapLost, content_tag, plain_folder, plain_key
from rollmill.weights.schema import Schema, make_schema
from rollmill.weights.shard import all_of, rows_of
from rollmill.weights.store import WeightStore

ROW_CUTS = {"a": (6, 12, 18)}
SCHEMA = make_schema(
    [("a", "bfloat16", (24, 16)), ("b", "float32", (10,)), ("e", "float32", (0, 4)), ("n", "int64", (3,))],
    row_cuts=ROW_CUTS,
)
Bytes = dict[str, np.ndarray]


class MemoryObjects:
    """Objects in a dict: as strict as a directory and a thousand times as fast."""

    def __init__(self) -> None:
        self._held: dict[str, bytes] = {}
        self._keys: list[str] = []
        self._lock = threading.Lock()

    def get(self, key: str) -> tuple[bytes, str]:
        data = self._data(key)
        return data, content_tag(data)

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        data = self._data(key)
        if any(stop > len(data) for _, stop in ranges):
            raise CorruptSnapshot(f"{key} in memory ends too early")
        return [data[start:stop] for start, stop in ranges]

    def size(self, key: str) -> int:
        return len(self._data(key))

    def put(self, key: str, chunks: Iterable[bytes | memoryview]) -> None:
        data = b"".join(chunks)
        with self._lock:
            self._set(key, data)

    def create(self, key: str, data: bytes) -> bool:
        with self._lock:
            if key in self._held:
                return False
            self._set(key, data)
            return True

    def swap(self, key: str, data: bytes, *, expected: str | None) -> str:
        with self._lock:
            held = content_tag(self._held[key]) if key in self._held else None
            if held != expected:
                raise SwapLost(f"{key} is {held}, expected {expected}")
            self._set(key, data)
        return content_tag(data)

    def list(self, prefix: str, *, after: str = "") -> Iterator[str]:
        folder = plain_folder(prefix)
        below = f"{folder}/" if folder else ""
        with self._lock:
            start = max(bisect.bisect_left(self._keys, below), bisect.bisect_right(self._keys, after))
            stop = bisect.bisect_left(self._keys, below[:-1] + "0") if below else len(self._keys)
            return iter(self._keys[start:stop])

    def delete(self, keys: Sequence[str]) -> None:
        with self._lock:
            for key in keys:
                if self._held.pop(plain_key(key), None) is not None:
                    self._keys.remove(key)

    def describe(self) -> str:
        return "memory"

    def _data(self, key: str) -> bytes:
        try:
            return self._held[plain_key(key)]
        except KeyError:
            raise ObjectMissing(f"{key} is not in memory") from None

    def _set(self, key: str, data: bytes) -> None:
        if key not in self._held:
            bisect.insort(self._keys, plain_key(key))
        self._held[key] = data


@functools.cache
def _at(step: int) -> dict[str, bytes]:
    if step == 0:
        first = np.random.default_rng(7)
        return {spec.name: first.integers(0, 256, spec.num_bytes, np.uint8).tobytes() for spec in SCHEMA.tensors}
    rng = np.random.default_rng(step)
    after = {}
    for spec in SCHEMA.tensors:
        data = np.frombuffer(_at(step - 1)[spec.name], np.uint8).copy()
        if data.size and (spec.name == "a" or step % 3 == 0):
            items = rng.integers(0, spec.num_elements, 3)
            data[items * spec.item_bytes] ^= rng.integers(1, 4, 3).astype(np.uint8)
        after[spec.name] = data.tobytes()
    return after


def bytes_at(step: int) -> Bytes:
    """What the weights are after `step` optimiser steps: a few elements differ from those of the step before."""
    # Filled from below, so that the recursion stays shallow.
    for before in range(step):
        _at(before)
    return {name: np.frombuffer(data, np.uint8).copy() for name, data in _at(step).items()}


def publish(
    store: WeightStore, step: int, *, ranks: int = 1, schema: Schema = SCHEMA, on_number: Callable[[int], object] = lambda number: None
) -> Version:
    """Publish the weights of a step as the next version: a delta on latest, or full when there is none."""
    pointer = store.latest()
    base = None if pointer is None else store.version(pointer.version)
    version = store.reserve()
    on_number(version)
    kind = Kind.FULL if base is None else Kind.DELTA
    old = None if base is None else bytes_at(base.step)
    parts = []
    for rank in range(ranks):
        held = all_of(schema) if ranks == 1 else _shard(schema, rank, ranks)
        new = _held(bytes_at(step), held)
        before = None if old is None else _held(old, held)
        base_number = None if base is None else base.version
        parts.append(
            write_part(store, schema, kind=kind, version=version, base=base_number, held=held, new=new, old=before, rank=rank, workers=1)
        )
    return commit(
        store, schema, parts, kind=kind, version=version, base=None if base is None else base.version,
        expected=None if pointer is None else pointer.version, step=step, run_id="line", writer="test",
        epoch=0 if pointer is None else pointer.epoch,
    )  # fmt: skip


def add_route(store: WeightStore, version: int, *, base: int | None) -> Route:
    """One more way: a full route, or a fold from `base`."""
    record = store.version(version)
    old = None if base is None else bytes_at(store.version(base).step)
    kind = Kind.FULL if base is None else Kind.FOLD
    part = write_part(
        store, SCHEMA, kind=kind, version=version, base=base, held=all_of(SCHEMA), new=bytes_at(record.step), old=old, workers=1
    )
    route = Route(kind=kind, version=version, base=base, schema=record.schema, packs=part.packs, writer="test", created=time.time())
    store.add_route(route)
    return route


def _shard(schema: Schema, rank: int, ranks: int) -> dict:
    """Rows of `a` over the ranks; everything else belongs to the first."""
    specs = {spec.name: spec for spec in schema.tensors}
    rows = specs["a"].shape[0] // ranks
    mine = {"a": rows_of(specs["a"], rank * rows, (rank + 1) * rows)}
    return mine if rank else {**{name: held for name, held in all_of(schema).items() if name != "a"}, **mine}


def _held(data: Bytes, held: dict) -> Bytes:
    found = {}
    for name, part in held.items():
        start = part.region.start * part.spec.item_bytes
        found[name] = data[name][start : start + part.num_bytes]
    return found
