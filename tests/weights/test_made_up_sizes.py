"""A tensor table that claims more than its packs hold is refused in words, before anything of the claimed size is made."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.weights import CorruptSnapshot, Follower, HostWeights, WrongBase, open_store, verify
from rollmill.weights.check import fsck
from rollmill.weights.encode import code_cell, works_of, write_cells
from rollmill.weights.manifest import Kind, Route, Version
from rollmill.weights.peer import _fetch, _Peer
from rollmill.weights.reader import materialise
from rollmill.weights.schema import Schema, TensorSpec, make_schema
from rollmill.weights.shard import all_of
from rollmill.weights.store import WeightStore

TRUE_SHAPE = (40, 32)
MADE_UP = [(1 << 60,), (1 << 40, 1 << 40), (41, 32), (1 << 34, 32)]


def lying_store(path: Path, shape: tuple[int, ...]) -> tuple[WeightStore, Schema]:
    """Whole and sealed in every part; only the table says another shape than the one whose cells were written."""
    store = open_store(path)
    true, claimed = (make_schema([("wide", "bfloat16", s), ("gain", "float32", (9,))], chunk_elements=64) for s in (TRUE_SHAPE, shape))
    data = {spec.name: np.arange(spec.num_bytes, dtype=np.uint64).astype(np.uint8) for spec in true.tensors}
    coded = (code_cell(item, data[item.name], None) for item in works_of(true, all_of(true)))
    part = write_cells(store, claimed, coded, kind=Kind.FULL, version=0, base=None)
    store.reserve()
    store.put_schema(claimed)
    store.add_route(Route(kind=Kind.FULL, version=0, base=None, schema=claimed.digest, packs=part.packs, writer="w", created=1.0))
    record = Version(
        version=0, previous=None, schema=claimed.digest, fingerprint="00" * 16, tensors=("00" * 16,) * 2, num_changed=0,
        raw_bytes=claimed.num_bytes, step=0, run_id="r", writer="w", created=1.0,
    )  # fmt: skip
    store.publish(record, expected=None)
    return store, claimed


@pytest.mark.parametrize("shape", MADE_UP)
def test_a_made_up_shape_is_refused_with_the_name_of_the_tensor_and_its_size(tmp_path: Path, shape: tuple[int, ...]) -> None:
    store, claimed = lying_store(tmp_path, shape)
    size = next(spec for spec in claimed.tensors if spec.name == "wide").num_bytes
    with pytest.raises(CorruptSnapshot, match=rf"wide is said to have the shape .*, {size} bytes in \d+ cells; its packs hold 20 of them"):
        materialise(store, 0)
    # Held bytes of another size are no start, so these come to the full route too.
    held = {spec.name: np.zeros(64, np.uint8) for spec in claimed.tensors}
    with pytest.raises(CorruptSnapshot, match="wide is said to have"):
        materialise(store, 0, start=(0, held))
    assert any("wide is said to have the shape" in line for line in verify(store))
    assert any("wide is said to have the shape" in found.what for found in fsck(store, deep=True, now=2.0))


@pytest.mark.parametrize("shape", MADE_UP)
def test_a_rank_that_cannot_compare_whole_tensors_refuses_a_made_up_shape_too(tmp_path: Path, shape: tuple[int, ...]) -> None:
    store, _ = lying_store(tmp_path, shape)
    live = HostWeights({"wide": torch.zeros(TRUE_SHAPE, dtype=torch.bfloat16), "gain": torch.zeros(9)})
    follower = Follower(store, live, replica="rank", agree=lambda lanes: lanes)
    with pytest.raises(ValueError, match="wide is said to have the shape"):
        follower.bootstrap()


def test_a_joiner_asks_no_peer_for_a_tensor_of_another_shape_than_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, claimed = lying_store(tmp_path, MADE_UP[0])
    held = all_of(make_schema([("wide", "bfloat16", TRUE_SHAPE)]))

    def offer(_: _Peer) -> object:
        return type("Offer", (), {"version": 0, "held": ("wide",)})

    monkeypatch.setattr(_Peer, "offer", offer)
    with pytest.raises(WrongBase, match=r"wide is bfloat16 \[1152921504606846976\] in the store and bfloat16 \[40, 32\] here"):
        next(_fetch(_Peer("http://127.0.0.1:1", 1.0), store.version(0), claimed, held))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data())
def test_cells_are_counted_as_they_are_made(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 12), max_size=3)))
    rows, cols = TensorSpec(name="w", dtype="float32", shape=shape).matrix
    cuts = [tuple(sorted(data.draw(st.sets(st.integers(1, max(1, end - 1)), max_size=3)))) if end > 1 else () for end in (rows, cols)]
    spec = TensorSpec(name="w", dtype="float32", shape=shape, row_cuts=cuts[0], col_cuts=cuts[1])
    chunk = data.draw(st.integers(1, 40))
    assert spec.num_cells(chunk) == len(spec.cells(chunk))
