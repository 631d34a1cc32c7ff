"""What a roll-back promises: old bits under a new number, few bytes for those who serve, and all or nothing."""

from __future__ import annotations

import itertools
import random
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from objects_fakes import Death, FaultyObjects, Killed
from ops_fakes import TENSORS, TinyRun, same

from rollmill.weights.directory import Directory
from rollmill.weights.errors import CorruptSnapshot, LatestMoved
from rollmill.weights.follower import Follower
from rollmill.weights.gc import collect
from rollmill.weights.live import HostWeights
from rollmill.weights.manifest import Kind, Tag, pack_key
from rollmill.weights.objects import open_objects
from rollmill.weights.plan import plan
from rollmill.weights.reader import materialise
from rollmill.weights.rollback import rollback
from rollmill.weights.store import WeightStore

LATER = time.time() + 1e6


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(Directory(tmp_path / "store"))


def back_to(store: WeightStore, version: int) -> int:
    return rollback(store, version, run_id="tiny", writer="me").version


def test_rolling_back_publishes_the_old_bits_under_a_new_number(where: str) -> None:
    store = WeightStore(open_objects(where))
    run = TinyRun(store)
    run.publish(5)
    record = rollback(store, 1, run_id="tiny", writer="me", note="loss went up")
    assert (record.version, record.previous, record.restores, record.epoch, record.note) == (5, 4, 1, 1, "loss went up")
    assert record.step == store.version(1).step and store.version(5) == record
    pointer = store.latest()
    assert pointer is not None and (pointer.version, pointer.epoch) == (5, 1)
    assert record.fingerprint == store.version(1).fingerprint
    run.resume_from(record)
    run.check_routes()
    run.check(range(6))
    kinds = {store.route(name).kind: name for name in store.routes() if name.version == 5}
    assert kinds.keys() == {Kind.ALIAS, Kind.DELTA} and kinds[Kind.DELTA].base == 4
    assert kinds[Kind.DELTA].num_bytes < store.version(5).raw_bytes / 4


def test_those_who_serve_move_by_the_delta_and_those_who_stayed_behind_read_nothing(store: WeightStore) -> None:
    run = TinyRun(store)
    followers = []
    for held in (1, 4):
        run.publish(held + 1 - len(run.truth))
        live = {"a": torch.zeros(48, 32, dtype=torch.bfloat16), "b": torch.zeros(16), "c": torch.zeros(5, dtype=torch.int64)}
        follower = Follower(store, HostWeights(live))
        follower.swap(follower.bootstrap())
        followers.append((follower, live))
    restored = back_to(store, 1)
    reads = []
    for follower, live in followers:
        staged = follower.poll()
        assert staged is not None
        reads.append(staged.bytes_read)
        follower.swap(staged)
        assert follower.version == restored
        assert same({name: tensor.view(torch.uint8).numpy().reshape(-1) for name, tensor in live.items()}, run.truth[1])
    assert reads == [0, next(name.num_bytes for name in store.routes() if (name.version, name.base) == (restored, 4))]


def test_training_goes_on_after_a_rollback_and_the_old_trainer_is_stopped(store: WeightStore) -> None:
    run, old = TinyRun(store), TinyRun(store)
    run.publish(4)
    old.latest = old._base = 3
    old.truth, old.data = dict(run.truth), {name: data.copy() for name, data in run.data.items()}
    run.resume_from(rollback(store, 1, run_id="tiny", writer="me"))
    with pytest.raises(LatestMoved, match="roll-back"):
        old.publish()
    run.publish(2)
    record = rollback(store, 4, run_id="tiny", writer="me")
    assert record.epoch == 2 and record.restores == 4
    run.resume_from(record)
    run.check([place.version for place in store.line()])


def test_it_refuses_what_nobody_can_go_back_to(store: WeightStore) -> None:
    with pytest.raises(ValueError, match="nothing was published"):
        back_to(store, 0)
    run = TinyRun(store)
    run.publish(3)
    for version in (7, -1):
        with pytest.raises(ValueError, match="never published or was collected; there are 0 to 2"):
            back_to(store, version)
    with pytest.raises(ValueError, match="has the bits of version 2 already"):
        back_to(store, 2)
    restored = back_to(store, 0)
    with pytest.raises(ValueError, match="has the bits of version 0 already"):
        back_to(store, 0)
    pointer = store.latest()
    assert pointer is not None and pointer.version == restored


def test_it_refuses_a_version_that_was_never_served(store: WeightStore) -> None:
    run = TinyRun(store)
    run.publish(2)

    class Overtaken(Directory):
        """Another trainer moves `latest` after this one's version was written."""

        def swap(self, key: str, data: bytes, *, expected: str | None) -> str:
            if key == "latest.json":
                loser.store = store
                run.publish()
            return super().swap(key, data, expected=expected)

    loser = TinyRun(WeightStore(Overtaken(store.objects.path)), seed=1)  # type: ignore[attr-defined]
    loser.truth, loser.latest, loser._base = dict(run.truth), 1, 1
    with pytest.raises(LatestMoved):
        loser.publish()
    assert store.versions() == [0, 1, 2, 3] and [place.version for place in store.line()] == [0, 1, 3]
    with pytest.raises(ValueError, match="never served"):
        back_to(store, 2)


def test_it_refuses_a_version_that_cannot_be_rebuilt_and_says_why(store: WeightStore) -> None:
    run = TinyRun(store)
    run.publish(4)
    run.add_full(3)
    key = pack_key(1, Kind.DELTA, base=0, rank=0)
    store.objects.delete([key])
    with pytest.raises(CorruptSnapshot, match=f"cannot go back to version 2.*{key}.*missing"):
        back_to(store, 2)
    assert store.line()[-1].version == 3


def test_damage_to_what_is_served_does_not_stop_a_rollback(store: WeightStore) -> None:
    run = TinyRun(store)
    run.publish(4)
    store.objects.delete([pack_key(3, Kind.DELTA, base=2, rank=0)])
    record = rollback(store, 1, run_id="tiny", writer="me")
    run.resume_from(record)
    run.check([record.version])
    assert [store.route(name).kind for name in store.routes() if name.version == record.version] == [Kind.ALIAS]


def test_going_back_over_a_change_of_schema_works_without_a_delta(store: WeightStore) -> None:
    run = TinyRun(store)
    run.publish(3)
    run.change_schema([*TENSORS, ("d", "uint8", (9,))])
    run.publish(2)
    record = rollback(store, 1, run_id="tiny", writer="me")
    run.resume_from(record)
    run.check([record.version])
    assert record.schema == store.version(1).schema != store.version(4).schema
    assert [name.base for name in plan(store.routes(), held=4, target=record.version) or []] == [None, 0, 1]


def test_a_tagged_version_can_be_gone_back_to_after_the_line_was_collected(store: WeightStore) -> None:
    run = TinyRun(store)
    run.publish(9)
    run.add_full(5)
    run.add_full(7)
    store.tag(Tag(name="best", version=2, created=0.0))
    for now in (LATER, LATER + 10):
        collect(store, now, grace_s=1.0)
    with pytest.raises(ValueError, match="collected"):
        back_to(store, 3)
    run.resume_from(rollback(store, 2, run_id="tiny", writer="me"))
    run.publish()
    store.untag("best")
    for now in (LATER + 20, LATER + 40):
        collect(store, now, grace_s=1.0)
    run.check([2, *(place.version for place in store.line())])


def test_a_publication_that_comes_between_wins(store: WeightStore) -> None:
    run = TinyRun(store)
    run.publish(3)

    class Busy(Directory):
        """The trainer publishes while the roll-back writes its routes."""

        def put(self, key: str, chunks: object) -> None:
            super().put(key, chunks)  # type: ignore[arg-type]
            if key.startswith("routes/") and run.latest == 2:
                run.publish()

    with pytest.raises(LatestMoved):
        back_to(WeightStore(Busy(store.objects.path)), 0)  # type: ignore[attr-defined]
    assert store.line()[-1].version == run.latest == 4
    run.check([0, 1, 2, 4])
    assert back_to(store, 0) == 5


@pytest.mark.parametrize("death", list(Death))
def test_a_rollback_that_dies_at_any_write_has_happened_or_not(tmp_path: Path, death: Death) -> None:
    for at in itertools.count(1):
        store = WeightStore(Directory(tmp_path / f"{at}"))
        run = TinyRun(store)
        run.publish(3)
        faulty = FaultyObjects(store.objects, random.Random(at), die_at=at, death=death)
        with suppress(Killed):
            back_to(WeightStore(faulty), 0)
        latest = store.line()[-1].version
        happened = latest != 2
        assert same(materialise(store, latest)[2], run.truth[0 if happened else 2])
        again = latest if happened else back_to(store, 0)
        assert same(materialise(store, again)[2], run.truth[0])
        assert store.reserve() > again
        if not faulty.dead:
            break
    assert at > 5 and happened
