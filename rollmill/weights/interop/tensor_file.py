"""One safetensors file, read by its header and mapped, or written in order; bytes only, so that no machine needs torch for it.

u64 header length | header: JSON of name -> {dtype, shape, data_offsets}, "__metadata__" -> {str: str} | data
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rollmill.weights.errors import CorruptSnapshot, UnknownFormat
from rollmill.weights.schema import item_bytes_of

_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100_000_000
"""What the reference reader refuses, too."""
_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32", "U64": "uint64",
    "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64", "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu", "F4": "float4_e2m1fn_x2",
}  # fmt: skip
_NAMES = {ours: theirs for theirs, ours in _DTYPES.items()} | {"packed_uint4": "U8"}
_PAIRS = "float4_e2m1fn_x2"
"""safetensors counts both halves of a byte, torch counts the byte."""


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """A tensor without its name, e.g. `Tensor(dtype="bfloat16", shape=(2, 3), data=<12 bytes>)`."""

    dtype: str
    """As in the store's schema."""
    shape: tuple[int, ...]
    data: np.ndarray
    """uint8, row-major; nobody writes into it."""


Tensors = Mapping[str, Tensor]


def read_file(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(tensors over the mapped file, metadata). Raises CorruptSnapshot for a file that is torn or not what its header says."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < _LENGTH.size:
            raise CorruptSnapshot(f"{path} is no safetensors file: it has {size} bytes; fetch or make it again")
        # A private mapping: its arrays count as writable, for which the compiled loops exist already.
        mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), np.uint8)
    (length,) = _LENGTH.unpack(mapped[: _LENGTH.size].tobytes())
    start = _LENGTH.size + length
    if length > _MAX_HEADER_BYTES or start > size:
        raise CorruptSnapshot(
            f"{path} is no safetensors file, or torn: a header of {length} bytes in a file of {size}; fetch or make it again"
        )
    try:
        header = json.loads(mapped[_LENGTH.size : start].tobytes())
        metadata = {str(k): str(v) for k, v in (header.pop("__metadata__", None) or {}).items()}
        spans = sorted((*row["data_offsets"], name, row["dtype"], tuple(row["shape"])) for name, row in header.items())
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CorruptSnapshot(f"{path} has a header that cannot be read ({error!r}); fetch or make it again") from error
    found, at = {}, 0
    for begin, end, name, their_type, their_shape in spans:
        dtype, shape = _ours(path, name, their_type, their_shape)
        if begin != at or end - begin != math.prod(shape) * item_bytes_of(dtype):
            raise CorruptSnapshot(
                f"{path}: {name} of {their_type} {list(their_shape)} does not fill bytes {begin} to {end}; fetch or make it again"
            )
        at = end
        found[name] = Tensor(dtype=dtype, shape=shape, data=_aligned(mapped[start + begin : start + end], item_bytes_of(dtype)))
    if start + at != size:
        raise CorruptSnapshot(f"{path} has {size - start} bytes of tensors where its header promises {at}; fetch or make it again")
    return found, metadata


def write_file(path: Path, tensors: Tensors, metadata: Mapping[str, str]) -> int:
    """Write a new file, durably; returns its size. The widest elements come first, so that everything stays aligned."""
    order = sorted(tensors, key=lambda name: (-item_bytes_of(tensors[name].dtype), name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name in order:
        tensor = tensors[name]
        header[name] = {
            "dtype": their_dtype(name, tensor.dtype),
            "shape": _their_shape(tensor),
            "data_offsets": [at, at + tensor.data.nbytes],
        }
        at += tensor.data.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(_LENGTH.pack(len(text)) + text)
        for name in order:
            file.write(np.ascontiguousarray(tensors[name].data).data)
        file.flush()
        os.fsync(file.fileno())
    return _LENGTH.size + len(text) + at


def cut_into_files(sizes: Iterable[tuple[str, int]], max_file_bytes: int) -> list[list[str]]:
    """Names in the given order, as many to a file as fit; a tensor larger than a file has one of its own."""
    files: list[list[str]] = []
    room = -1
    for name, num_bytes in sizes:
        if num_bytes > room:
            files.append([])
            room = max_file_bytes
        files[-1].append(name)
        room -= num_bytes
    return files


def their_dtype(name: str, dtype: str) -> str:
    if dtype not in _NAMES:
        raise ValueError(f"{name} is {dtype}, which safetensors files cannot hold; publish it as {', '.join(sorted(_NAMES))}")
    return _NAMES[dtype]


def sync_directory(path: Path) -> None:
    """Make renames inside a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _ours(path: Path, name: str, dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    if dtype not in _DTYPES:
        raise UnknownFormat(f"{path}: {name} has dtype {dtype!r}; known are {', '.join(_DTYPES)}")
    if any(not isinstance(n, int) or n < 0 for n in shape):
        raise CorruptSnapshot(f"{path}: {name} has shape {list(shape)}; fetch or make it again")
    if _DTYPES[dtype] == _PAIRS:
        if not shape or shape[-1] % 2:
            raise UnknownFormat(f"{path}: {name} has {list(shape)} elements of half a byte; the last dimension must be even")
        shape = (*shape[:-1], shape[-1] // 2)
    return _DTYPES[dtype], shape


def _their_shape(tensor: Tensor) -> list[int]:
    if tensor.dtype == _PAIRS and tensor.shape:
        return [*tensor.shape[:-1], tensor.shape[-1] * 2]
    return list(tensor.shape)


def _aligned(data: np.ndarray, item_bytes: int) -> np.ndarray:
    return data if data.ctypes.data % item_bytes == 0 else data.copy()
