"""Claims about the publisher: it returns at once, waits only when it must, ships deltas, and hides no failure."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from weights_fakes import ReplicaFake, same_bits, weights_at

from rollmill.weights import Follower, HostWeights, Kind, Published, Publisher, PublishFailed, WeightStore, fingerprint, open_store, verify
from rollmill.weights.directory import Directory
from rollmill.weights.encode import code_cell, commit, works_of, write_cells
from rollmill.weights.reader import materialise
from rollmill.weights.schema import make_schema
from rollmill.weights.shard import all_of

DEADLINE_S = 60.0


class GatedDirectory(Directory):
    """A directory whose packs wait until the test opens the gate."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.gate = threading.Event()
        self.entered = threading.Event()

    def put(self, key: str, chunks: Iterable[bytes | memoryview]) -> None:
        if key.startswith("packs/"):
            self.entered.set()
            assert self.gate.wait(DEADLINE_S)
        super().put(key, chunks)


def latest_bits(store: WeightStore) -> dict[str, torch.Tensor]:
    live = ReplicaFake()
    follower = Follower(store, live)
    follower.swap(follower.bootstrap())
    return live.tensors


def kinds(store: WeightStore) -> list[list[str]]:
    """The bases of every version's routes, full ones as `full`."""
    found: dict[int, list[str]] = {}
    for name in store.routes():
        found.setdefault(name.version, []).append("full" if name.base is None else str(name.base))
    return [sorted(found[version]) for version in sorted(found)]


def test_submit_copies_at_once_so_the_trainer_may_go_on_writing(tmp_path: Path) -> None:
    gated = GatedDirectory(tmp_path)
    weights = weights_at(3)
    with Publisher(WeightStore(gated), run_id="r") as publisher:
        publisher.submit(weights, step=3)
        weights["wide"].fill_(0)
        gated.gate.set()
    assert same_bits(latest_bits(open_store(tmp_path)), weights_at(3))


def test_one_may_be_in_work_and_one_may_wait_and_the_third_blocks(tmp_path: Path) -> None:
    gated = GatedDirectory(tmp_path)
    with Publisher(WeightStore(gated), run_id="r") as publisher:
        publisher.submit(weights_at(0), step=0)
        assert gated.entered.wait(DEADLINE_S)
        publisher.submit(weights_at(1), step=1)
        assert publisher.stats().num_pending == 2
        with pytest.raises(TimeoutError, match="a free place"):
            publisher.submit(weights_at(2), step=2, timeout_s=0.01)
        with pytest.raises(TimeoutError, match="to finish"):
            publisher.flush(0.01)
        assert publisher.stats().blocked_s >= 0.01
        gated.gate.set()
        assert publisher.submit(weights_at(2), step=2) == 2, "a refused submit takes no number"
    assert publisher.stats().num_published == 3


def test_the_first_version_is_full_and_every_other_a_delta_on_the_one_before(where: str) -> None:
    seen: list[Published] = []
    store = open_store(where)
    with Publisher(store, run_id="r", on_published=seen.append) as publisher:
        for step in range(7):
            publisher.submit(weights_at(step), step=step)
    assert [p.kind for p in seen] == [Kind.FULL] + [Kind.DELTA] * 6
    assert [p.version for p in seen] == [p.step for p in seen] == list(range(7))
    assert kinds(store) == [["full"], *([str(v)] for v in range(6))]
    assert all(p.num_changed in (10, 9) for p in seen[1:]), "nine gains, and one wide element that may round to itself"
    assert seen[5].fingerprint == fingerprint(weights_at(5))
    assert verify(store) == []


def test_a_new_schema_starts_full_and_a_dense_change_is_still_exact(tmp_path: Path) -> None:
    seen: list[Published] = []
    store = open_store(tmp_path)
    last = {"new": torch.ones(3)}
    with Publisher(store, run_id="r", on_published=seen.append) as publisher:
        publisher.submit({"w": torch.zeros(500)}, step=0)
        publisher.submit({"w": torch.zeros(500), "new": torch.ones(3)}, step=1)
        publisher.submit({"w": torch.randn(500), "new": torch.ones(3)}, step=2)
        publisher.submit({"w": torch.zeros(500, dtype=torch.bfloat16), "new": torch.ones(3)}, step=3)
        publisher.submit(last, step=4)
    assert [p.kind for p in seen] == [Kind.FULL, Kind.FULL, Kind.DELTA, Kind.FULL, Kind.FULL]
    assert seen[2].num_bytes < 500 * 4 + 800, "never much larger than the bytes themselves"
    assert verify(store) == []
    live = HostWeights({"new": torch.zeros(3)})
    follower = Follower(store, live)
    follower.swap(follower.bootstrap())
    assert same_bits(live.tensors, last)


def test_resume_reuses_the_version_of_equal_weights_and_goes_on_with_deltas(where: str) -> None:
    store = open_store(where)
    with Publisher(store, run_id="r") as publisher:
        for step in range(3):
            publisher.submit(weights_at(step), step=step)
    with Publisher(store, run_id="r") as publisher:
        assert publisher.resume(weights_at(2), step=2) == 2
        for step in range(3, 6):
            publisher.submit(weights_at(step), step=step)
    assert kinds(store) == [["full"], *([str(v)] for v in range(5))]
    assert {store.version(v).epoch for v in range(6)} == {0} and verify(store) == []


def test_resume_with_older_weights_is_a_new_number_in_a_new_epoch_and_a_small_delta(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with Publisher(store, run_id="r") as publisher:
        assert publisher.resume(weights_at(0), step=0) == 0
        publisher.submit(weights_at(1), step=1)
    with Publisher(store, run_id="r") as publisher:
        assert publisher.resume(weights_at(0), step=0) == 2
        pointer = store.latest()
        assert pointer is not None and (pointer.version, pointer.epoch) == (2, 1), "durable on return"
    assert kinds(store)[2] == ["1"] and store.version(2).previous == 1
    assert same_bits(latest_bits(store), weights_at(0))


@pytest.mark.parametrize("key", ["versions/00000000.json", "packs/00000000/full-0000.pack"])
def test_resume_over_a_store_it_cannot_read_starts_a_new_full_version(tmp_path: Path, key: str) -> None:
    store = open_store(tmp_path)
    with Publisher(store, run_id="r") as publisher:
        publisher.submit(weights_at(0), step=0)
    (tmp_path / key).write_bytes(b"\0")
    with Publisher(store, run_id="r") as publisher:
        assert publisher.resume(weights_at(1), step=1) == 1
    assert same_bits(latest_bits(store), weights_at(1)) and kinds(store)[1] == ["full"]


def test_damage_that_a_replica_reports_adds_a_full_route_to_the_next_version(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with Publisher(store, run_id="r") as publisher:
        for step in range(3):
            publisher.submit(weights_at(step), step=step)
        publisher.flush(DEADLINE_S)
        store.quarantine("packs/00000001/delta-0000.pack", "test")
        for step in range(3, 5):
            publisher.submit(weights_at(step), step=step)
    assert kinds(store) == [["full"], ["0"], ["1"], ["2", "full"], ["3"]]


def test_an_error_in_the_thread_is_raised_by_the_next_call_and_by_every_one_after(tmp_path: Path) -> None:
    def refuse(published: Published) -> None:
        raise RuntimeError("the listener failed")

    publisher = Publisher(open_store(tmp_path), run_id="r", on_published=refuse)
    publisher.submit(weights_at(0), step=0)
    for call in (lambda: publisher.flush(DEADLINE_S), lambda: publisher.submit(weights_at(1), step=1), lambda: publisher.close(DEADLINE_S)):
        with pytest.raises(PublishFailed, match="the listener failed"):
            call()


def test_a_second_trainer_on_the_same_store_is_stopped(where: str) -> None:
    first, second = (Publisher(open_store(where), run_id=name) for name in ("a", "b"))
    first.submit(weights_at(0), step=0)
    first.flush(DEADLINE_S)
    second.submit(weights_at(1), step=0)
    with pytest.raises(PublishFailed, match="latest is 0, this publisher had left it at None"):
        second.flush(DEADLINE_S)
    first.submit(weights_at(1), step=1)
    first.close(DEADLINE_S)
    pointer = open_store(where).latest()
    assert pointer is not None and pointer.version == 2, "the number the second one had reserved is never used again"


def test_a_closed_publisher_refuses_and_bad_borders_are_named(tmp_path: Path) -> None:
    publisher = Publisher(open_store(tmp_path), run_id="r")
    publisher.close(DEADLINE_S)
    publisher.close(DEADLINE_S)
    with pytest.raises(ValueError, match="closed"):
        publisher.submit(weights_at(0), step=0)
    cut = Publisher(open_store(tmp_path), run_id="r", row_cuts={"wide": (24,)})
    with pytest.raises(ValueError, match="wide: row borders \\(24,\\) must ascend between 1 and 23"):
        cut.submit(weights_at(0), step=0)


def test_what_is_too_much_for_one_object_becomes_several_packs_that_read_back(where: str) -> None:
    store, rng = open_store(where), np.random.default_rng(0)
    schema = make_schema([("w", "bfloat16", (64, 64))], chunk_elements=256)
    data = {"w": rng.integers(0, 256, 8192, dtype=np.uint8)}
    assert store.reserve() == 0
    done = [code_cell(work, data["w"], None) for work in works_of(schema, all_of(schema))]
    part = write_cells(store, schema, done, kind=Kind.FULL, version=0, base=None, max_pack_bytes=2000)
    assert len(part.packs) > 3 and len({pack.key for pack in part.packs}) == len(part.packs)
    commit(store, schema, [part], kind=Kind.FULL, version=0, base=None, expected=None, step=0, run_id="r", writer="t")
    assert np.array_equal(materialise(store, 0)[2]["w"], data["w"]) and verify(store) == []
    with pytest.raises(ValueError, match="the 2 ranks hold 8192 elements, the tensors have 4096"):
        commit(store, schema, [part, part], kind=Kind.FULL, version=1, base=None, expected=0, step=1, run_id="r", writer="t")
