"""The seam below the weight store: named byte strings that are durable, conditional and listed in order, and a directory of them.

What a verb returned for holds after a power cut; a reader sees an old object or a whole new one. Knows nothing of weights or versions.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Protocol
from urllib.parse import unquote, urlsplit

from blake3 import blake3

from rollmill.weights.errors import CorruptSnapshot

# No leading dot: such names belong to the implementations (temporary files, locks, a server's own folders).
_KEY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}(/[A-Za-z0-9_-][A-Za-z0-9._-]{0,199})*")
_MAX_KEY_BYTES = 700
"""S3 takes 1024 with the prefix of the store."""
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}
_FULL = {errno.ENOSPC, errno.EDQUOT}
_PLACE_ATTEMPTS = 100


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


def plain_key(key: str) -> str:
    """The key itself. Raises ValueError for one that could leave the store or hide in it."""
    if not _KEY.fullmatch(key) or len(key) > _MAX_KEY_BYTES:
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


class Directory:
    """Objects as files below one folder, safe among processes of one machine or one shared file system with working `flock`.

    Written here because object store libraries for local files neither fsync nor replace conditionally. A tag is the BLAKE3 of the content:
    times and inode numbers come again, so they cannot tell that a file was replaced twice. Nothing is made before the first write.
    """

    def __init__(self, path: str | os.PathLike[str], *, lock_timeout_s: float = 60.0) -> None:
        self.path = Path(path)
        self._temporary = self.path / ".tmp"
        self._lock_timeout_s = lock_timeout_s
        self._prepared = False
        self._settled: set[int] = set()

    def get(self, key: str) -> tuple[bytes, str]:
        with self._reading(key) as file:
            data = file.read()
        return data, content_tag(data)

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        with self._reading(key) as file:
            found = [_pread(file.fileno(), start, stop) for start, stop in ranges]
        for data, (start, stop) in zip(found, ranges, strict=True):
            if len(data) != stop - start:
                raise CorruptSnapshot(f"{key} in {self.describe()} ends before byte {stop}")
        return found

    def size(self, key: str) -> int:
        with self._reading(key) as file:
            return os.fstat(file.fileno()).st_size

    def put(self, key: str, chunks: Iterable[bytes | memoryview]) -> None:
        target = self._target(key)
        with self._written(key, chunks) as temporary, self._explained(key):
            self._place(os.replace, temporary, target)

    def create(self, key: str, data: bytes) -> bool:
        target = self._target(key)
        with self._written(key, [data]) as temporary, self._explained(key):
            try:
                # A link fails where a rename would replace: of two creators one is refused by the kernel.
                self._place(os.link, temporary, target)
            except FileExistsError:
                if target.is_dir():
                    raise ValueError(f"{key!r} is a folder in {self.describe()} and cannot be an object too") from None
                # Its creator may not have come to this yet, and our caller will rely on the object being there.
                self._settle(target.parent)
                return False
            except OSError as error:
                # The temporary file could be written, so this is no lack of permission.
                if error.errno not in (errno.EPERM, errno.EOPNOTSUPP):
                    raise
                text = f"the file system of {self.path} has no hard links, which creating needs; put the store on another one"
                raise StoreUnavailable(errno.EOPNOTSUPP, text) from error
        return True

    def swap(self, key: str, data: bytes, *, expected: str | None) -> str:
        if expected is None:
            if not self.create(key, data):
                raise SwapLost(f"{key} exists in {self.describe()}; it was expected not to")
            return content_tag(data)
        self._target(key)
        with self._locked():
            try:
                held = self.get(key)[1]
            except ObjectMissing:
                held = "nothing"
            if held != expected:
                raise SwapLost(f"{key} in {self.describe()} is {held}, expected {expected}; another process wrote it")
            self.put(key, [data])
        return content_tag(data)

    def list(self, prefix: str, *, after: str = "") -> Iterator[str]:
        folder = plain_folder(prefix)
        plain_folder(after)
        return self._walk(f"{folder}/" if folder else "", after)

    def delete(self, keys: Sequence[str]) -> None:
        folders = set()
        for key in keys:
            target = self._target(key)
            with self._explained(key), suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
                target.unlink()
                folders.add(target.parent)
        for folder in folders:
            with self._explained(str(folder)), suppress(FileNotFoundError):
                _sync(self._remove_empty(folder))

    def describe(self) -> str:
        return f"directory {self.path}"

    def leftovers(self) -> Sequence[Path]:
        """Half-written files of writers that died; the next process to write here removes them."""
        found = []
        for path in sorted(self._temporary.glob("*")):
            with suppress(FileNotFoundError, BlockingIOError), path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                found.append(path)
        return found

    def _target(self, key: str) -> Path:
        return self.path / plain_key(key)

    @contextmanager
    def _reading(self, key: str) -> Iterator[IO[bytes]]:
        target = self._target(key)
        try:
            with target.open("rb", buffering=0) as file:
                yield file
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise ObjectMissing(f"{key} is not in {self.describe()}") from None
        except OSError as error:
            raise StoreUnavailable(error.errno, f"cannot read {target}: {error.strerror}") from error

    @contextmanager
    def _explained(self, key: str, num_bytes: int = 0) -> Iterator[None]:
        """Errors of writing, in words."""
        try:
            yield
        except (FileExistsError, ReadOnly, StoreUnavailable):
            raise
        except (NotADirectoryError, IsADirectoryError):
            raise ValueError(f"{key!r} in {self.describe()} would be an object and a folder at once; choose another name") from None
        except OSError as error:
            if error.errno in _READ_ONLY:
                raise ReadOnly(error.errno, f"cannot write {key} in {self.describe()}: {error.strerror}") from error
            if error.errno in _FULL:
                needed = f"at least {num_bytes / 1e6:.1f} MB needed"
                text = f"no space left for {key} in {self.describe()} ({needed}); free space there or move the store"
                raise StoreUnavailable(error.errno, text) from error
            raise StoreUnavailable(error.errno, f"cannot write {key} in {self.describe()}: {error.strerror}") from error

    @contextmanager
    def _written(self, key: str, chunks: Iterable[bytes | memoryview]) -> Iterator[Path]:
        """A file with these bytes, on the disk and seen by nobody; what is not moved away is gone at the end."""
        with self._explained(key):
            self._prepare()
            path, file = _new_file(self._temporary)
        num_bytes = 0
        try:
            # Held open, and so locked, until the file has its name: an unlocked temporary file is one whose writer died.
            with file:
                for chunk in chunks:
                    num_bytes += memoryview(chunk).nbytes
                    with self._explained(key, num_bytes):
                        file.write(chunk)
                with self._explained(key, num_bytes):
                    file.flush()
                    os.fsync(file.fileno())
                yield path
        finally:
            path.unlink(missing_ok=True)

    def _place(self, move: Callable[[Path, Path], None], temporary: Path, target: Path) -> None:
        for _ in range(_PLACE_ATTEMPTS):
            # A deleter may take the folder away as empty at any moment until something lies in it.
            with suppress(FileNotFoundError):
                try:
                    target.parent.mkdir(parents=True, exist_ok=True)
                except FileExistsError:
                    if target.parent.is_file():
                        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(target.parent)) from None
                    continue
                move(temporary, target)
                self._settle(target.parent)
                return
        raise StoreUnavailable(errno.ENOENT, f"{target.parent} was removed {_PLACE_ATTEMPTS} times while {target.name} was being put there")

    def _settle(self, folder: Path) -> None:
        """Make the entries of a folder durable and, the first time, those of the folders above: a new folder is lost with its own entry."""
        # Gone again means that somebody deleted the object after it was placed.
        with suppress(FileNotFoundError):
            _sync(folder)
            number = folder.stat().st_ino
            if number not in self._settled:
                for above in folder.relative_to(self.path).parents:
                    _sync(self.path / above)
                self._settled.add(number)

    def _prepare(self) -> None:
        """Before the first write: make the folders, and remove what killed writers left half-written."""
        if self._prepared:
            return
        missing = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        self._temporary.mkdir(parents=True, exist_ok=True)
        for folder in missing:
            _sync(folder.parent)
        for path in self._temporary.iterdir():
            with suppress(FileNotFoundError, BlockingIOError), path.open("r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
        self._prepared = True

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One swap at a time; the kernel frees the lock when its holder dies."""
        path = self.path / ".lock"
        with self._explained(path.name):
            self._prepare()
            file = path.open("ab")
        deadline = time.monotonic() + self._lock_timeout_s
        with file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise StoreUnavailable(
                            errno.ETIMEDOUT,
                            f"{path} was held by another process for {self._lock_timeout_s:g} s; find it with `fuser {path}` and end it",
                        ) from None
                    # flock has no deadline of its own.
                    time.sleep(0.002)
            yield

    def _walk(self, folder: str, after: str) -> Iterator[str]:
        try:
            with os.scandir(self.path / folder) as entries:
                # With its slash a folder sorts where its keys do: `a.b` comes before `a/z`.
                names = sorted(f"{entry.name}/" if entry.is_dir() else entry.name for entry in entries if _KEY.fullmatch(entry.name))
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise StoreUnavailable(error.errno, f"cannot list {self.path / folder}: {error.strerror}") from error
        for name in names:
            key = folder + name
            if not name.endswith("/"):
                if key > after:
                    yield key
            elif key > after or after.startswith(key):
                yield from self._walk(key, after)

    def _remove_empty(self, folder: Path) -> Path:
        """Empty folders would slow every later listing; returns the first that stays."""
        while folder != self.path:
            try:
                folder.rmdir()
            except FileNotFoundError:
                pass
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY):
                    raise
                break
            folder = folder.parent
        return folder


def _pread(descriptor: int, start: int, stop: int) -> bytes:
    assert 0 <= start <= stop, f"range {start}..{stop}"
    data = os.pread(descriptor, stop - start, start)
    if len(data) == stop - start:
        return data
    # One call gives at most 2 GiB, and a network file system may give less.
    pieces = [data]
    while pieces[-1] and (start := start + len(pieces[-1])) < stop:
        pieces.append(os.pread(descriptor, stop - start, start))
    return b"".join(pieces)


def _new_file(folder: Path) -> tuple[Path, IO[bytes]]:
    """A new file under a lock that says its writer lives."""
    while True:
        path = folder / secrets.token_hex(12)
        file = path.open("xb")
        fcntl.flock(file, fcntl.LOCK_EX)
        # A sweep may have come between the two lines above and unlinked the file as nobody's.
        if os.fstat(file.fileno()).st_nlink:
            return path, file
        file.close()


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
