"""A full disk in words: tells it from every other failure of a role, and says where there is how much left; frees and writes nothing."""

from __future__ import annotations

import errno
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rollmill.config import RunConfig

FULL = (errno.ENOSPC, errno.EDQUOT)
MIN_FREE_BYTES = 1 << 20
"""Below this a run cannot write one small version and its records: whatever a role died of, a new process would die too."""
_IN_RUST = tuple(f"(os error {number})" for number in FULL)
"""Libraries written in Rust, such as safetensors, hand the number on in their text only."""


class DiskFull(ValueError):
    """There is no space left for something the run must write."""


def is_full(error: BaseException) -> bool:
    """Whether a full disk is behind it, also where a thread or a library handed it on as its own failure."""
    at: BaseException | None = error
    while at is not None:
        if (isinstance(at, OSError) and at.errno in FULL) or (isinstance(at, sqlite3.Error) and _is_full_database(at)):
            return True
        if any(words in str(at) for words in _IN_RUST):
            return True
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)
    return False


def _is_full_database(error: sqlite3.Error) -> bool:
    code = getattr(error, "sqlite_errorcode", None) or 0
    # The second: the file that readers and writers of a log share cannot grow, which SQLite calls an I/O error.
    return code & 0xFF == sqlite3.SQLITE_FULL or code == sqlite3.SQLITE_IOERR_SHMSIZE


@contextmanager
def room_for(path: Path) -> Iterator[None]:
    """Where a file of the run is written: the kernel's own error of a full disk names no file once the file is open."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise DiskFull(f"no space left for {path}: {left([path])}; free some space and go on with --resume") from error


def places(config: RunConfig) -> list[Path]:
    """Where a run keeps what it makes, as far as that is on this machine."""
    store = [] if "://" in config.weight_store else [Path(config.weight_store)]
    return [config.run.dir, *store]


def full_disks(where: Sequence[Path]) -> list[Path]:
    """Those of them whose disk has next to nothing left."""
    return [path for path in _one_per_disk(where) if shutil.disk_usage(path).free < MIN_FREE_BYTES]


def left(where: Sequence[Path]) -> str:
    """e.g. `5.3 MB left in /runs/a, 2150.0 MB left in /tmp`."""
    return ", ".join(f"{shutil.disk_usage(path).free / 1e6:.1f} MB left in {path}" for path in _one_per_disk(where))


def _one_per_disk(where: Sequence[Path]) -> list[Path]:
    found: dict[int, Path] = {}
    for path in where:
        # What is not made yet will lie on the disk of the folder above.
        there = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.is_dir())
        found.setdefault(there.stat().st_dev, there)
    return list(found.values())
