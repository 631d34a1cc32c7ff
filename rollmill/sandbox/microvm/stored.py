"""Saved machines as blobs: memory and devices compressed, the root disk beside them, one manifest that names both."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zstandard

from rollmill.sandbox.microvm.machine import MachineConfig, Saved
from rollmill.sandbox.records import SandboxSpec
from rollmill.sandbox.snapshots.store import BlobStore
from rollmill.sandbox.snapshots.threads import PIECE_BYTES, in_thread

if TYPE_CHECKING:
    from rollmill.sandbox.microvm.box import MicrovmSnapshot

SCHEMA = 1
_LEVEL = 1
"""Memory is mostly zero or code: higher levels take ten times as long for a few per cent."""


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """Where the talk with an agent was when its machine was saved."""

    begun: bytes
    """The part of a frame the owner had heard."""
    num_requests: int
    hostname: str
    shell: str


class MachineManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One saved machine."""

    kind: str = "machine"
    schema: int = SCHEMA
    maker: str
    """Monitor, its version and accelerator: only the same can read it."""
    spec: SandboxSpec
    standing: Standing
    memory_bytes: int
    files: dict[str, str]
    """Name -> digest of the blob, zstd: the monitor's own files."""
    disk: str
    """Digest of the root disk's blob, as it is."""


async def save(store: BlobStore, snapshot: MicrovmSnapshot) -> str:
    saved = snapshot.saved
    files = {name: (await store.put(_packed(fd))).digest for name, fd in saved.files.items()}
    manifest = MachineManifest(
        maker=snapshot.maker,
        spec=snapshot.spec,
        standing=snapshot.standing,
        memory_bytes=saved.config.memory_bytes,
        files=files,
        disk=(await store.put(_plain(saved.config.disk))).digest,
    )
    return await store.put_manifest(msgspec.json.encode(manifest))


async def load(store: BlobStore, digest: str, *, maker: str, cache: Path) -> tuple[MachineManifest, Saved]:
    """The disk goes to the cache, where machines share it; the rest into files without a name."""
    try:
        manifest = msgspec.json.decode(await store.get_manifest(digest), type=MachineManifest)
    except msgspec.ValidationError as error:
        raise ValueError(f"{digest} in {store.name} is no saved machine ({error}); restore it with the backend that saved it") from None
    if manifest.schema != SCHEMA:
        raise ValueError(f"snapshot {digest} has schema {manifest.schema}, this version reads {SCHEMA}; save it again")
    if manifest.maker != maker:
        raise ValueError(f"snapshot {digest} was saved by {manifest.maker} and cannot be read by {maker}; restore it where that runs")
    disk = await _cached(store, manifest.disk, cache)
    saved = Saved({}, MachineConfig(name="restored", disk=str(disk), memory_bytes=manifest.memory_bytes))
    try:
        for name, blob in manifest.files.items():
            saved.files[name] = await _unpacked(store, blob)
    except BaseException:
        saved.close()
        raise
    return manifest, saved


async def _plain(path: str) -> AsyncIterator[bytes]:
    with await in_thread(Path(path).open, "rb") as file:
        while data := await in_thread(file.read, PIECE_BYTES):
            yield data


async def _packed(fd: int) -> AsyncIterator[bytes]:
    packer, at = zstandard.ZstdCompressor(level=_LEVEL).compressobj(), 0
    while data := await in_thread(os.pread, fd, PIECE_BYTES, at):
        at += len(data)
        if piece := await in_thread(packer.compress, data):
            yield piece
    yield packer.flush()


async def _unpacked(store: BlobStore, digest: str) -> int:
    unpacker = zstandard.ZstdDecompressor().decompressobj()
    with tempfile.TemporaryFile() as file:
        async for piece in store.get(digest):
            await in_thread(file.write, await in_thread(unpacker.decompress, piece))
        file.flush()
        return os.dup(file.fileno())


async def _cached(store: BlobStore, digest: str, cache: Path) -> Path:
    path = cache / f"{digest}.blob"
    if not await in_thread(path.is_file):
        await in_thread(lambda: cache.mkdir(parents=True, exist_ok=True))
        with tempfile.NamedTemporaryFile(dir=cache, delete=False) as file:
            try:
                async for piece in store.get(digest):
                    await in_thread(file.write, piece)
                file.flush()
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    return path
