"""A chunk comes back bit for bit through every codec, is never larger than its bytes plus one, and what cannot be coded is told why."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from chunk_cases import CGR_DTYPES, DTYPES, WIDE_DTYPES, adamw_steps, changed, codes_of
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.weights.chunk import MAX_ELEMENTS, Codec, decode, decode_into, decode_patch, elements_of, encode
from rollmill.weights.errors import CorruptSnapshot, UnknownFormat, WrongBase

SIZES = st.sampled_from([0, 1, 2, 63, 64, 65, 127, 200, 700, 4095, 4096, 4160, 9001])


def assert_round_trips(new: np.ndarray, old: np.ndarray, dtype: str, codec: Codec | None) -> None:
    encoded = encode(new, old, dtype, codec=codec)
    width = elements_of(dtype).code_bytes
    num_changed = int(np.count_nonzero(new.view(f"u{width}") != old.view(f"u{width}")))
    assert encoded.num_changed == num_changed
    assert encoded.data[0] == encoded.codec
    assert codec is not None or len(encoded.data) <= len(new) + 1
    assert np.array_equal(decode(encoded.data, num_bytes=len(new), dtype=dtype, old=old), new)
    target = old.copy()
    assert decode_into(encoded.data, dtype=dtype, target=target) == num_changed
    assert np.array_equal(target, new)
    patch = decode_patch(encoded.data, num_bytes=len(new), dtype=dtype, old=old)
    patched = old.copy()
    patched.view(f"u{width}")[patch.positions] = patch.codes
    assert np.array_equal(patched, new)
    assert patch.positions.dtype == np.uint32 and patch.codes.dtype == np.dtype(f"u{width}")
    assert len(patch.positions) == num_changed and bool(np.all(np.diff(patch.positions.astype(np.int64)) > 0))


@settings(max_examples=250, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from(DTYPES),
    size=SIZES,
    contents=st.sampled_from(["weights", "any", "special"]),
    density=st.sampled_from([0.0, 0.002, 0.05, 0.5, 1.0]),
    kind=st.sampled_from(["step", "jump", "mixed", "copy"]),
    codec=st.sampled_from([None, *Codec]),
)
def test_every_dtype_comes_back_bit_for_bit(
    seed: int, dtype: str, size: int, contents: str, density: float, kind: str, codec: Codec | None
) -> None:
    rng = np.random.default_rng(seed)
    old = codes_of(dtype, rng, size, contents)
    new = changed(old, rng, density, kind)
    if codec is Codec.CGR and dtype in WIDE_DTYPES:
        codec = Codec.XOR
    assert_round_trips(new.view(np.uint8), old.view(np.uint8), dtype, codec)
    alone = encode(new.view(np.uint8), None, dtype)
    assert alone.num_changed == len(new) and len(alone.data) <= new.nbytes + 1
    assert np.array_equal(decode(alone.data, num_bytes=new.nbytes, dtype=dtype, old=None), new.view(np.uint8))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_all_codes_of_a_float_change_to_all_others(dtype: str) -> None:
    """Every NaN payload, both zeros, denormals and infinities; steps of every sign and, at half the range, of the largest size."""
    every = np.arange(1 << 16, dtype=np.uint16)
    for new in (every[::-1].copy(), np.roll(every, 1), every ^ 0x8000, np.roll(every, 1 << 15)):
        assert_round_trips(new.view(np.uint8), every.view(np.uint8), dtype, Codec.CGR)


def test_gaps_of_a_whole_chunk_and_escapes_come_back() -> None:
    size = MAX_ELEMENTS
    old = np.zeros(size, np.uint8)
    last = old.copy()
    last[-1] = 1
    assert len(encode(last, old, "uint8").data) < 16
    rare = old.copy()
    rare[:3000] = 1  # gaps of zero make kg small, and then one gap needs an escape
    rare[-1] = 77
    for new in (last, rare):
        assert_round_trips(new, old, "uint8", Codec.CGR)
        assert_round_trips(new, old, "uint8", Codec.SPARSE)
        assert_round_trips(new, old, "packed_uint4", Codec.CGR)
    weights = np.full(5000, 0x3C00, np.uint16)
    far = weights + 1
    far[[7, 4000]] = (0x7FFF, 0xFFFF)  # steps that escape from runs of ones
    assert_round_trips(far.view(np.uint8), weights.view(np.uint8), "bfloat16", Codec.CGR)


def test_neighbours_across_zero_cost_as_little_as_other_neighbours() -> None:
    old = np.zeros(4096, np.uint16)
    across, beside = old.copy(), old.copy()
    across[::64], beside[::64] = 0x8000, 0x0001
    sizes = [len(encode(new.view(np.uint8), old.view(np.uint8), "bfloat16").data) for new in (across, beside)]
    assert sizes[0] == sizes[1] < 80


def test_delta_is_three_times_smaller_than_xor_zstd_on_adamw_steps() -> None:
    old, new = (copy.view(np.uint8) for copy in adamw_steps(1 << 20, 1.25e-6, 2)[1:])
    encoded, xor = encode(new, old, "bfloat16"), encode(new, old, "bfloat16", codec=Codec.XOR)
    assert encoded.codec is Codec.CGR
    assert 0.010 < encoded.num_changed / (1 << 20) < 0.014
    assert 3.0 * len(encoded.data) <= len(xor.data)
    assert 8 * len(encoded.data) < 7.3 * encoded.num_changed


def test_a_handful_of_changes_costs_a_handful_of_bytes() -> None:
    old = adamw_steps(1 << 16, 1e-6, 0)[0]
    new = old.copy()
    new[[5, 77, 40000]] ^= 1
    assert len(encode(old.view(np.uint8), old.view(np.uint8), "bfloat16").data) == 3
    assert len(encode(new.view(np.uint8), old.view(np.uint8), "bfloat16").data) <= 16


def test_full_codes_bf16_weights_to_two_thirds() -> None:
    weights = adamw_steps(1 << 18, 1e-6, 0)[0].view(np.uint8)
    encoded = encode(weights, None, "bfloat16")
    assert encoded.codec is Codec.FULL and len(weights) > 1.49 * len(encoded.data)


def test_infinities_and_zeros_among_the_weights_do_not_spoil_the_classes() -> None:
    old, new = adamw_steps(1 << 18, 1.25e-6, 1)
    plain = len(encode(new.view(np.uint8), old.view(np.uint8), "bfloat16").data)
    for special in (0x7F80, 0x0000):
        old[:200], new[:200] = special, special + 1
        assert len(encode(new.view(np.uint8), old.view(np.uint8), "bfloat16").data) < 1.05 * plain


def test_noise_is_stored_as_it_is() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (2, 1 << 14), np.uint8)
    assert encode(noise[0], noise[1], "bfloat16").codec is Codec.RAW
    assert encode(noise[0], None, "uint8").codec is Codec.RAW


def test_sparse_needs_no_old_bytes_and_may_be_applied_twice() -> None:
    rng = np.random.default_rng(0)
    old = codes_of("bfloat16", rng, 5000, "weights")
    new = changed(old, rng, 0.02, "mixed")
    data = encode(new.view(np.uint8), old.view(np.uint8), "bfloat16", codec=Codec.SPARSE).data
    patch = decode_patch(data, num_bytes=new.nbytes, dtype="bfloat16", old=None)
    assert np.array_equal(patch.positions, np.flatnonzero(new != old)) and np.array_equal(patch.codes, new[patch.positions])
    target = old.view(np.uint8).copy()
    assert decode_into(data, dtype="bfloat16", target=target) == len(patch.positions)
    assert decode_into(data, dtype="bfloat16", target=target) == 0
    assert np.array_equal(target, new.view(np.uint8))


def test_unaligned_and_read_only_bytes_are_taken() -> None:
    rng = np.random.default_rng(0)
    old = codes_of("bfloat16", rng, 3000, "weights")
    new = changed(old, rng, 0.05, "step")
    odd_old, odd_new = (np.frombuffer(b"x" + codes.tobytes(), np.uint8)[1:] for codes in (old, new))
    encoded = encode(odd_new, odd_old, "bfloat16")
    assert encoded.data == encode(new.view(np.uint8), old.view(np.uint8), "bfloat16").data
    assert np.array_equal(decode(memoryview(encoded.data), num_bytes=6000, dtype="bfloat16", old=odd_old), odd_new)
    target = np.empty(6001, np.uint8)[1:]
    target[:] = odd_old
    decode_into(encoded.data, dtype="bfloat16", target=target)
    assert np.array_equal(target, odd_new)


def test_two_threads_write_the_same_bytes_as_one() -> None:
    rng = np.random.default_rng(0)
    olds = [codes_of("bfloat16", rng, 20000, "weights").view(np.uint8) for _ in range(16)]
    news = [changed(old.view(np.uint16), rng, 0.02, "mixed").view(np.uint8) for old in olds]
    alone = [encode(new, old, "bfloat16").data for new, old in zip(news, olds, strict=True)]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda pair: encode(*pair, "bfloat16").data, zip(news, olds, strict=True)))
        back = list(
            pool.map(lambda pair: decode(pair[0], num_bytes=40000, dtype="bfloat16", old=pair[1]), zip(together, olds, strict=True))
        )
    assert together == alone
    assert all(np.array_equal(a, b) for a, b in zip(back, news, strict=True))


def test_what_a_person_can_fix_is_a_value_error_that_says_how() -> None:
    some = np.zeros(64, np.uint8)
    with pytest.raises(ValueError, match=r"float3.*bfloat16"):
        elements_of("float3")
    with pytest.raises(ValueError, match="CGR codes 4-, 8- and 16-bit"):
        encode(some, some, "float32", codec=Codec.CGR)
    for codec in (Codec.CGR, Codec.XOR, Codec.SPARSE):
        with pytest.raises(ValueError, match="needs the old bytes"):
            encode(some, None, "bfloat16", codec=codec)
    with pytest.raises(ValueError, match="63 bytes is not up to"):
        encode(some[:63], None, "bfloat16")
    with pytest.raises(ValueError, match="cut the tensor"):
        encode(np.zeros(MAX_ELEMENTS + 1, np.uint8), None, "uint8")
    with pytest.raises(ValueError, match="changed its size"):
        encode(some, some[:32], "bfloat16")
    with pytest.raises(ValueError, match="flat array of uint8"):
        encode(some.view(np.uint16), None, "bfloat16")
    with pytest.raises(ValueError, match="flat contiguous"):
        decode_into(b"\0", dtype="uint8", target=some[::2])


def test_a_delta_without_its_base_is_a_wrong_base() -> None:
    old = np.zeros(64, np.uint8)
    new = old.copy()
    new[10] = 1
    for codec in (Codec.CGR, Codec.XOR, Codec.SPARSE):
        data = encode(new, old, "bfloat16", codec=codec).data
        with pytest.raises(WrongBase, match="needs the old bytes"):
            decode(data, num_bytes=64, dtype="bfloat16", old=None)
        with pytest.raises(WrongBase, match="32 old ones"):
            decode(data, num_bytes=64, dtype="bfloat16", old=old[:32])


def test_an_unknown_codec_is_told_from_damage() -> None:
    with pytest.raises(UnknownFormat, match="codec 4"):
        decode(b"\x04abc", num_bytes=2, dtype="bfloat16", old=None)
    with pytest.raises(CorruptSnapshot, match="no bytes"):
        decode(b"", num_bytes=2, dtype="bfloat16", old=None)
    with pytest.raises(CorruptSnapshot, match="CGR chunk of float32"):
        decode(b"\x02abc", num_bytes=4, dtype="float32", old=np.zeros(4, np.uint8))


def test_every_torch_dtype_with_plain_bytes_has_its_elements() -> None:
    torch = pytest.importorskip("torch")
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    # Quantised tensor objects and the sub-byte integers without storage of their own are not published.
    names = {str(dtype).removeprefix("torch.") for dtype in dtypes}
    unstorable = {name for name in names if name.startswith(("q", "bits", "uint", "int")) and name not in DTYPES}
    assert names - unstorable <= set(DTYPES)
    for name in (names - unstorable) & set(DTYPES):
        assert elements_of(name).element_bytes == getattr(torch, name).itemsize
    assert set(CGR_DTYPES) - names == {"packed_uint4"}


def run_python(code: str, **env: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_import_leaves_numba_alone_and_the_setting_keeps_it_away() -> None:
    code = """
import sys
import numpy as np
from rollmill.weights.chunk import decode, encode
assert "numba" not in sys.modules
old = np.arange(512, dtype=np.uint8)
new = old.copy(); new[::9] += 1
data = encode(new, old, "bfloat16").data
assert np.array_equal(decode(data, num_bytes=512, dtype="bfloat16", old=old), new)
assert "numba" not in sys.modules
print(data.hex())
"""
    old = np.arange(512, dtype=np.uint8)
    new = old.copy()
    new[::9] += 1
    assert run_python(code, ROLLMILL_NUMBA="0") == encode(new, old, "bfloat16").data.hex()


def test_without_numba_the_numpy_coders_are_used_and_say_so() -> None:
    code = """
import logging, sys
logging.basicConfig(stream=sys.stdout, format="%(message)s")
sys.modules["numba"] = None
from rollmill.weights.chunk import backend, reference
assert backend.backend() is reference and backend.backend() is reference
"""
    assert run_python(code).count("tens of times slower, because numba cannot be imported") == 1


@pytest.mark.parametrize("failure", ["no folder", "full disk"])
def test_a_cache_that_cannot_be_written_costs_only_time(failure: str) -> None:
    code = f"""
import errno
import numpy as np
from numba.core import caching
def fail(*args, **kwargs):
    raise OSError(errno.ENOSPC, "no space left on device")
if {failure!r} == "no folder":
    caching.FunctionCache._impl_class._locator_classes = []
else:
    caching.FunctionCache.save_overload = fail
    caching.FunctionCache.load_overload = lambda *args: None
from rollmill.weights.chunk import compiled
print(compiled.decode_gaps(compiled.encode_gaps(np.arange(3, dtype=np.uint32)), 9)[0].tolist())
"""
    assert run_python(code) == "[0, 1, 2]"


def test_a_compiler_that_gives_other_bytes_is_found_out_and_numpy_does_the_work() -> None:
    code = """
import logging, sys
logging.basicConfig(stream=sys.stdout, format="%(message)s")
from rollmill.weights.chunk import backend, compiled, reference
compiled.encode_cgr = lambda new, old, elements: (b"", 0)
assert backend.backend() is reference
"""
    assert "the compiled encoder gives other bytes" in run_python(code)
