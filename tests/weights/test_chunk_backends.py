"""The compiled coders and the numpy ones write and refuse the same bytes; damage is an error or a whole chunk, never anything else."""

from __future__ import annotations

import numpy as np
import pytest
from chunk_cases import CGR_DTYPES, changed, codes_of
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.weights.chunk import Codec, backend, codecs, compiled, decode, decode_into, decode_patch, elements_of, encode, reference
from rollmill.weights.errors import CorruptSnapshot, UnknownFormat

BACKENDS = {"compiled": compiled, "reference": reference}


def nibbles(codes: np.ndarray, dtype: str) -> np.ndarray:
    return codecs._nibbles(codes) if elements_of(dtype).bits == 4 else codes


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from(CGR_DTYPES),
    size=st.sampled_from([0, 1, 5, 64, 100, 1000, 4096, 5000, 12345]),
    contents=st.sampled_from(["weights", "any", "special"]),
    density=st.sampled_from([0.0, 0.003, 0.05, 0.3, 1.0]),
    kind=st.sampled_from(["step", "jump", "mixed", "copy"]),
)
def test_both_write_the_same_bytes_and_read_each_other(seed: int, dtype: str, size: int, contents: str, density: float, kind: str) -> None:
    rng = np.random.default_rng(seed)
    elements = elements_of(dtype)
    old = codes_of(dtype, rng, size, contents)
    new, old = nibbles(changed(old, rng, density, kind), dtype), nibbles(old, dtype)
    body, num_changed = compiled.encode_cgr(new, old, elements)
    assert (body, num_changed) == reference.encode_cgr(new, old, elements)
    positions, codes = compiled.decode_cgr(body, old, elements)
    assert np.array_equal(positions, np.flatnonzero(new != old)) and np.array_equal(codes, new[positions])
    slow_positions, slow_codes = reference.decode_cgr(body, old, elements)
    assert np.array_equal(positions, slow_positions) and np.array_equal(codes, slow_codes)
    gaps = compiled.encode_gaps(positions)
    assert gaps == reference.encode_gaps(positions)
    for module in BACKENDS.values():
        again, num_bytes = module.decode_gaps(gaps + b"rest", len(old))
        assert np.array_equal(again, positions) and num_bytes == len(gaps)


def outcome(data: bytes, dtype: str, old: np.ndarray) -> bytes | str:
    """The decoded bytes, or what was refused; all three readers agree, and an error leaves the target alone."""
    target = old.copy()
    try:
        new = decode(data, num_bytes=len(old), dtype=dtype, old=old)
    except (CorruptSnapshot, UnknownFormat) as error:
        with pytest.raises(type(error)):
            decode_into(data, dtype=dtype, target=target)
        assert np.array_equal(target, old)
        with pytest.raises(type(error)):
            decode_patch(data, num_bytes=len(old), dtype=dtype, old=old)
        return type(error).__name__
    assert len(new) == len(old)
    decode_into(data, dtype=dtype, target=target)
    assert np.array_equal(target, new)
    patch = decode_patch(data, num_bytes=len(old), dtype=dtype, old=old)
    assert len(patch.positions) == len(patch.codes)
    return new.tobytes()


def assert_both_agree(data: bytes, dtype: str, old: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> bytes | str:
    outcomes = []
    for module in BACKENDS.values():
        monkeypatch.setattr(codecs, "backend", lambda module=module: module)
        outcomes.append(outcome(data, dtype, old))
    assert outcomes[0] == outcomes[1]
    return outcomes[0]


def small_pair(dtype: str, size: int = 96) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(7)
    old = codes_of(dtype, rng, size, "weights")
    return changed(old, rng, 0.2, "mixed").view(np.uint8), old.view(np.uint8)


DAMAGED = [
    *((dtype, Codec.CGR) for dtype in ("bfloat16", "float8_e4m3fn", "float4_e2m1fn_x2", "uint8")),
    *((dtype, Codec.SPARSE) for dtype in ("bfloat16", "float32", "packed_uint4")),
    *((dtype, codec) for dtype in ("bfloat16", "int64") for codec in (Codec.RAW, Codec.XOR, Codec.FULL)),
]


@pytest.mark.parametrize(("dtype", "codec"), DAMAGED, ids=lambda value: getattr(value, "name", value))
def test_a_chunk_cut_anywhere_is_refused(dtype: str, codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    new, old = small_pair(dtype)
    data = encode(new, old, dtype, codec=codec).data
    assert assert_both_agree(data, dtype, old, monkeypatch) == new.tobytes()
    for end in range(len(data)):
        assert assert_both_agree(data[:end], dtype, old, monkeypatch) == "CorruptSnapshot", f"cut at {end} of {len(data)}"
    assert assert_both_agree(data + b"\0", dtype, old, monkeypatch) == "CorruptSnapshot"


@pytest.mark.parametrize(("dtype", "codec"), DAMAGED, ids=lambda value: getattr(value, "name", value))
def test_a_flipped_bit_is_refused_or_gives_a_whole_chunk(dtype: str, codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    new, old = small_pair(dtype)
    data = encode(new, old, dtype, codec=codec).data
    for bit in range(8 * min(len(data), 150)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        assert_both_agree(bytes(damaged), dtype, old, monkeypatch)


def test_a_sized_chunk_with_damage_is_refused_alike_by_both(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    old = codes_of("bfloat16", rng, 20000, "weights")
    new = changed(old, rng, 0.15, "mixed")
    data = encode(new.view(np.uint8), old.view(np.uint8), "bfloat16", codec=Codec.CGR).data
    assert data[1] & 1, "3,000 changes make a sized chunk"
    bits = [*range(8, 120), *rng.integers(120, 8 * len(data), 12).tolist()]
    refused = 0
    for bit in bits:
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        refused += assert_both_agree(bytes(damaged), "bfloat16", old.view(np.uint8), monkeypatch) == "CorruptSnapshot"
    assert refused > len(bits) // 2


@pytest.mark.parametrize("codec", list(Codec), ids=lambda codec: codec.name)
def test_random_bytes_are_refused_or_give_a_whole_chunk(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(int(codec))
    for _ in range(300):
        dtype = str(rng.choice(["bfloat16", "float8_e5m2", "float4_e2m1fn_x2"]))
        old = codes_of(dtype, rng, int(rng.integers(0, 200)), "weights").view(np.uint8)
        # Thinned bits make long runs of zeros, which is where unary numbers are.
        body = rng.integers(0, 256, int(rng.integers(0, 80)), np.uint8) & rng.integers(0, 256, 1, np.uint8)
        assert_both_agree(bytes([codec]) + body.tobytes(), dtype, old, monkeypatch)


def test_a_delta_on_other_old_bytes_is_refused_or_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    new, old = small_pair("bfloat16", 400)
    data = encode(new, old, "bfloat16", codec=Codec.CGR).data
    assert assert_both_agree(data, "bfloat16", np.zeros_like(old), monkeypatch) == "CorruptSnapshot"
    other = codes_of("bfloat16", np.random.default_rng(99), 400, "any").view(np.uint8)
    assert_both_agree(data, "bfloat16", other, monkeypatch)


def test_the_compiled_coders_are_the_ones_in_use() -> None:
    assert backend.backend() is compiled
