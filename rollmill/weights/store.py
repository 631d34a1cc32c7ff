"""The seam between trainer and replicas: immutable packs and manifests, and one `latest` that only moves forward.

Bytes are durable before the manifest, the manifest before the pointer; a number once reserved is never given out again.
Knows nothing of tensors: it moves bytes and sealed records.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Protocol

from rollmill.weights.errors import CorruptSnapshot, LatestMoved, UnknownFormat
from rollmill.weights.manifest import MANIFEST_SCHEMA, Manifest, Pointer, seal, unseal

_NUMBER = re.compile(r"v(\d{8,})\.")
_LOCK_TIMEOUT_S = 60.0
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}


class SnapshotStore(Protocol):
    """What a publisher, a follower and the checks need. Names of packs and manifests are those of the manifest records."""

    def latest(self) -> int | None:
        """The version replicas should move to; None before the first. Raises CorruptSnapshot."""

    def versions(self) -> list[int]:
        """Every version with a manifest, ascending, whether or not `latest` ever pointed at it."""

    def manifest(self, version: int) -> Manifest:
        """Raises CorruptSnapshot when it is missing or damaged, UnknownFormat when it is too new."""

    def read_pack(self, name: str) -> bytes:
        """The bytes as they lie there, not yet checked. Raises CorruptSnapshot when the pack is missing."""

    def reserve(self) -> int:
        """A version number that nobody was given before or will be given again."""

    def put_pack(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Durable when it returns."""

    def publish(self, manifest: Manifest, *, expected: int | None) -> None:
        """Write the manifest, then move `latest` from `expected` to it. Raises LatestMoved when it is elsewhere."""

    def quarantine(self, name: str, reason: str) -> bool:
        """Take a pack or manifest out of use for everybody; False when this process may not write here."""

    def quarantined(self) -> dict[str, str]:
        """name -> reason."""


class DirectoryStore:
    """A store in one directory, safe among the processes of one machine."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        for folder in ("packs", "manifests", "quarantine"):
            (self.path / folder).mkdir(parents=True, exist_ok=True)
        self._swept = False

    def latest(self) -> int | None:
        try:
            data = (self.path / "latest").read_bytes()
        except FileNotFoundError:
            return None
        hint = f"{self.path / 'latest'} (delete it: the next publisher points it at a new full version)"
        return unseal(data, Pointer, hint).version

    def versions(self) -> list[int]:
        return sorted(_numbers(self.path / "manifests"))

    def manifest(self, version: int) -> Manifest:
        path = self.path / "manifests" / f"v{version:08d}.json"
        try:
            found = unseal(path.read_bytes(), Manifest, str(path))
        except FileNotFoundError as error:
            raise CorruptSnapshot(f"{path} is missing") from error
        if found.version != version:
            raise CorruptSnapshot(f"{path} describes version {found.version}")
        if found.schema != MANIFEST_SCHEMA:
            raise UnknownFormat(f"{path} has schema {found.schema}, this Rollmill reads {MANIFEST_SCHEMA}; use the one that wrote it")
        return found

    def read_pack(self, name: str) -> bytes:
        path = self.path / "packs" / _plain(name)
        try:
            return path.read_bytes()
        except FileNotFoundError as error:
            raise CorruptSnapshot(f"{path} is missing") from error

    def reserve(self) -> int:
        with self._lock():
            self._sweep()
            version = self._highest_reserved() + 1
            _write_durably(self.path / "reserved", [seal(Pointer(version=version))])
            return version

    def put_pack(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        _write_durably(self.path / "packs" / _plain(name), chunks)

    def publish(self, manifest: Manifest, *, expected: int | None) -> None:
        with self._lock():
            current = self.latest()
            if current != expected:
                raise LatestMoved(
                    f"cannot publish version {manifest.version}: latest is {current}, this publisher had left it at {expected}; "
                    f"two trainers write to {self.path}: stop one of them or give it another store"
                )
            assert current is None or manifest.version > current, "versions only grow"
            path = self.path / "manifests" / manifest.file_name
            assert not path.exists(), "a reserved number is published at most once"
            for pack in manifest.packs:
                assert (self.path / "packs" / pack.name).stat().st_size == pack.num_bytes, "bytes first, manifest second"
            _write_durably(path, [seal(manifest)])
            _write_durably(self.path / "latest", [seal(Pointer(version=manifest.version))])

    def quarantine(self, name: str, reason: str) -> bool:
        folder = "manifests" if name.endswith(".json") else "packs"
        try:
            # The reason first: a pack that vanished without one would look like a loss.
            _write_durably(self.path / "quarantine" / f"{_plain(name)}.why", [reason.encode()])
            with suppress(FileNotFoundError):
                os.replace(self.path / folder / name, self.path / "quarantine" / name)
        except OSError as error:
            if error.errno in _READ_ONLY:
                return False
            raise
        return True

    def quarantined(self) -> dict[str, str]:
        folder = self.path / "quarantine"
        return {path.stem: path.read_text(errors="replace") for path in sorted(folder.glob("v*.why")) if _NUMBER.match(path.name)}

    def _highest_reserved(self) -> int:
        try:
            return unseal((self.path / "reserved").read_bytes(), Pointer, "reserved").version
        except (FileNotFoundError, CorruptSnapshot):
            # Lost with its disk block, or a new store: every number that left a trace counts as given out.
            folders = (self.path / folder for folder in ("packs", "manifests", "quarantine"))
            return max((number for folder in folders for number in _numbers(folder)), default=-1)

    def _sweep(self) -> None:
        """Remove what killed writers left half-written; a living writer holds a lock on its file."""
        if self._swept:
            return
        for folder in ("packs", "manifests", "quarantine", "."):
            for path in (self.path / folder).glob("*.tmp"):
                with suppress(FileNotFoundError, BlockingIOError), path.open("rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink(missing_ok=True)
        self._swept = True

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """One writer of `reserved` and `latest` at a time; the kernel frees it when its holder dies."""
        deadline = time.monotonic() + _LOCK_TIMEOUT_S
        with (self.path / "lock").open("a") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise TimeoutError(
                            f"{self.path / 'lock'} was held by another process for {_LOCK_TIMEOUT_S:.0f} s; find it with `fuser` and end it"
                        ) from None
                    time.sleep(0.005)
            yield


def version_in(name: str) -> int:
    """The version a pack or manifest file belongs to."""
    found = _NUMBER.match(name)
    assert found, f"{name!r} is not a name of this store"
    return int(found[1])


def _numbers(folder: Path) -> set[int]:
    return {int(found[1]) for path in folder.iterdir() if (found := _NUMBER.match(path.name))}


def _plain(name: str) -> str:
    if not _NUMBER.match(name) or "/" in name:
        raise CorruptSnapshot(f"{name!r} is not the name of a pack or manifest")
    return name


@contextmanager
def _locked(path: Path) -> Iterator[IO[bytes]]:
    """A new file under a lock that says its writer lives."""
    while True:
        with path.open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            # A sweep may have come between the two lines above and unlinked the file as nobody's.
            if os.fstat(file.fileno()).st_nlink:
                yield file
                return


def _write_durably(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Readers see the old file or the whole new one, also after a power cut."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    num_bytes = 0
    try:
        with _locked(temporary) as file:
            for chunk in chunks:
                num_bytes += len(chunk)
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        if error.errno == errno.ENOSPC:
            text = f"no space left on device for {path} (at least {num_bytes / 1e6:.1f} MB needed); free space there or move the store"
            raise OSError(errno.ENOSPC, text) from error
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
