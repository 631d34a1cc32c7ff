"""Claims about kill -9: whoever dies between any two writes, the store opens, no number comes twice, and replicas get the right bits."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from crash_workers import COST, GRACE_S, LATER, ArrayWeights, ForkServer
from line_fakes import ROW_CUTS, SCHEMA, add_route, bytes_at, publish

from rollmill.weights import Follower, Publisher, check, gc, survey
from rollmill.weights.check import Damage, fsck, repair, verify
from rollmill.weights.compactor import Compactor
from rollmill.weights.gc import collect
from rollmill.weights.manifest import Tag, version_key
from rollmill.weights.reader import materialise
from rollmill.weights.store import LATEST, RESERVED, WeightStore, open_store

LITTER = {
    Damage.PACK_ORPHAN, Damage.ROUTE_ORPHAN, Damage.TEMPORARY_FILE, Damage.VERSION_UNSERVED, Damage.FORK, Damage.LEASE_EXPIRED,
    Damage.TOMBSTONE_OVERDUE,
}  # fmt: skip


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """In memory where that is possible: a killed process loses nothing that it wrote, and hundreds of syncs need no disk."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="rollmill-crash-") as path:
        yield Path(path)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks after each death are many and tiny: threads would cost more than they save."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    for module, name in ((survey, "READERS"), (check, "READERS"), (gc, "_READERS")):
        monkeypatch.setattr(module, name, 1)


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer() as server:
        yield server


def kill_everywhere(server: ForkServer, worker: str, prepared: Path, look: Callable[[WeightStore, list[str]], None]) -> int:
    """Run `worker` on copies of a store, killed at its first point, its second and so on until it lives; how often it died."""
    for kill_at in itertools.count(1):
        path = prepared.parent / f"{worker}-{kill_at}"
        if prepared.exists():
            shutil.copytree(prepared, path)
        log = path.with_suffix(".log")
        log.touch()
        code = server.run(worker, path, log, kill_at=kill_at)
        assert code in (0, -9), f"{worker} failed at point {kill_at}"
        look(open_store(path), log.read_text().split("\n")[:-1])
        shutil.rmtree(path, ignore_errors=True)
        if code == 0:
            return kill_at - 1
    raise AssertionError("unreachable")


def assert_sound(store: WeightStore) -> None:
    """Nothing that was published is damaged; what a dead process left is litter, or mended without the trainer."""
    found = fsck(store, deep=True, now=LATER)
    # Killed before `latest` was ever written, which looks as if it had been lost and is mended alike.
    assert {one.kind for one in found} <= LITTER | {Damage.LATEST_MISSING}, found
    repair(store, found, now=LATER)
    assert verify(store) == []


def assert_reached(store: WeightStore, follower: Follower, live: ArrayWeights) -> None:
    pointer = store.latest()
    if pointer is None:
        assert follower.poll() is None
        return
    staged = follower.poll()
    if staged is not None:
        follower.swap(staged)
    assert follower.version == pointer.version, follower.stats().problem
    expected = bytes_at(store.version(pointer.version).step)
    assert all(np.array_equal(live.data[name], expected[name]) for name in expected)


def assert_late_joiner_arrives(store: WeightStore) -> None:
    live = ArrayWeights()
    assert_reached(store, Follower(store, live), live)


def tensors_at(step: int) -> dict[str, torch.Tensor]:
    found = {spec.name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in SCHEMA.tensors}
    for name, data in bytes_at(step).items():
        if data.size:
            found[name].reshape(-1).view(torch.uint8).copy_(torch.from_numpy(data))
    return found


def line(path: Path, num_versions: int) -> WeightStore:
    store = open_store(path)
    for step in range(num_versions):
        publish(store, step)
    return store


def test_a_trainer_killed_between_any_two_writes_is_followed_by_one_that_goes_on(server: ForkServer, place: Path) -> None:
    def look(store: WeightStore, said: list[str]) -> None:
        assert_sound(store)
        assigned = {int(text.split()[1]) for text in said if text.startswith("assigned")}
        published = [int(text.split()[1]) for text in said if text.startswith("published")]
        pointer = store.latest()
        assert max(published, default=-1) <= (-1 if pointer is None else pointer.version), "what was announced is durable"
        live = ArrayWeights()
        follower = Follower(store, live)
        assert_reached(store, follower, live)
        step = 0 if pointer is None else store.version(pointer.version).step
        with Publisher(store, run_id="line", row_cuts=ROW_CUTS) as again:
            resumed = again.resume(tensors_at(step), step=step)
            assert pointer is None or resumed == pointer.version, "the same weights keep their number"
            number = again.submit(tensors_at(step + 1), step=step + 1)
            assert number > resumed and number not in assigned
        assert_reached(store, follower, live)
        assert_late_joiner_arrives(store)
        assert_sound(store)

    assert kill_everywhere(server, "trainer", place / "none", look) >= 36


def test_a_compactor_killed_between_any_two_writes_is_finished_by_the_next(server: ForkServer, place: Path) -> None:
    line(place / "line", 6)
    whole = place / "whole"
    shutil.copytree(place / "line", whole)
    Compactor(open_store(whole), cost=COST).step(LATER)
    expected = [name.key for name in open_store(whole).routes()]
    assert len(expected) > 8

    def look(store: WeightStore, said: list[str]) -> None:
        assert_sound(store)
        assert_late_joiner_arrives(store)
        Compactor(store, cost=COST).step(LATER)
        assert [name.key for name in store.routes()] == expected
        assert fsck(store, deep=True, now=LATER) == []

    assert kill_everywhere(server, "compactor", place / "line", look) >= 20


def test_a_collector_killed_between_any_two_deletes_is_finished_by_the_next(server: ForkServer, place: Path) -> None:
    store = line(place / "line", 9)
    for version in (3, 6, 8):
        add_route(store, version, base=None)
    add_route(store, 8, base=6)
    store.tag(Tag(name="best", version=1, created=0.0))

    def look(store: WeightStore, said: list[str]) -> None:
        assert_sound(store)
        assert_late_joiner_arrives(store)
        for at in range(2, 6):
            collect(store, LATER + at * 3 * GRACE_S, grace_s=GRACE_S)
        assert fsck(store, deep=True, now=LATER + 9e5) == []
        assert store.versions() == [0, 1, 6, 7, 8] and list(store.objects.list("tombstones/")) == []
        _, _, data = materialise(store, 1)
        assert all(np.array_equal(data[name], value) for name, value in bytes_at(1).items()), "what is tagged stays"

    assert kill_everywhere(server, "collector", place / "line", look) >= 20


def test_a_replica_killed_between_any_two_writes_harms_nobody(server: ForkServer, place: Path) -> None:
    store = line(place / "line", 4)
    add_route(store, 3, base=None)
    key = "packs/00000003/full-0000.pack"
    store.objects.put(key, [store.objects.get(key)[0][:-1]])

    def look(store: WeightStore, said: list[str]) -> None:
        kinds = {one.kind for one in fsck(store, deep=True, now=LATER)}
        assert kinds <= {Damage.PACK_TRUNCATED, Damage.QUARANTINED, Damage.LEASE_EXPIRED, Damage.TEMPORARY_FILE}
        assert_late_joiner_arrives(store)
        repair(store, fsck(store, deep=True, now=LATER), now=LATER)
        assert verify(store) == [] and store.quarantined() == {}
        assert_late_joiner_arrives(store)

    assert kill_everywhere(server, "replica", place / "line", look) >= 6


def test_a_roll_back_killed_between_any_two_writes_happened_or_did_not(server: ForkServer, place: Path) -> None:
    line(place / "line", 4)

    def look(store: WeightStore, said: list[str]) -> None:
        assert_sound(store)
        pointer = store.latest()
        assert pointer is not None
        record, _, data = materialise(store, pointer.version)
        expected = bytes_at(3 if record.restores is None else record.restores)
        assert all(np.array_equal(data[name], expected[name]) for name in expected)
        assert store.reserve() > max(store.versions())

    assert kill_everywhere(server, "going_back", place / "line", look) >= 9


def test_a_repair_killed_between_any_two_writes_is_finished_by_the_next(server: ForkServer, place: Path) -> None:
    store = line(place / "line", 5)
    route = add_route(store, 4, base=0)
    add_route(store, 3, base=None)
    flipped = ["packs/00000004/delta-0000.pack", "packs/00000003/delta-0000.pack", version_key(2), route.name.key]
    for key in flipped:
        data = bytearray(store.objects.get(key)[0])
        data[20] ^= 1
        store.objects.put(key, [bytes(data)])
    store.objects.delete([LATEST, RESERVED])

    def look(store: WeightStore, said: list[str]) -> None:
        repair(store, fsck(store, deep=True, now=LATER), now=LATER)
        assert fsck(store, deep=True, now=LATER) == []
        assert_late_joiner_arrives(store)
        for number in store.versions():
            _, _, data = materialise(store, number)
            assert all(np.array_equal(data[name], value) for name, value in bytes_at(number).items())

    assert kill_everywhere(server, "operator", place / "line", look) >= 15
