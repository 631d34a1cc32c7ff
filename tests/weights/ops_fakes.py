"""A run of tiny weights that remembers what every version was, and processes that kill themselves between two writes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from rollmill.weights.encode import commit, write_part
from rollmill.weights.manifest import Kind, Route, Version
from rollmill.weights.objects import Objects
from rollmill.weights.reader import materialise, replay
from rollmill.weights.schema import make_schema
from rollmill.weights.shard import all_of
from rollmill.weights.store import WeightStore

DEADLINE_S = 60.0
TENSORS = (("a", "bfloat16", (48, 32)), ("b", "float32", (16,)), ("c", "int64", (5,)))


class TinyRun:
    """A trainer without torch: publishes small random steps, one after the other, and knows the bytes of each."""

    def __init__(self, store: WeightStore, *, seed: int = 0, tensors: Sequence[tuple[str, str, tuple[int, ...]]] = TENSORS) -> None:
        self.store = store
        self.truth: dict[int, dict[str, np.ndarray]] = {}
        self.rng = np.random.default_rng(seed)
        self.latest: int | None = None
        self.epoch = 0
        self.change_schema(tensors)

    def change_schema(self, tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> None:
        """The next version is of other tensors, and so a full one."""
        self.schema = make_schema(tensors, chunk_elements=512)
        self.data = {spec.name: self.rng.integers(0, 256, spec.num_bytes, dtype=np.uint8) for spec in self.schema.tensors}
        self._base: int | None = None

    def publish(self, count: int = 1, *, skip_numbers: bool = False) -> int:
        for _ in range(count):
            if skip_numbers:
                self.store.reserve()
            self._publish_one()
        assert self.latest is not None
        return self.latest

    def resume_from(self, record: Version) -> None:
        """Go on after somebody else, a roll-back, published."""
        assert record.restores is not None
        self.truth[record.version] = self.truth[record.restores]
        self.data = {name: data.copy() for name, data in self.truth[record.version].items()}
        self.latest = self._base = record.version
        self.epoch = record.epoch

    def _publish_one(self) -> None:
        # A few elements near each other come and go, so that folds pay.
        flat = self.data["a"].view(np.uint16)
        flat[self.rng.integers(0, min(60, len(flat)), 12)] ^= np.uint16(1)
        version = self.store.reserve()
        old = None if self._base is None else self.truth[self._base]
        kind = Kind.FULL if old is None else Kind.DELTA
        part = write_part(
            self.store,
            self.schema,
            kind=kind,
            version=version,
            base=self._base,
            held=all_of(self.schema),
            new=self.data,
            old=old,
            workers=1,
        )
        commit(
            self.store, self.schema, [part], kind=kind, version=version, base=self._base, expected=self.latest, step=version,
            run_id="tiny", writer="trainer", epoch=self.epoch,
        )  # fmt: skip
        self.truth[version] = {name: data.copy() for name, data in self.data.items()}
        self.latest = self._base = version

    def add_full(self, version: int) -> None:
        schema = self.store.schema(self.store.version(version).schema)
        part = write_part(
            self.store, schema, kind=Kind.FULL, version=version, base=None, held=all_of(schema), new=self.truth[version], old=None
        )
        self.store.add_route(
            Route(kind=Kind.FULL, version=version, base=None, schema=schema.digest, packs=part.packs, writer="t", created=0.0)
        )

    def check(self, versions: Iterable[int]) -> None:
        """Every one of them can be rebuilt from nothing, bit for bit."""
        for version in versions:
            assert same(materialise(self.store, version, workers=1)[2], self.truth[version]), version

    def check_move(self, held: int, target: int) -> None:
        """A replica that holds one gets to the other, bit for bit."""
        assert same(materialise(self.store, target, start=(held, self.truth[held]), workers=1)[2], self.truth[target])

    def check_routes(self) -> None:
        """Every route gives what its version is, by itself."""
        for name in self.store.routes():
            route, record = self.store.route(name), self.store.version(name.version)
            schema = self.store.schema(record.schema)
            data = None if name.base is None else {tensor: data.copy() for tensor, data in self.truth[name.base].items()}
            assert same(replay(self.store, route, record, schema, data), self.truth[name.version])


def same(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def keys_in(objects: Objects) -> set[str]:
    return set(objects.list(""))


class Suicidal:
    """Objects of a process that kills itself with SIGKILL right before its write number `at` (from 1)."""

    def __init__(self, inner: Objects, at: int) -> None:
        self._inner, self._left = inner, at

    def __getattr__(self, name: str) -> object:
        found = getattr(self._inner, name)
        if name not in ("put", "create", "swap", "delete"):
            return found

        def write(*args: object, **kwargs: object) -> object:
            self._left -= 1
            if not self._left:
                os.kill(os.getpid(), signal.SIGKILL)
            return found(*args, **kwargs)

        return write


def run_and_die(code: str, path: Path, *, at: int) -> int:
    """Run `code` with a `store` whose process dies before write number `at`; the exit code, -9 when it died."""
    setup = (
        "from ops_fakes import Suicidal\n"
        "from rollmill.weights.objects import open_objects\n"
        "from rollmill.weights.store import WeightStore\n"
        f"store = WeightStore(Suicidal(open_objects({str(path)!r}), {at}))\n"
    )
    here = str(Path(__file__).parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([here, os.getcwd()])}
    return subprocess.run([sys.executable, "-c", setup + code], env=environment, timeout=DEADLINE_S, check=False).returncode
