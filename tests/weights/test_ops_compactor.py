"""What the compactor promises: shorter ways that are proved, never fewer ways, and nothing broken wherever it dies."""

from __future__ import annotations

import itertools
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from objects_fakes import Death, FaultyObjects, Killed
from ops_fakes import TENSORS, TinyRun, keys_in, run_and_die, same

from rollmill.weights.compactor import Compactor, CostModel, Outcome, Wanted, due
from rollmill.weights.directory import Directory
from rollmill.weights.manifest import Kind, RouteName, Tombstone, pack_key, seal
from rollmill.weights.objects import open_objects
from rollmill.weights.plan import plan
from rollmill.weights.reader import materialise
from rollmill.weights.rollback import rollback
from rollmill.weights.store import Place, WeightStore

NOW = 1e6
NO_ANCHORS = CostModel(anchor_replay=1e9, anchor_versions=10**9)


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(Directory(tmp_path / "store"))


def folds_of(store: WeightStore) -> set[tuple[int, int]]:
    """(base, version)"""
    found = [store.route(name) for name in store.routes()]
    return {(route.base, route.version) for route in found if route.kind is Kind.FOLD and route.base is not None}


def test_folds_stand_at_every_fourth_and_sixteenth_place_and_give_the_bits_of_their_version(where: str) -> None:
    store = WeightStore(open_objects(where))
    run = TinyRun(store)
    run.publish(19)
    before, pointer = store.routes(), store.latest()
    done = Compactor(store, cost=NO_ANCHORS).step(NOW)
    assert {one.outcome for one in done} == {Outcome.ADDED}
    assert folds_of(store) == {(0, 4), (4, 8), (8, 12), (12, 16), (0, 16)}
    assert set(before) <= set(store.routes()) and store.latest() == pointer
    run.check_routes()
    assert [route.base for route in plan(store.routes(), held=0, target=16) or []] == [0]


def test_places_are_counted_on_the_line_and_not_by_numbers(store: WeightStore) -> None:
    run = TinyRun(store)
    run.publish(9, skip_numbers=True)
    line = [place.version for place in store.line()]
    assert line == [1, 3, 5, 7, 9, 11, 13, 15, 17]
    Compactor(store, cost=NO_ANCHORS).step(NOW)
    assert folds_of(store) == {(line[0], line[4]), (line[4], line[8])}
    run.check_routes()


def test_a_step_builds_only_what_is_new_and_then_nothing(store: WeightStore) -> None:
    run = TinyRun(store)
    compactor = Compactor(store, cost=NO_ANCHORS)
    assert compactor.step(NOW) == []
    for _ in range(18):
        run.publish()
        compactor.step(NOW)
        assert compactor.step(NOW) == []
    assert folds_of(store) == {(0, 4), (4, 8), (8, 12), (12, 16), (0, 16)}
    run.check_routes()


def test_an_anchor_is_made_when_the_replay_has_grown_to_its_share_of_a_full_route(store: WeightStore) -> None:
    run = TinyRun(store)
    compactor = Compactor(store)
    made = []
    for _ in range(24):
        run.publish()
        path = plan(store.routes(), held=None, target=run.latest or 0) or []
        grown = sum(route.num_bytes for route in path[1:]) >= 0.3 * path[0].num_bytes
        done = compactor.step(NOW)
        after = plan(store.routes(), held=None, target=run.latest or 0) or []
        assert sum(route.num_bytes for route in after[1:]) < 0.3 * after[0].num_bytes
        anchors = [one for one in done if one.wanted.kind is Kind.FULL]
        made += anchors
        assert grown or not anchors
    assert made and all(one.outcome is Outcome.ADDED for one in made)
    run.check_routes()


def test_an_anchor_is_made_after_so_many_versions(store: WeightStore) -> None:
    run = TinyRun(store)
    compactor = Compactor(store, cost=CostModel(anchor_replay=1e9, anchor_versions=6))
    for _ in range(14):
        run.publish()
        compactor.step(NOW)
    assert [name.version for name in store.routes() if name.base is None] == [0, 6, 12]
    run.check_routes()


def test_a_fold_that_is_not_smaller_than_its_chain_is_declined_for_good(store: WeightStore) -> None:
    run = TinyRun(store)
    run.publish(2)
    run.resume_from(rollback(store, 0, run_id="tiny", writer="me"))
    run.publish()
    rollback(store, 2, run_id="tiny", writer="me")
    assert [name.num_bytes for name in plan(store.routes(), held=0, target=4) or []] == [0, 0]
    (done,) = Compactor(store, cost=NO_ANCHORS).step(NOW)
    assert (done.outcome, done.wanted) == (Outcome.DECLINED, Wanted(version=4, base=0)) and "declined fold" in str(done)
    assert folds_of(store) == set() and done.wanted.pack_key not in keys_in(store.objects)
    assert Compactor(store, cost=NO_ANCHORS).step(NOW + 1e6) == []


def test_no_fold_crosses_a_change_of_schema(store: WeightStore) -> None:
    run = TinyRun(store)
    run.publish(6)
    run.change_schema([*TENSORS, ("d", "uint8", (9,))])
    run.publish(4)
    run.change_schema(TENSORS)
    run.publish(7)
    Compactor(store, cost=NO_ANCHORS).step(NOW)
    assert folds_of(store) == {(0, 4), (12, 16)}
    run.check_routes()


def test_what_cannot_be_rebuilt_is_tried_again_only_after_a_while(store: WeightStore) -> None:
    run = TinyRun(store)
    run.publish(5)
    key = pack_key(2, Kind.DELTA, base=1, rank=0)
    whole = store.objects.get(key)[0]
    store.objects.put(key, [whole[:-1] + bytes([whole[-1] ^ 1])])
    compactor = Compactor(store, cost=NO_ANCHORS)
    (done,) = compactor.step(NOW)
    assert done.outcome is Outcome.FAILED and key in done.reason
    store.objects.put(key, [whole])
    assert compactor.step(NOW + 1) == []
    assert [one.outcome for one in compactor.step(NOW + 601)] == [Outcome.ADDED]
    run.check_routes()


def test_a_pack_that_does_not_give_the_version_gets_no_route(store: WeightStore) -> None:
    run = TinyRun(store)
    run.publish(5)

    class Bending(Directory):
        def put(self, key: str, chunks: object) -> None:
            data = b"".join(bytes(chunk) for chunk in chunks)  # type: ignore[attr-defined]
            super().put(key, [data[:9] + bytes([data[9] ^ 4]) + data[10:]] if "fold" in key else [data])

    bent = WeightStore(Bending(store.objects.path))  # type: ignore[attr-defined]
    (done,) = Compactor(bent, cost=NO_ANCHORS).step(NOW)
    assert done.outcome is Outcome.FAILED and folds_of(store) == set()
    run.check(range(5))


def test_a_pack_that_awaits_deletion_is_not_built_on(store: WeightStore) -> None:
    run = TinyRun(store)
    run.publish(5)
    doomed = Wanted(version=4, base=0).pack_key
    stone = Tombstone(name="1", created=0.0, delete_after=1.0, routes=(), versions=(), packs=(doomed,), num_bytes=0)
    store.objects.put(stone.key, [seal(stone)])
    compactor = Compactor(store, cost=NO_ANCHORS)
    assert compactor.step(NOW) == [] and folds_of(store) == set()
    store.objects.delete([stone.key])
    assert len(compactor.step(NOW)) == 1


def test_two_compactors_at_once_are_harmless(store: WeightStore) -> None:
    run = TinyRun(store)
    run.publish(17)
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(Compactor(WeightStore(store.objects), writer=name).step, NOW) for name in "ab"]
        done = [one for future in both for one in future.result()]
    assert {one.outcome for one in done} == {Outcome.ADDED}
    assert folds_of(store) == {(0, 4), (4, 8), (8, 12), (12, 16), (0, 16)}
    run.check_routes()
    assert Compactor(store).step(NOW) == []


@pytest.mark.parametrize("death", list(Death))
def test_a_compactor_that_dies_at_any_write_leaves_at_most_one_pack_without_a_route(tmp_path: Path, death: Death) -> None:
    whole: set[str] | None = None
    for at in itertools.count(1):
        store = WeightStore(Directory(tmp_path / f"{at}"))
        run = TinyRun(store)
        run.publish(9)
        faulty = FaultyObjects(store.objects, random.Random(at), die_at=at, death=death)
        with suppress(Killed):
            Compactor(WeightStore(faulty)).step(NOW)
        named = {pack.key for name in store.routes() for pack in store.route(name).packs}
        assert len({key for key in keys_in(store.objects) if key.startswith("packs/")} - named) <= 1
        pointer = store.latest()
        assert pointer is not None and pointer.version == run.latest
        run.check_routes()
        Compactor(store).step(NOW)
        run.check_routes()
        whole = whole or keys_in(store.objects)
        assert keys_in(store.objects) == whole
        if not faulty.dead:
            break
    assert at > 4


@pytest.mark.parametrize("at", [2, 3])
def test_a_killed_process_is_continued_by_the_next(tmp_path: Path, at: int) -> None:
    store = WeightStore(Directory(tmp_path / "store"))
    run = TinyRun(store)
    run.publish(9)
    code = "from rollmill.weights.compactor import Compactor\nCompactor(store).step(1e6)\n"
    assert run_and_die(code, tmp_path / "store", at=at) == -9
    run.check_routes()
    Compactor(store, cost=NO_ANCHORS).step(NOW)
    assert folds_of(store) == {(0, 4), (4, 8)}
    run.check_routes()


# The pure choice


def places(schemas: str, first: int = 0) -> list[Place]:
    return [Place(position=first + at, version=3 * at, schema=schema, created=0.0) for at, schema in enumerate(schemas)]


def chain(line: list[Place]) -> list[RouteName]:
    names = [RouteName(version=line[0].version, base=None, num_bytes=10_000)]
    for before, after in itertools.pairwise(line):
        base = before.version if before.schema == after.schema else None
        names.append(RouteName(version=after.version, base=base, num_bytes=100 if base is not None else 10_000))
    return names


@given(st.text("AB", min_size=1, max_size=90), st.integers(0, 70), st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_due_wants_only_aligned_missing_folds_within_one_schema_and_comes_to_an_end(schemas: str, first: int, data: st.DataObject) -> None:
    runs = "".join(letter * data.draw(st.integers(1, 40)) for letter in schemas[:5])
    line = places(runs, first)
    routes = chain(line)
    at = {place.version: index for index, place in enumerate(line)}
    while wanted := due(routes, line, cost=NO_ANCHORS):
        for one in wanted:
            assert one.base is not None
            span = at[one.version] - at[one.base]
            assert span in (4, 16, 64) and line[at[one.version]].position % span == 0
            assert len({place.schema for place in line[at[one.base] : at[one.version] + 1]}) == 1
        fresh = [RouteName(version=one.version, base=one.base, num_bytes=200) for one in wanted]
        assert not {(new.version, new.base) for new in fresh} & {(old.version, old.base) for old in routes}
        routes += fresh
    assert due(routes, line, cost=NO_ANCHORS, skip=()) == []


@given(st.integers(2, 300), st.data())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_with_all_folds_any_version_is_a_few_hops_from_any_other(length: int, data: st.DataObject) -> None:
    line = places("A" * length)
    routes = chain(line)
    while wanted := due(routes, line, cost=NO_ANCHORS):
        routes += [RouteName(version=one.version, base=one.base, num_bytes=100) for one in wanted]
    held = data.draw(st.integers(0, length - 2))
    target = data.draw(st.integers(held + 1, length - 1))
    path = plan([route for route in routes if route.base is not None], held=line[held].version, target=line[target].version)
    # Up three levels, along the widest, and down three levels, three hops each.
    assert path is not None and len(path) <= 3 * 3 * 2 + (target - held) // 64


def test_due_wants_nothing_of_what_is_damaged_or_tried() -> None:
    line = places("A" * 9)
    routes = chain(line)
    first, second = due(routes, line, cost=NO_ANCHORS)
    assert due(routes, line, cost=NO_ANCHORS, skip={first}) == [second]
    assert due(routes, line, cost=NO_ANCHORS, refused={routes[6].key}) == [first]
    assert due(routes, line, cost=NO_ANCHORS, refused={routes[0].key}) == []
    assert due([], [], cost=NO_ANCHORS) == []


def test_an_anchor_waits_for_the_folds_that_make_it_needless() -> None:
    line = places("A" * 65)
    routes = chain(line)
    assert all(wanted.base is not None for wanted in due(routes, line))
    while wanted := due(routes, line):
        assert all(one.base is not None for one in wanted)
        routes += [RouteName(version=one.version, base=one.base, num_bytes=250) for one in wanted]


# What it builds on


def test_bytes_that_are_the_version_already_are_given_back_and_wrong_ones_are_rebuilt(store: WeightStore) -> None:
    run = TinyRun(store)
    run.publish(3)
    run.check_move(2, 2)
    assert same(materialise(store, 2, start=(2, run.truth[1]))[2], run.truth[2])
