"""Claims about the fingerprint: it sees every change of the values and none of the layout."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.weights import fingerprint
from rollmill.weights.bits import _DTYPES
from rollmill.weights.fingerprint import _CPU_CHUNK, tensor_fingerprint


@given(st.integers(1, 400), st.integers(0, 2**32 - 1), st.data())
@settings(max_examples=60, deadline=None)
def test_one_flipped_bit_always_changes_it(num_elements: int, seed: int, data: st.DataObject) -> None:
    bits = torch.randint(-(2**15), 2**15, (num_elements,), dtype=torch.int16, generator=torch.Generator().manual_seed(seed))
    hurt = bits.clone()
    hurt[data.draw(st.integers(0, num_elements - 1))] ^= 1 << data.draw(st.integers(0, 14))
    assert tensor_fingerprint("w", bits.view(torch.bfloat16)) != tensor_fingerprint("w", hurt.view(torch.bfloat16))


@given(st.integers(2, 300), st.data())
@settings(max_examples=60, deadline=None)
def test_two_swapped_elements_change_it(num_elements: int, data: st.DataObject) -> None:
    weights = torch.arange(num_elements, dtype=torch.float32)
    first = data.draw(st.integers(0, num_elements - 2))
    second = data.draw(st.integers(first + 1, num_elements - 1))
    swapped = weights.clone()
    swapped[first], swapped[second] = weights[second], weights[first]
    assert tensor_fingerprint("w", weights) != tensor_fingerprint("w", swapped)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", sorted(_DTYPES))
def test_every_dtype_has_one_and_strides_do_not_matter(dtype: str) -> None:
    torch_dtype = _DTYPES[dtype]
    plain = torch.randint(0, 2, (6 * 8 * torch_dtype.itemsize,), dtype=torch.uint8).view(torch_dtype).reshape(6, 8)
    # torch cannot copy some of its one-byte dtypes as themselves.
    turned = (plain.view(torch.uint8) if torch_dtype.itemsize == 1 else plain).t().contiguous().t().view(torch_dtype)
    assert not turned.is_contiguous()
    assert tensor_fingerprint("w", plain) == tensor_fingerprint("w", turned)


def test_chunk_borders_do_not_matter() -> None:
    long = torch.randint(-128, 128, (2 * _CPU_CHUNK + 5,), dtype=torch.int8)
    short_chunks = sum(_by_definition("w", long, start, start + 1000) for start in range(0, len(long), 1000)) % 2**64
    assert tensor_fingerprint("w", long) == f"{short_chunks:016x}"


def test_the_total_is_the_sum_and_knows_names_and_shapes() -> None:
    ones, twos = torch.ones(4), torch.full((4,), 2.0)
    both = fingerprint({"a": ones, "b": twos})
    assert both.total == f"{sum(int(v, 16) for v in both.tensors.values()) % 2**64:016x}"
    assert both == fingerprint({"b": twos, "a": ones})
    assert both.total != fingerprint({"a": twos, "b": ones}).total
    assert tensor_fingerprint("a", ones) != tensor_fingerprint("a", ones.reshape(2, 2))
    assert both.differing(fingerprint({"a": ones, "c": twos})) == ("b", "c")


def test_minus_zero_and_nan_payloads_are_told_apart() -> None:
    assert tensor_fingerprint("w", torch.tensor([0.0])) != tensor_fingerprint("w", torch.tensor([-0.0]))
    quiet, other = (torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (0x7FC00000, 0x7FC00001))
    assert tensor_fingerprint("w", quiet) != tensor_fingerprint("w", other)


def _by_definition(name: str, words: torch.Tensor, start: int, end: int) -> int:
    """The documented formula in Python integers."""
    from rollmill.weights.fingerprint import _GOLDEN, _MASK, _MUL_1, _MUL_2, _seed

    seed, total = _seed(name, "int8", tuple(words.shape)), 0
    for index, word in enumerate(words[start:end].tolist(), start):
        x = ((seed + index * _GOLDEN) & _MASK) ^ (word & _MASK)
        x = (x * _MUL_1) & _MASK
        x ^= x >> 32
        x = (x * _MUL_2) & _MASK
        total += x ^ (x >> 29)
    return total
