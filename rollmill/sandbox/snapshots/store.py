"""Blobs by their BLAKE3 digest, in a folder or a bucket: what was put is there whole or not at all, and no byte leaves unverified.

A stream passes through a file of this machine on its way up and down, so nothing is held in memory, a blob that lies there already is not
sent again, and a damaged one is noticed before its first byte is used. Knows nothing of layers. Credentials come from the provider's
environment variables and are never printed.

    /a/path  file:///a/path  memory://name
    s3://bucket/prefix?region=eu-west-1      s3://bucket/prefix?endpoint=http://127.0.0.1:9000
    gs://bucket/prefix                       az://container/prefix?account=name
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import AsyncIterable, AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol
from urllib.parse import unquote, urlsplit

import msgspec
from blake3 import blake3

from rollmill.records import Boundary, RunFailure
from rollmill.sandbox.snapshots.threads import PIECE_BYTES, in_steps, in_thread

_DIGEST = re.compile(r"[0-9a-f]{64}")
_STALE_S = 86_400.0
"""A temporary file older than this belongs to a writer that was killed."""


class BlobMissing(ValueError):
    """The store has no such blob."""


class BlobDamaged(ValueError):
    """What lies in the store is not what its name says."""


class Blob(msgspec.Struct, frozen=True, kw_only=True):
    """What `put` stored."""

    digest: str
    """BLAKE3 of the bytes, 64 hex digits."""
    num_bytes: int


class Place(Protocol):
    """Where blobs lie: keys with whole values. Failures of the place itself are `RunFailure(Boundary.SANDBOX)`."""

    name: str
    """For people; holds no credentials."""

    async def size(self, key: str) -> int | None:
        """Bytes; None when it is not there."""

    async def fetch(self, key: str) -> BinaryIO:
        """A file of this machine with the value, at its beginning; the caller closes it. Raises BlobMissing."""

    async def store(self, key: str, file: BinaryIO) -> None:
        """Write or replace with what the file holds; durable and whole when this returns."""

    async def delete(self, key: str) -> None:
        """Take it away; again is harmless."""

    async def keys(self, folder: str) -> list[str]:
        """Every key below a folder, sorted."""

    def scratch(self) -> BinaryIO:
        """An empty file of this machine that `store` takes, gone when closed."""


def open_store(where: str | os.PathLike[str]) -> BlobStore:
    """The store at a path or URL; nothing is made or asked before it is used."""
    text = os.fspath(where)
    scheme = urlsplit(text).scheme if "://" in text else ""
    if scheme in ("", "file"):
        parts = urlsplit(text)
        if scheme and (parts.netloc not in ("", "localhost") or not parts.path):
            raise ValueError(f"{text!r} does not name a path of this machine; write file:///a/path")
        return BlobStore(Folder(Path(unquote(parts.path) if scheme else text)))
    from rollmill.sandbox.snapshots.bucket import open_bucket  # obstore is loaded by those who use it

    return BlobStore(open_bucket(text))


@contextmanager
def working(name: str) -> Iterator[None]:
    """A disk that fails is a failure of ours; an `OSError` would pass for one that a program in a box met."""
    try:
        yield
    except OSError as error:
        raise RunFailure(Boundary.SANDBOX, f"{name}: {error.strerror or error}; look at its disk and rights") from error


class BlobStore:
    """Blobs under `blobs/`, and small records that name them under `manifests/`; both by digest."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self.name = place.name

    async def put(self, chunks: AsyncIterable[bytes]) -> Blob:
        """Store a stream. Equal streams are stored once; one that fails or is cancelled leaves nothing."""
        with working(self.name):
            scratch = self._place.scratch()
        with scratch as file:
            digest, num_bytes = blake3(), 0
            async for chunk in chunks:
                with working(self.name):
                    await in_thread(_take, file, digest, chunk)
                num_bytes += len(chunk)
            blob = Blob(digest=digest.hexdigest(), num_bytes=num_bytes)
            # A blob of another length is damaged, and this puts it right.
            with working(self.name):
                if await self._place.size(_blob_key(blob.digest)) != num_bytes:
                    await in_thread(file.flush)
                    await self._place.store(_blob_key(blob.digest), file)
        return blob

    async def get(self, digest: str) -> AsyncIterator[bytes]:
        """The bytes of a blob, verified before the first is given. Raises BlobMissing and BlobDamaged."""
        with await self._verified(_blob_key(digest), digest) as file:
            async for piece in in_steps(_pieces(file)):
                yield piece

    async def open(self, digest: str) -> BinaryIO:
        """A file of this machine with the verified bytes of a blob; the caller closes it. Raises as `get`."""
        return await self._verified(_blob_key(digest), digest)

    async def has(self, digest: str) -> bool:
        return await self._place.size(_blob_key(digest)) is not None

    async def delete(self, digest: str) -> None:
        await self._place.delete(_blob_key(digest))

    async def digests(self) -> list[str]:
        """Every blob, sorted."""
        return [key.rpartition("/")[2] for key in await self._place.keys("blobs")]

    async def put_manifest(self, data: bytes) -> str:
        """Store a small record; its digest."""
        digest = blake3(data).hexdigest()
        if await self._place.size(_manifest_key(digest)) != len(data):
            with working(self.name), self._place.scratch() as file:
                await in_thread(file.write, data)
                await in_thread(file.flush)
                await self._place.store(_manifest_key(digest), file)
        return digest

    async def get_manifest(self, digest: str) -> bytes:
        with await self._verified(_manifest_key(digest), digest) as file:
            return await in_thread(file.read)

    async def manifests(self) -> list[str]:
        """Digests of every record, sorted."""
        return [key.rpartition("/")[2].removesuffix(".json") for key in await self._place.keys("manifests")]

    async def delete_manifest(self, digest: str) -> None:
        await self._place.delete(_manifest_key(digest))

    async def _verified(self, key: str, digest: str) -> BinaryIO:
        with working(self.name):
            file = await self._place.fetch(key)
        try:
            found = blake3()
            while data := await in_thread(file.read, 8 * PIECE_BYTES):
                await in_thread(found.update, data)
            if found.hexdigest() != digest:
                raise BlobDamaged(f"{key} in {self.name} is damaged: its bytes have digest {found.hexdigest()}; delete it and save again")
            file.seek(0)
        except BaseException:
            file.close()
            raise
        return file


class Folder:
    """A folder of this machine: written beside, synced, renamed."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self.name = str(self._root)

    async def size(self, key: str) -> int | None:
        try:
            return (await in_thread((self._root / key).stat)).st_size
        except FileNotFoundError:
            return None

    async def fetch(self, key: str) -> BinaryIO:
        try:
            return await in_thread((self._root / key).open, "rb")
        except FileNotFoundError:
            raise BlobMissing(f"{key} is not in {self.name}; check the digest and the store") from None

    async def store(self, key: str, file: BinaryIO) -> None:
        await in_thread(self._store, key, file)

    def _store(self, key: str, file: BinaryIO) -> None:
        path = self._root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        os.fsync(file.fileno())
        os.link(file.name, held := f"{file.name}.whole")
        os.replace(held, path)
        for folder in (path.parent, path.parent.parent):
            sync_folder(folder)

    async def delete(self, key: str) -> None:
        await in_thread((self._root / key).unlink, missing_ok=True)

    async def keys(self, folder: str) -> list[str]:
        return await in_thread(self._keys, folder)

    def _keys(self, folder: str) -> list[str]:
        return sorted(str(path.relative_to(self._root)) for path in (self._root / folder).rglob("*") if path.is_file())

    def scratch(self) -> BinaryIO:
        folder = self._root / ".tmp"
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.iterdir():
            if old.lstat().st_mtime < time.time() - _STALE_S:
                old.unlink(missing_ok=True)
        return tempfile.NamedTemporaryFile(prefix="put-", dir=folder)  # type: ignore[return-value]


def _blob_key(digest: str) -> str:
    return f"blobs/{_checked(digest)[:2]}/{digest}"


def _manifest_key(digest: str) -> str:
    return f"manifests/{_checked(digest)}.json"


def _checked(digest: str) -> str:
    if not _DIGEST.fullmatch(digest):
        raise ValueError(f"{digest[:80]!r} is no digest: it has 64 hex digits")
    return digest


def _take(file: BinaryIO, digest: blake3, chunk: bytes) -> None:
    file.write(chunk)
    digest.update(chunk)


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    while data := file.read(PIECE_BYTES):
        yield data


def sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
