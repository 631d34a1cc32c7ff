"""From the bytes of whole tensors, wherever they come from, to one more version of a store; the small sibling of the publisher.

A version is a delta on latest whenever the tensor table is the same, and nothing is published when the bits are, too.
"""

from __future__ import annotations

import logging
import os
import socket
from dataclasses import dataclass

import numpy as np

from rollmill.weights.encode import commit, write_part
from rollmill.weights.errors import CorruptSnapshot
from rollmill.weights.interop.tensor_file import Tensor, Tensors
from rollmill.weights.manifest import Kind, Version
from rollmill.weights.proof import combine, fingerprint_bytes
from rollmill.weights.reader import materialise
from rollmill.weights.schema import Schema, make_schema
from rollmill.weights.shard import all_of
from rollmill.weights.store import WeightStore

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What became of a set of tensors."""

    record: Version
    is_new: bool
    """False: latest had these bits already."""
    kind: Kind
    num_bytes: int
    """Of the pack written; 0 when nothing was."""


def take_in(
    store: WeightStore,
    tensors: Tensors,
    *,
    step: int | None = None,
    run_id: str = "",
    note: str = "",
    held: Tensors | None = None,
    always: bool = False,
) -> Taken:
    """Publish tensors as the next version, the same bits again only when that is asked for (`always`).

    `step` and `run_id` go on from latest when they are not given; `held` are the bytes of latest, when the caller has them.
    """
    if not tensors:
        raise ValueError("there are no tensors to publish; give a safetensors file or a directory of them")
    pointer = store.latest()
    latest = None if pointer is None else store.version(pointer.version)
    schema = _schema(store, tensors, latest)
    new = {name: tensor.data for name, tensor in tensors.items()}
    fits = latest is not None and latest.schema == schema.digest
    if latest is not None and fits and not always and latest.fingerprint == _total(schema, new):
        return Taken(record=latest, is_new=False, kind=Kind.ALIAS, num_bytes=0)
    old = _bytes_of(store, latest, held) if latest is not None and fits else None
    kind = Kind.FULL if old is None else Kind.DELTA
    base = None if old is None or latest is None else latest.version
    version = store.reserve()
    part = write_part(store, schema, kind=kind, version=version, base=base, held=all_of(schema), new=new, old=old)
    record = commit(
        store, schema, [part], kind=kind, version=version, base=base, expected=None if latest is None else latest.version,
        step=(0 if latest is None else latest.step + 1) if step is None else step,
        run_id=run_id or ("imported" if latest is None else latest.run_id), writer=f"{socket.gethostname()}-{os.getpid()}",
        epoch=0 if pointer is None else pointer.epoch, note=note,
    )  # fmt: skip
    return Taken(record=record, is_new=True, kind=kind, num_bytes=part.num_bytes)


def tensors_of(schema: Schema, data: dict[str, np.ndarray]) -> Tensors:
    return {spec.name: Tensor(dtype=spec.dtype, shape=spec.shape, data=data[spec.name]) for spec in schema.tensors if spec.name in data}


def _schema(store: WeightStore, tensors: Tensors, latest: Version | None) -> Schema:
    plain = {name: (_plain(tensor.dtype), tensor.shape) for name, tensor in tensors.items()}
    if latest is not None:
        # The same tensors with the cuts and the quantiser that the store already knows, so that a delta is possible.
        known = store.schema(latest.schema)
        if plain == {spec.name: (_plain(spec.dtype), spec.shape) for spec in known.tensors}:
            return known
    return make_schema((name, tensor.dtype, tensor.shape) for name, tensor in tensors.items())


def _plain(dtype: str) -> str:
    """The dtype that is left of it after a safetensors file."""
    return "uint8" if dtype == "packed_uint4" else dtype


def _total(schema: Schema, data: dict[str, np.ndarray]) -> str:
    return combine({s.name: fingerprint_bytes(s.name, s.dtype, s.shape, data[s.name]) for s in schema.tensors}).total


def _bytes_of(store: WeightStore, latest: Version, held: Tensors | None) -> dict[str, np.ndarray] | None:
    if held is not None:
        return {name: tensor.data for name, tensor in held.items()}
    try:
        return materialise(store, latest.version)[2]
    except CorruptSnapshot as error:
        log.warning("version %d cannot be rebuilt (%s); the next version is a full one", latest.version, error)
        return None
