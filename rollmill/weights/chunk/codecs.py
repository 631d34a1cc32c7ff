"""One chunk of one tensor to bytes and back, never larger than the bytes plus one; knows dtypes by name and no file, version or torch.

A decoder refuses what it can see is wrong before it writes; whether the result is the right one is decided by the caller's fingerprint.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from rollmill.weights.chunk import frames
from rollmill.weights.chunk.backend import backend
from rollmill.weights.chunk.elements import MAX_ELEMENTS, Elements, elements_of
from rollmill.weights.errors import CorruptSnapshot, UnknownFormat, WrongBase

# Under this share of the raw bytes a delta is what it should be; above it the change is odd or dense enough that another codec may win.
_DELTA_IS_GOOD = 0.25


class Codec(IntEnum):
    """The first byte of a chunk."""

    RAW = 0
    """The bytes."""
    XOR = 1
    """zstd of new xor old; what other systems read."""
    CGR = 2
    """Class-wise gaps and steps, the classes taken from the old exponents."""
    SPARSE = 3
    """Positions and new values; applying it twice is applying it once."""
    FULL = 5
    """Byte planes; needs no old bytes."""


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """One coded chunk, e.g. 1,048,576 bfloat16 of which 12,000 changed in about 10,600 bytes."""

    data: bytes
    codec: Codec
    num_changed: int
    """Addressable codes that differ (bytes for 4-bit dtypes, 64-bit halves for complex128); all of them where there is no old chunk."""


@dataclass(frozen=True, kw_only=True)
class Patch:
    """New codes and where they go, in addressable codes of the chunk (bytes for 4-bit dtypes, 64-bit halves for complex128)."""

    positions: np.ndarray
    """uint32, ascending."""
    codes: np.ndarray
    """Unsigned integers of the code's width; as many as positions."""


def encode(new: np.ndarray, old: np.ndarray | None, dtype: str, *, codec: Codec | None = None) -> Encoded:
    """Code the bytes `new` (uint8), given the bytes `old` of the same chunk or nothing; the smallest codec unless one is asked for."""
    elements = elements_of(dtype)
    _check_length(len(new), elements)
    new = _contiguous(new)
    if old is not None:
        if len(old) != len(new):
            raise ValueError(f"{len(old)} old bytes for {len(new)} new ones; a chunk that changed its size is coded without old bytes")
        old = _contiguous(old)
    if codec is not None:
        data, num_changed = _encode_as(codec, new, old, elements)
        return Encoded(data=data, codec=codec, num_changed=_num_changed(new, old, elements) if num_changed is None else num_changed)
    return _encode_smallest(new, old, elements)


def _encode_smallest(new: np.ndarray, old: np.ndarray | None, elements: Elements) -> Encoded:
    best, best_codec, num_changed = b"", Codec.RAW, None
    candidates = [Codec.FULL]
    if old is not None:
        candidates = [Codec.CGR, Codec.XOR, Codec.FULL] if elements.has_cgr else [Codec.SPARSE, Codec.XOR, Codec.FULL]
    limit = len(new) + 1
    for codec in candidates:
        data, counted = _encode_as(codec, new, old, elements)
        num_changed = counted if counted is not None else num_changed
        if len(data) < limit:
            best, best_codec, limit = data, codec, len(data)
        if codec is not Codec.FULL and limit <= _DELTA_IS_GOOD * len(new):
            break
    if best_codec is Codec.RAW:
        best = bytes([Codec.RAW]) + new.tobytes()
    return Encoded(data=best, codec=best_codec, num_changed=_num_changed(new, old, elements) if num_changed is None else num_changed)


def _encode_as(codec: Codec, new: np.ndarray, old: np.ndarray | None, elements: Elements) -> tuple[bytes, int | None]:
    """The whole chunk, and the number of changed codes where the codec counts them anyway."""
    mark = bytes([codec])
    if codec is Codec.RAW:
        return mark + new.tobytes(), None
    if codec is Codec.FULL:
        return mark + frames.encode_full(new, elements), None
    if old is None:
        raise ValueError(f"{codec.name} codes a difference and needs the old bytes; use RAW or FULL for a chunk without them")
    if codec is Codec.XOR:
        return mark + frames.encode_xor(new, old), None
    if codec is Codec.SPARSE:
        codes = _codes(new, elements)
        positions = np.flatnonzero(codes != _codes(old, elements))
        return b"".join([mark, backend().encode_gaps(positions.astype(np.uint32)), codes[positions].tobytes()]), len(positions)
    if not elements.has_cgr:
        raise ValueError(f"CGR codes 4-, 8- and 16-bit elements, not {elements.dtype}; use XOR, SPARSE or FULL")
    if elements.bits == 4:
        return mark + backend().encode_cgr(_nibbles(new), _nibbles(old), elements)[0], None
    body, num_changed = backend().encode_cgr(_codes(new, elements), _codes(old, elements), elements)
    return mark + body, num_changed


def decode(data: bytes | memoryview, *, num_bytes: int, dtype: str, old: np.ndarray | None) -> np.ndarray:
    """The bytes (uint8[num_bytes], fresh memory) that a chunk stands for."""
    elements = elements_of(dtype)
    codec, body = _open(data, num_bytes, elements, old)
    if codec is Codec.RAW:
        if len(body) != num_bytes:
            raise CorruptSnapshot(f"{len(body)} raw bytes where {num_bytes} belong")
        return np.frombuffer(body, np.uint8).copy()
    if codec is Codec.FULL:
        return frames.decode_full(body, num_bytes, elements)
    old = _needed(old, codec)
    if codec is Codec.XOR:
        return frames.decode_xor(body, old)
    new = np.array(old, copy=True, order="C")
    decode_into(data, dtype=dtype, target=new)
    return new


def decode_into(data: bytes | memoryview, *, dtype: str, target: np.ndarray) -> int:
    """Turn the old bytes in `target` into the new ones; the number of codes it changed. Any error leaves `target` as it was."""
    elements = elements_of(dtype)
    if not target.flags.c_contiguous or target.dtype != np.uint8 or target.ndim != 1:
        raise ValueError(
            f"a target is a flat contiguous array of uint8, not {target.dtype} of shape {target.shape}; view the tensor's bytes"
        )
    codec, body = _open(data, len(target), elements, target)
    if codec is Codec.CGR and elements.has_cgr and elements.bits != 4 and target.ctypes.data % 8 == 0:
        return backend().apply_cgr(body, _codes(target, elements), elements)
    if codec in (Codec.CGR, Codec.SPARSE):
        patch = _decode_patch(codec, body, len(target), elements, target)
        codes = _codes(target, elements)
        num_changed = len(patch.positions) if codec is Codec.CGR else int(np.count_nonzero(codes[patch.positions] != patch.codes))
        codes[patch.positions] = patch.codes
        return num_changed
    new = decode(data, num_bytes=len(target), dtype=dtype, old=target)
    num_changed = _num_changed(new, target, elements)
    target[:] = new
    return num_changed


def decode_patch(data: bytes | memoryview, *, num_bytes: int, dtype: str, old: np.ndarray | None) -> Patch:
    """What a chunk changes. SPARSE needs no `old` and may name codes that already hold their value; the others name those that differ."""
    elements = elements_of(dtype)
    codec, body = _open(data, num_bytes, elements, old)
    if codec in (Codec.CGR, Codec.SPARSE):
        return _decode_patch(codec, body, num_bytes, elements, old)
    old = _needed(old, codec)
    codes = _codes(decode(data, num_bytes=num_bytes, dtype=dtype, old=old), elements)
    positions = np.flatnonzero(codes != _codes(np.ascontiguousarray(old), elements))
    return Patch(positions=positions.astype(np.uint32), codes=codes[positions])


def _decode_patch(codec: Codec, body: memoryview, num_bytes: int, elements: Elements, old: np.ndarray | None) -> Patch:
    if codec is Codec.SPARSE:
        num_codes = num_bytes // elements.code_bytes
        positions, at = backend().decode_gaps(body, num_codes)
        if len(body) - at != len(positions) * elements.code_bytes:
            raise CorruptSnapshot(f"{len(body) - at} bytes of values for {len(positions)} positions of {elements.code_bytes}")
        return Patch(positions=positions, codes=np.frombuffer(body[at:], f"<u{elements.code_bytes}").copy())
    if not elements.has_cgr:
        raise CorruptSnapshot(f"a CGR chunk of {elements.dtype}")
    old = _contiguous(_needed(old, codec))
    if elements.bits != 4:
        positions, codes = backend().decode_cgr(body, _codes(old, elements), elements)
        return Patch(positions=positions, codes=codes)
    positions, codes = backend().decode_cgr(body, _nibbles(old), elements)
    # Two changed nibbles of one byte become one code: the second write goes to the same byte.
    in_bytes, index = np.unique(positions >> 1, return_inverse=True)
    merged = old[in_bytes]
    for is_high in (False, True):
        here = (positions & 1) == is_high
        at, nibble = index[here], codes[here]
        merged[at] = (merged[at] & 0x0F | nibble << 4) if is_high else (merged[at] & 0xF0 | nibble)
    return Patch(positions=in_bytes, codes=merged)


def _open(data: bytes | memoryview, num_bytes: int, elements: Elements, old: np.ndarray | None) -> tuple[Codec, memoryview]:
    _check_length(num_bytes, elements)
    view = memoryview(data).cast("B")
    if not view:
        raise CorruptSnapshot("a chunk of no bytes; even an empty one has its codec byte")
    try:
        codec = Codec(view[0])
    except ValueError:
        raise UnknownFormat(f"chunk codec {view[0]} is not known here; a newer Rollmill wrote it, or it is no chunk") from None
    if old is not None and len(old) != num_bytes:
        raise WrongBase(f"a chunk of {num_bytes} bytes was given {len(old)} old ones")
    return codec, view[1:]


def _needed(old: np.ndarray | None, codec: Codec) -> np.ndarray:
    if old is None:
        raise WrongBase(f"a {codec.name} chunk needs the old bytes and there are none; start from a full version")
    return old


def _check_length(num_bytes: int, elements: Elements) -> None:
    if num_bytes % elements.element_bytes or num_bytes > MAX_ELEMENTS * elements.element_bytes:
        raise ValueError(
            f"a chunk of {num_bytes} bytes is not up to {MAX_ELEMENTS} elements of {elements.dtype} ({elements.element_bytes} bytes each); "
            "cut the tensor at multiples of that"
        )


def _contiguous(data: np.ndarray) -> np.ndarray:
    """The kernels read whole words, so a chunk that begins off a word is copied once."""
    if data.dtype != np.uint8 or data.ndim != 1:
        raise ValueError(f"a chunk is a flat array of uint8, not {data.dtype} of shape {data.shape}; view the tensor's bytes")
    return data if data.flags.c_contiguous and data.ctypes.data % 8 == 0 else data.copy()


def _codes(data: np.ndarray, elements: Elements) -> np.ndarray:
    return data.view(f"<u{elements.code_bytes}")


def _nibbles(data: np.ndarray) -> np.ndarray:
    codes = np.empty(2 * len(data), np.uint8)
    codes[0::2] = data & 0x0F
    codes[1::2] = data >> 4
    return codes


def _num_changed(new: np.ndarray, old: np.ndarray | None, elements: Elements) -> int:
    if old is None:
        return len(new) // elements.code_bytes
    return int(np.count_nonzero(_codes(new, elements) != _codes(old, elements)))
