"""What people read: one line per version with everything that matters, also of a store that is damaged."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ops_fakes import TinyRun

from rollmill.weights.compactor import Compactor, CostModel
from rollmill.weights.directory import Directory
from rollmill.weights.errors import CorruptSnapshot
from rollmill.weights.gc import collect
from rollmill.weights.history import _brackets, log, show
from rollmill.weights.manifest import Kind, Lease, Tag, pack_key, version_key
from rollmill.weights.objects import open_objects
from rollmill.weights.rollback import rollback
from rollmill.weights.store import WeightStore


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(Directory(tmp_path / "store"))


def test_the_log_tells_the_line_newest_first(store: WeightStore) -> None:
    run = TinyRun(store)
    run.publish(5)
    Compactor(store, cost=CostModel(anchor_replay=1e9)).step(1e6)
    store.tag(Tag(name="best", version=3, created=0.0))
    record = rollback(store, 1, run_id="tiny", writer="me", note="loss went up")
    lines = log(store, now=record.created + 120)
    assert len(lines) == 6
    assert [line.split()[2 if index in (1, 2, 3, 4, 5) else 1] for index, line in enumerate(lines)] == ["v5", "v4", "v3", "v2", "v1", "v0"]
    assert "<- latest restores v1 loss went up" in lines[0] and "alias of v1" in lines[0] and "epoch 1" in lines[0]
    assert record.fingerprint[:8] in lines[0] and "2 min ago" in lines[0]
    assert lines[2].endswith("[best]") and not any("<- latest" in line for line in lines[1:])
    size = next(name.num_bytes for name in store.routes() if (name.version, name.base) == (4, 3))
    fold = next(name.num_bytes for name in store.routes() if (name.version, name.base) == (4, 0))
    raw = store.version(4).raw_bytes
    assert f"delta {size} B ({raw / size:.1f}x) + fold v0 {fold} B ({raw / fold:.1f}x)" in lines[1]
    assert "full 3" in lines[5] and "100 % changed" in lines[5]
    assert "".join(line[2] for line in lines) == " .|||'"
    assert all(line.isascii() for line in lines)
    places = {line.index("epoch") for line in lines}
    assert len(places) == 1, "columns stand under each other"
    assert log(store, limit=2, now=record.created + 120)[0].split() == lines[0].split() and len(log(store, limit=2)) == 2


def test_the_log_of_nothing_says_so(store: WeightStore) -> None:
    assert log(store) == [f"nothing was published in {store} yet"]


def test_the_log_ends_where_the_line_was_collected_and_where_it_is_damaged(store: WeightStore) -> None:
    run = TinyRun(store)
    run.publish(8)
    run.add_full(3)
    run.add_full(5)
    for now in (1e12, 2e12):
        collect(store, now, grace_s=1.0)
    assert [line.split()[1] for line in log(store)] == ["v7", "v6", "v5", "v4", "v3"]
    store.objects.put(version_key(5), [b"torn"])
    lines = log(store)
    assert [line.split()[1] for line in lines[:-1]] == ["v7", "v6"]
    assert lines[-1].startswith("the line ends here: versions/00000005.json") and "fsck" in lines[-1]


def test_show_tells_everything_about_one_version(where: str) -> None:
    store = WeightStore(open_objects(where))
    run = TinyRun(store)
    run.publish(5)
    Compactor(store, cost=CostModel(anchor_replay=1e9)).step(1e6)
    store.tag(Tag(name="best", version=4, created=0.0, note="eval 0.71"))
    for name, version, staging, expires in (("r1", 4, None, 160.0), ("r2", 3, 4, 40.0), ("r3", 1, None, 160.0)):
        store.renew(Lease(replica=name, version=version, staging=staging, renewed=0.0, expires=expires))
    text = "\n".join(show(store, 4, now=100.0))
    record = store.version(4)
    for part in (
        "version 4, step 4, run tiny, epoch 0",
        "previous     v3",
        record.fingerprint,
        record.schema,
        f"{record.num_changed} elements",
        "best: eval 0.71",
        "r1 serves it, for 60 s more",
        "r2 stages it, expired 1 min ago",
        "delta  from v3",
        "fold   from v0",
        "packs/00000004/delta-0000.pack",
        "1 pack, by trainer",
        "codecs       CGR 1",
        "tensors      1 of 3 changed",
        "most changed a ",
        "most bytes   a ",
    ):
        assert part in text, part
    assert "r3" not in text
    full = "\n".join(show(store, 0, now=100.0))
    assert "previous     none" in full and "full   from nothing" in full and "tensors      3 of 3 changed" in full
    assert "most changed a 100 %" in full


def test_show_of_a_rollback_and_of_damage(store: WeightStore) -> None:
    run = TinyRun(store)
    run.publish(3)
    record = rollback(store, 0, run_id="tiny", writer="me", note="why")
    text = "\n".join(show(store, record.version))
    assert "previous     v2, restores v0" in text and "note         why" in text and "alias  from v0, 0 B, 0 packs" in text
    store.objects.delete([pack_key(1, Kind.DELTA, base=0, rank=0)])
    name = next(name for name in store.routes() if name.version == 2)
    store.objects.put(name.key, [b"torn"])
    for version in (1, 2):
        assert "damaged: " in "\n".join(show(store, version))
    store.objects.delete([name.key])
    assert show(store, 2)[-1] == "  no route leads to it"
    with pytest.raises(CorruptSnapshot, match="missing"):
        show(store, 9)


def test_brackets_join_where_folds_meet_and_leave_the_page_where_the_log_ends() -> None:
    assert _brackets([8, 7, 6, 5, 4, 3], [(8, 4), (4, 0)]) == [".", "|", "|", "|", "+", "|"]
    assert _brackets([2, 1, 0], []) == ["", "", ""]
    assert _brackets([4, 3, 2, 1, 0], [(4, 2), (3, 1), (4, 0)]) == [". .", "|.|", "'||", " '|", "  '"]


@given(st.integers(2, 20), st.data())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_every_fold_is_drawn_from_its_version_to_its_base(length: int, data: st.DataObject) -> None:
    pairs = data.draw(st.lists(st.tuples(st.integers(0, length - 1), st.integers(0, length - 1)), max_size=6))
    folds = sorted({(max(pair), min(pair)) for pair in pairs if pair[0] != pair[1]}, key=lambda fold: fold[0] - fold[1])
    versions = list(range(length - 1, -1, -1))
    drawn = _brackets(versions, folds)
    columns = ["".join(column) for column in zip(*drawn, strict=True)]
    found = []
    for column in columns:
        top = None
        for row, mark in enumerate(column):
            if mark in "'+":
                assert top is not None
                found.append((versions[top], versions[row]))
            if mark in ".+":
                top = row
    assert sorted(found) == sorted(folds)
