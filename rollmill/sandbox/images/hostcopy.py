"""A base made of this host's own programs: those named, the libraries they need, Python with its standard library. Works offline.

Takes nothing else of the host: no packages of its Python, no configuration, no accounts.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

from rollmill.sandbox.images.elf import default_folders, libraries_of
from rollmill.sandbox.images.tree import Tree

_SEARCH = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin:/usr/local/sbin"
PROGRAMS = tuple(
    "sh bash ls cat cp mv rm mkdir rmdir ln touch chmod chown chgrp stat head tail wc sort uniq cut tr tee echo printf env pwd id whoami "
    "date sleep true false test expr seq xargs basename dirname readlink realpath mktemp uname hostname df du sync dd od md5sum "
    "sha256sum base64 nproc timeout nohup kill ps top free uptime pgrep pkill find grep egrep fgrep sed awk diff cmp patch tar gzip "
    "gunzip zcat bzip2 xz zstd less more file which setpriv nice stty tty clear tput getent git make curl wget perl python3 vi vim "
    "nano sqlite3 ssh".split()
)
"""What people expect to find; those that this host lacks are left out."""
_WITH = {
    "git": ("/usr/lib/git-core", "/usr/share/git-core"),
    "vim": ("/usr/share/vim",),
    "file": ("/usr/share/misc", "/usr/lib/file"),
    "perl": ("/usr/share/perl-base", "PERL"),
    "less": ("/usr/lib/terminfo", "/lib/terminfo"),
    "curl": ("/etc/ssl/certs", "/usr/share/ca-certificates"),
}
"""Folders that a program is of no use without; those of the host that do not exist are left out."""
_ALWAYS = ("/usr/share/zoneinfo/Etc", "/usr/share/zoneinfo/UTC", "/usr/lib/locale/C.utf8", "/usr/lib/os-release", "/usr/lib/terminfo")
_NOT_OF_PYTHON = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "turtledemo", "ensurepip", "lib2to3"}
_USR = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_NSS = ("libnss_files.so.2", "libnss_dns.so.2", "libresolv.so.2")


def signature(programs: Iterable[str]) -> str:
    """What the copy depends on, cheaply: where each program lies, its size and its time."""
    found = ((name, shutil.which(name, path=_SEARCH)) for name in (*PROGRAMS, *programs))
    facts = [(name, path, os.stat(path).st_size, os.stat(path).st_mtime_ns) for name, path in found if path]
    return repr((facts, os.stat("/etc/os-release").st_mtime_ns if os.path.exists("/etc/os-release") else 0))


def copy_host(tree: Tree, programs: Iterable[str] = (), *, common: Iterable[str] = PROGRAMS) -> list[str]:
    """Fill a tree; `programs` must be there, of `common` those that are. The programs copied."""
    copy = _Copy(tree)
    for top in _USR:
        if os.path.islink(f"/{top}"):
            tree.put_folder(f"usr/{top}")
            tree.put_link(top, os.readlink(f"/{top}"))
    wanted = {name: shutil.which(name, path=_SEARCH) for name in (*common, *programs)}
    missing = [name for name in programs if wanted[name] is None]
    if missing:
        raise ValueError(f"this host has no {', '.join(missing)}; install them here, or choose another base than `host-copy`")
    for name, path in wanted.items():
        if path is None:
            continue
        copy.file(path)
        for folder in _WITH.get(name, ()):
            for real in _perl_folders(path) if folder == "PERL" else (folder,):
                copy.folder(real)
        if name.startswith("python3"):
            _copy_python(copy, path)
    for path in _ALWAYS:
        copy.folder(path) if os.path.isdir(path) else copy.file(path) if os.path.exists(path) else None
    for name in _NSS:
        if path := next((p for p in (f"{folder}/{name}" for folder in default_folders()) if os.path.exists(p)), None):
            copy.file(path)
    copy.libraries()
    if tree.stat("etc/os-release") is None and tree.stat("usr/lib/os-release") is not None:
        tree.put_link("etc/os-release", "../usr/lib/os-release")
    if os.path.exists("/etc/debian_version"):
        tree.put_file("etc/debian_version", [Path("/etc/debian_version").read_bytes()])
    return sorted(name for name, path in wanted.items() if path)


class _Copy:
    """Copies each path once, with the links it leads through, and remembers which programs still need their libraries."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._seen: set[str] = set()
        self._binaries: list[str] = []

    def file(self, path: str) -> None:
        path = f"{os.path.realpath(os.path.dirname(path))}/{os.path.basename(path)}"
        if path in self._seen:
            return
        self._seen.add(path)
        found = os.lstat(path)
        if stat.S_ISLNK(found.st_mode):
            target = os.readlink(path)
            self._tree.put_link(path, target, mtime_ns=found.st_mtime_ns)
            if os.path.exists(path):
                self.file(os.path.normpath(os.path.join(os.path.dirname(path), target)))
        elif stat.S_ISREG(found.st_mode):
            mode = stat.S_IMODE(found.st_mode) & 0o755 | 0o444
            self._tree.put_file(path, _chunks(path), mode=mode, mtime_ns=found.st_mtime_ns)
            if found.st_mode & 0o111 or ".so" in path:
                self._binaries.append(path)

    def folder(self, path: str, *, without: frozenset[str] | set[str] = frozenset()) -> None:
        if not os.path.isdir(path):
            return
        for top, folders, files in os.walk(os.path.realpath(path)):
            folders[:] = sorted(f for f in folders if f not in without and not f.startswith("config-"))
            for name in [*files, *(f for f in folders if os.path.islink(f"{top}/{f}"))]:
                if os.path.exists(f"{top}/{name}"):
                    self.file(f"{top}/{name}")

    def libraries(self) -> None:
        """Until nothing new appears: a library that is copied may need others."""
        while self._binaries:
            for library in libraries_of(self._binaries.pop()):
                self.file(library)
                self._reach(library)

    def _reach(self, library: str) -> None:
        """A library that only the loader's cache leads to gets a second name where the loader looks by itself: the copy has no cache."""
        folder, name = os.path.split(library)
        places = [f"{place}/{name}" for place in default_folders()]
        if folder.startswith("/usr/local/") and not any(os.path.exists(place) for place in places):
            self._tree.put_link(places[0], library)


def _copy_python(copy: _Copy, path: str) -> None:
    ask = "import sys, sysconfig; print(sysconfig.get_path('stdlib')); print(sysconfig.get_path('platstdlib')); print(sys.base_prefix)"
    done = subprocess.run([path, "-I", "-S", "-c", ask], capture_output=True, text=True, timeout=60, check=True)
    for folder in dict.fromkeys(done.stdout.split("\n")[:2]):
        copy.folder(folder, without=_NOT_OF_PYTHON)


def _perl_folders(path: str) -> list[str]:
    done = subprocess.run([path, "-e", "print join(qq(\\n), @INC)"], capture_output=True, text=True, timeout=60, check=False)
    return [folder for folder in done.stdout.split("\n") if folder.endswith("perl-base")]


def _chunks(path: str) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            yield chunk
