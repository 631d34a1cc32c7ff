"""Claims about the publisher: it returns at once, waits only when it must, anchors when due, and hides no failure."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from weights_fakes import EngineFake, same_bits, weights_at

from rollmill.weights import DirectoryStore, Follower, Kind, Published, Publisher, PublishFailed, fingerprint, verify

DEADLINE_S = 60.0


class GatedStore(DirectoryStore):
    """A store whose packs wait until the test opens the gate."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.gate = threading.Event()
        self.entered = threading.Event()

    def put_pack(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        self.entered.set()
        assert self.gate.wait(DEADLINE_S)
        super().put_pack(name, chunks)


def latest_bits(store: DirectoryStore) -> dict[str, torch.Tensor]:
    return Follower(store, apply=EngineFake().apply).bootstrap().tensors


def test_submit_copies_at_once_so_the_trainer_may_go_on_writing(tmp_path: Path) -> None:
    store = GatedStore(tmp_path)
    weights = weights_at(3)
    with Publisher(store, run_id="r") as publisher:
        publisher.submit(weights, step=3)
        weights["wide"].fill_(0)
        store.gate.set()
    assert same_bits(latest_bits(store), weights_at(3))


def test_one_may_be_in_work_and_one_may_wait_and_the_third_blocks(tmp_path: Path) -> None:
    store = GatedStore(tmp_path)
    with Publisher(store, run_id="r") as publisher:
        publisher.submit(weights_at(0), step=0)
        assert store.entered.wait(DEADLINE_S)
        publisher.submit(weights_at(1), step=1)
        assert publisher.stats().num_pending == 2
        with pytest.raises(TimeoutError, match="a free place"):
            publisher.submit(weights_at(2), step=2, timeout_s=0.01)
        with pytest.raises(TimeoutError, match="to finish"):
            publisher.flush(0.01)
        assert publisher.stats().blocked_s >= 0.01
        store.gate.set()
        assert publisher.submit(weights_at(2), step=2) == 2, "a refused submit takes no number"
    assert publisher.stats().num_published == 3


def test_anchors_come_in_time_and_carry_a_delta_beside_the_full_pack(tmp_path: Path) -> None:
    seen: list[Published] = []
    store = DirectoryStore(tmp_path)
    with Publisher(store, run_id="r", anchor_every=3, on_published=seen.append) as publisher:
        for step in range(7):
            publisher.submit(weights_at(step), step=step)
    assert [p.kind for p in seen] == [Kind.FULL, Kind.DELTA, Kind.DELTA] * 2 + [Kind.FULL]
    assert [p.version for p in seen] == list(range(7)) and [p.step for p in seen] == list(range(7))
    assert [len(store.manifest(v).packs) for v in range(7)] == [1, 1, 1, 2, 1, 1, 2]
    assert all(p.delta_bytes is not None and p.delta_bytes < p.num_bytes for p in seen if p.version in (3, 6))
    assert seen[5].fingerprint == fingerprint(weights_at(5))


def test_a_new_schema_and_a_delta_that_does_not_pay_become_full(tmp_path: Path) -> None:
    seen: list[Published] = []
    store = DirectoryStore(tmp_path)
    with Publisher(store, run_id="r", on_published=seen.append) as publisher:
        publisher.submit({"w": torch.zeros(500)}, step=0)
        publisher.submit({"w": torch.zeros(500), "new": torch.ones(3)}, step=1)
        publisher.submit({"w": torch.randn(500), "new": torch.ones(3)}, step=2)
        publisher.submit({"w": torch.zeros(500, dtype=torch.bfloat16), "new": torch.ones(3)}, step=3)
        publisher.submit({"new": torch.ones(3)}, step=4)
    assert [p.kind for p in seen] == [Kind.FULL] * 5
    assert verify(store) == []
    assert list(latest_bits(store)) == ["new"]


def test_resume_reuses_the_version_of_equal_weights_and_goes_on_with_deltas(tmp_path: Path) -> None:
    store, seen = DirectoryStore(tmp_path), []
    with Publisher(store, run_id="r", anchor_every=4) as publisher:
        for step in range(3):
            publisher.submit(weights_at(step), step=step)
    with Publisher(store, run_id="r", anchor_every=4, on_published=seen.append) as publisher:
        assert publisher.resume(weights_at(2), step=2) == 2
        for step in range(3, 6):
            publisher.submit(weights_at(step), step=step)
    assert [(p.version, p.kind) for p in seen] == [(3, Kind.DELTA), (4, Kind.FULL), (5, Kind.DELTA)]
    assert verify(store) == []


def test_resume_with_other_weights_publishes_them_whole_under_a_new_number(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    with Publisher(store, run_id="r") as publisher:
        assert publisher.resume(weights_at(0), step=0) == 0
        publisher.submit(weights_at(1), step=1)
    with Publisher(store, run_id="r") as publisher:
        assert publisher.resume(weights_at(0), step=0) == 2
        assert store.latest() == 2, "durable on return"
    assert store.manifest(2).kind is Kind.FULL and store.manifest(2).previous == 1
    assert same_bits(latest_bits(store), weights_at(0))


def test_resume_over_a_damaged_manifest_starts_a_new_full_version(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    with Publisher(store, run_id="r") as publisher:
        publisher.submit(weights_at(0), step=0)
    (tmp_path / "manifests" / "v00000000.json").write_bytes(b"\0")
    with Publisher(store, run_id="r") as publisher:
        assert publisher.resume(weights_at(0), step=0) == 1
    assert same_bits(latest_bits(store), weights_at(0))


def test_damage_that_a_replica_reports_makes_the_next_version_an_anchor(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    with Publisher(store, run_id="r") as publisher:
        for step in range(3):
            publisher.submit(weights_at(step), step=step)
        publisher.flush(DEADLINE_S)
        store.quarantine("v00000001.delta", "test")
        for step in range(3, 5):
            publisher.submit(weights_at(step), step=step)
    assert [store.manifest(v).kind for v in range(5)] == [Kind.FULL, Kind.DELTA, Kind.DELTA, Kind.FULL, Kind.DELTA]


def test_an_error_in_the_thread_is_raised_by_the_next_call_and_by_every_one_after(tmp_path: Path) -> None:
    def refuse(published: Published) -> None:
        raise RuntimeError("the listener failed")

    publisher = Publisher(DirectoryStore(tmp_path), run_id="r", on_published=refuse)
    publisher.submit(weights_at(0), step=0)
    for call in (lambda: publisher.flush(DEADLINE_S), lambda: publisher.submit(weights_at(1), step=1), lambda: publisher.close(DEADLINE_S)):
        with pytest.raises(PublishFailed, match="the listener failed"):
            call()


def test_settings_and_states_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="anchor_every is 0"):
        Publisher(DirectoryStore(tmp_path), run_id="r", anchor_every=0)
    publisher = Publisher(DirectoryStore(tmp_path), run_id="r")
    publisher.close(DEADLINE_S)
    publisher.close(DEADLINE_S)
    with pytest.raises(ValueError, match="closed"):
        publisher.submit(weights_at(0), step=0)
