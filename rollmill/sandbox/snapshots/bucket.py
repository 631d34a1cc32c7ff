"""A place for blobs in a bucket of S3, Google Cloud Storage or Azure, or in this process's memory; owns requests and their deadlines."""

from __future__ import annotations

import re
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import parse_qsl, urlsplit

from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import AzureStore, GCSStore, MemoryStore, S3Store

from rollmill.records import Boundary, RunFailure
from rollmill.sandbox.snapshots.store import BlobMissing
from rollmill.sandbox.snapshots.threads import in_thread

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

    AnyStore = S3Store | GCSStore | AzureStore | MemoryStore

_PART_BYTES = 8 << 20
"""Of one request up. S3 takes 10,000 parts, so a blob has at most 84 GB."""
_IN_FLIGHT = 4
_PATIENCE = timedelta(seconds=60)
_SETTINGS = {"s3": ("endpoint", "region"), "gs": ("endpoint",), "az": ("endpoint", "account")}
_ENDPOINT = {"s3": "aws_endpoint_url_s3", "gs": "base_url", "az": "endpoint"}
_memory: dict[str, MemoryStore] = {}
"""memory://NAME is one store for the whole process, as the other addresses are one for everybody."""


def open_bucket(url: str) -> Bucket:
    parts = urlsplit(url)
    where = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}".rstrip("/")
    if parts.scheme == "memory":
        return Bucket(_memory.setdefault(where, MemoryStore()), name=where)
    if parts.scheme not in _SETTINGS:
        raise ValueError(f"cannot open {parts.scheme}://; a snapshot store is a path, file://, memory://, s3://, gs:// or az://")
    if "@" in parts.netloc:
        raise ValueError("a bucket URL holds no credentials; put them into the environment variables of the provider")
    if not parts.netloc:
        raise ValueError(f"{where!r} names no bucket; write {parts.scheme}://bucket/prefix")
    settings = dict(parse_qsl(parts.query, keep_blank_values=True))
    if unknown := [name for name in settings if name not in _SETTINGS[parts.scheme]]:
        raise ValueError(f"{where} does not take {unknown[0]!r}; it takes {', '.join(_SETTINGS[parts.scheme])}")
    endpoint = settings.get("endpoint", "")
    if "endpoint" in settings and not re.fullmatch(r"https?://[^/?#@]+(/[^?#@]*)?", endpoint):
        raise ValueError(f"the endpoint of {where} is no address; write http://host:port or https://host")
    client: ClientConfig = {
        "allow_http": endpoint.startswith("http://"),
        "connect_timeout": timedelta(seconds=5),
        "timeout": _PATIENCE,
        "user_agent": "rollmill",
    }
    retry: RetryConfig = {
        "max_retries": 10,
        "retry_timeout": _PATIENCE,
        "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=2), "base": 2},
    }
    config: dict[str, Any] = {_ENDPOINT[parts.scheme]: endpoint} if endpoint else {}
    config |= {{"region": "region", "account": "account_name"}[key]: settings[key] for key in ("region", "account") if key in settings}
    kind: Any = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}[parts.scheme]
    try:
        store = kind(parts.netloc, prefix=parts.path.strip("/") or None, config=config, client_options=client, retry_config=retry)
    except BaseError as error:
        raise ValueError(f"cannot open {where}: {_short(error)}") from None
    return Bucket(store, name=f"{where} at {endpoint}" if endpoint else where)


class Bucket:
    """`Place` in a bucket. An upload that is broken off stays invisible; the bucket's own rule for unfinished uploads removes it."""

    def __init__(self, store: AnyStore, *, name: str) -> None:
        self._store = store
        self.name = name

    async def size(self, key: str) -> int | None:
        try:
            with self._answers(key):
                return int((await self._store.head_async(key))["size"])
        except BlobMissing:
            return None

    async def fetch(self, key: str) -> BinaryIO:
        file = self.scratch()
        try:
            with self._answers(key):
                size = int((await self._store.head_async(key))["size"])
                # By ranges, so that each request is short enough for its deadline however long the blob is.
                for start in range(0, size, _PART_BYTES):
                    data = await self._store.get_range_async(key, start=start, end=min(start + _PART_BYTES, size))
                    await in_thread(file.write, memoryview(data))
            file.seek(0)
        except BaseException:
            file.close()
            raise
        return file

    async def store(self, key: str, file: BinaryIO) -> None:
        size = file.seek(0, 2)
        file.seek(0)
        with self._answers(key):
            if size <= _PART_BYTES:
                await self._store.put_async(key, await in_thread(file.read), use_multipart=False)
            else:
                await self._store.put_async(key, _parts(file), use_multipart=True, chunk_size=_PART_BYTES, max_concurrency=_IN_FLIGHT)

    async def delete(self, key: str) -> None:
        try:
            with self._answers(key):
                await self._store.delete_async(key)
        except BlobMissing:
            return

    async def keys(self, folder: str) -> list[str]:
        with self._answers(folder):
            return sorted([entry["path"] async for batch in self._store.list(folder, chunk_size=1000) for entry in batch])

    def scratch(self) -> BinaryIO:
        return tempfile.TemporaryFile(prefix="rollmill-blob-")

    @contextmanager
    def _answers(self, key: str) -> Iterator[None]:
        """Errors in our words. The originals are not chained: their text repeats request addresses, which can carry a signature."""
        try:
            yield
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                raise ValueError(f"{self.name}: the bucket does not exist; create it or correct its name") from None
            raise BlobMissing(f"{key} is not in {self.name}; check the digest and the store") from None
        except (PermissionDeniedError, UnauthenticatedError) as error:
            raise ValueError(f"{self.name} refuses access to {key}; check the credentials: {_short(error)}") from None
        except BaseError as error:
            words = f"{self.name}: no good answer for {key}; check the endpoint and the network: {_short(error)}"
            raise RunFailure(Boundary.SANDBOX, words) from None


async def _parts(file: BinaryIO) -> AsyncIterator[bytes]:
    while data := await in_thread(file.read, _PART_BYTES):
        yield data


def _short(error: Exception) -> str:
    """One line without addresses: those of signed requests hold secrets."""
    return re.sub(r"https?://\S+", "(address)", str(error).split("\n", 1)[0])[:200]
