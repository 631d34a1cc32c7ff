"""Claims about the check of a store: every damage has its own name, and what can be mended is mended without the trainer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from line_fakes import SCHEMA, MemoryObjects, add_route, bytes_at, publish

from rollmill.weights.check import Damage, Finding, fsck, repair, verify
from rollmill.weights.compactor import Compactor, CostModel
from rollmill.weights.directory import Directory
from rollmill.weights.encode import commit, write_part
from rollmill.weights.errors import CorruptSnapshot
from rollmill.weights.gc import collect
from rollmill.weights.manifest import (
    Kind,
    Lease,
    Pointer,
    Route,
    Tag,
    Tombstone,
    pack_key,
    schema_key,
    seal,
    version_key,
)
from rollmill.weights.pack import Coded, PackWriter
from rollmill.weights.probe import identify
from rollmill.weights.reader import materialise
from rollmill.weights.retrace import Retrace
from rollmill.weights.rollback import rollback
from rollmill.weights.schema import make_schema
from rollmill.weights.shard import all_of
from rollmill.weights.store import LATEST, RESERVED, WeightStore, open_store
from rollmill.weights.survey import survey

NOW = 4_000_000_000.0
"""Later than anything that is written here."""
DELTA, FOLD, FULL = (pack_key(4, kind, base=0, rank=0) for kind in (Kind.DELTA, Kind.FOLD, Kind.FULL))


@pytest.fixture
def store() -> WeightStore:
    """Versions 0 to 5; version 4 can be reached by a delta, a fold and in full. Version 3 came from two ranks."""
    made = WeightStore(MemoryObjects())
    for step in range(6):
        publish(made, step, ranks=2 if step == 3 else 1)
    add_route(made, 4, base=0)
    add_route(made, 4, base=None)
    return made


def kinds(store: WeightStore, *, deep: bool = False, now: float = NOW) -> list[tuple[Damage, str]]:
    return [(one.kind, one.key) for one in fsck(store, deep=deep, now=now)]


def flip(store: WeightStore, key: str, at: int = 30) -> None:
    data = bytearray(store.objects.get(key)[0])
    data[at] ^= 4
    store.objects.put(key, [bytes(data)])


def rewrite(store: WeightStore, record: msgspec.Struct, key: str) -> None:
    store.objects.put(key, [seal(record)])


def route_to(store: WeightStore, version: int, base: int | None) -> Route:
    return store.route(next(name for name in store.routes() if (name.version, name.base) == (version, base)))


def lease(version: int | None, fingerprint: str, **more: float) -> Lease:
    return Lease(replica="r1", version=version, fingerprint=fingerprint, renewed=NOW, expires=more.get("expires", NOW + 60))


def assert_same_bits(store: WeightStore) -> None:
    """Every version that has a record gives the trainer's bytes; here its number is its step."""
    for number in store.versions():
        _, _, data = materialise(store, number)
        expected = bytes_at(number)
        assert all(np.array_equal(data[name], expected[name]) for name in expected)


def test_a_whole_store_has_no_findings(store: WeightStore) -> None:
    assert verify(store) == []
    assert kinds(store, deep=True) == kinds(store) == []


def test_an_empty_store_has_no_findings() -> None:
    store = WeightStore(MemoryObjects())
    assert verify(store) == kinds(store, deep=True) == []


def test_a_store_with_a_roll_back_and_two_schemas_has_no_findings(store: WeightStore) -> None:
    rollback(store, 2, run_id="line", writer="test")
    wider = make_schema([("a", "bfloat16", (24, 16)), ("z", "uint8", (5,))])
    new = {"a": bytes_at(9)["a"], "z": np.arange(5, dtype=np.uint8)}
    version = store.reserve()
    part = write_part(store, wider, kind=Kind.FULL, version=version, base=None, held=all_of(wider), new=new, old=None)
    commit(store, wider, [part], kind=Kind.FULL, version=version, base=None, expected=6, step=9, run_id="line", writer="test", epoch=1)
    assert verify(store) == kinds(store, deep=True) == []


def test_the_walk_holds_few_versions_and_still_proves_every_fold() -> None:
    store = WeightStore(MemoryObjects())
    for step in range(24):
        publish(store, step)
    for version, base in ((4, 0), (8, 4), (16, 0), (20, 1), (23, 2), (22, 7)):
        add_route(store, version, base=base)
    seen = survey(store)
    walk = Retrace(store, seen, max_held=2)
    assert walk.all() == set(range(24))
    assert walk.found == [] and len(walk._held) <= 2


# One damage, one name. A damage that repair can mend leaves a clean store behind it.


def lose_latest(store: WeightStore) -> tuple[Damage, str]:
    store.objects.delete([LATEST])
    return Damage.LATEST_MISSING, LATEST


def flip_latest(store: WeightStore) -> tuple[Damage, str]:
    flip(store, LATEST, 3)
    return Damage.LATEST_UNREADABLE, LATEST


def lose_latest_version(store: WeightStore) -> tuple[Damage, str]:
    store.objects.delete([version_key(5)])
    return Damage.LATEST_POINTS_AT_NOTHING, LATEST


def lose_reserved(store: WeightStore) -> tuple[Damage, str]:
    store.objects.delete([RESERVED])
    return Damage.RESERVED_MISSING, RESERVED


def flip_reserved(store: WeightStore) -> tuple[Damage, str]:
    flip(store, RESERVED, 3)
    return Damage.RESERVED_UNREADABLE, RESERVED


def turn_reserved_back(store: WeightStore) -> tuple[Damage, str]:
    rewrite(store, Pointer(version=3), RESERVED)
    return Damage.RESERVED_BEHIND, RESERVED


def lose_version(store: WeightStore) -> tuple[Damage, str]:
    store.objects.delete([version_key(2)])
    return Damage.VERSION_MISSING, version_key(2)


def flip_version(store: WeightStore) -> tuple[Damage, str]:
    flip(store, version_key(2))
    return Damage.VERSION_UNREADABLE, version_key(2)


def misnumber_version(store: WeightStore) -> tuple[Damage, str]:
    rewrite(store, store.version(3), version_key(2))
    return Damage.VERSION_MISNUMBERED, version_key(2)


def flip_route(store: WeightStore) -> tuple[Damage, str]:
    key = route_to(store, 2, 1).name.key
    flip(store, key)
    return Damage.ROUTE_UNREADABLE, key


def flip_route_of_two_ranks(store: WeightStore) -> tuple[Damage, str]:
    key = route_to(store, 3, 2).name.key
    flip(store, key)
    return Damage.ROUTE_UNREADABLE, key


def flip_route_and_lose_its_pack(store: WeightStore) -> tuple[Damage, str]:
    key = route_to(store, 4, 0).name.key
    flip(store, key)
    store.objects.delete([FOLD])
    return Damage.ROUTE_UNREADABLE, key


def misname_route(store: WeightStore) -> tuple[Damage, str]:
    route = route_to(store, 4, 3)
    rewrite(store, route_to(store, 5, 4), route.name.key)
    return Damage.ROUTE_MISNAMED, route.name.key


def give_route_another_schema(store: WeightStore) -> tuple[Damage, str]:
    route = route_to(store, 4, 3)
    rewrite(store, msgspec.structs.replace(route, schema="0" * 32), route.name.key)
    return Damage.ROUTE_OF_ANOTHER_SCHEMA, route.name.key


def lose_delta(store: WeightStore) -> tuple[Damage, str]:
    store.objects.delete([DELTA])
    return Damage.PACK_MISSING, DELTA


def lose_full(store: WeightStore) -> tuple[Damage, str]:
    store.objects.delete([FULL])
    return Damage.PACK_MISSING, FULL


def truncate_fold(store: WeightStore) -> tuple[Damage, str]:
    store.objects.put(FOLD, [store.objects.get(FOLD)[0][:-7]])
    return Damage.PACK_TRUNCATED, FOLD


def empty_fold(store: WeightStore) -> tuple[Damage, str]:
    store.objects.put(FOLD, [b""])
    return Damage.PACK_TRUNCATED, FOLD


def put_another_pack_there(store: WeightStore) -> tuple[Damage, str]:
    store.objects.put(FOLD, [store.objects.get(DELTA)[0]])
    return Damage.PACK_OF_ANOTHER_VERSION, FOLD


def expel_lease(store: WeightStore) -> tuple[Damage, str]:
    store.objects.put("leases/r1.json", [b"not a lease"])
    return Damage.LEASE_UNREADABLE, "leases/r1.json"


def flip_tombstone(store: WeightStore) -> tuple[Damage, str]:
    store.objects.put("tombstones/t.json", [b"?"])
    return Damage.TOMBSTONE_UNREADABLE, "tombstones/t.json"


def flip_quarantine(store: WeightStore) -> tuple[Damage, str]:
    store.objects.put("quarantine/x.json", [b"?"])
    return Damage.QUARANTINE_UNREADABLE, "quarantine/x.json"


def quarantine_whole_pack(store: WeightStore) -> tuple[Damage, str]:
    store.quarantine(FOLD, "a bad cable")
    return Damage.QUARANTINE_OBSOLETE, f"quarantine/{FOLD.replace('/', '__')}.json"


def quarantine_whole_route(store: WeightStore) -> tuple[Damage, str]:
    key = route_to(store, 4, 0).name.key
    store.quarantine(key, "a bad cable")
    return Damage.QUARANTINE_OBSOLETE, f"quarantine/{key.replace('/', '__')}.json"


def quarantine_whole_version(store: WeightStore) -> tuple[Damage, str]:
    store.quarantine(version_key(4), "a bad cable")
    return Damage.QUARANTINE_OBSOLETE, f"quarantine/{version_key(4).replace('/', '__')}.json"


def quarantine_what_is_gone(store: WeightStore) -> tuple[Damage, str]:
    store.quarantine("packs/00000099/delta-0000.pack", "flipped")
    return Damage.QUARANTINE_OBSOLETE, "quarantine/packs__00000099__delta-0000.pack.json"


MENDED = [
    lose_latest, flip_latest, lose_latest_version, lose_reserved, flip_reserved, turn_reserved_back, lose_version, flip_version,
    misnumber_version, flip_route, flip_route_of_two_ranks, flip_route_and_lose_its_pack, misname_route, lose_delta, lose_full,
    truncate_fold, empty_fold, put_another_pack_there, expel_lease, flip_tombstone, flip_quarantine, quarantine_whole_pack,
    quarantine_whole_route, quarantine_whole_version, quarantine_what_is_gone,
]  # fmt: skip


def name_of(damage: Callable[..., object]) -> str:
    return damage.__name__


@pytest.mark.parametrize("damage", MENDED, ids=name_of)
def test_a_damage_is_named_and_mended_without_the_trainer(store: WeightStore, damage: Callable[[WeightStore], tuple[Damage, str]]) -> None:
    last = store.reserve()
    expected = damage(store)
    # A version may have had its only way through a damaged route; the routes named are the cause, and the first to be told.
    found = fsck(store, now=NOW)
    causes = [(one.kind, one.key) for one in found if one.kind is not Damage.VERSION_UNREACHABLE]
    assert causes == [expected]
    assert all(one.what and one.repair for one in found)
    assert bool(verify(store)) == any(one.is_fatal for one in found)
    said = repair(store, found, now=NOW)
    assert said and not any(line.startswith("cannot") for line in said)
    assert kinds(store, deep=True) == []
    assert_same_bits(store)
    assert store.latest() == Pointer(version=5)
    assert store.reserve() > last or expected[0] in (Damage.RESERVED_MISSING, Damage.RESERVED_UNREADABLE, Damage.RESERVED_BEHIND)
    assert store.reserve() > 5


def flip_payload(store: WeightStore) -> tuple[Damage, str]:
    flip(store, FOLD, 9)
    return Damage.PACK_FLIPPED, FOLD


def flip_trailing_digest(store: WeightStore) -> tuple[Damage, str]:
    flip(store, FOLD, -1)
    return Damage.PACK_FLIPPED, FOLD


def flip_index(store: WeightStore) -> tuple[Damage, str]:
    flip(store, FOLD, store.objects.size(FOLD) - 50)
    return Damage.PACK_INDEX_WRONG, FOLD


def _repack(store: WeightStore, cells: list[Coded], *, version: int = 4, base: int | None = 0) -> Route:
    """Write the fold to version 4 again with cells of our own, everything sealed and in order."""
    writer = PackWriter(key=FOLD, version=version, base=base, schema=SCHEMA.digest)
    old = route_to(store, 4, 0)
    route = msgspec.structs.replace(old, packs=(store.put_pack(writer, cells),))
    store.objects.delete([old.name.key])
    store.add_route(route)
    return route


def write_pack_of_another_version(store: WeightStore) -> tuple[Damage, str]:
    _repack(store, [], version=3)
    return Damage.PACK_OF_ANOTHER_VERSION, FOLD


def write_nonsense(store: WeightStore) -> tuple[Damage, str]:
    index = identify(store, FOLD).index
    first = next(index.entries())
    payload = store.objects.get(FOLD)[0][first.start : first.stop - 1]
    _repack(store, [Coded(first.tensor, first.cell, payload, first.num_changed, first.proof)])
    return Damage.PACK_UNDECODABLE, FOLD


def write_too_little(store: WeightStore) -> tuple[Damage, str]:
    return Damage.ROUTE_GIVES_OTHER_WEIGHTS, _repack(store, []).name.key


def write_a_tensor_that_is_not(store: WeightStore) -> tuple[Damage, str]:
    return Damage.ROUTE_GIVES_OTHER_WEIGHTS, _repack(store, [Coded(77, 0, b"", 0, 0)]).name.key


def flip_one_rank(store: WeightStore) -> tuple[Damage, str]:
    # Version 3 has no other way, so the fold past it does not help; a full route does.
    add_route(store, 3, base=None)
    key = pack_key(3, Kind.DELTA, base=2, rank=1)
    flip(store, key, 9)
    return Damage.PACK_FLIPPED, key


@pytest.mark.parametrize(
    "damage",
    [flip_payload, flip_trailing_digest, flip_index, write_pack_of_another_version, write_nonsense, write_too_little,
     write_a_tensor_that_is_not, flip_one_rank],
    ids=name_of,
)  # fmt: skip
def test_a_damage_that_only_a_deep_look_sees_is_named_and_mended(
    store: WeightStore, damage: Callable[[WeightStore], tuple[Damage, str]]
) -> None:
    expected = damage(store)
    assert kinds(store) == [], "records and sizes are as they should be"
    assert kinds(store, deep=True) == [expected]
    assert len(verify(store)) == 1 and expected[1] in verify(store)[0]
    said = repair(store, fsck(store, deep=True, now=NOW), now=NOW)
    assert said and not any(line.startswith("cannot") for line in said)
    assert [one for one in kinds(store, deep=True) if one[0] is not Damage.PACK_ORPHAN] == []
    assert_same_bits(store)


def test_a_pack_made_again_is_the_same_to_the_byte(store: WeightStore) -> None:
    whole = {key: store.objects.get(key) for key in (DELTA, FOLD, FULL)}
    for key in whole:
        flip(store, key, 9)
        repair(store, fsck(store, deep=True, now=NOW), now=NOW)
        assert store.objects.get(key) == whole[key]


# What is told and not mended here.


def test_a_route_from_nowhere_and_a_route_to_nowhere_are_told(store: WeightStore) -> None:
    alias = Route(kind=Kind.ALIAS, version=5, base=77, schema=SCHEMA.digest, packs=(), writer="x", created=0.0)
    store.add_route(alias)
    assert kinds(store) == [(Damage.ROUTE_BASE_UNKNOWN, alias.name.key)]
    store.objects.delete([alias.name.key])
    orphan = Route(kind=Kind.ALIAS, version=99, base=5, schema=SCHEMA.digest, packs=(), writer="x", created=0.0)
    store.add_route(orphan)
    store.objects.put(RESERVED, [seal(Pointer(version=99))])
    assert kinds(store) == [(Damage.ROUTE_ORPHAN, orphan.name.key)]
    assert verify(store) == []


def test_a_route_of_another_schema_is_told_and_dropped(store: WeightStore) -> None:
    expected = give_route_another_schema(store)
    assert kinds(store) == [expected]
    repair(store, fsck(store, now=NOW), now=NOW)
    assert kinds(store, deep=True) == [(Damage.PACK_ORPHAN, DELTA)]


def test_orphan_packs_are_told_and_left_to_collection(store: WeightStore) -> None:
    write_part(store, SCHEMA, kind=Kind.FOLD, version=5, base=2, held=all_of(SCHEMA), new=bytes_at(5), old=bytes_at(2))
    (one,) = fsck(store, deep=True, now=NOW)
    assert one.kind is Damage.PACK_ORPHAN and not one.is_fatal and one.repair == "rollmill weights gc"
    assert verify(store) == []
    collect(store, NOW, grace_s=1.0)
    assert kinds(store, now=NOW + 1) == [], "what collection has marked is in order"
    collect(store, NOW + 2, grace_s=1.0)
    assert one.key not in store.objects.list("packs/")


@pytest.mark.parametrize("damage", [Damage.SCHEMA_MISSING, Damage.SCHEMA_UNREADABLE])
def test_a_lost_schema_is_told_and_written_again_by_the_trainer(store: WeightStore, damage: Damage) -> None:
    key = schema_key(SCHEMA.digest)
    if damage is Damage.SCHEMA_MISSING:
        store.objects.delete([key])
    else:
        flip(store, key)
    fresh = WeightStore(store.objects)
    found = fsck(fresh, now=NOW)
    assert [(one.kind, one.key) for one in found] == [(damage, key)]
    assert verify(fresh)
    assert "trainer" in " ".join(repair(fresh, found, now=NOW))
    fresh.put_schema(SCHEMA)
    assert kinds(WeightStore(store.objects), deep=True) == []


def test_a_lost_route_is_found_again_in_its_packs(store: WeightStore) -> None:
    for version, base in ((2, 1), (3, 2)):
        store.objects.delete([route_to(store, version, base).name.key])
    found = kinds(store)
    assert [key for kind, key in found if kind is Damage.VERSION_UNREACHABLE] == [version_key(2), version_key(3)]
    assert {kind for kind, _ in found} == {Damage.VERSION_UNREACHABLE, Damage.PACK_ORPHAN}
    repair(store, fsck(store, now=NOW), now=NOW)
    assert kinds(store, deep=True) == []
    assert_same_bits(store)


def test_a_damage_that_cuts_versions_off_is_told_with_all_of_them_and_calls_for_a_full_version(store: WeightStore) -> None:
    key = pack_key(1, Kind.DELTA, base=0, rank=0)
    store.objects.delete([key])
    found = fsck(store, now=NOW)
    assert [(one.kind, one.key) for one in found] == [
        *((Damage.VERSION_UNREACHABLE, version_key(number)) for number in (1, 2, 3)),
        (Damage.PACK_MISSING, key),
    ]
    said = repair(store, found, now=NOW)
    assert any(line.startswith("cannot") and key in line and "trainer" in line for line in said)
    assert key in store.quarantined(), "which makes the trainer's next version full"
    assert Damage.QUARANTINED in {kind for kind, _ in kinds(store)}


def test_a_record_made_again_says_so_and_keeps_the_line(store: WeightStore) -> None:
    before = store.version(2)
    flip_version(store)
    repair(store, fsck(store, now=NOW), now=NOW)
    after = store.version(2)
    assert (after.fingerprint, after.tensors, after.previous, after.num_changed) == (
        before.fingerprint, before.tensors, before.previous, before.num_changed,
    )  # fmt: skip
    assert "made again" in after.note
    assert [record.version for record in store.lineage()] == [5, 4, 3, 2, 1, 0]


def test_a_version_that_is_lost_for_good_ends_the_line_so_that_collection_goes_on(store: WeightStore) -> None:
    store.objects.delete([version_key(2), pack_key(2, Kind.DELTA, base=1, rank=0)])
    with pytest.raises(CorruptSnapshot):
        collect(store, NOW, grace_s=1.0)
    said = repair(store, fsck(store, now=NOW), now=NOW)
    assert any("the line begins at version 4" in line for line in said)
    assert [record.version for record in store.lineage()] == [5, 4]
    for later in (0.0, 10.0, 20.0):
        collect(store, NOW + later, grace_s=1.0)
    assert store.versions() == [4, 5]
    repair(store, fsck(store, now=NOW), now=NOW)
    assert kinds(store, deep=True, now=NOW + 20) == [] and verify(store) == []
    assert_same_bits(store)


def test_a_replica_that_serves_something_else_is_told_loudly(store: WeightStore) -> None:
    good = store.version(4).fingerprint
    store.renew(lease(4, good))
    assert kinds(store) == []
    store.renew(lease(4, "0" * 32))
    (one,) = fsck(store, now=NOW)
    assert one.kind is Damage.LEASE_OTHER_FINGERPRINT and one.is_fatal and one.repair == "stop that replica"
    store.renew(lease(77, good))
    assert kinds(store) == [(Damage.LEASE_OF_GONE_VERSION, "leases/r1.json")]
    store.renew(lease(4, "0" * 32, expires=NOW - 1))
    assert kinds(store) == [(Damage.LEASE_EXPIRED, "leases/r1.json")]
    store.renew(lease(None, ""))
    assert kinds(store) == [], "a replica that joins serves nothing yet"


def test_a_pointer_that_was_turned_back_is_told(store: WeightStore) -> None:
    store.renew(lease(5, store.version(5).fingerprint))
    rewrite(store, Pointer(version=4), LATEST)
    assert kinds(store) == [(Damage.LATEST_WENT_BACK, LATEST), (Damage.VERSION_UNSERVED, version_key(5))]


def test_a_tag_of_a_missing_version_and_an_unreadable_tag_are_told(store: WeightStore) -> None:
    store.tag(Tag(name="best", version=3, created=0.0))
    assert kinds(store) == []
    store.tag(Tag(name="best", version=44, created=0.0))
    assert kinds(store) == [(Damage.TAG_OF_MISSING_VERSION, "tags/best.json")]
    flip(store, "tags/best.json", 2)
    assert kinds(store) == [(Damage.TAG_UNREADABLE, "tags/best.json")]


def test_a_tombstone_that_nobody_acts_on_is_told(store: WeightStore) -> None:
    stone = Tombstone(name="t", created=0.0, delete_after=NOW - 10, routes=(), versions=(), packs=(), num_bytes=5)
    rewrite(store, stone, stone.key)
    assert kinds(store) == []
    assert kinds(store, now=NOW + 10_000) == [(Damage.TOMBSTONE_OVERDUE, stone.key)]


def test_a_version_that_was_never_served_is_told_as_such_and_later_as_a_fork(store: WeightStore) -> None:
    dead = msgspec.structs.replace(store.version(5), version=6, previous=5)
    part = write_part(
        store, SCHEMA, kind=Kind.DELTA, version=store.reserve(), base=5, held=all_of(SCHEMA), new=bytes_at(5), old=bytes_at(5)
    )
    store.add_route(Route(kind=Kind.DELTA, version=6, base=5, schema=SCHEMA.digest, packs=part.packs, writer="x", created=0.0))
    rewrite(store, dead, dead.key)
    assert kinds(store, now=dead.created + 1) == [], "its publisher may be at work"
    assert kinds(store) == [(Damage.VERSION_UNSERVED, dead.key)]
    publish(store, 7)
    assert kinds(store) == [(Damage.FORK, dead.key)]
    assert verify(store) == []


def test_a_fold_that_saves_nothing_is_advice(store: WeightStore) -> None:
    route = add_route(store, 5, base=3)
    chain = route_to(store, 5, 4).num_bytes + route_to(store, 4, 3).num_bytes
    padded = msgspec.structs.replace(route.packs[0], num_bytes=chain)
    store.objects.delete([route.name.key])
    big = msgspec.structs.replace(route, packs=(padded,))
    store.add_route(big)
    store.objects.put(padded.key, [bytes(chain)])
    assert kinds(store) == [(Damage.FOLD_NOT_SMALLER, big.name.key)]


def test_what_another_rollmill_wrote_is_told_and_left_alone(store: WeightStore) -> None:
    store.objects.put("leases/r2.json", [seal(Tag(name="r2", version=1, created=0.0))])
    found = fsck(store, now=NOW)
    assert [(one.kind, one.key) for one in found] == [(Damage.OTHER_FORM, "leases/r2.json")]
    repair(store, found, now=NOW)
    assert "leases/r2.json" in store.objects.list("leases/")


def test_strange_objects_and_half_written_files_are_told(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    publish(store, 0)
    (tmp_path / ".tmp" / "half").write_bytes(b"x")
    (tmp_path / "notes.txt").write_bytes(b"x")
    (tmp_path / "versions" / "00000000.json.bak").write_bytes(b"x")
    assert kinds(store) == [
        (Damage.TEMPORARY_FILE, ".tmp/half"),
        (Damage.STRANGE_OBJECT, "notes.txt"),
        (Damage.STRANGE_OBJECT, "versions/00000000.json.bak"),
    ]
    publish(WeightStore(Directory(tmp_path)), 1)
    assert Damage.TEMPORARY_FILE not in {kind for kind, _ in kinds(store)}, "the next writer removed it"


# Collection.


def collected() -> WeightStore:
    """Versions 0 to 11 with full routes at 0, 4 and 8, of which everything before 4 was collected."""
    store = WeightStore(MemoryObjects())
    for step in range(12):
        publish(store, step)
    for version in (4, 8):
        add_route(store, version, base=None)
    add_route(store, 8, base=4)
    collect(store, NOW, grace_s=1.0)
    collect(store, NOW + 10, grace_s=1.0)
    collect(store, NOW + 20, grace_s=1.0)
    assert store.floor().version == 4 and store.versions() == list(range(4, 12))
    return store


def test_a_line_that_was_collected_ends_cleanly() -> None:
    store = collected()
    assert verify(store) == kinds(store, deep=True) == []


def test_a_store_between_the_phases_of_collection_is_in_order() -> None:
    store = WeightStore(MemoryObjects())
    for step in range(8):
        publish(store, step)
    for version in (3, 6):
        add_route(store, version, base=None)
    collect(store, NOW, grace_s=1.0)
    assert store.versions() == list(range(8)) and min(name.version for name in store.routes()) == 3
    assert verify(store) == kinds(store, deep=True) == []


@pytest.mark.parametrize("damage", [Damage.FLOOR_UNREADABLE, Damage.FLOOR_MISSING])
def test_a_lost_floor_is_told_and_put_back(damage: Damage) -> None:
    store = collected()
    floor = store.floor()
    if damage is Damage.FLOOR_MISSING:
        store.objects.delete(["floor.json"])
    else:
        flip(store, "floor.json", 4)
    found = fsck(store, now=NOW)
    assert (damage, "floor.json") in [(one.kind, one.key) for one in found]
    repair(store, found, now=NOW)
    assert store.floor().version == floor.version
    assert store.floor().position % 4 == floor.position % 4, "so that folds are made where they lie already"
    assert kinds(store, deep=True) == []


def test_a_store_at_work_is_not_called_damaged() -> None:
    """Publishing, compaction and collection go on while the check reads; whatever it sees half of is not damage."""
    store = WeightStore(MemoryObjects())
    publish(store, 0)
    looks: list[list[Finding]] = []
    is_done = threading.Event()

    def look() -> None:
        while not is_done.is_set():
            looks.append(fsck(store, deep=len(looks) % 2 == 1, now=time.time()))

    checker = threading.Thread(target=look)
    checker.start()
    try:
        compactor = Compactor(store, cost=CostModel(spans=(4,), anchor_versions=16))
        for step in range(1, 160):
            publish(store, step)
            if step % 4 == 0:
                compactor.step(NOW)
            if step % 16 == 0:
                collect(store, NOW + step, grace_s=20.0)
    finally:
        is_done.set()
        checker.join(60)
    assert looks and not checker.is_alive()
    assert [str(one) for found in looks for one in found if one.is_fatal] == []
    assert verify(store) == []


# Of one version.


def test_one_version_can_be_verified_by_all_its_routes(store: WeightStore) -> None:
    flip(store, FOLD, 9)
    assert verify(store, version=3) == []
    (line,) = verify(store, version=4)
    assert line.startswith("pack_flipped") and "cell" in line
    with pytest.raises(ValueError, match="version 40 is not in"):
        verify(store, version=40)


def test_every_kind_of_damage_has_a_test() -> None:
    text = Path(__file__).read_text()
    assert [kind for kind in Damage if f"Damage.{kind.name}" not in text] == []


def test_the_check_finds_its_way_on_a_real_bucket_and_a_directory(where: str) -> None:
    store = open_store(where)
    for step in range(5):
        publish(store, step)
    add_route(store, 4, base=0)
    flip(store, DELTA, 9)
    assert kinds(store, deep=True) == [(Damage.PACK_FLIPPED, DELTA)]
    repair(store, fsck(store, deep=True, now=NOW), now=NOW)
    assert kinds(store, deep=True) == [] and verify(store) == []
