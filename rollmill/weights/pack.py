"""One pack: the coded tensors of one snapshot as one checked run of bytes; knows no store and no path.

    magic "RMPACK01" | u32 header length | header (MessagePack) | payloads in header order | BLAKE3 (32 bytes) of all before

The digest over everything decides whether the bytes are ours, a digest per tensor whether the decoded bytes are.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

import msgspec
import numpy as np
from blake3 import blake3

from rollmill.weights import codec
from rollmill.weights.bits import Bits, dtype_of, num_bytes_of
from rollmill.weights.codec import Coding
from rollmill.weights.errors import CorruptSnapshot, UnknownFormat, WrongBase

MAGIC = b"RMPACK01"
_LENGTH = struct.Struct("<I")
_TRAILER_BYTES = 32


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where one tensor lies in a pack; payloads follow each other in the order of the entries."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    coding: Coding
    num_bytes: int
    """Length of the payload."""
    digest: bytes
    """BLAKE3, 16 bytes, of the decoded bytes."""
    base_digest: bytes = b""
    """The same of the old bytes an XOR needs; empty for the other codings."""


class Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: int
    base_version: int | None
    """None: the pack holds every tensor. Otherwise it holds those that differ from that version."""
    entries: tuple[Entry, ...]


class Pack(msgspec.Struct, frozen=True, kw_only=True):
    """An encoded pack, ready to be written."""

    chunks: tuple[bytes | memoryview, ...]
    num_bytes: int
    digest: str
    """BLAKE3 of everything before the trailer, hex; the trailer holds the same."""


def build(*, version: int, new: Mapping[str, Bits], base_version: int | None = None, old: Mapping[str, Bits] | None = None) -> Pack:
    """A full pack of `new`, or with `old` (same names, dtypes and shapes) a pack of what changed since."""
    assert (base_version is None) == (old is None)
    entries: list[Entry] = []
    payloads: list[bytes | memoryview] = []
    for name, bits in new.items():
        before = None if old is None else old[name].data
        if before is not None and np.array_equal(bits.data, before):
            continue
        coding, payload = codec.encode(bits.data, before, bits.itemsize)
        base_digest = _digest(before) if before is not None and coding is Coding.XOR else b""
        payloads.append(payload)
        entries.append(
            Entry(
                name=name, dtype=bits.dtype, shape=bits.shape, coding=coding,
                num_bytes=len(payload), digest=_digest(bits.data), base_digest=base_digest,
            )
        )  # fmt: skip
    header = msgspec.msgpack.encode(Header(version=version, base_version=base_version, entries=tuple(entries)))
    chunks = [MAGIC + _LENGTH.pack(len(header)) + header, *payloads]
    hasher = blake3()
    for chunk in chunks:
        hasher.update(chunk)
    chunks.append(hasher.digest())
    return Pack(chunks=tuple(chunks), num_bytes=sum(len(chunk) for chunk in chunks), digest=hasher.hexdigest())


def check(data: bytes, digest: str) -> None:
    """Refuse `data` unless it is, to the byte, the pack with this digest."""
    if len(data) < len(MAGIC) + _LENGTH.size + _TRAILER_BYTES or not data.startswith(MAGIC):
        raise CorruptSnapshot(f"{len(data)} bytes that do not begin as a pack")
    found = blake3(memoryview(data)[:-_TRAILER_BYTES]).digest()
    if found != data[-_TRAILER_BYTES:] or found.hex() != digest:
        raise CorruptSnapshot(f"BLAKE3 of the bytes is {found.hex()[:16]}, published was {digest[:16]}")


def read(data: bytes, *, digest: str, old: Mapping[str, Bits]) -> tuple[Header, dict[str, Bits]]:
    """The tensors a pack carries, decoded on top of `old`, each proved by its digest."""
    check(data, digest)
    body = len(MAGIC) + _LENGTH.size
    (length,) = _LENGTH.unpack_from(data, len(MAGIC))
    view = memoryview(data)[body:-_TRAILER_BYTES]
    try:
        header = msgspec.msgpack.decode(view[:length], type=Header)
    except msgspec.MsgspecError as error:
        raise UnknownFormat(f"the header of the pack is of another form: {error}; read it with the Rollmill that wrote it") from error
    if any(entry.num_bytes < 0 for entry in header.entries) or length + sum(entry.num_bytes for entry in header.entries) != len(view):
        raise CorruptSnapshot("the payloads do not fill the pack")
    at, decoded = length, {}
    for entry in header.entries:
        decoded[entry.name] = _decode(entry, view[at : at + entry.num_bytes], old.get(entry.name))
        at += entry.num_bytes
    return header, decoded


def _decode(entry: Entry, payload: memoryview, old: Bits | None) -> Bits:
    if entry.coding is Coding.XOR and not _fits(entry, old):
        raise WrongBase(f"{entry.name}: the held bytes are not those this delta was made from")
    data = codec.decode(
        entry.coding, payload, num_bytes=num_bytes_of(entry.dtype, entry.shape),
        itemsize=dtype_of(entry.dtype).itemsize, old=None if old is None else old.data,
    )  # fmt: skip
    if _digest(data) != entry.digest:
        raise CorruptSnapshot(f"{entry.name}: the decoded bytes are not those that were published")
    return Bits(dtype=entry.dtype, shape=entry.shape, data=data)


def _fits(entry: Entry, old: Bits | None) -> bool:
    return old is not None and (old.dtype, old.shape) == (entry.dtype, entry.shape) and _digest(old.data) == entry.base_digest


def _digest(data: np.ndarray) -> bytes:
    return blake3(data.data).digest(length=16)
