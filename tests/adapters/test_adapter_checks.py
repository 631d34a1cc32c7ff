"""Version stamps and routed rows, as pure functions over any input."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.adapters.checks import SWAPPING, Stamp, finish_of, spans_of
from rollmill.adapters.routed import from_int32, from_npy, record_of
from rollmill.engine.client import EngineUnavailable
from rollmill.engine.protocol import FinishReason, GenerateRequest
from rollmill.model.route_record import RouteRecord, RouteShape

SHAPE = RouteShape(num_layers=2, layers=(1,), num_experts=5, top_k=2)
PAIRS = list(itertools.combinations(range(5), 2))


@settings(derandomize=True, max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 9)), min_size=1, max_size=6))
def test_stamps_that_touch_become_spans_that_cover_every_token(runs: list[tuple[int, int]]) -> None:
    edges = np.cumsum([0, *(length for _, length in runs)]).tolist()
    stamps = [Stamp(version=str(v), start=a, end=b) for (v, _), a, b in zip(runs, edges[:-1], edges[1:], strict=True)]
    spans = spans_of(stamps, edges[-1])
    assert [span.version for span in spans for _ in range(span.start, span.end)] == [v for v, length in runs for _ in range(length)]


@settings(derandomize=True, max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=4), st.integers(1, 6))
def test_stamps_with_a_gap_an_overlap_or_an_end_elsewhere_are_refused(ranges: list[tuple[int, int]], num_tokens: int) -> None:
    stamps = [Stamp(version="1", start=a, end=b) for a, b in ranges]
    covered = [at for a, b in ranges for at in range(a, b)]
    if covered == list(range(num_tokens)) and all(a < b for a, b in ranges):
        assert len(spans_of(stamps, num_tokens)) == len(ranges)
    else:
        with pytest.raises(EngineUnavailable):
            spans_of(stamps, num_tokens)


@pytest.mark.parametrize("stamp", ["default", SWAPPING, "", "-1", "v3", "1.0"])
def test_stamp_that_is_no_version_of_the_store_is_refused(stamp: str) -> None:
    with pytest.raises(EngineUnavailable, match="no version of the store"):
        spans_of([Stamp(version=stamp, start=0, end=2)], 2)


@pytest.mark.parametrize(
    ("reason", "num_sampled", "is_late", "finish"),
    [
        ("stop", 2, False, FinishReason.STOP),
        ("length", 8, False, FinishReason.LENGTH),
        ("length", 6, False, FinishReason.CONTEXT),
        ("abort", 2, True, FinishReason.DEADLINE),
        ("abort", 2, False, FinishReason.CANCELLED),
    ],
)
def test_finish_reasons_are_told_apart(reason: str, num_sampled: int, is_late: bool, finish: FinishReason) -> None:
    request = GenerateRequest(prompt_ids=[1, 2], max_tokens=8)
    assert finish_of(reason, request, num_sampled=num_sampled, max_len=8, is_late=is_late) is finish


@settings(derandomize=True, max_examples=50, deadline=None)
@given(st.data())
def test_record_holds_the_rows_from_the_start_on_whether_or_not_the_engine_cut_them(data: st.DataObject) -> None:
    num_prompt, num_sampled = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    start = data.draw(st.integers(0, num_prompt))
    rows = data.draw(st.lists(st.sampled_from(PAIRS), min_size=num_prompt + num_sampled - 1, max_size=num_prompt + num_sampled - 1))
    ids = np.zeros((len(rows), 2, 2), np.int32)
    ids[:, 1] = np.array(rows).reshape(-1, 2)
    start = min(start, len(rows))
    sent = ids if data.draw(st.booleans()) else ids[start:]
    record = record_of(sent, SHAPE, num_prompt=num_prompt, num_sampled=num_sampled, start=start)
    found = RouteRecord.from_bytes(record).ids_TLK()
    assert np.array_equal(found[:, 1], ids[start:, 1])
    assert (found[:, 0] == -1).all()


@pytest.mark.parametrize(
    ("ids", "why"),
    [
        (np.zeros((3, 2, 2), np.int32), "3 rows of routed experts for 5 computed tokens from 1 on; expected 4"),
        (np.zeros((4, 3, 2), np.int32), "2 layers and 2 experts a token"),
        (np.zeros((4, 2, 2), np.float32), "float32"),
        (np.full((4, 2, 2), 5, np.int32), "name 5..5"),
        (np.zeros((4, 2, 2), np.int32), "twice|repeat|set"),
    ],
)
def test_routed_experts_that_cannot_be_those_of_the_tokens_are_refused(ids: np.ndarray, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        record_of(ids, SHAPE, num_prompt=3, num_sampled=3, start=1)


@pytest.mark.parametrize("text", ["", "!!", "AAAA"])
def test_bytes_that_are_not_routed_experts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="routed experts are not"):
        from_npy(text)
    if text:
        with pytest.raises(ValueError, match="routed experts are not"):
            from_int32(text, SHAPE)
