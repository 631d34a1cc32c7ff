"""The codecs that lean on zstd, XOR and FULL: whole chunks as bytes; a frame is believed only when its size is the one that belongs."""

from __future__ import annotations

import struct

import numpy as np
import zstandard

from rollmill.weights.chunk.elements import Elements
from rollmill.weights.errors import CorruptSnapshot

_LEVEL = 1
# A plane of mantissas may shrink by a few bytes by luck; that does not pay for decompressing it.
_WORTH = 63 / 64


def encode_xor(new: np.ndarray, old: np.ndarray) -> bytes:
    return _compress(new ^ old)


def decode_xor(body: bytes | memoryview, old: np.ndarray) -> np.ndarray:
    return _decompress(body, len(old)) ^ old


def encode_full(new: np.ndarray, elements: Elements) -> bytes:
    """Planes from the most significant byte down, each as a frame where that is clearly smaller."""
    planes = _split(new, elements)
    packed, lengths, parts = 0, b"", []
    for index, plane in enumerate(planes):
        frame = _compress(plane, is_entropy=elements.is_float)
        if len(frame) + 4 < _WORTH * len(plane):
            packed |= 1 << index
            lengths += struct.pack("<I", len(frame))
            parts.append(frame)
        else:
            parts.append(plane.tobytes())
    return b"".join([bytes([packed]), lengths, *parts])


def decode_full(body: bytes | memoryview, num_bytes: int, elements: Elements) -> np.ndarray:
    view = memoryview(body)
    num_planes = elements.code_bytes
    num_codes = num_bytes // num_planes
    if not view or view[0] >> num_planes:
        raise CorruptSnapshot(f"planes marked {bytes(view[:1])!r} where a code has {num_planes} bytes")
    packed = view[0]
    at = 1 + 4 * packed.bit_count()
    if len(view) < at:
        raise CorruptSnapshot(f"{len(view)} bytes end within the lengths of the planes")
    lengths = iter(struct.unpack_from(f"<{packed.bit_count()}I", view, 1))
    parts = []
    for index in range(num_planes):
        is_frame = packed >> index & 1
        length = next(lengths) if is_frame else num_codes
        part = view[at : at + length]
        if len(part) != length:
            raise CorruptSnapshot(f"plane {index} has {len(part)} bytes of {length}")
        parts.append(_decompress(part, num_codes) if is_frame else np.frombuffer(part, np.uint8))
        at += length
    if at != len(view):
        raise CorruptSnapshot(f"{len(view) - at} bytes after the last plane")
    return _join(parts, elements)


def _split(data: np.ndarray, elements: Elements) -> list[np.ndarray]:
    if elements.code_bytes == 1:
        return [data]
    codes = data.view(f"<u{elements.code_bytes}")
    if elements.is_float:
        codes = (codes << 1) | (codes >> (elements.bits - 1))
    planes = codes.view(np.uint8).reshape(-1, elements.code_bytes)
    return [np.ascontiguousarray(planes[:, index]) for index in reversed(range(elements.code_bytes))]


def _join(planes: list[np.ndarray], elements: Elements) -> np.ndarray:
    if elements.code_bytes == 1:
        return planes[0].copy()
    joined = np.empty((len(planes[0]), elements.code_bytes), np.uint8)
    for index, plane in enumerate(reversed(planes)):
        joined[:, index] = plane
    codes = joined.reshape(-1).view(f"<u{elements.code_bytes}")
    if elements.is_float:
        codes = (codes >> 1) | (codes << (elements.bits - 1))
    return codes.view(np.uint8)


def _compress(data: np.ndarray, *, is_entropy: bool = False) -> bytes:
    if not is_entropy:
        return zstandard.ZstdCompressor(level=_LEVEL).compress(data.data)
    # Exponents repeat by chance, and each repetition zstd finds costs more than it saves: with hardly a memory for them it is
    # left with its entropy coder. On bf16 weights 9 % smaller and twice as fast; runs of one byte are still found.
    params = zstandard.ZstdCompressionParameters.from_level(_LEVEL, source_size=len(data), hash_log=6, min_match=7)
    return zstandard.ZstdCompressor(compression_params=params).compress(data.data)


def _decompress(frame: bytes | memoryview, num_bytes: int) -> np.ndarray:
    try:
        # The size is read before anything is allocated: a damaged frame may claim any number of bytes.
        size = zstandard.get_frame_parameters(frame).content_size
        if size != num_bytes:
            raise CorruptSnapshot(f"a frame of {size} bytes where {num_bytes} belong")
        plain = zstandard.ZstdDecompressor().decompress(frame, max_output_size=num_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptSnapshot(f"zstd refuses the frame: {error}") from error
    if len(plain) != num_bytes:
        raise CorruptSnapshot(f"{len(plain)} decoded bytes where {num_bytes} belong")
    return np.frombuffer(plain, np.uint8)
