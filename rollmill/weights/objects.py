"""The seam below the weight store: named byte strings that are durable, conditional and listed in order.

What a verb returned for holds after a power cut; a reader sees an old object or a whole new one. Knows nothing of weights or versions.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol
from urllib.parse import unquote, urlsplit

from blake3 import blake3

# No leading dot: such names belong to the implementations (temporary files, locks, a server's own folders).
_KEY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}(/[A-Za-z0-9_-][A-Za-z0-9._-]{0,199})*")
_MAX_KEY_BYTES = 700
"""S3 takes 1024 with the prefix of the store."""


class ObjectMissing(LookupError):
    """There is no object of this name."""


class SwapLost(ValueError):
    """The object is not, or no longer, the one that was to be replaced; look again before the next try."""


class StoreUnavailable(OSError):
    """No answer, a refusal or a broken device: what was being written may or may not be there."""


class ReadOnly(PermissionError):
    """This process may read here and not write."""


class Objects(Protocol):
    """Where bytes lie. A key is plain names joined by '/'; no key may lie below another key.

    A key is either written once (`put`, `create`) or swapped for ever: mixing them loses one of the writes.
    Every verb may raise StoreUnavailable, every writing one ReadOnly, and ValueError for a key that is not plain.
    """

    def get(self, key: str) -> tuple[bytes, str]:
        """The bytes and their tag. Raises ObjectMissing."""

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """The bytes of each (start, stop). Raises ObjectMissing, and CorruptSnapshot when the object ends before a stop."""

    def size(self, key: str) -> int:
        """Bytes. Raises ObjectMissing."""

    def put(self, key: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Write or replace; all or nothing. Chunks are streamed and must not change before this returns."""

    def create(self, key: str, data: bytes) -> bool:
        """Write unless something is there; False when there is, which then stays as it was."""

    def swap(self, key: str, data: bytes, *, expected: str | None) -> str:
        """Replace the object tagged `expected` (None: there must be none) and return the new tag. Raises SwapLost.

        Equal bytes may have equal tags: whoever must see A to B to A puts a counter into the bytes.
        """

    def list(self, prefix: str, *, after: str = "") -> Iterator[str]:
        """Every key below the folder `prefix` ("" for all) that is greater than `after`, ascending as plain strings.

        `after` is a key or a folder, there or not.
        """

    def delete(self, keys: Sequence[str]) -> None:
        """Take them away; those that are missing are fine."""

    def describe(self) -> str:
        """For people; holds no credentials."""


def open_objects(where: str | os.PathLike[str]) -> Objects:
    """`/a/path` or `file:///a/path` is a Directory; `s3://`, `gs://` and `az://` are a Bucket (its module says how to write them)."""
    from rollmill.weights.directory import Directory  # which stands on this module

    text = os.fspath(where)
    if "://" not in text:
        return Directory(text)
    parts = urlsplit(text)
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost") or not parts.path:
            raise ValueError(f"{text!r} does not name a path of this machine; write file:///a/path")
        return Directory(unquote(parts.path))
    if parts.scheme in ("s3", "gs", "az"):
        from rollmill.weights.bucket import open_bucket  # obstore is loaded by those who use a bucket

        return open_bucket(text)
    raise ValueError(f"cannot open {parts.scheme}://: a weight store is a path, file://, s3://, gs:// or az://")


def is_plain(name: str) -> bool:
    """Whether it could be a key: what else lies in a folder or a bucket is not ours."""
    return _KEY.fullmatch(name) is not None


def plain_key(key: str) -> str:
    """The key itself. Raises ValueError for one that could leave the store or hide in it."""
    if not is_plain(key) or len(key) > _MAX_KEY_BYTES:
        raise ValueError(
            f"{key[:100]!r} is no key: it is up to {_MAX_KEY_BYTES} characters long, names joined by '/', "
            "each of letters, digits, '.', '_' and '-' and not beginning with '.'"
        )
    return key


def plain_folder(prefix: str) -> str:
    """The name of a folder, or "" for all, without a slash at its end."""
    folder = prefix.removesuffix("/")
    return plain_key(folder) if folder else ""


def content_tag(data: bytes) -> str:
    return blake3(data).hexdigest(length=16)
