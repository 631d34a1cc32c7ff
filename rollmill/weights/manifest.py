"""The small records of a weight store and their sealed file form, in which a flipped bit is an error; opens no file.

one line of JSON \\n BLAKE3 of that line in hex \\n
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeVar

import msgspec
from blake3 import blake3

from rollmill.weights.errors import CorruptSnapshot, UnknownFormat
from rollmill.weights.fingerprint import Fingerprint

MANIFEST_SCHEMA = 1
Record = TypeVar("Record", bound=msgspec.Struct)


class Kind(StrEnum):
    FULL = "full"
    DELTA = "delta"


class PackRef(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One way to reach a version: from nothing (`base_version` None) or from the bytes of another version."""

    name: str
    """File name below `packs/`, e.g. `v00000016.delta`."""
    base_version: int | None
    num_bytes: int
    digest: str
    """BLAKE3 of the pack before its trailer, hex."""


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    dtype: str
    shape: tuple[int, ...]
    fingerprint: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One published version: what it is and every way to reach it. An anchor has a full pack beside its delta.

    >>> Manifest(version=1, kind=Kind.DELTA, base_version=0, previous=0, packs=(), fingerprint="0" * 16, tensors=(), raw_bytes=0,
    ...          step=1, run_id="r", created=0.0).file_name
    'v00000001.json'
    """

    schema: int = MANIFEST_SCHEMA
    version: int
    kind: Kind
    """FULL when a full pack exists, whatever else does."""
    base_version: int | None
    """What the delta was made from; None when there is only a full pack."""
    previous: int | None
    """The version that was latest when this one was published; None for the first. Following it lists what was ever served."""
    packs: tuple[PackRef, ...]
    fingerprint: str
    """The total over all tensors, 16 hex digits."""
    tensors: tuple[TensorEntry, ...]
    raw_bytes: int
    """Bytes of all tensors in the serving dtype."""
    step: int
    """The optimiser step that made these weights."""
    run_id: str
    created: float
    """Unix seconds."""

    @property
    def file_name(self) -> str:
        return f"v{self.version:08d}.json"

    def print_of(self) -> Fingerprint:
        return Fingerprint(total=self.fingerprint, tensors={entry.name: entry.fingerprint for entry in self.tensors})

    def full_pack(self) -> PackRef | None:
        return next((pack for pack in self.packs if pack.base_version is None), None)


class Pointer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of `latest`, and of `reserved`."""

    version: int


def seal(record: msgspec.Struct) -> bytes:
    line = msgspec.json.encode(record)
    return line + b"\n" + blake3(line).hexdigest().encode() + b"\n"


def unseal(data: bytes, kind: type[Record], what: str) -> Record:
    line, _, rest = data.partition(b"\n")
    if rest != blake3(line).hexdigest().encode() + b"\n":
        raise CorruptSnapshot(f"{what} is damaged: its digest line does not fit its content")
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.MsgspecError as error:
        raise UnknownFormat(f"{what} is whole but of another form: {error}; read it with the Rollmill that wrote it") from error
