"""Weights to measure, as bytes: read from safetensors by their header or from a version of a weight store; needs no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rollmill.weights.reader import materialise
from rollmill.weights.schema import item_bytes_of
from rollmill.weights.store import find_store


class Tensor(NamedTuple):
    """One tensor's bytes."""

    dtype: str
    """torch's name without `torch.`."""
    shape: tuple[int, ...]
    data: np.ndarray
    """uint8, flat, row-major."""


State = Mapping[str, Tensor]
_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32", "U64": "uint64",
    "I64": "int64", "BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64", "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "F4": "float4_e2m1fn_x2",
}  # fmt: skip
_MAX_HEADER_BYTES = 100 << 20


def read_state(where: str) -> dict[str, Tensor]:
    """`FILE.safetensors`, a folder of such files, or `STORE@VERSION` (a number or `latest`)."""
    path = Path(where)
    if path.is_file():
        return _read_file(path)
    if files := sorted(path.glob("*.safetensors")) if path.is_dir() else []:
        found: dict[str, Tensor] = {}
        for file in files:
            found |= _read_file(file)
        return found
    store, at, version = where.rpartition("@")
    if not at or not (version.isdecimal() or version == "latest"):
        raise ValueError(
            f"{where!r} is no safetensors file or folder of them; a version of a store is written STORE@VERSION or STORE@latest"
        )
    return _read_version(store, version)


def check_pair(old: State, new: State) -> None:
    """A delta is between snapshots of the same tensors."""
    if old.keys() != new.keys():
        odd = sorted(old.keys() ^ new.keys())
        raise ValueError(f"{len(odd)} tensors are in one snapshot only, {odd[0]} first; give two snapshots of one model")
    for name, tensor in new.items():
        if (tensor.dtype, tensor.shape) != (old[name].dtype, old[name].shape):
            raise ValueError(
                f"{name} is {old[name].dtype} {old[name].shape} in one snapshot and {tensor.dtype} {tensor.shape} in the other"
            )


def _read_version(where: str, version: str) -> dict[str, Tensor]:
    store = find_store(where)
    if version == "latest":
        if (pointer := store.latest()) is None:
            raise ValueError(f"nothing is published in {store}; publish first or name another store")
        number = pointer.version
    else:
        number = int(version)
    _, schema, data = materialise(store, number)
    return {spec.name: Tensor(spec.dtype, spec.shape, data[spec.name]) for spec in schema.tensors}


def _read_file(path: Path) -> dict[str, Tensor]:
    whole = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)
    length = int.from_bytes(whole[:8].tobytes(), "little") if whole.size >= 8 else 0
    if not 2 <= length <= min(_MAX_HEADER_BYTES, whole.size - 8):
        raise ValueError(f"{path} does not begin as a safetensors file does")
    try:
        header = json.loads(whole[8 : 8 + length].tobytes())
    except ValueError as error:
        raise ValueError(f"the header of {path} is no JSON: {error}") from error
    body = whole[8 + length :]
    found = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in _DTYPES:
            raise ValueError(f"{name} in {path} has dtype {entry['dtype']}, which no codec knows; leave it out")
        start, stop = entry["data_offsets"]
        dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
        # A safetensors shape counts 4-bit elements, a store counts their bytes.
        if dtype == "float4_e2m1fn_x2":
            shape = (*shape[:-1], shape[-1] // 2)
        if not 0 <= start <= stop <= body.size or stop - start != math.prod(shape) * item_bytes_of(dtype):
            raise ValueError(f"{name} in {path} lies outside the file or is not {shape} of {dtype}; the file is cut short or damaged")
        # Copied into memory of its own: reading from disk and words across pages are no part of what is measured.
        found[name] = Tensor(dtype, shape, np.array(body[start:stop]))
    return found
