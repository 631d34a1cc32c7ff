"""A folder that is the root of an image: every path is looked up inside it, whatever links it holds, so nothing outside is read or written.

Files are replaced, never written in place: trees share their files by hard links. Knows no archives and no images.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NUM_LINKS = 40
"""As many links as the kernel follows in one path."""
MAX_DEPTH = 256
"""Folders below folders: deeper trees are refused, so that walking and removing one never runs out of stack."""
MAX_ID = 65535
NOBODY = 65534
"""Ids above `MAX_ID` become this one: a box maps no more."""


def parts_of(path: str) -> list[str]:
    """The names of a path below the root. `..` is refused: no honest archive or recipe needs it."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise ValueError(f"path {path!r} leads upwards; write it without `..`")
    if len(parts) > MAX_DEPTH or len(os.fsencode(path)) > 4096 or any(len(os.fsencode(part)) > 255 for part in parts):
        raise ValueError(f"path {path[:60]!r}... is longer or deeper than a file system takes")
    if "\0" in path:
        raise ValueError(f"path {path!r} holds a zero byte")
    return parts


class Tree:
    """Writes and reads below one folder.

        with Tree(folder) as tree:
            tree.put_file("etc/hostname", [b"workstation\\n"])

    As root every file gets its owner; otherwise all belong to the caller, who can always read them.
    """

    def __init__(self, root: Path) -> None:
        self._root = os.open(root, _FOLDER & ~os.O_NOFOLLOW)
        self._is_root = os.geteuid() == 0
        self._near: tuple[tuple[str, ...], int, tuple[str, ...]] | None = None
        self._times: dict[tuple[str, ...], int] = {}

    def __enter__(self) -> Tree:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Give folders the times they were put with (filling them changed it), and let go."""
        for names, when in self._times.items():
            try:
                folder, _ = self._walk(names, make=False)
            except OSError:
                continue  # Put, and then taken away or replaced.
            os.utime(folder, ns=(when, when))
            os.close(folder)
        self._times.clear()
        self._forget()
        os.close(self._root)

    # Looking up

    def _forget(self) -> None:
        if self._near is not None:
            os.close(self._near[1])
            self._near = None

    def _walk(self, parts: Iterable[str], *, make: bool) -> tuple[int, tuple[str, ...]]:
        """The folder at the end of `parts`, links followed as if this tree were the whole system, and its names without links."""
        waiting = list(parts)[::-1]
        names: list[str] = []
        num_links = 0
        at = os.dup(self._root)
        try:
            while waiting:
                part = waiting.pop()
                if part in ("", "."):
                    continue
                if part == "..":
                    os.close(at)
                    at = -1
                    at, found = self._walk(names[:-1], make=False)
                    names = list(found)
                    continue
                try:
                    below = os.open(part, _FOLDER, dir_fd=at)
                except FileNotFoundError:
                    if not make:
                        raise
                    os.mkdir(part, 0o755, dir_fd=at)
                    below = os.open(part, _FOLDER, dir_fd=at)
                except OSError as error:
                    if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                        raise
                    if not stat.S_ISLNK(os.lstat(part, dir_fd=at).st_mode):
                        if not make:
                            raise
                        os.unlink(part, dir_fd=at)
                        waiting.append(part)
                        continue
                    num_links += 1
                    if num_links > _NUM_LINKS:
                        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), "/".join([*names, part])) from None
                    target = os.readlink(part, dir_fd=at)
                    if target.startswith("/"):
                        os.close(at)
                        at, names = os.dup(self._root), []
                    waiting.extend(target.split("/")[::-1])
                    continue
                os.close(at)
                at = below
                names.append(part)
                if len(names) > MAX_DEPTH:
                    raise ValueError(f"folder {'/'.join(names)[:60]!r}... is deeper than {MAX_DEPTH} folders")
        except BaseException:
            if at >= 0:
                os.close(at)
            raise
        return at, tuple(names)

    def _parent(self, parts: list[str], *, make: bool) -> tuple[int, tuple[str, ...]]:
        """The folder of a path; stays ours, and is kept because archives list the files of a folder one after another."""
        key = tuple(parts[:-1])
        if self._near is None or self._near[0] != key:
            self._forget()
            folder, names = self._walk(key, make=make)
            self._near = (key, folder, names)
        return self._near[1], self._near[2]

    def _clear(self, folder: int, name: str, *, keep_folder: bool = False) -> bool:
        """Take away what has this name; True where a folder stays."""
        try:
            mode = os.lstat(name, dir_fd=folder).st_mode
        except FileNotFoundError:
            return False
        if stat.S_ISDIR(mode):
            if keep_folder:
                return True
            shutil.rmtree(name, dir_fd=folder)
        else:
            os.unlink(name, dir_fd=folder)
        return False

    def _own(self, at: int, mode: int, uid: int, gid: int) -> None:
        if self._is_root:
            os.chown(at, *_ids(uid, gid))
            os.chmod(at, mode & 0o7777)
        else:
            os.chmod(at, (mode & 0o1777) | (0o700 if stat.S_ISDIR(os.fstat(at).st_mode) else 0o400))

    # Writing

    def put_file(
        self, path: str, chunks: Iterable[bytes], *, mode: int = 0o644, uid: int = 0, gid: int = 0, mtime_ns: int | None = None
    ) -> str:  # fmt: skip
        """A regular file in place of whatever has this path; the folders above it are made. The path without links."""
        parts = _named(path)
        folder, names = self._parent(parts, make=True)
        self._clear(folder, parts[-1])
        out = os.open(parts[-1], os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
        try:
            length = 0
            for chunk in chunks:
                length += len(chunk)
                if not chunk[:1].strip(b"\0") and chunk.count(0) == len(chunk):
                    os.lseek(out, len(chunk), os.SEEK_CUR)
                    continue
                view = memoryview(chunk)
                while view:
                    view = view[os.write(out, view) :]
            os.ftruncate(out, length)
            self._own(out, mode, uid, gid)
            if mtime_ns is not None:
                os.utime(out, ns=(mtime_ns, mtime_ns))
        finally:
            os.close(out)
        return "/".join([*names, parts[-1]])

    def put_folder(self, path: str, *, mode: int = 0o755, uid: int = 0, gid: int = 0, mtime_ns: int | None = None) -> str:
        """A folder; one that is there keeps what it holds, anything else with this path is replaced."""
        parts = _named(path)
        folder, names = self._parent(parts, make=True)
        if not self._clear(folder, parts[-1], keep_folder=True):
            os.mkdir(parts[-1], 0o700, dir_fd=folder)
        made = os.open(parts[-1], _FOLDER, dir_fd=folder)
        try:
            self._own(made, mode, uid, gid)
        finally:
            os.close(made)
        if mtime_ns is not None:
            self._times[(*names, parts[-1])] = mtime_ns
        return "/".join([*names, parts[-1]])

    def put_link(self, path: str, target: str, *, uid: int = 0, gid: int = 0, mtime_ns: int | None = None) -> str:
        """A symbolic link, wherever it leads: it is only ever followed inside a tree."""
        if not target or "\0" in target or len(os.fsencode(target)) > 4095:
            raise ValueError(f"link {path!r} has a target that no file system takes: {target[:60]!r}")
        parts = _named(path)
        folder, names = self._parent(parts, make=True)
        self._clear(folder, parts[-1])
        os.symlink(target, parts[-1], dir_fd=folder)
        if self._is_root:
            os.chown(parts[-1], *_ids(uid, gid), dir_fd=folder, follow_symlinks=False)
        if mtime_ns is not None:
            os.utime(parts[-1], ns=(mtime_ns, mtime_ns), dir_fd=folder, follow_symlinks=False)
        return "/".join([*names, parts[-1]])

    def put_hard_link(self, path: str, target: str) -> str:
        """A second name of a file of this tree."""
        source, _ = self._walk(parts_of(target)[:-1], make=False)
        try:
            name = _named(target)[-1]
            found = os.lstat(name, dir_fd=source)
            if not (stat.S_ISREG(found.st_mode) or stat.S_ISLNK(found.st_mode)):
                raise ValueError(f"hard link {path!r} leads to {target!r}, which is not a regular file")
            parts = _named(path)
            folder, names = self._parent(parts, make=True)
            try:
                is_same = os.path.samestat(os.lstat(parts[-1], dir_fd=folder), found)
            except FileNotFoundError:
                is_same = False
            if not is_same:
                self._clear(folder, parts[-1])
                os.link(name, parts[-1], src_dir_fd=source, dst_dir_fd=folder, follow_symlinks=False)
        finally:
            os.close(source)
        return "/".join([*names, parts[-1]])

    def put_pipe(self, path: str, *, mode: int = 0o644, uid: int = 0, gid: int = 0) -> str:
        parts = _named(path)
        folder, names = self._parent(parts, make=True)
        self._clear(folder, parts[-1])
        os.mkfifo(parts[-1], 0o600, dir_fd=folder)
        if self._is_root:
            os.chown(parts[-1], *_ids(uid, gid), dir_fd=folder, follow_symlinks=False)
            os.chmod(parts[-1], mode & 0o777, dir_fd=folder)
        return "/".join([*names, parts[-1]])

    def remove(self, path: str, *, keep: frozenset[str] | set[str] = frozenset()) -> None:
        """Take a file or a folder away, if it is there. Paths in `keep` (without links, their folders among them) stay."""
        parts = _named(path)
        self._forget()
        try:
            folder, names = self._walk(parts[:-1], make=False)
        except (FileNotFoundError, NotADirectoryError):
            return
        try:
            self._remove(folder, parts[-1], "/".join([*names, parts[-1]]), keep)
        finally:
            os.close(folder)

    def remove_below(self, path: str, *, keep: frozenset[str] | set[str] = frozenset()) -> None:
        """Empty a folder, if it is there, but for `keep`."""
        self._forget()
        try:
            folder, names = self._walk(parts_of(path), make=False)
        except (FileNotFoundError, NotADirectoryError):
            return
        try:
            for name in os.listdir(folder):
                self._remove(folder, name, "/".join([*names, name]), keep)
        finally:
            os.close(folder)

    def _remove(self, folder: int, name: str, path: str, keep: frozenset[str] | set[str]) -> None:
        if path not in keep:
            self._clear(folder, name)
            return
        if not stat.S_ISDIR(os.lstat(name, dir_fd=folder).st_mode):
            return
        below = os.open(name, _FOLDER, dir_fd=folder)
        try:
            for inner in os.listdir(below):
                self._remove(below, inner, f"{path}/{inner}", keep)
        finally:
            os.close(below)

    # Reading

    def stat(self, path: str, *, follow: bool = True) -> os.stat_result | None:
        """What is there, links followed inside the tree; None: nothing."""
        found = self._find(path, follow=follow)
        if found is None:
            return None
        os.close(found[0])
        return found[2]

    def read(self, path: str, *, limit_bytes: int = 1 << 20) -> bytes | None:
        """The first bytes of a regular file, links followed inside the tree; None: there is none."""
        found = self._find(path, follow=True)
        if found is None:
            return None
        folder, name, facts = found
        try:
            if not stat.S_ISREG(facts.st_mode):
                return None
            with open(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder), "rb") as file:
                return file.read(limit_bytes)
        finally:
            os.close(folder)

    def _find(self, path: str, *, follow: bool) -> tuple[int, str, os.stat_result] | None:
        """The folder that holds what a path leads to, its name there (`.`: the folder itself) and what it is."""
        parts: list[str] = parts_of(path)
        above: tuple[str, ...] = ()
        try:
            for _ in range(_NUM_LINKS):
                folder, above = self._walk([*above, *parts[:-1]], make=False)
                name = parts[-1] if parts else "."
                if name == "..":
                    os.close(folder)
                    folder, above = self._walk(above[:-1], make=False)
                    name = "."
                try:
                    facts = os.lstat(name, dir_fd=folder)
                except FileNotFoundError:
                    os.close(folder)
                    return None
                if not (follow and stat.S_ISLNK(facts.st_mode)):
                    return folder, name, facts
                target = os.readlink(name, dir_fd=folder)
                os.close(folder)
                if target.startswith("/"):
                    above = ()
                parts = [part for part in target.split("/") if part not in ("", ".")]
        except (FileNotFoundError, NotADirectoryError):
            return None
        return None


def _named(path: str) -> list[str]:
    parts = parts_of(path)
    if not parts:
        raise ValueError(f"path {path!r} names the root itself; name something below it")
    return parts


def _ids(uid: int, gid: int) -> tuple[int, int]:
    return (uid if 0 <= uid <= MAX_ID else NOBODY), (gid if 0 <= gid <= MAX_ID else NOBODY)


def copy_tree(source: Path, target: Path, *, apart: str = "") -> None:
    """The same tree in a new folder; regular files become second names of the old ones where the file system can.

    Below `apart` they are copied: an owner who looks at the link counts in their own home should find ones.
    """
    is_root = os.geteuid() == 0
    own = f"{source}/{apart.strip('/')}/" if apart.strip("/") else ""
    target.mkdir(mode=0o700)
    for top, folders, files in os.walk(source):
        here = target / os.path.relpath(top, source)
        for name in [*files, *folders]:
            old, new = os.path.join(top, name), here / name
            found = os.lstat(old)
            if stat.S_ISDIR(found.st_mode):
                os.mkdir(new, 0o700)
                continue
            if stat.S_ISLNK(found.st_mode):
                os.symlink(os.readlink(old), new)
            elif stat.S_ISREG(found.st_mode):
                if own and old.startswith(own):
                    _copy_file(old, new)
                else:
                    _same_file(old, new)
                continue
            else:
                os.mkfifo(new, 0o600)
                os.chmod(new, stat.S_IMODE(found.st_mode))
            if is_root:
                os.chown(new, found.st_uid, found.st_gid, follow_symlinks=False)
            os.utime(new, ns=(found.st_mtime_ns, found.st_mtime_ns), follow_symlinks=False)
    for top, _, _ in os.walk(source, topdown=False):
        here, found = target / os.path.relpath(top, source), os.lstat(top)
        if is_root:
            os.chown(here, found.st_uid, found.st_gid)
        os.chmod(here, stat.S_IMODE(found.st_mode))
        os.utime(here, ns=(found.st_mtime_ns, found.st_mtime_ns))


def _same_file(old: str, new: Path) -> None:
    try:
        os.link(old, new, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EMLINK, errno.EPERM, errno.EOPNOTSUPP):
            raise
        _copy_file(old, new)


def _copy_file(old: str, new: Path) -> None:
    shutil.copy2(old, new, follow_symlinks=False)
    if os.geteuid() == 0:
        found = os.lstat(old)
        os.chown(new, found.st_uid, found.st_gid)
        os.chmod(new, stat.S_IMODE(found.st_mode))
        os.utime(new, ns=(found.st_mtime_ns, found.st_mtime_ns))
