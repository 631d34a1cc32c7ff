"""Claims about the fingerprint: it sees every change of the values and none of the layout, order or sharding."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.weights import fingerprint, proof
from rollmill.weights.bits import _DTYPES
from rollmill.weights.schema import TensorSpec, make_schema, place, take
from rollmill.weights.shard import columns_of, rows_of


def one(name: str, tensor: torch.Tensor) -> str:
    return fingerprint({name: tensor}).tensors[name]


@given(st.integers(1, 400), st.integers(0, 2**32 - 1), st.data())
@settings(max_examples=60, deadline=None)
def test_one_flipped_bit_always_changes_both_lanes(num_elements: int, seed: int, data: st.DataObject) -> None:
    bits = torch.randint(-(2**15), 2**15, (num_elements,), dtype=torch.int16, generator=torch.Generator().manual_seed(seed))
    hurt = bits.clone()
    hurt[data.draw(st.integers(0, num_elements - 1))] ^= 1 << data.draw(st.integers(0, 14))
    before, after = one("w", bits.view(torch.bfloat16)), one("w", hurt.view(torch.bfloat16))
    assert before[:16] != after[:16] and before[16:] != after[16:]


@given(st.integers(2, 300), st.data())
@settings(max_examples=60, deadline=None)
def test_two_swapped_elements_change_it(num_elements: int, data: st.DataObject) -> None:
    weights = torch.arange(num_elements, dtype=torch.float32)
    first = data.draw(st.integers(0, num_elements - 2))
    second = data.draw(st.integers(first + 1, num_elements - 1))
    swapped = weights.clone()
    swapped[first], swapped[second] = weights[second], weights[first]
    assert one("w", weights) != one("w", swapped)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", sorted(_DTYPES))
def test_every_dtype_has_one_and_strides_do_not_matter(dtype: str) -> None:
    torch_dtype = _DTYPES[dtype]
    plain = torch.randint(0, 2, (6 * 8 * torch_dtype.itemsize,), dtype=torch.uint8).view(torch_dtype).reshape(6, 8)
    # torch cannot copy some of its one-byte dtypes as themselves.
    turned = (plain.view(torch.uint8) if torch_dtype.itemsize == 1 else plain).t().contiguous().t().view(torch_dtype)
    assert not turned.is_contiguous()
    assert one("w", plain) == one("w", turned)


def test_it_is_what_the_page_says() -> None:
    """The documented formula in Python integers, over a row border of 4096 and for words of one, two, four and eight bytes."""
    mask, golden = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(x: int) -> int:
        x &= mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    for dtype, words in (("uint8", torch.uint8), ("bfloat16", torch.uint16), ("float32", torch.uint32), ("float64", torch.uint32)):
        raw = torch.randint(0, 256, (4200 * 8,), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
        tensor = raw.view(_DTYPES[dtype])
        digest = blake3(json.dumps(["w", dtype, list(tensor.shape)], separators=(",", ":")).encode()).digest(length=16)
        expected = ""
        for lane, key in enumerate((0x243F6A8885A308D3, 0x13198A2E03707344)):
            seed = int.from_bytes(digest[8 * lane : 8 * lane + 8], "little")
            total = mix(seed)
            for i, word in enumerate(raw.view(words).tolist()):
                total += (mix(seed + (i >> 12) * golden) | 1) * ((mix(key + (i & 4095) * golden) >> 32) | 1) * word
            expected += f"{total & mask:016x}"
        assert one("w", tensor) == expected, dtype


@given(st.integers(1, 9000), st.integers(0, 9000), st.sampled_from([np.uint8, np.uint16, np.uint32]), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_compiled_and_plain_sums_agree_and_updates_cost_only_the_changes(size: int, first: int, word: type, seed: int) -> None:
    rng = np.random.default_rng(seed)
    words = rng.integers(0, np.iinfo(word).max, size, dtype=word, endpoint=True)
    seeds = proof.seeds_of("w", "x", (size,))
    assert proof.part(words, first, seeds) == proof._part_numpy(words, first, seeds)
    after, at = words.copy(), np.unique(rng.integers(0, size, max(1, size // 20)))
    after[at] = rng.integers(0, np.iinfo(word).max, at.size, dtype=word)
    moved = proof.add(proof.part(words, first, seeds), proof.change(at + first, words[at], after[at], seeds))
    assert moved == proof.part(after, first, seeds)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 300), st.data())
@settings(max_examples=60, deadline=None)
def test_cells_cover_every_element_once_and_their_parts_add_up(rows: int, cols: int, chunk: int, data: st.DataObject) -> None:
    cuts = [tuple(sorted(data.draw(st.sets(st.integers(1, n - 1), max_size=3)))) if n > 1 else () for n in (rows, cols)]
    (spec,) = make_schema([("w", "bfloat16", (rows, cols))], row_cuts={"w": cuts[0]}, col_cuts={"w": cuts[1]}).tensors
    words = np.random.default_rng(rows * cols).integers(0, 65536, rows * cols, dtype=np.uint16)
    seeds, total, rebuilt = proof.seeds_of("w", "bfloat16", (rows, cols)), (0, 0), np.zeros_like(words)
    seen = np.zeros(rows * cols, np.int64)
    for cell in spec.cells(chunk):
        assert cell.num_elements <= max(chunk, 1)
        total = proof.add(total, proof.cell_part(take(words, cell), cell, seeds))
        place(rebuilt, cell, take(words, cell))
        ones = np.zeros(rows * cols, np.int64)
        place(ones, cell, np.ones(cell.num_elements, np.int64))
        seen += ones
    assert (seen == 1).all() and (rebuilt == words).all() and total == proof.part(words, 0, seeds)


def test_shards_of_rows_and_of_columns_add_up_to_the_whole() -> None:
    spec = TensorSpec(name="w", dtype="float32", shape=(30, 20))
    whole = torch.randn(30, 20)
    base = proof.base_value(proof.seeds_of("w", "float32", (30, 20)))
    by_rows = [rows_of(spec, a, b).lanes(whole[a:b].contiguous().view(torch.uint8).numpy().reshape(-1)) for a, b in ((0, 7), (7, 30))]
    by_columns = [
        columns_of(spec, a, b).lanes(whole[:, a:b].contiguous().view(torch.uint8).numpy().reshape(-1)) for a, b in ((0, 13), (13, 20))
    ]
    for parts in (by_rows, by_columns):
        assert proof.to_hex(proof.add(base, proof.add(*parts))) == one("w", whole)


def test_the_total_is_the_sum_and_knows_names_and_shapes() -> None:
    ones, twos = torch.ones(4), torch.full((4,), 2.0)
    both = fingerprint({"a": ones, "b": twos})
    assert both == fingerprint({"b": twos, "a": ones})
    assert both.total != fingerprint({"a": twos, "b": ones}).total
    assert one("a", ones) != one("a", ones.reshape(2, 2)) and one("a", torch.zeros(0)) != one("b", torch.zeros(0))
    assert both.differing(fingerprint({"a": ones, "c": twos})) == ("b", "c")


def test_minus_zero_and_nan_payloads_are_told_apart() -> None:
    assert one("w", torch.tensor([0.0])) != one("w", torch.tensor([-0.0]))
    quiet, other = (torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (0x7FC00000, 0x7FC00001))
    assert one("w", quiet) != one("w", other)
