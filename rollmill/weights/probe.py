"""What is wrong with one pack, and what a pack is by its own bytes alone; reads a pack of any size through little memory."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec
import zstandard
from blake3 import blake3

from rollmill.weights.damage import Damage, Finding, finding
from rollmill.weights.errors import CorruptSnapshot, UnknownFormat
from rollmill.weights.manifest import PackRef, Route
from rollmill.weights.objects import ObjectMissing
from rollmill.weights.pack import MAGIC, TAIL_BYTES, Entry, Index, check_payload, index_range, read_index
from rollmill.weights.store import WeightStore

_PIECE_BYTES = 16 << 20
_DIGEST_BYTES = 32


class SelfDescription(msgspec.Struct, frozen=True, kw_only=True):
    """A pack whose trailing digest fits its bytes."""

    ref: PackRef
    index: Index


def identify(store: WeightStore, key: str) -> SelfDescription:
    """What the pack at `key` says of itself. Raises CorruptSnapshot when its own digest does not fit, ObjectMissing."""
    objects = store.objects
    size = objects.size(key)
    if size < len(MAGIC) + TAIL_BYTES:
        raise CorruptSnapshot(f"{key} has {size} bytes, too few for a pack")
    magic, length = objects.get_ranges(key, [(0, len(MAGIC)), (size - TAIL_BYTES, size - _DIGEST_BYTES)])
    (index_bytes,) = struct.unpack("<I", length)
    digest, trailing = _digest(store, key, size), _trailing(store, key, size)
    if magic != MAGIC or digest != trailing or index_bytes > size - len(MAGIC) - TAIL_BYTES:
        raise CorruptSnapshot(f"{key}: BLAKE3 of its bytes is {digest.hex()[:16]}, at its end stands {trailing.hex()[:16]}")
    start = size - TAIL_BYTES - index_bytes
    (index,) = objects.get_ranges(key, [(start, size - TAIL_BYTES)])
    ref = PackRef(key=key, num_bytes=size, digest=digest.hex(), index_bytes=index_bytes, index_digest=blake3(index).hexdigest())
    return SelfDescription(ref=ref, index=read_index(index, ref))


def pack_damage(store: WeightStore, route: Route, ref: PackRef, *, deep: bool) -> Finding | None:
    """Why a pack is not the one its route names; None when it is (without `deep`: as far as its size tells)."""
    for last_try in (False, True):
        # A second look before the pack is blamed: the first may have met a bad cable.
        try:
            found = _pack_damage(store, route, ref, deep)
        except ObjectMissing:
            found = finding(Damage.PACK_MISSING, ref.key, f"{route.name.key} needs it")
        except CorruptSnapshot as error:
            found = finding(Damage.PACK_TRUNCATED, ref.key, str(error))
        if found is None or last_try:
            return found
    raise AssertionError("unreachable: the last try returns")


def _pack_damage(store: WeightStore, route: Route, ref: PackRef, deep: bool) -> Finding | None:
    size = store.objects.size(ref.key)
    if size == ref.num_bytes and not deep:
        return None
    if size == ref.num_bytes and _digest(store, ref.key, size).hex() == ref.digest == _trailing(store, ref.key, size).hex():
        return _misfit(store, route, ref)
    # Not the bytes that were published. Another whole pack in this place is a mistake of people, the rest is a fault of a disk.
    try:
        other = identify(store, ref.key).index
        return finding(Damage.PACK_OF_ANOTHER_VERSION, ref.key, f"a whole pack of version {other.version} on {other.base} lies there")
    except (CorruptSnapshot, UnknownFormat, zstandard.ZstdError):
        pass
    if size != ref.num_bytes:
        return finding(Damage.PACK_TRUNCATED, ref.key, f"has {size} bytes, published were {ref.num_bytes}")
    try:
        index = _index(store, ref)
    except (CorruptSnapshot, UnknownFormat) as error:
        return finding(Damage.PACK_INDEX_WRONG, ref.key, str(error))
    return finding(Damage.PACK_FLIPPED, ref.key, _flipped_cells(store, ref, index) or "bytes outside its cells and index are wrong")


def _misfit(store: WeightStore, route: Route, ref: PackRef) -> Finding | None:
    """Of a pack whose bytes are those that were published: whether they are what its route says."""
    try:
        index = _index(store, ref)
    except CorruptSnapshot as error:
        return finding(Damage.PACK_INDEX_WRONG, ref.key, str(error))
    except UnknownFormat as error:
        return finding(Damage.OTHER_FORM, ref.key, str(error))
    if (index.version, index.base, index.schema) != (route.version, route.base, route.schema):
        what = f"it holds version {index.version} on {index.base}, its route says {route.version} on {route.base}"
        return finding(Damage.PACK_OF_ANOTHER_VERSION, ref.key, what)
    wrong = _flipped_cells(store, ref, index)
    return finding(Damage.PACK_INDEX_WRONG, ref.key, f"its checks do not fit its payloads: {wrong}") if wrong else None


def _index(store: WeightStore, ref: PackRef) -> Index:
    (tail,) = store.objects.get_ranges(ref.key, [index_range(ref)])
    return read_index(tail, ref)


def _flipped_cells(store: WeightStore, ref: PackRef, index: Index) -> str:
    """Which cells are not what was written, in words; empty when all are."""
    wrong = []
    for batch in _batches(index):
        payloads = store.objects.get_ranges(ref.key, [(entry.start, entry.stop) for entry in batch])
        for entry, payload in zip(batch, payloads, strict=True):
            try:
                check_payload(payload, entry, ref.key)
            except CorruptSnapshot:
                wrong.append(f"cell {entry.cell} of tensor {entry.tensor}")
    return "" if not wrong else f"{len(wrong)} cells are not what was written, first {wrong[0]}"


def _batches(index: Index) -> Iterator[list[Entry]]:
    batch: list[Entry] = []
    for entry in index.entries():
        batch.append(entry)
        if entry.stop - batch[0].start > _PIECE_BYTES:
            yield batch
            batch = []
    if batch:
        yield batch


def _digest(store: WeightStore, key: str, size: int) -> bytes:
    """BLAKE3 of everything before the trailing digest."""
    hasher = blake3()
    for start in range(0, size - _DIGEST_BYTES, _PIECE_BYTES):
        (piece,) = store.objects.get_ranges(key, [(start, min(start + _PIECE_BYTES, size - _DIGEST_BYTES))])
        hasher.update(piece)
    return hasher.digest()


def _trailing(store: WeightStore, key: str, size: int) -> bytes:
    return store.objects.get_ranges(key, [(size - _DIGEST_BYTES, size)])[0]
