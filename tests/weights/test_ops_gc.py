"""What collection promises: whoever could get somewhere before still can, and what is garbage goes, wherever a run dies."""

from __future__ import annotations

import itertools
import random
import time
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objects_fakes import Death, FaultyObjects, Killed
from ops_fakes import TENSORS, TinyRun, keys_in, run_and_die, same

from rollmill.weights.compactor import Compactor, CostModel
from rollmill.weights.directory import Directory
from rollmill.weights.encode import write_part
from rollmill.weights.errors import CorruptSnapshot
from rollmill.weights.follower import Follower
from rollmill.weights.gc import Contents, Seen, collect, plan_gc
from rollmill.weights.live import HostWeights
from rollmill.weights.manifest import Kind, Lease, PackRef, Route, RouteName, Tag, pack_key, version_key
from rollmill.weights.objects import open_objects
from rollmill.weights.plan import plan, reachable
from rollmill.weights.reader import OpenRoute
from rollmill.weights.rollback import rollback
from rollmill.weights.shard import all_of
from rollmill.weights.store import Place, WeightStore

GRACE_S = 1000.0
LATER = time.time() + 1e6
"""Everything the tests publish is old by then."""


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(Directory(tmp_path / "store"))


def anchored(store: WeightStore, *anchors: int, versions: int) -> TinyRun:
    run = TinyRun(store)
    run.publish(versions)
    for version in anchors:
        run.add_full(version)
    return run


def collect_all(store: WeightStore, *, version: int | None = None, staging: int | None = None, start: float = LATER) -> None:
    """Both phases, while a replica that holds or stages something renews its lease."""
    for now in (start, start + 2 * GRACE_S):
        if version is not None or staging is not None:
            store.renew(lease(version, staging=staging, expires=now + 1))
        collect(store, now, grace_s=GRACE_S)


def lease(version: int | None, *, expires: float, staging: int | None = None) -> Lease:
    return Lease(replica="r1", version=version, staging=staging, renewed=0.0, expires=expires)


def test_the_last_two_anchors_and_all_that_follows_stay_and_the_rest_goes(where: str) -> None:
    store = WeightStore(open_objects(where))
    run = anchored(store, 4, 8, versions=11)
    Compactor(store, cost=CostModel(anchor_replay=1e9)).step(LATER - 1e5)
    collect_all(store)
    assert store.versions() == list(range(4, 11))
    assert [place.version for place in store.line()] == list(range(4, 11))
    assert [record.version for record in store.lineage()] == list(range(10, 3, -1))
    assert {int(key.split("/")[1]) for key in store.objects.list("packs/")} == set(range(4, 11))
    assert all(name.base is None or name.base >= 4 for name in store.routes())
    assert store.tombstones() == []
    run.check(range(4, 11))
    run.check_routes()
    before = keys_in(store.objects)
    report = collect(store, LATER + 1e5, grace_s=GRACE_S)
    assert (report.num_routes, report.num_packs, report.num_versions, report.num_waiting) == (0, 0, 0, 0)
    assert keys_in(store.objects) == before


def test_routes_go_first_and_packs_only_when_every_reader_is_done(store: WeightStore) -> None:
    run = anchored(store, 4, 8, versions=9)
    opened = store.route(next(name for name in store.routes() if name.base is None))
    store.renew(lease(8, expires=LATER + 3 * GRACE_S))
    report = collect(store, LATER, grace_s=GRACE_S)
    # Five ways to versions below the anchor 4, the first full one among them, and the delta onto 4 whose base goes.
    assert (report.num_routes, report.num_packs, report.marked_packs, report.num_waiting) == (5, 0, 5, 1)
    assert min(name.version for name in store.routes()) == 4
    assert OpenRoute(store, opened).tensors(), "a reader that had chosen its route can still read it"
    assert collect(store, LATER + 2 * GRACE_S, grace_s=GRACE_S).num_packs == 0, "a lease of the day of the tombstone may still live"
    report = collect(store, LATER + 3 * GRACE_S + 1, grace_s=GRACE_S)
    assert (report.num_packs, report.num_versions, report.num_waiting) == (5, 4, 0) and report.num_bytes > 0
    with pytest.raises(CorruptSnapshot, match="missing"):
        OpenRoute(store, opened)
    run.check(range(4, 9))


def test_a_dry_run_tells_and_writes_nothing(store: WeightStore) -> None:
    anchored(store, 4, 8, versions=9)
    before = keys_in(store.objects)
    report = collect(store, LATER, grace_s=GRACE_S, dry_run=True)
    assert keys_in(store.objects) == before and report.num_routes == 5
    assert report.lines()[0].startswith("would delete 5 routes") and any("late joiners" in line for line in report.lines())
    assert collect(store, LATER, grace_s=GRACE_S).lines()[0].startswith("deleted 5 routes")


def test_what_is_younger_than_the_grace_stays(store: WeightStore) -> None:
    anchored(store, 4, 8, versions=9)
    report = collect(store, time.time() + 10, grace_s=GRACE_S)
    assert report.num_routes == 0 and store.versions() == list(range(9))


def test_a_store_with_one_anchor_or_none_loses_nothing(store: WeightStore) -> None:
    assert collect(store, LATER).kept == ("everything: nothing was published yet",)
    anchored(store, versions=6)
    before = keys_in(store.objects)
    collect_all(store)
    assert keys_in(store.objects) == before


def test_a_replica_with_a_lease_can_mend_itself_and_move_on(store: WeightStore) -> None:
    run = anchored(store, 6, 9, versions=12)
    collect_all(store, version=3)
    assert store.version(3).version == 3
    run.check([3, *range(6, 12)])
    run.check_move(3, 11)
    collect_all(store, start=LATER + 1e5)
    assert store.versions() == list(range(6, 12)) and store.leases() == [] and store.tombstones() == []


def test_a_replica_that_is_staging_an_old_version_can_finish(store: WeightStore) -> None:
    run = anchored(store, 6, 9, versions=12)
    collect_all(store, staging=2)
    run.check([2])


def test_a_sleeping_follower_wakes_after_collection_and_serves_the_newest_bits(store: WeightStore) -> None:
    run = TinyRun(store)
    run.publish(3)
    live = {"a": torch.zeros(48, 32, dtype=torch.bfloat16), "b": torch.zeros(16), "c": torch.zeros(5, dtype=torch.int64)}
    follower = Follower(store, HostWeights(live), replica="sleeper", lease_s=10 * GRACE_S)
    follower.swap(follower.bootstrap())
    follower.renew(LATER)
    run.publish(9)
    run.add_full(6)
    run.add_full(9)
    collect_all(store)
    live["a"].view(torch.int16)[1, 1] ^= 1
    mended = follower.scrub()
    assert mended is not None
    follower.swap(mended)
    staged = follower.poll()
    assert staged is not None
    follower.swap(staged)
    assert follower.version == 11
    assert same({name: tensor.view(torch.uint8).numpy().reshape(-1) for name, tensor in live.items()}, run.truth[11])


def test_a_tag_holds_its_version_until_it_is_taken_away(store: WeightStore) -> None:
    run = anchored(store, 6, 9, versions=12)
    store.tag(Tag(name="best", version=2, created=0.0))
    report = collect(store, LATER, grace_s=GRACE_S)
    assert any("tag best" in reason for reason in report.kept)
    collect(store, LATER + 2 * GRACE_S, grace_s=GRACE_S)
    run.check([2, *range(6, 12)])
    assert [record.version for record in store.lineage(start=2)] == [2]
    store.untag("best")
    collect(store, LATER + 4 * GRACE_S, grace_s=GRACE_S)
    collect(store, LATER + 6 * GRACE_S, grace_s=GRACE_S)
    assert store.versions() == list(range(6, 12))


def test_a_tag_that_comes_while_a_run_is_at_work_is_heard(store: WeightStore) -> None:
    run = anchored(store, 6, 9, versions=12)

    class Tagging(Directory):
        """Somebody sets a tag right after the tombstone was written."""

        def put(self, key: str, chunks: object) -> None:
            super().put(key, chunks)  # type: ignore[arg-type]
            if key.startswith("tombstones/"):
                WeightStore(Directory(self.path)).tag(Tag(name="late", version=3, created=0.0))

    collect(WeightStore(Tagging(store.objects.path)), LATER, grace_s=GRACE_S)  # type: ignore[attr-defined]
    collect_all(store)
    run.check([3, *range(6, 12)])


def test_the_bits_behind_a_rollback_stay_with_it(store: WeightStore) -> None:
    run = anchored(store, versions=6)
    restored = rollback(store, 2, run_id="tiny", writer="me")
    run.resume_from(restored)
    run.publish(2)
    for version in (5, 8):
        run.add_full(version)
    collect_all(store)
    assert store.floor().version == 5
    run.check([2, *range(5, 9)])
    run.check_move(2, restored.version)
    run.check_routes()


def test_an_upload_past_latest_is_never_touched_and_a_dead_one_goes_after_the_grace(store: WeightStore) -> None:
    run = anchored(store, versions=3)
    number = store.reserve()
    held = all_of(run.schema)
    write_part(store, run.schema, kind=Kind.DELTA, version=number, base=2, held=held, new=run.data, old=run.truth[2])
    key = pack_key(number, Kind.DELTA, base=2, rank=0)
    collect_all(store)
    assert key in keys_in(store.objects)
    run.publish()
    report = collect(store, LATER, grace_s=GRACE_S)
    assert (report.marked_packs, report.num_packs) == (1, 0) and report.marked_bytes == store.objects.size(key)
    assert collect(store, LATER + GRACE_S / 2, grace_s=GRACE_S).num_packs == 0
    assert collect(store, LATER + 2 * GRACE_S, grace_s=GRACE_S).num_packs == 1
    assert key not in keys_in(store.objects)
    run.check([0, 1, 2, 4])


def test_an_orphan_that_got_its_route_meanwhile_stays(store: WeightStore) -> None:
    run = anchored(store, versions=5)
    held = all_of(run.schema)
    part = write_part(store, run.schema, kind=Kind.FOLD, version=4, base=0, held=held, new=run.truth[4], old=run.truth[0])
    assert collect(store, LATER, grace_s=GRACE_S).marked_packs == 1
    route = Route(kind=Kind.FOLD, version=4, base=0, schema=run.schema.digest, packs=part.packs, writer="c", created=0.0)
    store.add_route(route)
    report = collect(store, LATER + 2 * GRACE_S, grace_s=GRACE_S)
    assert (report.num_packs, report.num_waiting) == (0, 0)
    run.check_routes()


def test_a_version_that_was_never_served_goes_after_the_grace(store: WeightStore) -> None:
    run = anchored(store, versions=3)
    number = store.reserve()
    held = all_of(run.schema)
    part = write_part(store, run.schema, kind=Kind.DELTA, version=number, base=2, held=held, new=run.data, old=run.truth[2])
    now = time.time()
    store.add_route(Route(kind=Kind.DELTA, version=number, base=2, schema=run.schema.digest, packs=part.packs, writer="x", created=now))
    run.publish()
    assert collect(store, now + 1, grace_s=GRACE_S).num_routes == 0
    assert collect(store, LATER, grace_s=GRACE_S).num_routes == 1
    collect(store, LATER + 2 * GRACE_S, grace_s=GRACE_S)
    assert all(name.version != number for name in store.routes())
    assert not any(key.startswith(f"packs/{number:08d}") for key in store.objects.list("packs/"))


def test_a_quarantined_or_incomplete_full_route_is_no_anchor(store: WeightStore) -> None:
    run = anchored(store, 3, 6, 8, versions=10)
    store.quarantine(pack_key(8, Kind.FULL, base=None, rank=0), "flipped")
    store.objects.delete([pack_key(6, Kind.FULL, base=None, rank=0)])
    collect_all(store)
    assert store.floor().version < 0
    run.check(range(10))


def test_the_only_way_round_damage_stays_though_it_begins_below_the_floor(store: WeightStore) -> None:
    run = anchored(store, 2, 4, versions=9)
    held = all_of(run.schema)
    part = write_part(store, run.schema, kind=Kind.FOLD, version=8, base=1, held=held, new=run.truth[8], old=run.truth[1])
    store.add_route(Route(kind=Kind.FOLD, version=8, base=1, schema=run.schema.digest, packs=part.packs, writer="c", created=0.0))
    store.objects.delete([pack_key(6, Kind.DELTA, base=5, rank=0)])
    collect_all(store)
    run.check([2, 3, 4, 5, 8])


def test_a_line_that_cannot_be_read_is_not_collected(store: WeightStore) -> None:
    anchored(store, 4, 8, versions=9)
    store.objects.put(version_key(5), [b"torn"])
    before = keys_in(store.objects)
    with pytest.raises(CorruptSnapshot, match="damaged"):
        collect(store, LATER, grace_s=GRACE_S)
    assert keys_in(store.objects) == before


def test_packs_of_a_route_that_cannot_be_read_stay(store: WeightStore) -> None:
    run = anchored(store, 2, 5, versions=7)
    name = next(name for name in store.routes() if name.version == 6)
    whole = store.objects.get(name.key)[0]
    store.objects.put(name.key, [whole[:-2]])
    collect_all(store)
    store.objects.put(name.key, [whole])
    run.check(range(2, 7))


def test_marks_on_what_is_gone_go_with_it(store: WeightStore) -> None:
    anchored(store, 4, 8, versions=9)
    gone, stays = pack_key(1, Kind.DELTA, base=0, rank=0), pack_key(6, Kind.DELTA, base=5, rank=0)
    store.quarantine(gone, "flipped")
    store.quarantine(stays, "flipped")
    collect_all(store)
    assert store.quarantined() == {stays: "flipped"}


def test_places_on_the_line_survive_collection(store: WeightStore) -> None:
    run = anchored(store, 6, 9, versions=11)
    before = {place.version: place.position for place in store.line()}
    compactor = Compactor(store, cost=CostModel(anchor_replay=1e9))
    known = store.line()
    collect_all(store)
    assert {place.version: place.position for place in store.line()} == {version: before[version] for version in range(6, 11)}
    assert store.line(known=known) == store.line()
    run.publish(6)
    assert store.line(known=known) == store.line()
    compactor.step(LATER)
    folds = {(route.base, route.version) for route in map(store.route, store.routes()) if route.kind is Kind.FOLD}
    assert folds == {(8, 12), (12, 16)}
    run.check_routes()


def test_a_damaged_floor_is_replaced_by_the_next(store: WeightStore) -> None:
    run = anchored(store, 4, 8, versions=11)
    collect_all(store)
    floor = store.floor()
    store.objects.swap("floor.json", b"torn", expected=store.objects.get("floor.json")[1])
    with pytest.raises(CorruptSnapshot):
        list(store.lineage())
    store.raise_floor(floor)
    store.raise_floor(floor)
    assert store.floor() == floor
    run.check(range(4, 11))


@pytest.mark.parametrize("death", list(Death))
def test_a_run_that_dies_at_any_write_is_finished_by_the_next(tmp_path: Path, death: Death) -> None:
    whole: set[str] | None = None
    for at in itertools.count(1):
        store = WeightStore(Directory(tmp_path / f"{at}"))
        run = anchored(store, 3, 5, versions=7)
        store.renew(lease(1, expires=LATER + 1))
        faulty = FaultyObjects(store.objects, random.Random(at), die_at=at, death=death)
        # One process for both phases: its writes are numbered through.
        with suppress(Killed):
            collect(WeightStore(faulty), LATER, grace_s=GRACE_S)
            store.renew(lease(1, expires=LATER + 2 * GRACE_S + 1))
            collect(WeightStore(faulty), LATER + 2 * GRACE_S, grace_s=GRACE_S)
        run.check([1, *range(3, 7)])
        run.check_move(1, 6)
        assert [record.version for record in store.lineage()][-1] in (0, 3)
        collect_all(store, version=1, start=LATER + 4 * GRACE_S)
        run.check([1, *range(3, 7)])
        run.check_move(1, 6)
        whole = whole or keys_in(store.objects)
        assert keys_in(store.objects) == whole and store.tombstones() == []
        if not faulty.dead:
            break
    assert at > 6


@pytest.mark.parametrize("at", [3, 5])
def test_a_killed_process_is_finished_by_the_next(tmp_path: Path, at: int) -> None:
    store = WeightStore(Directory(tmp_path / "store"))
    run = anchored(store, 3, 5, versions=7)
    code = f"from rollmill.weights.gc import collect\ncollect(store, {LATER}, grace_s=1.0)\ncollect(store, {LATER + 2}, grace_s=1.0)\n"
    assert run_and_die(code, tmp_path / "store", at=at) == -9
    run.check(range(3, 7))
    collect(store, LATER + 4, grace_s=1.0)
    collect(store, LATER + 6, grace_s=1.0)
    assert store.versions() == list(range(3, 7)) and store.tombstones() == []
    run.check(range(3, 7))


def test_publishing_compacting_and_collecting_go_on_side_by_side(store: WeightStore) -> None:
    run = TinyRun(store)
    rng = random.Random(5)
    compactor = Compactor(store, cost=CostModel(anchor_versions=7))
    for round_ in range(12):
        run.publish(rng.randint(1, 4))
        now = LATER + round_ * 2 * GRACE_S
        compactor.step(now)
        line = [place.version for place in store.line()]
        held = rng.choice(line)
        store.renew(lease(held, expires=now + 1))
        collect(store, now, grace_s=GRACE_S)
        run.check_move(held, line[-1])
        run.check([place.version for place in store.line()])
    assert store.floor().version > 0 and len(store.versions()) < len(run.truth)
    run.check_routes()


def test_other_tensors_after_a_change_of_schema_do_not_confuse_it(store: WeightStore) -> None:
    run = TinyRun(store)
    run.publish(4)
    run.change_schema([*TENSORS, ("d", "uint8", (9,))])
    run.publish(4)
    run.add_full(6)
    collect_all(store, version=2)
    assert store.floor().version == 4
    run.check([2, 4, 5, 6, 7])


# The pure choice


@st.composite
def stores(draw: st.DrawFn) -> Contents:
    """A line with anchors, deltas, folds and aliases, some of it damaged, with replicas and tags anywhere."""
    length = draw(st.integers(1, 14))
    numbers = sorted(draw(st.sets(st.integers(0, 30), min_size=length, max_size=length)))
    stray = sorted(set(range(33)) - set(numbers))
    line = tuple(Place(position=at + 5, version=number, schema="A", created=float(at)) for at, number in enumerate(numbers))
    pairs = {(None, numbers[0]), *itertools.pairwise(numbers)}
    pairs |= {(None, number) for number in draw(st.lists(st.sampled_from(numbers), max_size=4))}
    ways = draw(st.lists(st.tuples(st.sampled_from(numbers), st.sampled_from(numbers)), max_size=6))
    pairs |= {(min(way), max(way)) for way in ways if way[0] != way[1]}
    pairs |= {(numbers[0], number) for number in draw(st.lists(st.sampled_from(stray), max_size=3)) if number > numbers[0]}
    routes: dict[RouteName, Route | None] = {}
    packs: set[str] = set()
    for base, version in sorted(pairs, key=str):
        is_alias = base is not None and draw(st.integers(0, 9)) == 0
        size = draw(st.integers(1, 9)) * 1000
        key = f"packs/{version:08d}/from{base}-0000.pack"
        refs = () if is_alias else (PackRef(key=key, num_bytes=size, digest="", index_bytes=0, index_digest=""),)
        kind = Kind.FULL if base is None else Kind.ALIAS if is_alias else Kind.FOLD
        created = float(draw(st.integers(0, 20)))
        route = Route(kind=kind, version=version, base=base, schema="A", packs=refs, writer="", created=created)
        routes[route.name] = route if draw(st.integers(0, 15)) else None
        if draw(st.integers(0, 15)):
            packs |= {ref.key for ref in refs}
    packs |= {f"packs/{number:08d}/orphan-0000.pack" for number in draw(st.lists(st.integers(0, 33), max_size=3))}
    some = st.sampled_from(numbers)
    leases = [
        Lease(replica=f"r{at}", version=version, staging=staging, renewed=0.0, expires=expires)
        for at, (version, staging, expires) in enumerate(
            draw(st.lists(st.tuples(st.none() | some, st.none() | some, st.sampled_from([50.0, 150.0])), max_size=3))
        )
    ]
    tags = [Tag(name=f"t{at}", version=version, created=0.0) for at, version in enumerate(draw(st.lists(some, max_size=2)))]
    keys = sorted({*packs, *(name.key for name in routes)})
    others = {number: float(number) for number in draw(st.lists(st.sampled_from(stray), max_size=3, unique=True))}
    return Contents(
        line=line, others=others, routes=routes, packs=frozenset(packs), leases=tuple(leases), tags=tuple(tags),
        quarantined=frozenset(draw(st.lists(st.sampled_from(keys), max_size=2)) if keys else ()),
    )  # fmt: skip


def usable(contents: Contents, routes: set[RouteName], packs: set[str]) -> list[RouteName]:
    good = packs - contents.quarantined
    return [
        name
        for name in routes
        if (route := contents.routes[name]) is not None and name.key not in contents.quarantined and {p.key for p in route.packs} <= good
    ]


@given(stores(), st.sampled_from([0.0, 92.0, 97.0]))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_whoever_could_get_somewhere_before_collection_still_can(contents: Contents, grace_s: float) -> None:
    now = 100.0
    found = plan_gc(contents, now=now, grace_s=grace_s)
    before = usable(contents, set(contents.routes), set(contents.packs))
    after = usable(contents, set(contents.routes) - set(found.routes), set(contents.packs) - set(found.packs))
    latest = contents.line[-1].version
    assert {name.key for name in after} == {name.key for name in before} - {name.key for name in found.routes}, "no kept route lost a pack"
    kept = {place.version for place in contents.line if place.version >= found.floor.version}
    live = [lease for lease in contents.leases if lease.expires > now]
    wanted = kept | {tag.version for tag in contents.tags}
    wanted |= {version for lease in live for version in (lease.version, lease.staging) if version is not None}
    assert wanted & reachable(before) <= reachable(after)
    for lease in live:
        if lease.version is not None:
            old, new = (plan(routes, held=lease.version, target=latest) for routes in (before, after))
            assert (old is None) == (new is None)
            assert old is None or sum(name.num_bytes for name in new or []) <= sum(name.num_bytes for name in old)
    assert not set(found.versions) & (kept | (wanted & reachable(before)))
    assert all(number <= latest for number in found.versions)
    assert all(int(key.split("/")[1]) <= latest for key in found.packs)
    assert all(place.created <= now - grace_s for place in contents.line if place.version < found.floor.version)


@given(stores())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_what_was_collected_leaves_nothing_more_to_collect(contents: Contents) -> None:
    found = plan_gc(contents, now=100.0, grace_s=0.0)
    gone = set(found.versions)
    line = tuple(place for place in contents.line if place.version >= found.floor.version)
    rest = {place.version: place.created for place in contents.line if place.version < found.floor.version} | contents.others
    left = Contents(
        line=line, others={number: created for number, created in rest.items() if number not in gone},
        routes={name: route for name, route in contents.routes.items() if name not in set(found.routes)},
        packs=contents.packs - set(found.packs), leases=contents.leases, tags=contents.tags, quarantined=contents.quarantined,
    )  # fmt: skip
    again = plan_gc(left, now=100.0, grace_s=0.0)
    assert (again.floor, again.routes, again.versions, again.packs) == (found.floor, (), (), ())


class Counting(Directory):
    """Remembers which objects were read."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.read: list[str] = []

    def get(self, key: str) -> tuple[bytes, str]:
        self.read.append(key)
        return super().get(key)

    def records(self) -> set[str]:
        """Routes and versions read since the last call."""
        found = {key for key in self.read if key.startswith(("routes/", "versions/"))}
        self.read.clear()
        return found


def test_who_collects_again_and_again_reads_each_record_once_but_decides_from_what_it_reads_then(tmp_path: Path) -> None:
    objects = Counting(tmp_path / "store")
    store, seen = WeightStore(objects), Seen()
    run = anchored(store, versions=6)
    objects.read.clear()
    assert collect(store, LATER, grace_s=GRACE_S, seen=seen).num_waiting == 0
    assert len(objects.records()) == 12
    run.publish(2)
    objects.read.clear()
    collect(store, LATER, grace_s=GRACE_S, seen=seen)
    # What is new, and the newest of what is known, where the line is joined.
    assert objects.records() == {
        *(name.key for name in store.routes(after=5)), *map(version_key, (5, 6, 7)),
    }  # fmt: skip

    run.add_full(4)
    run.add_full(6)
    objects.read.clear()
    assert collect(store, LATER, grace_s=GRACE_S, seen=seen).num_routes == 5
    assert {version_key(0), version_key(7)} <= objects.records(), "there was something to take away"
    collect(store, LATER + 1, grace_s=GRACE_S, seen=seen)
    assert objects.records() == {*map(version_key, (0, 1, 2, 3, 7))}, "those that have just left the line"
    assert collect(store, LATER + 2, grace_s=GRACE_S, seen=seen).num_waiting == 1
    assert objects.records() == {version_key(7)}, "there is nothing to do but to wait"
    report = collect(store, LATER + 2 * GRACE_S, grace_s=GRACE_S, seen=seen)
    assert (report.num_packs, report.num_versions, report.num_waiting) == (5, 4, 0)
    run.check(range(4, 8))
    run.check_routes()


def test_a_route_that_was_written_anew_is_not_collected_by_what_was_remembered_of_it(store: WeightStore) -> None:
    run, seen = anchored(store, versions=3), Seen()
    collect(store, LATER, grace_s=GRACE_S, seen=seen)
    name = next(name for name in store.routes() if name.version == 2)
    before = store.route(name)
    (ref,) = before.packs
    moved = msgspec.structs.replace(ref, key=ref.key.replace("-0000.pack", "-0001.pack"))
    store.objects.put(moved.key, [store.objects.get(ref.key)[0]])
    store.add_route(msgspec.structs.replace(before, packs=(moved,)))
    for now in (LATER, LATER + 2 * GRACE_S):
        collect(store, now, grace_s=GRACE_S, seen=seen)
    assert {moved.key} <= keys_in(store.objects) and ref.key not in keys_in(store.objects)
    run.check_routes()
