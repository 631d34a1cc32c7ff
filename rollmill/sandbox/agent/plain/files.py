"""Files of a box as its agent reads, writes, lists and compares them: opened inside, so a link can only lead to another place in it."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator

_READ_BYTES = 1 << 20
_MAX_ANSWER_BYTES = 32 << 20
"""A listing whose names are longer than this together is cut: it must fit into a frame."""
_OPAQUE = ("user.overlay.opaque", "trusted.overlay.opaque")
_KINDS = {stat.S_IFREG: 0, stat.S_IFDIR: 1, stat.S_IFLNK: 2}
_OTHER = 3


def read_file(path: bytes, limit: int) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _refuse_special(fd)
        chunks = []
        left = limit + 1
        # By chunks until the end, because files of /proc say they are empty.
        while left > 0 and (chunk := os.read(fd, min(left, _READ_BYTES))):
            chunks.append(chunk)
            left -= len(chunk)
        if left == 0:
            raise OSError(errno.EFBIG, f"larger than {limit} bytes")
        return b"".join(chunks)
    finally:
        os.close(fd)


def write_file(path: bytes, data: bytes, mode: int, *, is_append: bool = False) -> None:
    """A mode that is not 0 is the file's afterwards, whatever it had and whatever the umask; 0 leaves it, 0644 for a new file."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, mode or 0o644)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        fd = os.open(path, flags, mode or 0o644)
    try:
        _refuse_special(fd)
        if is_append:
            os.lseek(fd, 0, os.SEEK_END)
        else:
            os.ftruncate(fd, 0)
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        if mode and not is_append and stat.S_IMODE(os.fstat(fd).st_mode) != mode:
            os.fchmod(fd, mode)
    finally:
        os.close(fd)


def list_files(path: bytes, most: int) -> list[bytes]:
    """Regular files below, in the order of their bytes; links are neither followed nor listed."""
    found: list[bytes] = []
    folders = [b""]
    while folders:
        folder = folders.pop()
        try:
            with os.scandir(os.path.join(path, folder)) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(folder + entry.name + b"/")
                    elif entry.is_file(follow_symlinks=False):
                        found.append(folder + entry.name)
        except OSError:
            if not folder:
                raise
            continue  # removed meanwhile, closed to its own user, or nested deeper than a path can say
    found.sort()
    return list(_bounded(found[:most]))


def stat_file(path: bytes) -> tuple[int, int, int, float, bytes]:
    """Kind, mode, bytes, modification time, target of a link."""
    found = os.lstat(path)
    target = os.readlink(path) if stat.S_ISLNK(found.st_mode) else b""
    kind = _KINDS.get(stat.S_IFMT(found.st_mode), _OTHER)
    return kind, stat.S_IMODE(found.st_mode), found.st_size, found.st_mtime, target


def changes(upper_fd: int, most: int) -> list[tuple[bool, bytes]]:
    """What the upper folder of an overlay holds against what lies below: (is removed, absolute path), in the order of their bytes.

    A folder that only leads to a change is in the upper too; one that was made or replaced is told from it by being opaque, or
    by lying in one that is.
    """
    found: list[tuple[bytes, bool]] = []
    folders = [(b"", False)]
    while folders:
        folder, is_new = folders.pop()
        try:
            fd = os.open(folder or b".", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=upper_fd)
        except OSError:
            if not folder:
                raise
            continue  # removed meanwhile, or nested deeper than a path can say
        try:
            if folder and (is_new := is_new or _is_made_here(fd)):
                found.append((b"/" + folder, False))
            with os.scandir(fd) as entries:
                for entry in entries:
                    path = os.path.join(folder, os.fsencode(entry.name))
                    if entry.is_dir(follow_symlinks=False):
                        folders.append((path, is_new))
                    else:
                        found.append((b"/" + path, _is_whiteout(entry)))
        finally:
            os.close(fd)
    found.sort()
    removed = dict(found)
    return [(removed[path], path) for path in _bounded([path for path, _ in found[:most]])]


def _is_made_here(fd: int) -> bool:
    for name in _OPAQUE:
        with contextlib.suppress(OSError):
            if os.getxattr(fd, name) == b"y":
                return True
    try:
        os.getxattr(fd, "user.overlay.origin")
    except OSError as error:
        # The kernel notes on folders that it merely copied up where they came from.
        return error.errno == errno.ENODATA
    return False


def _is_whiteout(entry: os.DirEntry[str]) -> bool:
    with contextlib.suppress(OSError):
        found = entry.stat(follow_symlinks=False)
        return stat.S_ISCHR(found.st_mode) and found.st_rdev == 0
    return False


def _bounded(names: list[bytes]) -> Iterator[bytes]:
    left = _MAX_ANSWER_BYTES
    for name in names:
        left -= len(name) + 8
        if left < 0:
            return
        yield name


def _refuse_special(fd: int) -> None:
    mode = os.fstat(fd).st_mode
    if stat.S_ISDIR(mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "not a regular file")
