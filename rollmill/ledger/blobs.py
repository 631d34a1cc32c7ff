"""The run's content-addressed blob folder: a blob either reads back bit for bit or raises; it knows nothing of episodes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import zstandard
from blake3 import blake3

from rollmill.records import BlobRef

TEMP_PREFIX = ".put-"


class CorruptBlob(ValueError):
    """A blob that is missing, torn or changed."""

    def __init__(self, path: Path, expected: str, found: str) -> None:
        super().__init__(f"blob {path} is damaged: expected {expected}, found {found}; restore the file or drop the group as corrupt_blob")
        self.path = path
        self.expected = expected
        self.found = found


class BlobStore:
    """Blobs below `root`, at `root/ab/abcd...`, each one zstd frame; the address is the BLAKE3 of the bytes that were put.

    The address covers the content, not the compressed file: another zstd release writes other bytes for the same content.
    """

    def __init__(self, root: Path | str, *, fsync: bool = True) -> None:
        self.root = Path(root)
        self._fsync = fsync

    def path(self, ref: BlobRef) -> Path:
        return self.root / ref.digest[:2] / ref.digest

    def has(self, ref: BlobRef) -> bool:
        return self.path(ref).is_file()

    def put(self, content: bytes) -> BlobRef:
        """Store `content` and return its address; putting the same content again changes nothing, or heals a damaged file."""
        ref = BlobRef(digest=blake3(content).hexdigest(), num_bytes=len(content))
        # Compressors are not shared between calls: they are not thread-safe, and making one costs microseconds.
        frame = zstandard.ZstdCompressor(level=1, write_content_size=True).compress(content)
        path = self.path(ref)
        if _read(path) == frame:
            return ref
        path.parent.mkdir(parents=True, exist_ok=True)
        fd, name = tempfile.mkstemp(prefix=TEMP_PREFIX, dir=path.parent)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(frame)
                if self._fsync:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(name, path)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise
        if self._fsync:
            # The file's name, and that of a new folder, are durable only when the folders holding them are.
            _sync_folder(path.parent)
            _sync_folder(self.root)
        return ref

    def get(self, ref: BlobRef) -> bytes:
        """The bytes that were put, verified; CorruptBlob otherwise."""
        path = self.path(ref)
        expected = f"{ref.num_bytes} bytes with BLAKE3 {ref.digest}"
        frame = _read(path)
        if frame is None:
            raise CorruptBlob(path, expected, "no file")
        try:
            # Read the declared size first: a flipped size must not make us allocate it.
            declared = zstandard.get_frame_parameters(frame).content_size
            if declared != ref.num_bytes:
                raise CorruptBlob(path, expected, f"a frame of {declared} bytes")
            content = zstandard.ZstdDecompressor().decompress(frame)
        except zstandard.ZstdError as error:
            raise CorruptBlob(path, expected, f"{len(frame)} bytes that are no whole zstd frame ({error})") from error
        found = blake3(content).hexdigest()
        if len(content) != ref.num_bytes or found != ref.digest:
            raise CorruptBlob(path, expected, f"{len(content)} bytes with BLAKE3 {found}")
        return content

    def collect(self, referenced: Iterable[str], *, before: float | None = None) -> int:
        """Remove every blob whose digest is not in `referenced`, and abandoned temporary files; return the bytes freed.

        A blob is put before the ledger refers to it. While writers run, pass `before` (a file time): younger files stay.
        """
        keep = set(referenced)
        freed = 0
        for path in self.root.glob("??/*"):
            if path.name in keep:
                continue
            try:
                stat = path.stat()
                if before is None or stat.st_mtime < before:
                    path.unlink()
                    freed += stat.st_size
            except FileNotFoundError:
                continue  # a writer renamed its temporary file meanwhile
        return freed


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
