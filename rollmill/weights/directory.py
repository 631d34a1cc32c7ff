"""A directory as a place for objects: every file is whole, synced and moved into its name, or it is not there; knows no records."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from rollmill.weights.errors import CorruptSnapshot
from rollmill.weights.objects import ObjectMissing, ReadOnly, StoreUnavailable, SwapLost, content_tag, is_plain, plain_folder, plain_key

_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}
_FULL = {errno.ENOSPC, errno.EDQUOT}
_PLACE_ATTEMPTS = 100


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
                needed = f"at least {max(0.1, num_bytes / 1e6):.1f} MB needed"
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
            for chunk in chunks:
                num_bytes += memoryview(chunk).nbytes
                with self._explained(key, num_bytes):
                    file.write(chunk)
            with self._explained(key, num_bytes):
                file.flush()
                os.fsync(file.fileno())
            # Held open, and so locked, until the file has its name: an unlocked temporary file is one whose writer died.
            yield path
        finally:
            # All that counts is on the disk by now. What a full one refused is tried again here, and would hide the error that says so.
            with suppress(OSError):
                file.close()
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
                names = sorted(f"{entry.name}/" if entry.is_dir() else entry.name for entry in entries if is_plain(entry.name))
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
