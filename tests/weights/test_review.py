"""Claims that a hostile reader of the weight path tried to break: strange stores, lost races, replicas that know less than the trainer."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch
from blake3 import blake3
from line_fakes import SCHEMA, MemoryObjects, bytes_at, publish
from typer.testing import CliRunner
from weights_fakes import ReplicaFake, same_bits, weights_at

from rollmill.engine.swap import WeightWatch
from rollmill.weights import Follower, HostWeights, Publisher, WeightStore, open_store
from rollmill.weights.commands import weights_app
from rollmill.weights.compactor import Compactor
from rollmill.weights.encode import commit, write_part
from rollmill.weights.errors import CorruptSnapshot, UnknownFormat
from rollmill.weights.gc import collect
from rollmill.weights.history import show
from rollmill.weights.interop.hf import read_directory
from rollmill.weights.interop.pull import pull
from rollmill.weights.manifest import Floor, Kind, PackRef, Pointer, seal
from rollmill.weights.objects import ReadOnly, StoreUnavailable
from rollmill.weights.pack import index_range
from rollmill.weights.proof import Lanes
from rollmill.weights.reader import Damaged, OpenRoute, materialise
from rollmill.weights.schema import TensorSpec, make_schema
from rollmill.weights.shard import all_of, columns_of, rows_of, whole

DEADLINE_S = 30.0


def ended(work: Callable[[], Any]) -> Any:
    """What `work` gives; a failure, not a hang, when it does not come to an end."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    assert found, "it did not come to an end"
    return found[0]


def memory_store(steps: int = 0) -> WeightStore:
    store = WeightStore(MemoryObjects())
    for step in range(steps):
        publish(store, step)
    return store


def blank() -> HostWeights:
    """A replica of the model of `line_fakes` that was never told where its publisher cuts tensors."""
    return HostWeights({spec.name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in SCHEMA.tensors})


def resealed(data: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    record = json.loads(data.split(b"\n")[0])
    change(record)
    line = json.dumps(record, separators=(",", ":")).encode()
    return line + b"\n" + blake3(line).hexdigest().encode() + b"\n"


# Replicas that know less than the trainer.


def test_whole_replica_follows_a_publisher_that_cuts_its_tensors_and_blames_nobody(tmp_path: Path) -> None:
    store, live = open_store(tmp_path), ReplicaFake()
    follower = Follower(store, live)
    with Publisher(store, run_id="cut", row_cuts={"wide": (7, 20)}, col_cuts={"wide": (5,)}) as publisher:
        publisher.resume(weights_at(0), step=0)
        follower.swap(follower.bootstrap())
        for step in range(1, 4):
            publisher.submit(weights_at(step), step=step)
            publisher.flush()
            staged = follower.poll()
            assert staged is not None
            follower.swap(staged)
            assert same_bits(live.tensors, weights_at(step))
    live.hurt("wide", 30)
    mended = follower.scrub()
    assert mended is not None and mended.num_changed == 1
    follower.swap(mended)
    assert same_bits(live.tensors, weights_at(3)) and store.quarantined() == {}


def test_empty_shard_lies_outside_every_cell() -> None:
    spec = TensorSpec(name="w", dtype="bfloat16", shape=(8, 6))
    for held in (rows_of(spec, 3, 3), columns_of(spec, 2, 2)):
        assert [held.local(cell) for cell in spec.cells()] == [None]
        assert held.lanes(np.empty(0, np.uint8)) == (0, 0)


def test_scrub_of_a_rank_ignores_tensors_that_are_bad_on_another_rank_only() -> None:
    store = memory_store(2)
    specs = {spec.name: spec for spec in SCHEMA.tensors}
    shards = [{"a": whole(specs["a"])}, {name: whole(spec) for name, spec in specs.items() if name != "a"}]
    ranks = [
        HostWeights({n: torch.zeros(h.spec.shape, dtype=getattr(torch, h.spec.dtype)) for n, h in held.items()}, held) for held in shards
    ]

    def agree(mine: dict[str, Lanes]) -> dict[str, Lanes]:
        return {name: lanes for rank in ranks for name, lanes in rank.lanes().items()}

    followers = [Follower(store, rank, agree=agree) for rank in ranks]
    staged = [follower.bootstrap() for follower in followers]
    for follower, version in zip(followers, staged, strict=True):
        follower.swap(version)
    ranks[0].read("a")[11] ^= 4
    patches = [follower.scrub() for follower in followers]
    assert [None if patch is None else patch.num_changed for patch in patches] == [1, 0]


def test_conjugated_view_is_no_live_tensor() -> None:
    with pytest.raises(ValueError, match="plain tensor"):
        HostWeights({"c": torch.ones(3, dtype=torch.complex64).conj()})


# Loops that must end.


def wrong_base_line() -> WeightStore:
    """Version 0 in full, and two deltas by a trainer whose copy of version 0 had gone bad in the cells that they change."""
    store = memory_store(1)
    bad, new = bytes_at(0), bytes_at(0)
    bad["a"][0::2] ^= 3
    for version in (1, 2):
        assert store.reserve() == version
        old = {name: data.copy() for name, data in (bad if version == 1 else new).items()}
        new["a"][0:8:2] ^= 1
        part = write_part(store, SCHEMA, kind=Kind.DELTA, version=version, base=version - 1, held=all_of(SCHEMA), new=new, old=old)
        commit(
            store, SCHEMA, [part], kind=Kind.DELTA, version=version, base=version - 1, expected=version - 1, step=version, run_id="r",
            writer="w",
        )  # fmt: skip
    return store


def test_joiner_falls_back_to_the_newest_version_that_can_be_built_past_several_that_cannot() -> None:
    follower = Follower(wrong_base_line(), blank())
    staged = ended(follower.bootstrap)
    assert follower.swap(staged) and follower.version == 0
    assert "version 2 cannot be reached" in follower.stats().problem


def test_version_that_follows_itself_is_damaged_and_nobody_walks_in_circles() -> None:
    store = memory_store(3)
    objects = store.objects
    objects.put("versions/00000002.json", [resealed(objects.get("versions/00000002.json")[0], lambda record: record.update(previous=2))])
    with pytest.raises(CorruptSnapshot, match="claims to follow"):
        store.version(2)
    follower = Follower(store, blank())
    follower.swap(ended(follower.bootstrap))
    assert follower.version == 1


# Leases.


class UnwritableLeases(MemoryObjects):
    """A store that answers reads and, while `error` is set, refuses to write leases."""

    error: OSError | None = None

    def put(self, key: str, chunks: Any) -> None:
        if self.error is not None and key.startswith("leases/"):
            raise self.error
        super().put(key, chunks)


@pytest.mark.parametrize("error", [StoreUnavailable(5, "no answer"), ReadOnly(13, "read only")])
def test_replica_that_cannot_write_its_lease_follows_on_and_tries_again(error: OSError) -> None:
    objects = UnwritableLeases()
    store = WeightStore(objects)
    publish(store, 0)
    follower = Follower(store, blank(), replica="one", lease_s=30.0)
    follower.swap(follower.bootstrap())
    objects.error = error
    assert not follower.renew(100.0) and follower.stats().num_lease_errors == 1
    publish(store, 1)
    staged = follower.poll()
    assert staged is not None and follower.swap(staged) and follower.stats().problem == ""
    objects.error = None
    assert not follower.renew(105.0), "a third of the lease has not passed"
    assert follower.renew(110.0) and [lease.version for lease in store.leases()] == [1]


class SlowFollower:
    """Stages for as long as it is told to, and counts how often its lease is renewed meanwhile."""

    def __init__(self) -> None:
        self.is_staging, self.may_end, self.renewed = threading.Event(), threading.Event(), threading.Event()

    def stats(self) -> Any:
        from rollmill.weights.staged import FollowerStats

        return FollowerStats()

    def poll(self) -> None:
        self.is_staging.set()
        assert self.may_end.wait(DEADLINE_S)

    def renew(self, now: float) -> bool:
        if self.is_staging.is_set() and not self.may_end.is_set():
            self.renewed.set()
        return True


class IdleEngine:
    follow_problem = ""

    class metrics:
        class follow_errors:
            @staticmethod
            def inc(by: int) -> None: ...


def test_lease_is_renewed_while_a_version_is_being_staged() -> None:
    follower = SlowFollower()
    watch = WeightWatch(cast(Any, IdleEngine()), cast(Any, follower), poll_s=0.001)
    watch.start()
    try:
        assert follower.renewed.wait(DEADLINE_S)
    finally:
        follower.may_end.set()
        watch.close()


def test_lease_of_a_newer_rollmill_keeps_no_joiner_out() -> None:
    store = memory_store(2)
    publish_lease = {"replica": "new", "version": 1, "renewed": 0.0, "expires": 4e9, "url": "http://127.0.0.1:1", "mood": "fine"}
    line = msgspec.json.encode(publish_lease)
    store.objects.put("leases/new.json", [line + b"\n" + blake3(line).hexdigest().encode() + b"\n"])
    follower = Follower(store, blank(), replica="old")
    follower.swap(follower.bootstrap())
    assert follower.version == 1


# Blame.


class OneBadRange(MemoryObjects):
    """The first ranged read of a payload comes back with a flipped bit."""

    num_flips = 1

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        found = super().get_ranges(key, ranges)
        if ranges[0][0] == 8 and self.num_flips:
            self.num_flips -= 1
            found[0] = bytes([found[0][0] ^ 1]) + found[0][1:]
        return found


@pytest.mark.parametrize("num_flips", [1, 2])
def test_payload_read_by_range_is_read_twice_before_its_pack_is_blamed(num_flips: int) -> None:
    objects = OneBadRange()
    store = WeightStore(objects)
    publish(store, 0)
    (name,) = store.routes()
    opened = OpenRoute(store, store.route(name), whole_bytes=0)
    objects.num_flips = num_flips
    if num_flips == 1:
        assert len([*opened.payloads(0, lambda cell: True)]) == 4
    else:
        with pytest.raises(Damaged):
            list(opened.payloads(0, lambda cell: True))


class LateListing(MemoryObjects):
    """Goes on listing a route that was taken away."""

    gone = ""

    def list(self, prefix: str, *, after: str = "") -> Iterator[str]:
        found = list(super().list(prefix, after=after))
        return iter(sorted([*found, self.gone]) if self.gone and prefix == "routes/" else found)


def test_route_collected_between_listing_and_reading_is_gone_round_and_not_quarantined() -> None:
    from line_fakes import add_route

    objects = LateListing()
    store = WeightStore(objects)
    for step in range(5):
        publish(store, step)
    objects.gone = add_route(store, 4, base=0).name.key
    objects.delete([objects.gone])
    live = blank()
    follower = Follower(store, live)
    follower.swap(follower.bootstrap())
    assert follower.version == 4 and store.quarantined() == {}
    assert materialise(store, 4)[0].version == 4


# Numbers, tags and directories of another store.


def test_old_copy_of_the_counter_gives_out_no_published_number_and_no_pack_is_written_over() -> None:
    store = memory_store(5)
    before = {key: store.objects.get(key)[0] for key in store.objects.list("packs/")}
    store.objects.swap("reserved.json", seal(Pointer(version=1)), expected=store.objects.get("reserved.json")[1])
    record = publish(store, 5)
    assert record.version == 5
    assert all(store.objects.get(key)[0] == data for key, data in before.items())


def test_version_that_is_being_collected_cannot_be_tagged_as_if_it_were_kept(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for step in range(3):
        publish(store, step)
    from line_fakes import add_route

    add_route(store, 1, base=None)
    add_route(store, 2, base=None)
    collect(store, 4e9)
    assert 0 in store.versions(), "the record stays for the grace"
    result = CliRunner().invoke(weights_app, ["tag", str(tmp_path), "best", "0"])
    assert result.exit_code != 0 and "no route leads to version 0" in str(result.exception) and store.tags() == []
    assert CliRunner().invoke(weights_app, ["tag", str(tmp_path), "best", "1"]).exit_code == 0


def test_directory_pulled_from_another_store_under_the_same_number_is_pulled_in_full(tmp_path: Path) -> None:
    stores = [open_store(tmp_path / name) for name in ("one", "two")]
    tables: list[Mapping[str, torch.Tensor]] = []
    for offset, store in enumerate(stores):
        with Publisher(store, run_id="r") as publisher:
            tables.append(weights_at(5 * offset))
            publisher.resume(tables[-1], step=0)
    for store, tensors in [*zip(stores, tables, strict=True)] * 2:
        pull(store, 0, tmp_path / "out")
        found = read_directory(tmp_path / "out")
        assert all(
            found[n].data.tobytes() == t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for n, t in tensors.items() if t.numel()
        )


# Strange records.

STRANGE: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "fingerprints of another number of tensors": ("versions/", lambda record: record.update(tensors=["00" * 16])),
    "a schema outside the store": ("versions/", lambda record: record.update(schema="../../secret")),
    "a schema without a name": ("versions/", lambda record: record.update(schema="")),
    "a pack outside the store": ("routes/", lambda record: record["packs"][0].update(key="../secret")),
    "an index of less than nothing": ("routes/", lambda record: record["packs"][0].update(index_bytes=-5)),
    "an index larger than its pack": ("routes/", lambda record: record["packs"][0].update(index_bytes=1 << 40)),
}


@pytest.mark.parametrize("what", STRANGE)
def test_strange_record_is_refused_in_words_and_ends_no_thread(what: str) -> None:
    prefix, change = STRANGE[what]
    store = memory_store(1)
    for key in [*store.objects.list(prefix)]:
        store.objects.put(key, [resealed(store.objects.get(key)[0], change)])
    with pytest.raises((CorruptSnapshot, UnknownFormat)):
        materialise(store, 0)
    follower = Follower(store, blank())
    assert ended(lambda: [follower.poll()]) == [None] and follower.stats().problem


@pytest.mark.parametrize("change", [{"chunk_elements": 0}, {"chunk_elements": 1 << 40}, {"shape": [-1, 4]}])
def test_strange_schema_is_of_another_form(change: dict[str, Any]) -> None:
    store = memory_store(1)
    (key,) = store.objects.list("schema/")
    data = resealed(store.objects.get(key)[0], lambda record: (record["tensors"][0] if "shape" in change else record).update(change))
    store.objects.put(key, [data])
    with pytest.raises(UnknownFormat):
        store.schema(key.split("/")[1].removesuffix(".json"))


def test_index_range_of_a_pack_that_is_too_small_is_refused() -> None:
    with pytest.raises(CorruptSnapshot, match="does not fit"):
        index_range(PackRef(key="packs/00000000/full-0000.pack", num_bytes=40, digest="", index_bytes=9, index_digest=""))


def test_index_that_names_a_tensor_past_the_schema_is_shown_as_damage() -> None:
    store = memory_store(1)
    small = make_schema([("a", "bfloat16", (24, 16))])
    store.put_schema(small)
    keys = [*store.objects.list("versions/"), *store.objects.list("routes/")]
    for key in keys:
        fields: dict[str, Any] = {"schema": small.digest} | ({"tensors": ["00" * 16]} if key.startswith("versions/") else {})
        store.objects.put(key, [resealed(store.objects.get(key)[0], lambda record, fields=fields: record.update(fields))])  # type: ignore[misc]
    assert any("names tensor" in line for line in show(store, 0))


# Races.


def test_compactor_collector_and_joiners_side_by_side_quarantine_nothing() -> None:
    """Everything is healthy, so nothing may be blamed, whoever deletes routes while others have planned with them."""
    store = memory_store(1)
    stop, problems = threading.Event(), list[BaseException]()

    def loop(work: Callable[[int], object]) -> None:
        for turn in itertools.count():
            if stop.is_set():
                return
            try:
                work(turn)
            except BaseException as error:  # noqa: BLE001 - the main thread raises it
                problems.append(error)
                return

    def join(turn: int) -> None:
        follower = Follower(store, blank())
        follower.swap(follower.bootstrap())

    compactor = Compactor(store)
    works = [lambda turn: compactor.step(float(turn)), lambda turn: collect(store, 4e9 + turn, grace_s=1e8), join]
    threads = [threading.Thread(target=loop, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for step in range(1, 60):
        publish(store, step)
    stop.set()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    assert problems == [] and store.quarantined() == {}


class RisingFloor(MemoryObjects):
    """A collector raises the floor after its first reading."""

    next_floor: bytes = b""

    def get(self, key: str) -> tuple[bytes, str]:
        found = super().get(key)
        if key == "floor.json" and self.next_floor:
            self._set(key, self.next_floor)
        return found


def test_places_on_the_line_stay_what_they_are_while_a_collector_raises_the_floor() -> None:
    objects = RisingFloor()
    store = WeightStore(objects)
    for step in range(8):
        publish(store, step)
    store.raise_floor(Floor(version=2, position=2))
    objects.next_floor = seal(Floor(version=4, position=4))
    assert [place.position for place in store.line() if place.version >= 4] == [4, 5, 6, 7]


# The command line.


@pytest.mark.parametrize(
    "words", [["log", "--limit", "0"], ["log", "--limit", "-1"], ["gc", "--grace-s", "-1"], ["show", "²"], ["verify"]], ids=" ".join
)
def test_command_that_makes_no_sense_is_refused_and_not_answered_with_all_is_well(tmp_path: Path, words: list[str]) -> None:
    if words != ["verify"]:
        publish(open_store(tmp_path), 0)
    result = CliRunner().invoke(weights_app, [words[0], str(tmp_path), *words[1:]])
    assert result.exit_code != 0 and "invalid literal" not in str(result.exception)
