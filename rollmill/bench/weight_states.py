"""Weights to measure, as bytes: read from safetensors by their header or from a version of a weight store; needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from rollmill.weights.interop.tensor_file import Tensor, read_file
from rollmill.weights.reader import materialise
from rollmill.weights.store import find_store

State = Mapping[str, Tensor]


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
    return {spec.name: Tensor(dtype=spec.dtype, shape=spec.shape, data=data[spec.name]) for spec in schema.tensors}


def _read_file(path: Path) -> dict[str, Tensor]:
    # Copied into memory of its own: reading from disk and words across pages are no part of what is measured.
    return {name: replace(tensor, data=np.array(tensor.data)) for name, tensor in read_file(path)[0].items()}
