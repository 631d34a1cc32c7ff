"""Where a command log keeps the bytes that went in and came out: short ones in the line, long ones as blobs in a folder beside the logs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

from blake3 import blake3

from rollmill.sandbox.snapshots.events import Payload
from rollmill.sandbox.snapshots.store import BlobStore, open_store

INLINE_BYTES = 64 << 10
"""A blob costs a synced file; what an agent usually reads and writes fits a line."""


async def keep(log: Path, data: bytes) -> Payload:
    """The payload to write into a line of `log`; it can be fetched when this returns."""
    if len(data) <= INLINE_BYTES:
        return Payload(digest=blake3(data).hexdigest(), num_bytes=len(data), data=data)
    blob = await _blobs(log).put(_one(data))
    return Payload(digest=blob.digest, num_bytes=blob.num_bytes)


async def fetch(log: Path, payload: Payload) -> bytes:
    """The bytes again, verified."""
    if payload.data is not None:
        return payload.data
    return b"".join([piece async for piece in _blobs(log).get(payload.digest)])


def _blobs(log: Path) -> BlobStore:
    return open_store(log.parent / "payloads")


async def _one(data: bytes) -> AsyncIterator[bytes]:
    yield data
