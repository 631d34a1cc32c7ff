"""Claims about the follower: it never holds bytes that were not published, whatever happens to the store."""

from __future__ import annotations

import queue
import random
import threading
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from weights_fakes import EngineFake, same_bits, weights_at

from rollmill.weights import (
    DirectoryStore,
    Follower,
    Kind,
    Manifest,
    Publisher,
    Staged,
    UnknownFormat,
    WrongBase,
    WrongWeights,
    fingerprint,
    verify,
)
from rollmill.weights.manifest import PackRef, seal
from rollmill.weights.plan import plan


class Pair:
    """A publisher and one replica over one store."""

    def __init__(self, path: Path, *, anchor_every: int = 4) -> None:
        self.path = path
        self.store = DirectoryStore(path)
        self.publisher = Publisher(self.store, run_id="r", anchor_every=anchor_every)
        self.engine = EngineFake()
        self.follower = Follower(self.store, apply=self.engine.apply)

    def publish(self, *steps: int) -> None:
        for step in steps:
            self.publisher.submit(weights_at(step), step=step)
        self.publisher.flush(60)

    def catch_up(self) -> None:
        staged = self.follower.poll()
        assert staged is not None, self.follower.stats().problem
        self.follower.swap(staged)

    def hurt(self, name: str) -> None:
        path = self.path / "packs" / name
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 16
        path.write_bytes(data)


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def test_a_replica_follows_step_by_step_with_deltas_only_across_anchors(pair: Pair) -> None:
    for step in range(10):
        pair.publish(step)
        staged = pair.follower.poll()
        assert staged is not None and staged.num_packs == 1 and staged.version == step
        assert step == 0 or staged.tensors.keys() == {"wide", "gain"}, "only what changed is staged"
        assert step == 0 or staged.bytes_read < pair.store.manifest(0).packs[0].num_bytes
        pair.follower.swap(staged)
        assert same_bits(pair.engine.live, weights_at(step))
    assert pair.follower.poll() is None and pair.follower.stats().problem == ""


def test_versions_may_be_skipped_and_the_held_tensors_stay_untouched_while_staging(pair: Pair) -> None:
    pair.publish(0)
    pair.catch_up()
    pair.publish(1, 2, 3)
    staged = pair.follower.poll()
    assert staged is not None and staged.version == 3 and staged.base_version == 0 and staged.num_packs == 3
    assert same_bits(pair.engine.live, weights_at(0)) and same_bits(staged.restore, weights_at(0))
    assert pair.follower.version == 0, "staged is not held"
    pair.follower.swap(staged)
    pair.follower.swap(staged)
    assert same_bits(pair.engine.live, weights_at(3)), "twice is once"


def test_a_late_replica_starts_from_the_newest_anchor(pair: Pair) -> None:
    pair.publish(*range(7))
    staged = pair.follower.bootstrap()
    assert staged.version == 6 and staged.num_packs == 3 and staged.base_version is None
    assert same_bits(staged.tensors, weights_at(6))


def test_a_replica_that_slept_takes_the_cheaper_of_chain_and_anchor(tmp_path: Path) -> None:
    pair = Pair(tmp_path, anchor_every=30)
    pair.publish(0)
    pair.catch_up()
    pair.publish(*range(1, 35))
    staged = pair.follower.poll()
    assert staged is not None and staged.version == 34 and staged.num_packs == 5, "one anchor at 30 and four deltas beat 34 deltas"
    pair.follower.swap(staged)
    assert same_bits(pair.engine.live, weights_at(34))


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
    pair.engine.drop = "wide"
    with pytest.raises(WrongWeights, match="first wide") as caught:
        pair.follower.swap(staged)
    assert caught.value.tensors == ("wide",)
    assert pair.follower.version == 0 and same_bits(pair.engine.live, weights_at(0))
    assert pair.follower.stats().num_wrong_weights == 1 and "should show" in pair.follower.stats().problem
    pair.engine.drop = None
    pair.publish(2)
    pair.catch_up()
    assert same_bits(pair.engine.live, weights_at(2)) and pair.follower.stats().problem == ""


def test_live_weights_that_cannot_be_put_back_stop_the_replica(pair: Pair) -> None:
    pair.publish(0)
    pair.catch_up()
    pair.publish(1)
    staged = pair.follower.poll()
    assert staged is not None
    pair.engine.live["still"].fill_(9)
    pair.engine.drop = "still"
    with pytest.raises(WrongWeights, match="stop serving"):
        pair.follower.swap(staged)
    assert pair.follower.version == 0


def test_confirm_refuses_a_staged_version_whose_base_is_gone_or_that_is_older(pair: Pair) -> None:
    pair.publish(0)
    first = pair.follower.poll()
    assert first is not None
    pair.publish(1)
    second = pair.follower.poll()
    assert second is not None
    pair.follower.swap(second)
    with pytest.raises(WrongBase, match="drop it"):
        pair.follower.confirm(first, first.fingerprint)
    pair.publish(2)
    third = pair.follower.poll()
    pair.publish(3)
    fourth = pair.follower.poll()
    assert third is not None and fourth is not None
    pair.follower.swap(third)
    with pytest.raises(WrongBase, match="poll again"):
        pair.follower.swap(fourth)
    pair.catch_up()
    assert pair.follower.version == 3 and same_bits(pair.engine.live, weights_at(3))


def test_a_damaged_delta_is_quarantined_once_and_gone_round_by_the_anchor(pair: Pair) -> None:
    pair.publish(0)
    pair.catch_up()
    pair.publish(1, 2)
    pair.hurt("v00000002.delta")
    pair.catch_up()
    assert pair.follower.version == 1, "as far as the good bytes lead"
    assert "version 2 cannot be reached" in pair.follower.stats().problem
    assert pair.follower.poll() is None and pair.follower.stats().num_quarantined == 1, "reported once"
    assert "v00000002.delta" in pair.store.quarantined() and not (pair.path / "packs" / "v00000002.delta").exists()
    pair.publish(3)
    pair.catch_up()
    assert pair.follower.version == 3 and same_bits(pair.engine.live, weights_at(3)), "the publisher anchored at once"


def test_a_damaged_anchor_does_not_touch_replicas_that_follow_by_deltas(pair: Pair) -> None:
    pair.publish(*range(4))
    pair.catch_up()
    pair.publish(4)
    pair.hurt("v00000004.full")
    pair.catch_up()
    assert pair.follower.version == 4 and pair.follower.stats().num_quarantined == 0
    late = Follower(pair.store, apply=EngineFake().apply)
    staged = late.bootstrap()
    assert staged.version == 4 and staged.num_packs == 5, "a late one goes back to the anchor before"
    assert same_bits(staged.tensors, weights_at(4))


@pytest.mark.parametrize("name", ["packs/v00000000.full", "manifests/v00000000.json"])
def test_a_store_with_nothing_readable_is_said_and_nothing_is_served(pair: Pair, name: str) -> None:
    pair.publish(0)
    (pair.path / name).unlink()
    assert pair.follower.poll() is None
    assert "is missing" in pair.follower.stats().problem
    with pytest.raises(ValueError, match="is missing"):
        pair.follower.bootstrap()
    pair.publish(1)
    pair.catch_up()
    assert same_bits(pair.engine.live, weights_at(1))


def test_a_damaged_pointer_keeps_the_old_version_and_heals_with_the_next(pair: Pair) -> None:
    pair.publish(0)
    pair.catch_up()
    pair.publish(1)
    good = (pair.path / "latest").read_bytes()
    (pair.path / "latest").write_bytes(good[:-5])
    assert pair.follower.poll() is None and "latest" in pair.follower.stats().problem
    (pair.path / "latest").write_bytes(good)
    pair.catch_up()
    assert pair.follower.version == 1


def test_a_held_copy_that_went_bad_is_noticed_and_replaced_from_an_anchor(pair: Pair) -> None:
    pair.publish(0)
    pair.catch_up()
    pair.publish(1)
    held = pair.follower._held
    assert held is not None
    held.bits["wide"].data[5] ^= 1
    staged = pair.follower.poll()
    assert staged is not None and staged.base_version is None and same_bits(staged.tensors, weights_at(1))
    assert pair.follower.stats().num_wrong_base == 1 and pair.follower.stats().num_quarantined == 0
    pair.follower.swap(staged)


def test_another_store_under_the_same_numbers_is_not_mistaken_for_the_held_one(tmp_path: Path) -> None:
    pair, other = Pair(tmp_path / "a"), Pair(tmp_path / "b")
    pair.publish(0)
    pair.catch_up()
    other.publish(5, 6)
    pair.follower._store = other.store
    pair.catch_up()
    assert same_bits(pair.engine.live, weights_at(6)) and pair.follower.stats().num_wrong_base == 1


def test_a_store_that_went_back_moves_no_replica(pair: Pair) -> None:
    pair.publish(0)
    old = (pair.path / "latest").read_bytes()
    pair.publish(1)
    pair.catch_up()
    (pair.path / "latest").write_bytes(old)
    assert pair.follower.poll() is None and "went back" in pair.follower.stats().problem
    assert pair.follower.version == 1


class FlakyStore(DirectoryStore):
    """Reads that fail as a mount or a cable does: an error, or wrong bytes once."""

    def __init__(self, path: Path, trouble: list[str]) -> None:
        super().__init__(path)
        self.trouble = trouble

    def read_pack(self, name: str) -> bytes:
        data = super().read_pack(name)
        match self.trouble.pop(0) if self.trouble else "":
            case "error":
                raise OSError(5, "Input/output error")
            case "bytes":
                return data[:-1] + bytes([data[-1] ^ 1])
        return data


def test_a_read_that_fails_is_tried_again_and_condemns_nothing(pair: Pair) -> None:
    pair.publish(0)
    follower = Follower(FlakyStore(pair.path, ["error", "bytes"]), apply=pair.engine.apply)
    assert follower.poll() is None and follower.stats().num_read_errors == 1 and "Input/output" in follower.stats().problem
    staged = follower.poll()
    assert staged is not None and follower.stats().num_quarantined == 0 and pair.store.quarantined() == {}


def test_a_schema_change_reaches_the_replica_whole(pair: Pair) -> None:
    pair.publish(0)
    pair.catch_up()
    pair.publisher.submit({"wide": torch.ones(2, 2), "other": torch.zeros(3)}, step=1)
    pair.publisher.flush(60)
    staged = pair.follower.poll()
    assert staged is not None and staged.tensors.keys() == {"wide", "other"}
    assert staged.fingerprint == fingerprint({"wide": torch.ones(2, 2), "other": torch.zeros(3)})


def test_300_versions_under_random_faults_never_serve_a_wrong_byte(tmp_path: Path) -> None:
    rng = random.Random(11)
    pair = Pair(tmp_path, anchor_every=9)
    replicas = [(engine, Follower(pair.store, apply=engine.apply)) for engine in (EngineFake(), EngineFake(), EngineFake())]
    faults = swaps = 0
    for step in range(300):
        pair.publish(step)
        files = [ref.name for ref in pair.store.manifest(step).packs]
        match rng.choice(["none"] * 6 + ["flip", "cut", "lose", "manifest"]):
            case "flip":
                pair.hurt(rng.choice(files))
            case "cut":
                path = tmp_path / "packs" / rng.choice(files)
                path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])
            case "lose":
                (tmp_path / "packs" / rng.choice(files)).unlink()
            case "manifest":
                path = tmp_path / "manifests" / f"v{step:08d}.json"
                path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])
            case _:
                faults -= 1
        faults += 1
        for index, (engine, follower) in enumerate(replicas):
            staged = follower.poll() if rng.random() < (1.0, 0.4, 0.1)[index] else None
            if staged is not None:
                engine.drop = "gain" if rng.random() < 0.05 else None
                try:
                    follower.swap(staged)
                    swaps += 1
                except WrongWeights:
                    assert engine.drop
            if follower.version is not None:
                assert same_bits(engine.live, weights_at(follower.version)), f"replica {index} at step {step}"
    assert faults > 60 and swaps > 150
    pair.publish(300)
    for engine, follower in replicas:
        engine.drop = None
        staged = follower.poll()
        assert staged is not None
        follower.swap(staged)
        assert follower.version == 300 and same_bits(engine.live, weights_at(300))


Case = tuple[list[Manifest], int | None, set[str]]


@st.composite
def chains(draw: st.DrawFn) -> Case:
    manifests = []
    for version in range(draw(st.integers(1, 12))):
        packs = []
        if version == 0 or draw(st.integers(0, 3)) == 0:
            packs.append(PackRef(name=f"v{version:08d}.full", base_version=None, num_bytes=draw(st.integers(50, 200)), digest=""))
        if version and (draw(st.booleans()) or not packs):
            base = draw(st.integers(max(0, version - 3), version - 1))
            packs.append(PackRef(name=f"v{version:08d}.delta", base_version=base, num_bytes=draw(st.integers(1, 60)), digest=""))
        manifests.append(
            Manifest(
                version=version, kind=Kind.DELTA, base_version=None, previous=version - 1 if version else None, packs=tuple(packs),
                fingerprint="", tensors=(), raw_bytes=0, step=version, run_id="r", created=0.0,
            )
        )  # fmt: skip
    names = [pack.name for manifest in manifests for pack in manifest.packs]
    return manifests, draw(st.none() | st.integers(0, len(manifests) - 1)), set(draw(st.lists(st.sampled_from(names), max_size=4)))


@given(chains())
@settings(max_examples=200, deadline=None)
def test_a_plan_is_a_sound_path_to_the_newest_reachable_version_at_the_least_bytes(case: Case) -> None:
    manifests, held, refused = case

    def cheapest(version: int) -> float:
        """Every path, by brute force."""
        if version == held:
            return 0
        ways = [
            pack.num_bytes + (0 if pack.base_version is None else cheapest(pack.base_version))
            for pack in manifests[version].packs
            if pack.name not in refused
        ]
        return min(ways, default=float("inf"))

    hops = plan(manifests, held=held, refused=refused)
    at = hops[0].pack.base_version if hops else held
    assert at in (None, held)
    for hop in hops:
        assert hop.pack.base_version == at and hop.pack.name not in refused
        at = hop.manifest.version
    reachable = [m.version for m in manifests if cheapest(m.version) < float("inf") and (held is None or m.version > held)]
    assert at == max(reachable, default=held)
    if hops:
        assert sum(hop.pack.num_bytes for hop in hops) == cheapest(hops[-1].manifest.version)


def test_a_pack_that_is_whole_but_not_what_its_manifest_promises_is_refused(pair: Pair) -> None:
    """A fault of the publisher itself: every digest is right, the promised fingerprint is another's."""
    pair.publish(0)
    path = pair.path / "manifests" / "v00000000.json"
    other = fingerprint(weights_at(1))
    lie = msgspec.structs.replace(
        pair.store.manifest(0),
        fingerprint=other.total,
        tensors=tuple(msgspec.structs.replace(t, fingerprint=other.tensors[t.name]) for t in pair.store.manifest(0).tensors),
    )
    path.write_bytes(seal(lie))
    assert verify(pair.store)[0] == "v00000000.full does not give the weights that version 0 promises"
    assert pair.follower.poll() is None and "other tensors than its manifest names" in pair.follower.stats().problem


def test_a_manifest_of_a_newer_rollmill_is_left_in_peace_and_the_old_version_serves_on(pair: Pair) -> None:
    pair.publish(0)
    pair.catch_up()
    pair.publish(1)
    path = pair.path / "manifests" / "v00000001.json"
    path.write_bytes(seal(msgspec.structs.replace(pair.store.manifest(1), schema=99)))
    assert pair.follower.poll() is None and "has schema 99" in pair.follower.stats().problem
    assert pair.follower.version == 0 and pair.store.quarantined() == {} and path.exists()
    with pytest.raises(UnknownFormat, match="schema 99"):
        Follower(pair.store, apply=pair.engine.apply).bootstrap()


def test_a_replica_that_polls_in_the_background_while_the_trainer_publishes_ends_at_the_last_version(pair: Pair) -> None:
    ready: queue.Queue[Staged] = queue.Queue()
    done = threading.Event()

    def keep_polling() -> None:
        while not done.is_set():
            staged = pair.follower.poll()
            if staged is None:
                done.wait(0.001)
            else:
                ready.put(staged)

    poller = threading.Thread(target=keep_polling, daemon=True)
    poller.start()
    trainer = threading.Thread(target=lambda: pair.publish(*range(40)), daemon=True)
    trainer.start()
    try:
        while pair.follower.version != 39:
            try:
                pair.follower.swap(ready.get(timeout=60))
            except WrongBase:
                continue
            version = pair.follower.version
            assert version is not None and same_bits(pair.engine.live, weights_at(version))
    finally:
        done.set()
        poller.join(60)
    trainer.join(60)
    assert pair.follower.stats().num_wrong_weights == 0
