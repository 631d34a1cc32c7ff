"""One pack: coded cells of one route and an index of them, checked as a whole and cell by cell; knows no store.

    magic "RMPACK02" | cell payloads | index (zstd of MessagePack) | u32 index length | BLAKE3 (32 bytes) of all before

A reader of everything checks the last digest; a reader of some cells checks the index by the digest its route names and each
payload by the eight bytes the index holds. What a cell decodes to is proved by its part of the tensor's fingerprint.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import msgspec
import zstandard
from blake3 import blake3

from rollmill.weights.errors import CorruptSnapshot, UnknownFormat
from rollmill.weights.manifest import PackRef

MAGIC = b"RMPACK02"
_LENGTH = struct.Struct("<I")
_DIGEST_BYTES = 32
TAIL_BYTES = _LENGTH.size + _DIGEST_BYTES
_MAX_INDEX_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Coded:
    """One cell as it is stored."""

    tensor: int
    """Place of its tensor in the schema."""
    cell: int
    """Place of the cell in its tensor."""
    payload: bytes | memoryview
    num_changed: int
    proof: int
    """Lane 0 of the fingerprint's sum over the cell's new words."""


class Index(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the cells of a pack lie: columns of equal length, payloads in this order from the magic on."""

    version: int
    base: int | None
    schema: str
    tensors: list[int]
    cells: list[int]
    lengths: list[int]
    num_changed: list[int]
    proofs: bytes
    """u64 little-endian each."""
    checks: bytes
    """First eight bytes of each payload's BLAKE3."""

    def entries(self) -> Iterator[Entry]:
        at = len(MAGIC)
        for i, (tensor, cell, length) in enumerate(zip(self.tensors, self.cells, self.lengths, strict=True)):
            proof = int.from_bytes(self.proofs[8 * i : 8 * i + 8], "little")
            yield Entry(tensor, cell, at, at + length, self.num_changed[i], proof, self.checks[8 * i : 8 * i + 8])
            at += length


@dataclass(frozen=True, slots=True)
class Entry:
    tensor: int
    cell: int
    start: int
    stop: int
    num_changed: int
    proof: int
    check: bytes


@dataclass(kw_only=True)
class PackWriter:
    """Turns a stream of cells into a stream of bytes, so that a pack of any size passes through little memory."""

    key: str
    version: int
    base: int | None
    schema: str
    num_changed: int = 0
    ref: PackRef | None = None
    """Known when `stream` has ended."""
    _columns: tuple[list[int], list[int], list[int], list[int]] = field(default_factory=lambda: ([], [], [], []))

    def stream(self, cells: Iterable[Coded]) -> Iterator[bytes | memoryview]:
        hasher, num_bytes = blake3(MAGIC), len(MAGIC)
        yield MAGIC
        tensors, places, lengths, changed = self._columns
        proofs, checks = bytearray(), bytearray()
        for cell in cells:
            tensors.append(cell.tensor)
            places.append(cell.cell)
            lengths.append(len(cell.payload))
            changed.append(cell.num_changed)
            proofs += cell.proof.to_bytes(8, "little")
            checks += payload_check(cell.payload)
            hasher.update(cell.payload)
            num_bytes += len(cell.payload)
            self.num_changed += cell.num_changed
            yield cell.payload
        index = Index(
            version=self.version, base=self.base, schema=self.schema, tensors=tensors, cells=places,
            lengths=lengths, num_changed=changed, proofs=bytes(proofs), checks=bytes(checks),
        )  # fmt: skip
        tail = zstandard.ZstdCompressor(level=3).compress(msgspec.msgpack.encode(index))
        hasher.update(tail)
        hasher.update(_LENGTH.pack(len(tail)))
        yield tail + _LENGTH.pack(len(tail)) + hasher.digest()
        self.ref = PackRef(
            key=self.key, num_bytes=num_bytes + len(tail) + TAIL_BYTES, digest=hasher.hexdigest(),
            index_bytes=len(tail), index_digest=blake3(tail).hexdigest(),
        )  # fmt: skip


def payload_check(payload: bytes | memoryview) -> bytes:
    return blake3(payload).digest(length=8)


def check_whole(data: bytes | memoryview, ref: PackRef) -> None:
    """Refuse `data` unless it is, to the byte, the pack that `ref` names."""
    view = memoryview(data)
    if len(view) != ref.num_bytes or bytes(view[: len(MAGIC)]) != MAGIC:
        raise CorruptSnapshot(f"{ref.key}: {len(view)} bytes that do not begin as a pack of {ref.num_bytes}")
    found = blake3(view[:-_DIGEST_BYTES]).digest()
    if found != bytes(view[-_DIGEST_BYTES:]) or found.hex() != ref.digest:
        raise CorruptSnapshot(f"{ref.key}: BLAKE3 of the bytes is {found.hex()[:16]}, published was {ref.digest[:16]}")


def index_range(ref: PackRef) -> tuple[int, int]:
    """Where the index of a pack lies."""
    stop = ref.num_bytes - TAIL_BYTES
    if stop - ref.index_bytes < len(MAGIC):
        raise CorruptSnapshot(f"{ref.key}: an index of {ref.index_bytes} bytes does not fit into a pack of {ref.num_bytes}")
    return stop - ref.index_bytes, stop


def read_index(tail: bytes | memoryview, ref: PackRef) -> Index:
    """The index out of the bytes at `index_range`."""
    if blake3(tail).hexdigest() != ref.index_digest:
        raise CorruptSnapshot(f"{ref.key}: its index is not the one that was published")
    try:
        plain = zstandard.ZstdDecompressor().decompress(tail, max_output_size=_MAX_INDEX_BYTES)
        index = msgspec.msgpack.decode(plain, type=Index)
    except zstandard.ZstdError as error:
        raise CorruptSnapshot(f"{ref.key}: its index cannot be unpacked: {error}") from error
    except msgspec.MsgspecError as error:
        raise UnknownFormat(f"{ref.key}: its index is of another form: {error}; read it with the Rollmill that wrote it") from error
    columns = (index.tensors, index.cells, index.lengths, index.num_changed, index.proofs[::8], index.checks[::8])
    fills = len(MAGIC) + sum(index.lengths) == index_range(ref)[0]
    if len({len(column) for column in columns}) != 1 or min(index.lengths, default=0) < 0 or not fills:
        raise CorruptSnapshot(f"{ref.key}: its index does not fit its payloads")
    return index


def check_payload(payload: bytes | memoryview, entry: Entry, key: str) -> None:
    if payload_check(payload) != entry.check:
        raise CorruptSnapshot(f"{key}: cell {entry.cell} of tensor {entry.tensor} is not the one that was published")
