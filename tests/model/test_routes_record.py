"""The routing record: lossless for every shape, a fixed number of bytes per token, and safe to read whatever the bytes are."""

from __future__ import annotations

import doctest
import re
from bisect import bisect_right
from itertools import combinations
from math import comb
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.model import route_record
from rollmill.model.route_record import BLOCK, HEADER, IDS, RANKS, RouteRecord, RouteShape, _counts, _Ladder, _ladders

QWEN = RouteShape(num_layers=48, layers=tuple(range(48)), num_experts=128, top_k=8)
KIMI = RouteShape(num_layers=61, layers=tuple(range(1, 61)), num_experts=384, top_k=8)
WIDE = RouteShape(num_layers=5, layers=(0, 2, 4), num_experts=512, top_k=10)


def random_ids(shape: RouteShape, num_tokens: int, rng: np.random.Generator, missing: float = 0.0) -> np.ndarray:
    """Sets drawn evenly, ascending; some sets and some whole rows missing."""
    ids = np.full((num_tokens, shape.num_layers, shape.top_k), -1, np.int16)
    for layer in shape.layers:
        order = np.argsort(rng.random((num_tokens, shape.num_experts)), -1)[:, : shape.top_k]
        ids[:, layer] = np.sort(order, -1)
        ids[rng.random(num_tokens) < missing, layer] = -1
    ids[rng.random(num_tokens) < missing] = -1
    return ids


shapes = st.builds(
    lambda num_layers, keep, num_experts, k: RouteShape(
        num_layers=num_layers,
        layers=tuple(i for i in range(num_layers) if keep >> i & 1) or (num_layers - 1,),
        num_experts=num_experts,
        top_k=min(k, num_experts),
    ),
    st.integers(1, 12),
    st.integers(0, 2**12 - 1),
    st.integers(1, 600),
    st.integers(1, 14),
)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(shapes, st.integers(0, 40), st.sampled_from([0.0, 0.3, 1.0]), st.integers(0, 2**32))
def test_any_routes_survive_and_their_bytes_are_the_only_ones(shape: RouteShape, num_tokens: int, missing: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    ids = random_ids(shape, num_tokens, rng, missing)
    record = RouteRecord.of(ids, shape)
    data = record.to_bytes()
    back = RouteRecord.from_bytes(data)
    back.check()
    assert back == record and back.num_tokens == num_tokens and (back.ids_TLK() == ids).all()
    assert len(record.rows) == num_tokens * shape.row_bytes
    # The order within a set is not part of it.
    assert RouteRecord.of(rng.permuted(ids, axis=-1), shape) == record
    # What reads back is what was written, so equal routes are equal bytes.
    assert RouteRecord.of(back.ids_TLK(), shape).to_bytes() == data


@settings(max_examples=40, deadline=None, derandomize=True)
@given(shapes, st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(0, 2**32))
def test_joining_and_cutting_rows_is_joining_and_cutting_tokens(shape: RouteShape, lengths: list[int], seed: int) -> None:
    parts = [random_ids(shape, n, np.random.default_rng(seed + i), 0.2) for i, n in enumerate(lengths)]
    whole = RouteRecord.join([RouteRecord.of(p, shape) for p in parts])
    assert (whole.ids_TLK() == np.concatenate(parts)).all()
    at = 0
    for part in parts:
        assert (whole.cut(at, at + len(part)).ids_TLK() == part).all()
        at += len(part)


@pytest.mark.parametrize(("num_experts", "top_k"), [(6, 3), (5, 1), (8, 1), (4, 4), (7, 6)])
def test_every_set_has_its_own_rank(num_experts: int, top_k: int) -> None:
    shape = RouteShape(num_layers=1, layers=(0,), num_experts=num_experts, top_k=top_k)
    sets = np.array(list(combinations(range(num_experts), top_k)), np.int16)[:, None]
    rows = RouteRecord.of(sets, shape).rows
    ranks = [int.from_bytes(rows[i : i + shape.row_bytes], "little") for i in range(0, len(rows), shape.row_bytes)]
    assert sorted(ranks) == list(range(comb(num_experts, top_k)))
    assert RouteRecord.missing(shape, 1).rows not in {bytes([r]) for r in ranks}


@pytest.mark.parametrize(
    ("num_experts", "top_k"), [(128, 8), (384, 9), (1000, 6), (66, 32), (256, 1), (9, 8), (300, 299), (64, 64), (1, 1)]
)
def test_ranks_beside_every_count_lead_to_the_right_expert(num_experts: int, top_k: int) -> None:
    """The fixed-step search against bisection, where a rounded rank would land in the wrong bucket: up to 2^62.6."""
    for i, (counts, ladder) in enumerate(zip(_counts(num_experts, top_k), _ladders(num_experts, top_k), strict=True)):
        limit = comb(num_experts - top_k + i + 1, i + 1)
        near = {int(c) + d for c in counts for d in (-2, -1, 0, 1, 2)} | {2**p + d for p in range(63) for d in (-1, 0, 1)} | {limit - 1}
        ranks = sorted(r for r in near if 0 <= r < limit)
        found, taken = ladder(np.array(ranks, np.uint64))
        rising = counts.tolist()
        wanted = [bisect_right(rising, r) - 1 for r in ranks]
        assert found.tolist() == wanted and taken.tolist() == counts[wanted].tolist()


def test_rank_that_rounds_up_to_the_next_count_stays_below_it() -> None:
    """2^60 - 1 is 2^60 as a float64."""
    below = np.array([2**60 - 1], np.uint64)
    assert _Ladder(np.array([0, 1, 2**60], np.uint64), 2**60 + 1)(below)[0].tolist() == [1]
    # Nor may it fall off the table where the limit itself lies just below a power of two.
    assert _Ladder(np.array([0, 1], np.uint64), 2**60 - 5)(below - np.uint64(5))[0].tolist() == [1]


def test_a_token_of_48_layers_with_8_of_128_experts_takes_246_bytes() -> None:
    assert (QWEN.width, QWEN.row_bytes, QWEN.coding) == (41, 246, RANKS)
    assert (KIMI.width, KIMI.row_bytes) == (54, 405)
    record = RouteRecord.of(random_ids(QWEN, 100, np.random.default_rng(0)), QWEN)
    assert len(record.to_bytes()) == HEADER.size + 6 + 100 * 246
    # Missing rows change nothing about the size of the others.
    assert len(RouteRecord.of(random_ids(QWEN, 100, np.random.default_rng(0), 0.5), QWEN).to_bytes()) == len(record.to_bytes())


def test_sets_too_many_for_a_word_are_kept_as_ids() -> None:
    assert comb(512, 10) >= 2**63 and (WIDE.coding, WIDE.width, WIDE.row_bytes) == (IDS, 9, 34)
    ids = random_ids(WIDE, 50, np.random.default_rng(1), 0.3)
    # The greatest id is all ones in its bits, as `missing` is: only a whole set of them means that.
    ids[0, 0] = np.arange(502, 512)
    assert (RouteRecord.from_bytes(RouteRecord.of(ids, WIDE).to_bytes()).ids_TLK() == ids).all()


def test_records_longer_than_a_block_are_the_same_rows() -> None:
    shape = RouteShape(num_layers=2, layers=(1,), num_experts=16, top_k=3)
    ids = random_ids(shape, 2 * BLOCK + 7, np.random.default_rng(2), 0.1)
    record = RouteRecord.of(ids, shape)
    assert (record.ids_TLK() == ids).all()
    assert record.rows == b"".join(RouteRecord.of(ids[i : i + 1000], shape).rows for i in range(0, len(ids), 1000))


def test_missing_rows_are_minus_one_throughout() -> None:
    for shape in (QWEN, WIDE):
        record = RouteRecord.missing(shape, 3)
        assert (record.ids_TLK() == -1).all() and record == RouteRecord.of(record.ids_TLK(), shape)


def test_routes_that_cannot_be_are_refused() -> None:
    shape = RouteShape(num_layers=3, layers=(0, 2), num_experts=8, top_k=2)
    good = np.full((4, 3, 2), -1, np.int16)
    good[:, [0, 2]] = (3, 5)

    def broken(at: tuple[int, ...], value: int) -> np.ndarray:
        bad = good.copy()
        bad[at] = value
        return bad

    RouteRecord.of(good, shape)
    for bad, why in (
        (good[:, :2], "expected integers"),
        (good.astype(float), "expected integers"),
        (broken((1, 1, 0), 4), "in a dense layer"),
        (broken((1, 0, 0), 8), r"experts -?\d+\.\.8"),
        (broken((1, 0, 0), -2), r"experts -2\.\."),
        (broken((1, 0, 0), -1), "only some of"),
        (broken((1, 0, 0), 5), "an expert twice"),
    ):
        with pytest.raises(ValueError, match=why):
            RouteRecord.of(bad, shape)
    with pytest.raises(ValueError, match="of two models cannot be joined"):
        RouteRecord.join([RouteRecord.missing(shape, 1), RouteRecord.missing(QWEN, 1)])


@pytest.mark.parametrize(
    "facts",
    [
        {"num_layers": 0},
        {"num_layers": 5000},
        {"top_k": 0},
        {"top_k": 9},
        {"num_experts": 40000},
        {"num_experts": 1000, "top_k": 257},
        {"layers": ()},
        {"layers": (1, 0)},
        {"layers": (0, 3)},
        {"layers": (-1, 0)},
    ],
)
def test_shapes_that_cannot_be_are_refused(facts: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        RouteShape(**({"num_layers": 3, "layers": (0, 2), "num_experts": 8, "top_k": 2} | facts))  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [QWEN, KIMI, WIDE], ids=["qwen", "kimi", "wide"])
def test_cut_or_padded_bytes_are_refused(shape: RouteShape) -> None:
    data = RouteRecord.of(random_ids(shape, 3, np.random.default_rng(3)), shape).to_bytes()
    for size in (*range(HEADER.size + 9), len(data) - 1):
        with pytest.raises(ValueError):
            RouteRecord.from_bytes(data[:size])
    with pytest.raises(ValueError, match="bytes follow"):
        RouteRecord.from_bytes(data + b"\0")


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.sampled_from([QWEN, KIMI, WIDE]), st.lists(st.tuples(st.integers(0, 500), st.integers(1, 255)), min_size=1, max_size=4))
def test_damaged_bytes_are_refused_or_read_as_routes(shape: RouteShape, flips: list[tuple[int, int]]) -> None:
    """No crash, no id out of range, no partial or repeated set, and no two byte strings for one record."""
    data = bytearray(RouteRecord.of(random_ids(shape, 2, np.random.default_rng(4)), shape).to_bytes())
    for at, bits in flips:
        data[at % len(data)] ^= bits
    try:
        record = RouteRecord.from_bytes(bytes(data))
        record.check()
    except ValueError:
        return
    assert RouteRecord.of(record.ids_TLK(), record.shape).to_bytes() == bytes(data)


def test_check_refuses_whatever_reading_refuses() -> None:
    past = RouteShape(num_layers=1, layers=(0,), num_experts=6, top_k=3)
    unsorted = msgspec.structs.replace(WIDE, num_layers=1, layers=(0,))
    swapped = (5 | 3 << 9).to_bytes(unsorted.row_bytes, "little")
    for shape, rows, why in (
        (past, bytes([comb(6, 3)]), "the rank 20, there are 20 sets"),
        (past, bytes([1 << past.width]), "bits set after the last field"),
        (unsorted, swapped, "not an ascending set"),
    ):
        for read in (RouteRecord.check, RouteRecord.ids_TLK):
            with pytest.raises(ValueError, match=why):
                read(RouteRecord(shape=shape, rows=rows))


def test_the_program_of_the_format_page_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "formats" / "routes.md").read_text()
    (program,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    exec(compile(program, "routes.md", "exec"), {"__name__": "routes.md"})


@pytest.mark.parametrize(
    "shape",
    [
        QWEN,
        KIMI,
        RouteShape(num_layers=32, layers=tuple(range(32)), num_experts=8, top_k=2),
        RouteShape(num_layers=48, layers=tuple(range(48)), num_experts=512, top_k=10),
    ],
)
def test_sizes_on_the_format_page_are_true(shape: RouteShape) -> None:
    bits = shape.width if shape.coding == RANKS else f"{shape.width * shape.top_k} (ids)"
    packed = len(shape.layers) * shape.top_k * (shape.num_experts - 1).bit_length() // 8
    plain = shape.num_layers * shape.top_k * (1 if shape.num_experts <= 256 else 2)
    line = f"| {len(shape.layers)}, {shape.top_k} of {shape.num_experts} | {bits} | {shape.row_bytes} | {packed} | {plain} |"
    assert line in (Path(__file__).parents[2] / "docs" / "formats" / "routes.md").read_text()


def test_examples_in_the_docstrings_hold() -> None:
    assert doctest.testmod(route_record).failed == 0
