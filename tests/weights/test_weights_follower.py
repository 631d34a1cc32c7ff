"""Claims about the follower: it never holds bytes that were not published, whatever happens to the store or to the live weights."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from weights_fakes import ReplicaFake, same_bits, weights_at

from rollmill.weights import Follower, HostWeights, Publisher, Staged, WeightStore, WrongBase, WrongWeights, fingerprint, open_store
from rollmill.weights.directory import Directory
from rollmill.weights.manifest import RouteName, seal
from rollmill.weights.plan import plan


class Pair:
    """A publisher and one replica over one store."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.store = open_store(path)
        self.publisher = Publisher(self.store, run_id="r")
        self.live = ReplicaFake()
        self.follower = Follower(self.store, self.live, replica="one")

    def publish(self, *steps: int) -> None:
        for step in steps:
            self.publisher.submit(weights_at(step), step=step)
        self.publisher.flush(60)

    def catch_up(self) -> None:
        staged = self.follower.poll()
        assert staged is not None, self.follower.stats().problem
        self.follower.swap(staged)

    def holds(self, step: int) -> bool:
        return same_bits(self.live.tensors, weights_at(step))

    def hurt(self, key: str) -> None:
        path = self.path / key
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 16
        path.write_bytes(data)


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def test_a_replica_follows_step_by_step_and_stages_only_what_changed(pair: Pair) -> None:
    for step in range(10):
        pair.publish(step)
        staged = pair.follower.poll()
        assert staged is not None and staged.num_packs == 1 and staged.version == step
        assert staged.num_changed <= 10 if step else staged.num_changed == sum(t.numel() for t in pair.live.tensors.values())
        assert step == 0 or {patch.held.spec.name for patch in staged.patch} <= {"wide", "gain"}
        pair.follower.swap(staged)
        assert pair.holds(step)
    assert pair.follower.poll() is None and pair.follower.stats().problem == ""


def test_live_tensors_are_patched_in_place_and_stay_untouched_while_staging(pair: Pair) -> None:
    pointers = {name: tensor.data_ptr() for name, tensor in pair.live.tensors.items()}
    pair.publish(0)
    pair.catch_up()
    pair.publish(1, 2, 3)
    staged = pair.follower.poll()
    assert staged is not None and staged.version == 3 and staged.base_version == 0 and staged.num_packs == 3
    assert pair.holds(0) and pair.follower.version == 0, "staged is not held"
    pair.follower.swap(staged)
    pair.follower.swap(staged)
    assert pair.holds(3), "twice is once"
    assert pointers == {name: tensor.data_ptr() for name, tensor in pair.live.tensors.items()}


def test_a_late_replica_takes_the_full_route_and_every_delta_after_it(pair: Pair) -> None:
    pair.publish(*range(7))
    staged = pair.follower.bootstrap()
    assert staged.version == 6 and staged.num_packs == 7 and staged.base_version is None
    assert pair.follower.version is None, "loaded is not held"
    pair.follower.swap(staged)
    assert pair.holds(6)


def test_an_empty_store_gives_nothing_and_bootstrap_says_why(pair: Pair) -> None:
    assert pair.follower.poll() is None
    with pytest.raises(ValueError, match="nothing was published yet"):
        pair.follower.bootstrap()


def test_weights_that_are_not_those_published_are_refused_and_the_old_ones_put_back(pair: Pair) -> None:
    pair.publish(0)
    pair.catch_up()
    pair.publish(1)
    staged = pair.follower.poll()
    assert staged is not None
    pair.live.drop = "wide"
    with pytest.raises(WrongWeights, match="first wide") as caught:
        pair.follower.swap(staged)
    assert caught.value.tensors == ("wide",) and not caught.value.is_lost
    assert pair.follower.version == 0 and pair.holds(0)
    assert pair.follower.stats().num_wrong_weights == 1 and "should show" in pair.follower.stats().problem
    pair.live.drop = None
    pair.publish(2)
    pair.catch_up()
    assert pair.holds(2) and pair.follower.stats().problem == ""


def test_live_weights_that_cannot_be_put_back_stop_the_replica(pair: Pair) -> None:
    pair.publish(0)
    pair.catch_up()
    pair.publish(1)
    staged = pair.follower.poll()
    assert staged is not None
    pair.live.hurt("still", 3)
    with pytest.raises(WrongWeights, match="stop serving") as caught:
        pair.follower.swap(staged)
    assert caught.value.is_lost and pair.follower.version == 0


def test_a_staged_version_whose_base_is_gone_or_that_is_older_is_refused(pair: Pair) -> None:
    pair.publish(0)
    pair.catch_up()
    pair.publish(1)
    first = pair.follower.poll()
    pair.publish(2)
    second = pair.follower.poll()
    assert first is not None and second is not None
    pair.follower.swap(second)
    with pytest.raises(WrongBase, match="drop it"):
        pair.follower.swap(first)
    pair.publish(3)
    third = pair.follower.poll()
    pair.publish(4)
    fourth = pair.follower.poll()
    assert third is not None and fourth is not None
    pair.follower.swap(third)
    with pytest.raises(WrongBase, match="poll again"):
        pair.follower.swap(fourth)
    pair.catch_up()
    assert pair.follower.version == 4 and pair.holds(4)


def test_a_damaged_delta_is_quarantined_once_and_gone_round_by_the_next_full_route(pair: Pair) -> None:
    pair.publish(0)
    pair.catch_up()
    pair.publish(1, 2)
    pair.hurt("packs/00000002/delta-0000.pack")
    pair.catch_up()
    assert pair.follower.version == 1, "as far as the good bytes lead"
    assert "version 2 cannot be reached" in pair.follower.stats().problem
    assert pair.follower.poll() is None and pair.follower.stats().num_quarantined == 1, "reported once"
    assert list(pair.store.quarantined()) == ["packs/00000002/delta-0000.pack"]
    pair.publish(3)
    pair.catch_up()
    assert pair.follower.version == 3 and pair.holds(3), "the publisher added a full route at once"


@pytest.mark.parametrize("key", ["packs/00000000/full-0000.pack", "versions/00000000.json", "routes"])
def test_a_store_with_nothing_readable_is_said_and_nothing_is_served(pair: Pair, key: str) -> None:
    pair.publish(0)
    for path in [pair.path / key] if key != "routes" else (pair.path / key).iterdir():
        path.unlink()
    assert pair.follower.poll() is None
    assert "cannot be reached" in pair.follower.stats().problem
    with pytest.raises(ValueError, match="has no version to start from"):
        pair.follower.bootstrap()
    pair.store.quarantine("test", "so that the publisher knows")
    pair.publish(1)
    pair.catch_up()
    assert pair.holds(1)


def test_a_damaged_pointer_keeps_the_old_version_and_heals_with_the_next(pair: Pair) -> None:
    pair.publish(0)
    pair.catch_up()
    pair.publish(1)
    good = (pair.path / "latest.json").read_bytes()
    (pair.path / "latest.json").write_bytes(good[:-5])
    assert pair.follower.poll() is None and "latest.json" in pair.follower.stats().problem
    (pair.path / "latest.json").write_bytes(good)
    pair.catch_up()
    assert pair.follower.version == 1


def test_live_weights_that_went_bad_are_noticed_before_a_delta_touches_them_and_mended_from_a_full_route(pair: Pair) -> None:
    pair.publish(0)
    pair.catch_up()
    pair.live.hurt("wide", 74)
    pair.publish(1)
    staged = pair.follower.poll()
    assert staged is not None
    with pytest.raises(WrongWeights) as refused:
        pair.follower.swap(staged)
    assert refused.value.is_lost and refused.value.tensors == ("wide",) and pair.follower.version == 0
    mended = pair.follower.scrub()
    assert mended is not None and mended.version == 0
    pair.follower.swap(mended)
    assert pair.holds(0)
    pair.publish(2)
    pair.catch_up()
    assert pair.holds(2) and pair.follower.version == 2


def test_scrubbing_finds_a_flipped_bit_and_mends_only_its_cell(pair: Pair) -> None:
    pair.publish(0, 1, 2)
    pair.catch_up()
    assert pair.follower.scrub() is None
    pair.live.hurt("gain", 7)
    mended = pair.follower.scrub()
    assert mended is not None and mended.num_changed == 1 and pair.follower.stats().num_repaired_cells == 1
    assert "have changed under way: gain" in pair.follower.stats().problem
    pair.follower.swap(mended)
    assert pair.holds(2) and pair.follower.scrub() is None


def test_another_store_under_the_same_numbers_is_not_mistaken_for_the_held_one(tmp_path: Path) -> None:
    pair, other = Pair(tmp_path / "a"), Pair(tmp_path / "b")
    pair.publish(0)
    pair.catch_up()
    other.publish(5, 6)
    pair.follower._store = other.store
    pair.catch_up()
    assert pair.holds(6) and pair.follower.stats().num_wrong_base == 1


def test_a_store_that_went_back_moves_no_replica(pair: Pair) -> None:
    pair.publish(0)
    old = (pair.path / "latest.json").read_bytes()
    pair.publish(1)
    pair.catch_up()
    (pair.path / "latest.json").write_bytes(old)
    assert pair.follower.poll() is None and "went back" in pair.follower.stats().problem
    assert pair.follower.version == 1


class FlakyDirectory(Directory):
    """Reads that fail as a mount or a cable does: an error, or wrong bytes once."""

    def __init__(self, path: Path, trouble: list[str]) -> None:
        super().__init__(path)
        self.trouble = trouble

    def get(self, key: str) -> tuple[bytes, str]:
        data, tag = super().get(key)
        match self.trouble.pop(0) if self.trouble and key.startswith("packs/") else "":
            case "error":
                raise OSError(5, "Input/output error")
            case "bytes":
                return data[:-1] + bytes([data[-1] ^ 1]), tag
        return data, tag


def test_a_read_that_fails_is_tried_again_and_condemns_nothing(pair: Pair) -> None:
    pair.publish(0)
    follower = Follower(WeightStore(FlakyDirectory(pair.path, ["error", "bytes"])), pair.live)
    assert follower.poll() is None and follower.stats().num_read_errors == 1 and "Input/output" in follower.stats().problem
    staged = follower.poll()
    assert staged is not None and follower.stats().num_quarantined == 0 and pair.store.quarantined() == {}


def test_a_model_of_other_tensors_is_told_so_and_the_old_version_serves_on(pair: Pair) -> None:
    pair.publish(0)
    pair.catch_up()
    pair.publisher.submit({"wide": torch.ones(2, 2), "other": torch.zeros(3)}, step=1)
    pair.publisher.flush(60)
    assert pair.follower.poll() is None
    assert "start the replica with the model that is trained" in pair.follower.stats().problem
    assert pair.follower.version == 0 and pair.holds(0) and pair.store.quarantined() == {}


def test_a_version_whose_record_promises_other_weights_is_never_served(pair: Pair) -> None:
    """A fault of the publisher itself: every digest is right, the promised fingerprint is another's."""
    pair.publish(0)
    other, record = fingerprint(weights_at(1)), pair.store.version(0)
    schema = pair.store.schema(record.schema)
    lie = msgspec.structs.replace(record, fingerprint=other.total, tensors=tuple(other.tensors[spec.name] for spec in schema.tensors))
    (pair.path / record.key).write_bytes(seal(lie))
    staged = pair.follower.poll()
    if staged is not None:
        with pytest.raises(WrongWeights):
            pair.follower.swap(staged)
    assert pair.follower.version is None


def test_a_record_of_a_newer_rollmill_is_left_in_peace_and_the_old_version_serves_on(pair: Pair) -> None:
    pair.publish(0)
    pair.catch_up()
    pair.publish(1)
    record = pair.store.version(1)
    (pair.path / record.key).write_bytes(seal(msgspec.structs.replace(record, format=99)))
    assert pair.follower.poll() is None and "format 99" in pair.follower.stats().problem
    assert pair.follower.version == 0 and pair.store.quarantined() == {}


def test_a_replica_says_in_its_lease_what_it_serves(pair: Pair) -> None:
    pair.publish(0)
    pair.catch_up()
    now = time.time()
    assert pair.follower.renew(now) and not pair.follower.renew(now + 1), "not at every poll"
    (lease,) = pair.store.leases()
    assert (lease.replica, lease.version, lease.fingerprint) == ("one", 0, fingerprint(weights_at(0)).total)
    assert lease.timings_s.keys() == {"plan", "fetch_decode", "swap"} and lease.expires == now + 60


def test_a_replica_that_polls_in_the_background_while_the_trainer_publishes_ends_at_the_last_version(pair: Pair) -> None:
    ready: queue.Queue[Staged] = queue.Queue()
    done, taken = threading.Event(), threading.Semaphore(1)

    def keep_polling() -> None:
        # As the engine's watcher: a version is staged, offered and taken before the next is looked for.
        while not done.is_set():
            if not taken.acquire(timeout=0.01):
                continue
            while not done.is_set() and (staged := pair.follower.poll()) is None:
                done.wait(0.001)
            if not done.is_set() and staged is not None:
                ready.put(staged)

    poller = threading.Thread(target=keep_polling, daemon=True)
    poller.start()
    trainer = threading.Thread(target=lambda: pair.publish(*range(40)), daemon=True)
    trainer.start()
    try:
        while pair.follower.version != 39:
            pair.follower.swap(ready.get(timeout=60))
            version = pair.follower.version
            assert version is not None and pair.holds(version)
            taken.release()
    finally:
        done.set()
        poller.join(60)
    trainer.join(60)
    assert pair.follower.stats().num_wrong_weights == 0


Case = tuple[list[RouteName], int | None, set[str]]


@st.composite
def route_maps(draw: st.DrawFn) -> Case:
    routes = []
    for version in range(draw(st.integers(1, 12))):
        if version == 0 or draw(st.integers(0, 3)) == 0:
            routes.append(RouteName(version=version, base=None, num_bytes=draw(st.integers(50, 200))))
        for base in draw(st.sets(st.integers(max(0, version - 5), max(0, version - 1)), max_size=3)) if version else ():
            routes.append(RouteName(version=version, base=base, num_bytes=draw(st.integers(0, 60))))
    keys = [route.key for route in routes]
    return routes, draw(st.none() | st.integers(0, 11)), set(draw(st.lists(st.sampled_from(keys), max_size=4)))


@given(route_maps(), st.integers(0, 11))
@settings(max_examples=200, deadline=None)
def test_a_plan_is_a_sound_path_to_the_target_at_the_least_bytes(case: Case, target: int) -> None:
    routes, held, refused = case

    def cheapest(version: int) -> float:
        """Every path, by brute force."""
        if version == held:
            return 0
        ways = [
            route.num_bytes + (0 if route.base is None else cheapest(route.base))
            for route in routes
            if route.version == version and route.key not in refused
        ]
        return min(ways, default=float("inf"))

    found = plan(routes, held=held, target=target, refused=refused, hop_bytes=0)
    if found is None:
        assert cheapest(target) == float("inf")
        return
    at: int | None = found[0].base if found else held
    assert at in (None, held)
    for route in found:
        assert route.base == at and route.key not in refused
        at = route.version
    assert at == target and sum(route.num_bytes for route in found) == cheapest(target)


def test_a_thousand_hops_are_planned_in_one_pass() -> None:
    routes = [RouteName(version=0, base=None, num_bytes=10**9)] + [
        RouteName(version=version, base=version - 1, num_bytes=1) for version in range(1, 5000)
    ]
    found: Sequence[RouteName] | None = plan(routes, held=None, target=4999)
    assert found is not None and len(found) == 5000


def test_sharded_ranks_follow_together_and_all_agree_or_none_serves(tmp_path: Path) -> None:
    """Two trainer ranks hold rows, two replica ranks hold columns; each writes and reads only its own cells."""
    from rollmill.weights.bits import copied_bytes
    from rollmill.weights.encode import commit, write_part
    from rollmill.weights.manifest import Kind
    from rollmill.weights.proof import Lanes, add
    from rollmill.weights.schema import make_schema
    from rollmill.weights.shard import Held, columns_of, rows_of, whole

    store = open_store(tmp_path)
    generator = torch.Generator().manual_seed(1)
    schema = make_schema(
        [("w", "bfloat16", (40, 24)), ("norm", "bfloat16", (24,))],
        row_cuts={"w": (20,)}, col_cuts={"w": (8,)}, chunk_elements=64,
    )  # fmt: skip
    norm, w = schema.tensors
    states = []
    state = {"w": torch.randn(40, 24, generator=generator).bfloat16(), "norm": torch.ones(24).bfloat16()}
    for _ in range(4):
        states.append({name: tensor.clone() for name, tensor in state.items()})
        state["w"] += (torch.rand(40, 24, generator=generator) < 0.1) * 0.01
        state["norm"] += 0.5
    trainer: list[dict[str, Held]] = [{"w": rows_of(w, 0, 20), "norm": whole(norm)}, {"w": rows_of(w, 20, 40)}]

    def publish(version: int) -> None:
        parts = []
        for rank, held in enumerate(trainer):
            rows = slice(0, 20) if rank == 0 else slice(20, 40)
            new, old = (
                None if at < 0 else {n: copied_bytes(states[at][n][rows] if n == "w" else states[at][n]) for n in held}
                for at in (version, version - 1)
            )
            assert new is not None
            kind, base = (Kind.FULL, None) if old is None else (Kind.DELTA, version - 1)
            parts.append(write_part(store, schema, kind=kind, version=version, base=base, held=held, new=new, old=old, rank=rank))
        commit(store, schema, parts, kind=kind, version=version, base=base, expected=base, step=version, run_id="r", writer="t")

    shards = [{"w": columns_of(w, 0, 8), "norm": whole(norm)}, {"w": columns_of(w, 8, 24)}]
    ranks = [
        HostWeights({n: torch.zeros(40, (8, 16)[at]).bfloat16() if n == "w" else torch.zeros(24).bfloat16() for n in held}, held)
        for at, held in enumerate(shards)
    ]
    slip = 0

    def agree(mine: dict[str, Lanes]) -> dict[str, Lanes]:
        """What an all-reduce does, with both ranks in this process."""
        totals: dict[str, Lanes] = {}
        for rank in ranks:
            for name, lanes in rank.lanes().items():
                totals[name] = add(totals.get(name, (slip, 0)), lanes)
        return totals

    followers = [Follower(store, rank, agree=agree) for rank in ranks]
    for version in range(4):
        publish(version)
        staged = [follower.poll() for follower in followers]
        assert all(s is not None for s in staged)
        for rank, s in zip(ranks, staged, strict=True):
            rank.apply(s.patch)  # type: ignore[union-attr]
        if version == 2:
            slip = 1
            for follower, s in zip(followers, staged, strict=True):
                with pytest.raises(WrongWeights):
                    follower.swap(s)  # type: ignore[arg-type]
            slip = 0
            for follower in followers:
                assert follower.version == 1
                follower._settled = None
            staged = [follower.poll() for follower in followers]
            for rank, s in zip(ranks, staged, strict=True):
                rank.apply(s.patch)  # type: ignore[union-attr]
        for follower, s in zip(followers, staged, strict=True):
            follower.swap(s)  # type: ignore[arg-type]
            assert follower.version == version
        assert torch.equal(torch.cat([rank.tensors["w"] for rank in ranks], dim=1), states[version]["w"])
        assert torch.equal(ranks[0].tensors["norm"], states[version]["norm"])
        assert (staged[0].bytes_read, staged[1].bytes_read) > (0, 0)  # type: ignore[union-attr]


def test_a_replica_tells_of_its_first_version_at_once_and_of_later_ones_in_time(pair: Pair) -> None:
    pair.publish(0)
    assert pair.follower.renew(1000.0) and not pair.follower.renew(1000.1)
    pair.catch_up()
    assert pair.follower.renew(1000.2) and [lease.version for lease in pair.store.leases()] == [0]
    pair.publish(1)
    pair.catch_up()
    assert not pair.follower.renew(1000.3) and pair.follower.renew(1021.0)
    assert [lease.version for lease in pair.store.leases()] == [1]
