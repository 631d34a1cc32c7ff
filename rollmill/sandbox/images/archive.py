"""Tar archives from strangers, read front to back: no header, count or size makes us hold or write more than the bounds allow.

Knows compression and the tar format; not where the entries go.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
import math
import tarfile
import zlib
from collections.abc import Iterator
from typing import BinaryIO, cast

import msgspec
import zstandard

_CHUNK = 1 << 20
_HEADER_BYTES = 1 << 20
"""Largest long name or extended header: a program that reads one holds it in memory."""
BROKEN = (tarfile.TarError, zlib.error, lzma.LZMAError, zstandard.ZstdError, OSError, EOFError, RecursionError, OverflowError)
"""What reading a damaged archive raises."""
_MAGIC = ((b"\x1f\x8b", "gzip"), (b"BZh", "bzip2"), (b"\xfd7zXZ\x00", "xz"), (b"\x28\xb5\x2f\xfd", "zstd"))


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """How much one archive may hold."""

    num_entries: int = 2_000_000
    num_bytes: int = 64 << 30
    """Unpacked, holes included."""


class Forward:
    """A stream that is read once, front to back, never more than `_HEADER_BYTES` at a time, and counted."""

    def __init__(self, source: BinaryIO, bounds: Bounds) -> None:
        self._source = source
        self._left = bounds.num_bytes + 2048 * bounds.num_entries
        self._at = 0
        self._hash = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        if size < 0 or size > _HEADER_BYTES:
            raise ValueError(f"the archive has a header of {size} bytes; the largest allowed is {_HEADER_BYTES}")
        data = b""
        while len(data) < size and (more := self._source.read(size - len(data))):
            data = data + more if data else more
        self._left -= len(data)
        if self._left < 0:
            raise ValueError("the archive unpacks to more bytes than allowed")
        self._at += len(data)
        self._hash.update(data)
        return data

    def tell(self) -> int:
        return self._at

    def seek(self, position: int, whence: int = 0) -> int:
        if whence or position < self._at:
            raise ValueError(f"the archive leads back from byte {self._at} to {position}")
        while position > self._at:
            if not self.read(min(_CHUNK, position - self._at)):
                break
        return self._at

    def rest(self) -> str:
        """Read what follows the last entry; the SHA-256 of everything."""
        while self.read(_CHUNK):
            pass
        return self._hash.hexdigest()


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One entry, with numbers that a file system takes."""

    path: str
    kind: str
    """`file`, `folder`, `link`, `hard`, `pipe`, or `other`: devices, and what is no file at all."""
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    num_bytes: int
    target: str = ""


_KINDS = {
    tarfile.REGTYPE: "file", tarfile.AREGTYPE: "file", tarfile.CONTTYPE: "file", tarfile.GNUTYPE_SPARSE: "file", tarfile.DIRTYPE: "folder",
    tarfile.SYMTYPE: "link", tarfile.LNKTYPE: "hard", tarfile.FIFOTYPE: "pipe",
}  # fmt: skip


def compression(head: bytes) -> str:
    """What the first six bytes of a file say: `gzip`, `bzip2`, `xz`, `zstd`, or nothing for plain bytes."""
    return next((kind for magic, kind in _MAGIC if head.startswith(magic)), "")


def plain(source: BinaryIO) -> BinaryIO:
    """The same stream without its compression; the source must be able to go back to its start."""
    kind = compression(source.read(6))
    source.seek(0)
    match kind:
        case "gzip":
            return cast(BinaryIO, gzip.GzipFile(fileobj=source))
        case "bzip2":
            return cast(BinaryIO, bz2.BZ2File(source))
        case "xz":
            return cast(BinaryIO, lzma.LZMAFile(source))
        case "zstd":
            return cast(BinaryIO, zstandard.ZstdDecompressor().stream_reader(source, read_across_frames=True))
    return source


def entries(stream: Forward, bounds: Bounds, *, name: str) -> Iterator[tuple[Entry, Iterator[bytes]]]:
    """Every entry with its bytes, which must be taken, or not, before the next entry is asked for."""
    num_entries = num_bytes = 0
    try:
        with tarfile.open(fileobj=cast(BinaryIO, stream), mode="r:", errorlevel=2) as tar:
            while (member := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined]
                num_entries += 1
                kind = _KINDS.get(member.type, "other")
                if kind == "file":
                    num_bytes += member.size
                if num_entries > bounds.num_entries or num_bytes > bounds.num_bytes or member.size < 0:
                    raise ValueError(f"at {member.name[:80]!r}: more than {bounds.num_entries} entries or {bounds.num_bytes} bytes")
                yield _entry(member, kind), _content(tar, member) if kind == "file" else iter(())
    except BROKEN as error:
        raise ValueError(f"archive {name} is damaged: {error or type(error).__name__}; fetch it again") from error
    except ValueError as error:
        raise ValueError(f"archive {name} is refused: {error}") from error


def _entry(member: tarfile.TarInfo, kind: str) -> Entry:
    mtime_s = float(member.mtime)
    mtime_ns = int(mtime_s * 1e9) if math.isfinite(mtime_s) and 0 <= mtime_s < 2**33 else 0
    return Entry(
        path=member.name, kind=kind, mode=member.mode & 0o7777, uid=member.uid, gid=member.gid, mtime_ns=mtime_ns,
        num_bytes=member.size if kind == "file" else 0, target=member.linkname,
    )  # fmt: skip


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> Iterator[bytes]:
    file = tar.extractfile(member)
    assert file is not None
    left = member.size
    while left:
        try:
            data = file.read(min(_CHUNK, left))
        except BROKEN as error:
            raise ValueError(f"the archive is damaged: {error or type(error).__name__}") from error
        if not data:
            raise ValueError(f"the archive ends {left} bytes early")
        left -= len(data)
        yield data
