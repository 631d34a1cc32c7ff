"""Pure coding of one tensor's bytes, never larger than the bytes themselves; knows no file, no version and no torch.

A decoder here refuses what it can see is damaged and cannot overrun; whether the result is right is decided by the caller's digest.
"""

from __future__ import annotations

from enum import StrEnum

import numpy as np
import zstandard

from rollmill.weights.errors import CorruptSnapshot, WrongBase

_LEVEL = 1
# A bf16 tensor of real weights codes to about 0.67 of its bytes, so below this FULL cannot win often enough to pay for trying it.
_XOR_IS_GOOD = 0.5


class Coding(StrEnum):
    RAW = "raw"
    """The bytes."""
    FULL = "full"
    """Byte planes of the element width, zstd."""
    XOR = "xor"
    """Bytes xor the old bytes, then as FULL; needs the old bytes."""


def encode(new: np.ndarray, old: np.ndarray | None, itemsize: int) -> tuple[Coding, bytes | memoryview]:
    """The smallest coding of `new` (uint8), given `old` of the same length or nothing."""
    best: tuple[Coding, bytes | memoryview] = (Coding.RAW, new.data)
    if old is not None:
        assert len(old) == len(new), "a tensor that changed its size is coded without its old bytes"
        xor = _squeeze(new ^ old, itemsize)
        if len(xor) < len(new):
            best = (Coding.XOR, xor)
        if len(xor) <= _XOR_IS_GOOD * len(new):
            return best
    full = _squeeze(new, itemsize)
    return (Coding.FULL, full) if len(full) < len(best[1]) else best


def decode(coding: Coding, payload: bytes | memoryview, *, num_bytes: int, itemsize: int, old: np.ndarray | None) -> np.ndarray:
    """The bytes (uint8[num_bytes], fresh memory) that `payload` stands for."""
    if coding is Coding.RAW:
        if len(payload) != num_bytes:
            raise CorruptSnapshot(f"{len(payload)} raw bytes where {num_bytes} belong")
        return np.frombuffer(payload, np.uint8).copy()
    plain = _unsqueeze(payload, num_bytes, itemsize)
    if coding is Coding.XOR:
        if old is None or len(old) != num_bytes:
            raise WrongBase(f"a delta of {num_bytes} bytes needs old bytes of that length, not {'none' if old is None else len(old)}")
        plain ^= old
    return plain


def _squeeze(data: np.ndarray, itemsize: int) -> bytes:
    planes = np.ascontiguousarray(data.reshape(-1, itemsize).T) if itemsize > 1 else data
    return zstandard.ZstdCompressor(level=_LEVEL).compress(planes.reshape(-1).data)


def _unsqueeze(payload: bytes | memoryview, num_bytes: int, itemsize: int) -> np.ndarray:
    try:
        # The size is read before anything is allocated: a damaged frame may claim any number of bytes.
        size = zstandard.get_frame_parameters(payload).content_size
        if size != num_bytes:
            raise CorruptSnapshot(f"a frame of {size} bytes where {num_bytes} belong")
        plain = zstandard.ZstdDecompressor().decompress(payload, max_output_size=num_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptSnapshot(f"zstd refuses the payload: {error}") from error
    if len(plain) != num_bytes:
        raise CorruptSnapshot(f"{len(plain)} decoded bytes where {num_bytes} belong")
    flat = np.frombuffer(plain, np.uint8)
    return flat.reshape(itemsize, -1).T.copy().reshape(-1)
