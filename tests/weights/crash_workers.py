"""Processes that kill themselves with SIGKILL at a chosen write, forked from one warm parent without torch or threads.

Run as a program it is that parent: it reads lines of JSON (worker, store, log, kill_at), forks, and answers with the exit status.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import numpy as np
from line_fakes import SCHEMA, MemoryObjects, publish

from rollmill.weights.check import fsck, repair
from rollmill.weights.compactor import Compactor, CostModel
from rollmill.weights.directory import Directory
from rollmill.weights.follower import Follower
from rollmill.weights.gc import collect
from rollmill.weights.live import TensorPatch
from rollmill.weights.objects import Objects
from rollmill.weights.proof import Lanes
from rollmill.weights.rollback import rollback
from rollmill.weights.shard import Held, all_of
from rollmill.weights.store import WeightStore

T = TypeVar("T")
DEADLINE_S = 60
COST = CostModel(spans=(2, 4), anchor_replay=0.01)
GRACE_S = 10.0
LATER = 4_000_000_000.0
"""A time when everything in a test is old."""


class SelfKilling:
    """Objects whose process dies at point `kill_at` (from 1): three to a write, before it, in its middle, after it."""

    def __init__(self, inner: Objects, kill_at: int) -> None:
        self._inner, self._left = inner, kill_at

    def get(self, key: str) -> tuple[bytes, str]:
        return self._inner.get(key)

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        return self._inner.get_ranges(key, ranges)

    def size(self, key: str) -> int:
        return self._inner.size(key)

    def list(self, prefix: str, *, after: str = "") -> Iterator[str]:
        return self._inner.list(prefix, after=after)

    def put(self, key: str, chunks: Iterable[bytes | memoryview]) -> None:
        self._write(lambda: self._inner.put(key, self._torn(chunks)))

    def create(self, key: str, data: bytes) -> bool:
        return self._write(lambda: self._inner.create(key, data))

    def swap(self, key: str, data: bytes, *, expected: str | None) -> str:
        return self._write(lambda: self._inner.swap(key, data, expected=expected))

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._write(functools.partial(self._inner.delete, [key]))

    def describe(self) -> str:
        return self._inner.describe()

    def _torn(self, chunks: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        for at, chunk in enumerate(chunks):
            yield chunk
            if at == 0:
                self._point()

    def _write(self, write: Callable[[], T]) -> T:
        self._point()
        result = write()
        self._point()
        return result

    def _point(self) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


class ArrayWeights:
    """Live weights in numpy, for a replica without torch."""

    def __init__(self) -> None:
        self.data = {spec.name: np.full(spec.num_bytes, 255, np.uint8) for spec in SCHEMA.tensors}

    def held(self) -> Mapping[str, Held]:
        return all_of(SCHEMA)

    def read(self, name: str) -> np.ndarray:
        return self.data[name]

    def load(self, name: str, data: np.ndarray) -> None:
        self.data[name][:] = data

    def stage(self, patches: Sequence[TensorPatch]) -> list[TensorPatch]:
        return list(patches)

    def apply(self, staged: Sequence[TensorPatch]) -> None:
        for patch in staged:
            self.data[patch.held.spec.name].view(patch.codes.dtype)[patch.positions] = patch.codes

    def revert(self, staged: Sequence[TensorPatch]) -> None:
        for patch in staged:
            self.data[patch.held.spec.name].view(patch.before.dtype)[patch.positions] = patch.before

    def lanes(self) -> dict[str, Lanes]:
        return {name: held.lanes(self.data[name]) for name, held in all_of(SCHEMA).items()}


Say = Callable[[str], object]


def trainer(store: WeightStore, say: Say) -> None:
    """Three versions after what is there, each announced when it is published."""
    pointer = store.latest()
    first = 0 if pointer is None else store.version(pointer.version).step + 1
    for step in range(first, first + 3):
        say(f"published {publish(store, step, on_number=lambda number: say(f'assigned {number}')).version}")


def compactor(store: WeightStore, say: Say) -> None:
    Compactor(store, cost=COST).step(LATER)


def collector(store: WeightStore, say: Say) -> None:
    """Both phases."""
    collect(store, LATER, grace_s=GRACE_S)
    collect(store, LATER + 3 * GRACE_S, grace_s=GRACE_S)
    collect(store, LATER + 6 * GRACE_S, grace_s=GRACE_S)


def replica(store: WeightStore, say: Say) -> None:
    """Starts, follows, meets damage, and says where it is."""
    live = ArrayWeights()
    follower = Follower(store, live, replica="r1", lease_s=1.0)
    for now in range(3):
        staged = follower.poll()
        if staged is not None:
            follower.swap(staged)
        follower.renew(float(now))


def operator(store: WeightStore, say: Say) -> None:
    repair(store, fsck(store, deep=True, now=LATER), now=LATER)


def going_back(store: WeightStore, say: Say) -> None:
    rollback(store, 1, run_id="line", writer="test")


WORKERS = {worker.__name__: worker for worker in (trainer, compactor, collector, replica, operator, going_back)}


class ForkServer:
    """The warm parent as its tests see it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent
        )

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.communicate(timeout=DEADLINE_S)

    def run(self, worker: str, store: Path, log: Path, *, kill_at: int = 0) -> int:
        """0 when the worker came to its end, -9 when it was killed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps([worker, str(store), str(log), kill_at]), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, "the parent of the workers died"
        return int(answer)


def serve() -> None:
    warm = WeightStore(MemoryObjects())
    trainer(warm, lambda text: None)
    operator(warm, lambda text: None)
    replica(warm, lambda text: None)
    assert "torch" not in sys.modules, "operations on a store run on machines without it, and forking it is not safe"
    for line in sys.stdin:
        worker, path, log, kill_at = json.loads(line)
        child = os.fork()
        if child == 0:
            # A worker that hangs is a failure too.
            signal.alarm(DEADLINE_S)
            _child(WORKERS[worker], path, log, kill_at)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _child(worker: Callable[[WeightStore, Say], None], path: str, log: str, kill_at: int) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    code = 1
    try:
        worker(WeightStore(SelfKilling(Directory(path), kill_at)), lambda text: os.write(descriptor, f"{text}\n".encode()))
        code = 0
    finally:
        if code:
            traceback.print_exc()
        # Nothing of the parent's may be flushed or joined here.
        os._exit(code)


if __name__ == "__main__":
    serve()
