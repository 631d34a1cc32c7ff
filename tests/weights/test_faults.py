"""Claims about a store that lies, forgets and loses: never is a wrong byte served, no replica goes back, and all arrive in the end."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest
import torch
from line_fakes import MemoryObjects
from objects_fakes import Fault, FaultyObjects

from rollmill.weights import Follower, HostWeights, Publisher, check, gc, survey
from rollmill.weights.check import Damage, fsck, repair, verify
from rollmill.weights.compactor import Compactor
from rollmill.weights.errors import CorruptSnapshot, LatestMoved, PublishFailed, WrongBase
from rollmill.weights.gc import collect
from rollmill.weights.objects import ObjectMissing
from rollmill.weights.store import LATEST, RESERVED, WeightStore

RATES = {
    Fault.LOST_BEFORE: 0.004,
    Fault.LOST_AFTER: 0.004,
    Fault.TWICE: 0.02,
    Fault.UNAVAILABLE: 0.004,
    Fault.FLIPPED: 0.01,
    Fault.TRUNCATED: 0.01,
}
Bits = dict[str, bytes]
LEASE_S = 20.0
"""In a world whose clock moves a second with every version."""


class LateView:
    """Objects as a far reader sees them: lists and pointers that are now and then some writes old."""

    def __init__(self, inner: MemoryObjects, rng: Random, odds: float) -> None:
        self._inner, self._rng, self.odds = inner, rng, odds
        self._lists: dict[tuple[str, str], list[str]] = {}
        self._pointers: dict[str, tuple[bytes, str]] = {}
        self.num_late = 0

    def get(self, key: str) -> tuple[bytes, str]:
        found = self._inner.get(key)
        if key not in (LATEST, RESERVED):
            return found
        before = self._pointers.get(key, found)
        self._pointers[key] = found
        return before if self._is_late() else found

    def list(self, prefix: str, *, after: str = "") -> Iterator[str]:
        found = list(self._inner.list(prefix, after=after))
        before = self._lists.get((prefix, after), found[:-1])
        self._lists = {(prefix, after): found}
        return iter(before if self._is_late() else found)

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        return self._inner.get_ranges(key, ranges)

    def size(self, key: str) -> int:
        return self._inner.size(key)

    def put(self, key: str, chunks: Sequence[bytes | memoryview]) -> None:
        self._inner.put(key, chunks)

    def create(self, key: str, data: bytes) -> bool:
        return self._inner.create(key, data)

    def swap(self, key: str, data: bytes, *, expected: str | None) -> str:
        return self._inner.swap(key, data, expected=expected)

    def delete(self, keys: Sequence[str]) -> None:
        self._inner.delete(keys)

    def describe(self) -> str:
        return "a late view"

    def _is_late(self) -> bool:
        late = self._rng.random() < self.odds
        self.num_late += late
        return late


def small_model() -> dict[str, torch.Tensor]:
    return {
        "a": torch.zeros(24, 16, dtype=torch.bfloat16),
        "b": torch.zeros(10, dtype=torch.float32),
        "n": torch.zeros(3, dtype=torch.int64),
    }


def bits_of(tensors: dict[str, torch.Tensor]) -> Bits:
    return {name: tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}


@dataclass
class World:
    """One store, its trainer, its replicas, its operations, and everything that goes wrong between them."""

    seed: int
    objects: MemoryObjects = field(default_factory=MemoryObjects)
    history: dict[int, Bits] = field(default_factory=dict)
    """version -> what the trainer meant by it."""
    happened: Counter[str] = field(default_factory=Counter)
    faulty: list[FaultyObjects] = field(default_factory=list)
    late: list[LateView] = field(default_factory=list)
    now: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        self.rng = Random(self.seed)
        self.clean = WeightStore(self.objects)

    def store(self, *, is_late: bool = False, calmer: float = 1.0) -> WeightStore:
        inner: MemoryObjects | LateView = self.objects
        if is_late:
            inner = LateView(self.objects, Random(self.rng.random()), 0.02)
            self.late.append(inner)
        rates = {fault: odds / calmer for fault, odds in RATES.items()}
        self.faulty.append(FaultyObjects(inner, Random(self.rng.random()), rates=rates))
        return WeightStore(self.faulty[-1])

    def calm(self) -> None:
        for faulty in self.faulty:
            faulty.rates.clear()
        for late in self.late:
            late.odds = 0.0

    def damage_at_rest(self) -> None:
        """Disks rot: one stored object is flipped, cut or gone."""
        keys = list(self.objects.list(""))
        folder = self.rng.choice(["packs/", "packs/", "routes/", "versions/", "schema/", "l", "r"])
        key = self.rng.choice([key for key in keys if key.startswith(folder)] or keys)
        how = self.rng.choice(["flipped", "cut", "lost"])
        data = bytearray(self.objects.get(key)[0])
        at = self.rng.randrange(len(data)) if data else 0
        if how == "lost" or not data:
            self.objects.delete([key])
        elif how == "flipped":
            data[at] ^= 1 << self.rng.randrange(8)
            self.objects.put(key, [bytes(data)])
        else:
            self.objects.put(key, [bytes(data[:at])])
        self.happened[f"at rest: {key.split('/')[0]} {how}"] += 1

    def operate(self) -> None:
        """Somebody runs `fsck --deep --repair`."""
        found = fsck(self.clean, deep=True, now=self.now)
        self.happened.update(f"fsck: {one.kind}" for one in found)
        repair(self.clean, found, now=self.now)

    def injected(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for faulty in self.faulty:
            total.update({str(fault): count for fault, count in faulty.injected.items()})
        total["late"] = sum(late.num_late for late in self.late)
        return total


class Trainer:
    """Goes on whatever happens: a failed publisher is made anew, as a restarted trainer would, now and then from an older checkpoint."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = np.random.default_rng(world.seed)
        self._publisher: Publisher | None = None
        self._checkpoint: dict[str, torch.Tensor] = {}
        self.weights = small_model()
        self.step = 0
        self.version = -1

    def train(self) -> None:
        self.step += 1
        flat = self.weights["a"].view(torch.int16).reshape(-1).numpy()
        flat[self._rng.integers(0, flat.size, 4)] += self._rng.integers(-2, 3, 4).astype(np.int16)
        if self.step % 5 == 0:
            self.weights["b"][self.step % 10] = float("nan") if self.step % 3 else -0.0
            self.weights["n"][self.step % 3] += self.step
        if self.step % 40 == 0:
            self._checkpoint = {name: tensor.clone() for name, tensor in self.weights.items()}
        if self._rng.random() < 0.004 and self._checkpoint:
            self.weights = {name: tensor.clone() for name, tensor in self._checkpoint.items()}
            self._close()

    def publish(self) -> None:
        bits = bits_of(self.weights)
        for attempt in range(100):
            try:
                version = self._try()
            except (PublishFailed, OSError, CorruptSnapshot, LatestMoved) as error:
                self._world.happened[f"trainer restarted: {type(error.__cause__ or error).__name__}"] += 1
                self._publisher = None
                if attempt % 5 == 4:
                    self._world.operate()
                continue
            assert self._world.history.setdefault(version, bits) == bits, "a number names one set of weights for ever"
            assert version >= self.version
            self.version = version
            return
        raise AssertionError("the trainer cannot publish any more")

    def _try(self) -> int:
        if self._publisher is None:
            self._publisher = Publisher(self._world.store(), run_id="faults")
            return self._publisher.resume(self.weights, step=self.step, timeout_s=60)
        version = self._publisher.submit(self.weights, step=self.step, timeout_s=60)
        # Published or not, this number was given to these weights.
        assert self._world.history.setdefault(version, bits_of(self.weights)) == bits_of(self.weights), "a number was given out twice"
        self._publisher.flush(60)
        return version

    def _close(self) -> None:
        if self._publisher is not None:
            self._publisher.close(60)
        self._publisher = None


class Replica:
    """An engine that serves what its follower proved, compared with the trainer's own bytes after every swap."""

    def __init__(self, name: str, world: World) -> None:
        self.name, self._world = name, world
        self._rng = Random(f"{world.seed} {name}")
        self.newest = -1
        self.restart()

    def restart(self) -> None:
        if self.newest >= 0:
            self._world.happened.update(self.stats())
        # One that starts anew may begin lower, where the newest version is out of reach at that moment.
        self.newest = -1
        self._live = small_model()
        for tensor in self._live.values():
            tensor.reshape(-1).view(torch.uint8).fill_(self._rng.randrange(256))
        self._follower = Follower(self._world.store(is_late=True), HostWeights(self._live), replica=self.name, lease_s=LEASE_S)

    @property
    def version(self) -> int | None:
        return self._follower.version

    def look(self) -> None:
        staged = self._follower.poll()
        if staged is not None and self._rng.random() < 0.03:
            # Overtaken on its way to the engine: another look comes first, and both are swapped in.
            self._swap(self._follower.poll())
        self._swap(staged)
        if staged is not None and self._rng.random() < 0.1:
            self._swap(staged)
        self.assert_true()
        try:
            self._follower.renew(self._world.now)
        except OSError:
            self._world.happened["replica: lease not renewed"] += 1

    def suffer(self) -> None:
        """A bit of the live memory flips; the scrub puts it right or the replica starts again, and serves nothing meanwhile."""
        if self.version is None:
            return
        live = self._live["a"].reshape(-1).view(torch.uint8)
        live[self._rng.randrange(live.numel())] ^= 1 << self._rng.randrange(8)
        for _ in range(3):
            try:
                patch = self._follower.scrub()
            except (CorruptSnapshot, OSError):
                continue
            assert patch is not None
            self._swap(patch)
            self._world.happened["replica: live bit flip mended"] += 1
            break
        else:
            self._world.happened["replica: restarted after a live bit flip"] += 1
            self.restart()
        self.assert_true()

    def _swap(self, staged: object) -> None:
        if staged is None:
            return
        try:
            self._follower.swap(staged)
        except WrongBase:
            self._world.happened["replica: stale patch refused"] += 1

    def assert_true(self) -> None:
        version = self._follower.version
        if version is None:
            return
        assert bits_of(self._live) == self._world.history[version], f"{self.name} serves wrong bytes as version {version}"
        assert version >= self.newest, "a replica never goes back"
        self.newest = version

    def stats(self) -> Counter[str]:
        stats = self._follower.stats()
        names = ("num_confirmed", "num_quarantined", "num_read_errors", "num_wrong_base", "num_wrong_weights")
        return Counter({f"replica: {name}": getattr(stats, name) for name in names})


def live_through(num_versions: int, *, seed: int) -> World:
    world = World(seed=seed)
    trainer = Trainer(world)
    steady, sleeper, late, restless = (Replica(name, world) for name in ("steady", "sleeper", "late", "restless"))
    replicas = [steady, sleeper, late, restless]
    # Each of their runs makes hundreds of calls, so that at the rates of the others none would come to its end.
    compactor, collector = Compactor(world.store(calmer=20)), world.store(calmer=20)
    sleeps_until = 0
    for at in range(num_versions):
        world.now += 1.0
        trainer.train()
        trainer.publish()
        steady.look()
        if at >= sleeps_until:
            sleeper.look()
            sleeps_until = at + world.rng.choice([1, 2, 7, 30, 90])
        if at >= num_versions // 2 or at % 100 == 99:
            late.look()
        if at % 37 == 0:
            restless.restart()
        if at % 3 == 0:
            restless.look()
        if at % 61 == 60:
            world.rng.choice(replicas).suffer()
        if at % 8 == 7:
            attempt(world, "compactor", lambda: compactor.step(world.now))
        if at % 50 == 49:
            attempt(world, "gc", lambda: collect(collector, world.now, grace_s=10.0))
        if at % 45 == 44:
            world.damage_at_rest()
        if at % 150 == 149:
            world.operate()
    settle(world, trainer, replicas)
    return world


def attempt(world: World, name: str, work: object) -> None:
    try:
        work()
        world.happened[f"{name}: ran"] += 1
    except (OSError, CorruptSnapshot, ObjectMissing) as error:
        world.happened[f"{name}: {type(error).__name__}"] += 1


def settle(world: World, trainer: Trainer, replicas: list[Replica]) -> None:
    """The faults end, somebody repairs, the trainer takes one more step: everybody arrives, and the store is whole."""
    world.calm()
    world.operate()
    trainer.train()
    trainer.publish()
    # The tensor table comes back with a version only, and what needs it can be made again after that.
    world.operate()
    for replica in replicas:
        for _ in range(3):
            replica.look()
        assert replica.version == trainer.version, f"{replica.name} did not arrive"
        world.happened.update(replica.stats())
    left = [one for one in fsck(world.clean, deep=True, now=world.now) if one.is_fatal]
    lost = {Damage.VERSION_UNREACHABLE, Damage.VERSION_MISSING, Damage.VERSION_UNREADABLE, Damage.PACK_MISSING, Damage.PACK_FLIPPED}
    assert all(one.kind in lost for one in left), "what is left is what nobody could make again"
    assert len(verify(world.clean)) == len(left)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One thread, so that a seed gives one world, and no log of ten thousand complaints."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    for module, name in ((survey, "READERS"), (check, "READERS"), (gc, "_READERS")):
        monkeypatch.setattr(module, name, 1)
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


def test_no_wrong_byte_is_served_through_1500_versions_of_faults() -> None:
    world = live_through(1500, seed=1)
    injected = world.injected()
    assert all(injected[str(fault)] > 0 for fault in Fault) and injected["late"] > 0
    assert world.happened["replica: num_confirmed"] > 0


@pytest.mark.slow
def test_no_wrong_byte_is_served_through_10000_versions_of_faults() -> None:
    began = time.monotonic()
    world = live_through(10_000, seed=2)
    print(f"\n{len(world.history)} versions in {time.monotonic() - began:.0f} s")
    for name, count in sorted((world.injected() + world.happened).items()):
        print(f"{count:8d}  {name}")


# The two ways out of a dead end.


def one_bad_delta() -> tuple[WeightStore, Publisher, dict[str, torch.Tensor], dict[str, torch.Tensor], Follower, str]:
    """A replica at version 0 that has found the delta to version 1 damaged, and knows no other way."""
    store, trained, live = WeightStore(MemoryObjects()), small_model(), small_model()
    publisher, follower = Publisher(store, run_id="x"), Follower(store, HostWeights(live))
    publisher.resume(trained, step=0)
    follower.swap(follower.bootstrap())
    trained["a"][0] = 1.0
    publisher.submit(trained, step=1)
    publisher.flush()
    key = "packs/00000001/delta-0000.pack"
    whole = store.objects.get(key)[0]
    store.objects.put(key, [whole[:-1] + bytes([whole[-1] ^ 1])])
    assert follower.poll() is None and list(store.quarantined()) == [key]
    store.objects.put("packs/kept-aside", [whole])
    return store, publisher, trained, live, follower, key


def test_a_stuck_replica_moves_on_when_the_object_is_whole_again_without_a_new_version() -> None:
    store, publisher, trained, live, follower, key = one_bad_delta()
    publisher.close()
    assert follower.poll() is None
    store.objects.put(key, [store.objects.get("packs/kept-aside")[0]])
    repair(store, fsck(store, now=time.time()), now=time.time())
    staged = follower.poll()
    assert staged is not None
    follower.swap(staged)
    assert follower.version == 1 and bits_of(live) == bits_of(trained)
    assert follower.stats().problem == ""


def test_damage_from_before_a_restart_of_the_trainer_still_brings_a_full_route() -> None:
    store, publisher, trained, live, follower, _ = one_bad_delta()
    publisher.close()
    with Publisher(store, run_id="x") as again:
        assert again.resume(trained, step=1) == 1, "it goes on from the same weights, so nothing needs to be rebuilt"
        trained["a"][1] = 2.0
        again.submit(trained, step=2)
    staged = follower.poll()
    assert staged is not None
    follower.swap(staged)
    assert follower.version == 2 and bits_of(live) == bits_of(trained)


def test_a_lost_pointer_does_not_begin_a_second_line() -> None:
    store, trained = WeightStore(MemoryObjects()), small_model()
    with Publisher(store, run_id="x") as publisher:
        publisher.resume(trained, step=0)
        trained["a"][0] = 1.0
        publisher.submit(trained, step=1)
    store.objects.delete([LATEST])
    with Publisher(store, run_id="x") as again:
        trained["a"][1] = 1.0
        assert again.resume(trained, step=2) == 2
    assert [record.version for record in store.lineage()] == [2, 1, 0]
    assert store.version(2).epoch == 1
