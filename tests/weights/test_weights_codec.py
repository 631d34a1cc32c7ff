"""Claims about bytes: every dtype and layout round-trips bit for bit, and no damaged pack ever decodes to a tensor."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from weights_fakes import raw

from rollmill.weights import CorruptSnapshot, WrongBase, codec, pack
from rollmill.weights.bits import _DTYPES, Bits, bits_of
from rollmill.weights.codec import Coding

DTYPES = sorted(_DTYPES)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors of one dtype and shape with arbitrary bits, the second mostly like the first."""
    dtype = _DTYPES[draw(st.sampled_from(DTYPES))]
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    size = int(np.prod(shape, dtype=int)) * dtype.itemsize
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    old = rng.integers(0, 256, size, dtype=np.uint8)
    if draw(st.booleans()):
        old[:] = draw(st.integers(0, 255))
    new = np.where(rng.random(size) < draw(st.sampled_from([0.0, 0.02, 1.0])), rng.integers(0, 256, size, dtype=np.uint8), old)
    name = str(dtype).removeprefix("torch.")
    first, second = (Bits(dtype=name, shape=shape, data=data.astype(np.uint8)).tensor() for data in (old, new))
    return first, second


@given(pairs())
@settings(max_examples=150, deadline=None)
def test_every_dtype_round_trips_bit_for_bit_through_full_and_delta(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    old, new = ({"w": bits_of(tensor)} for tensor in pair)
    full = pack.build(version=1, new=new)
    delta = pack.build(version=1, new=new, base_version=0, old=old)
    _, from_full = pack.read(b"".join(full.chunks), digest=full.digest, old={})
    _, from_delta = pack.read(b"".join(delta.chunks), digest=delta.digest, old=old)
    for back in (from_full["w"], {**old, **from_delta}["w"]):
        assert raw(back.tensor()) == raw(pair[1])
        assert (back.tensor().dtype, back.tensor().shape) == (pair[1].dtype, pair[1].shape)


@given(pairs())
@settings(max_examples=100, deadline=None)
def test_no_coding_is_larger_than_the_bytes(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    old, new = (bits_of(tensor) for tensor in pair)
    for before in (None, old.data):
        _, payload = codec.encode(new.data, before, new.itemsize)
        assert len(payload) <= new.data.size


def test_special_floats_keep_their_bits() -> None:
    patterns = torch.tensor([0x7F800001, 0x7FC12345, -1, -(2**31), 0x7F800000, 1, 0], dtype=torch.int32)
    for tensor in (patterns.view(torch.float32), patterns.view(torch.bfloat16), patterns.view(torch.float16)):
        assert bits_of(tensor).data.tobytes() == raw(tensor)


def test_non_contiguous_conjugated_and_zero_dim_tensors_give_their_values_in_row_major_order() -> None:
    wide = torch.randn(6, 8)
    assert bits_of(wide.t()[1:, ::2]).data.tobytes() == raw(wide.t()[1:, ::2].clone())
    assert bits_of(torch.tensor(3.5)).shape == ()
    waves = torch.randn(4, dtype=torch.complex128)
    assert bits_of(waves.conj()).data.tobytes() == raw(waves.conj().resolve_conj())


def test_a_copy_does_not_follow_later_writes() -> None:
    weights = torch.zeros(4)
    bits = bits_of(weights)
    weights.fill_(1.0)
    assert not bits.data.any()


def test_a_tensor_without_plain_bytes_is_refused_with_a_hint() -> None:
    with pytest.raises(ValueError, match="publish the dense tensors"):
        bits_of(torch.eye(3).to_sparse())


def test_sparse_change_is_coded_as_xor_and_noise_as_raw() -> None:
    rng = np.random.default_rng(0)
    old = rng.integers(0, 256, 20_000, dtype=np.uint8)
    new = old.copy()
    new[::500] ^= 1
    assert codec.encode(new, old, 2)[0] is Coding.XOR
    assert codec.encode(rng.integers(0, 256, 20_000, dtype=np.uint8), old, 2)[0] is Coding.RAW
    assert codec.encode(np.zeros(20_000, np.uint8), old, 2)[0] is Coding.FULL


def small_delta() -> tuple[pack.Pack, dict[str, Bits], dict[str, Bits]]:
    generator = torch.Generator().manual_seed(3)
    old = {"a": torch.randn(40, 4, generator=generator).bfloat16(), "b": torch.arange(6), "c": torch.randn(5, generator=generator)}
    new = {name: tensor.clone() for name, tensor in old.items()}
    new["a"][3, 2] = 9.0
    new["b"][:] = 0
    new["c"] += 1
    before, after = ({name: bits_of(tensor) for name, tensor in tensors.items()} for tensors in (old, new))
    return pack.build(version=2, new=after, base_version=1, old=before), before, after


def test_no_truncation_and_no_bit_flip_of_a_pack_ever_decodes() -> None:
    built, old, _ = small_delta()
    data = b"".join(built.chunks)
    assert len(pack.read(data, digest=built.digest, old=old)[1]) == 3
    for end in range(len(data)):
        with pytest.raises(CorruptSnapshot):
            pack.read(data[:end], digest=built.digest, old=old)
    for bit in range(8 * len(data)):
        hurt = bytearray(data)
        hurt[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(CorruptSnapshot):
            pack.read(bytes(hurt), digest=built.digest, old=old)


@pytest.mark.parametrize("coding", [Coding.FULL, Coding.XOR])
def test_a_damaged_payload_behind_a_forged_digest_is_still_refused_by_the_tensor_digest(coding: Coding) -> None:
    """The outer digest is taken away here: what remains must neither crash nor give other bytes."""
    rng = np.random.default_rng(1)
    old = rng.integers(0, 4, 600, dtype=np.uint8)
    new = old.copy()
    new[::50] ^= 2
    payload = codec._squeeze(new ^ old if coding is Coding.XOR else new, 2)
    for bit in range(8 * len(payload)):
        hurt = bytearray(payload)
        hurt[bit // 8] ^= 1 << (bit % 8)
        entry = pack.Entry(
            name="w", dtype="bfloat16", shape=(300,), coding=coding, num_bytes=len(hurt),
            digest=pack._digest(new), base_digest=pack._digest(old),
        )  # fmt: skip
        try:
            back = pack._decode(entry, memoryview(bytes(hurt)), Bits(dtype="bfloat16", shape=(300,), data=old))
        except CorruptSnapshot:
            continue
        assert back.data.tobytes() == new.tobytes()  # zstd ignores a few header bits; the bytes are still the right ones
    for end in range(len(payload)):
        with pytest.raises(CorruptSnapshot):
            codec.decode(coding, payload[:end], num_bytes=600, itemsize=2, old=old)


def test_a_frame_that_claims_a_huge_size_is_refused_before_memory_is_taken() -> None:
    import zstandard

    bomb = zstandard.ZstdCompressor().compress(bytes(50_000_000))
    with pytest.raises(CorruptSnapshot, match="where 100 belong"):
        codec.decode(Coding.FULL, bomb, num_bytes=100, itemsize=2, old=None)


def test_a_delta_refuses_a_wrong_base() -> None:
    built, old, after = small_delta()
    data = b"".join(built.chunks)
    for base in (after, {}, {**old, "a": bits_of(torch.zeros(40, 4, dtype=torch.bfloat16))}):
        with pytest.raises(WrongBase):
            pack.read(data, digest=built.digest, old=base)


def test_a_delta_names_only_what_changed() -> None:
    _, old, after = small_delta()
    built = pack.build(version=2, new={**old, "b": after["b"]}, base_version=1, old=old)
    header, decoded = pack.read(b"".join(built.chunks), digest=built.digest, old=old)
    assert list(decoded) == ["b"] and header.base_version == 1
