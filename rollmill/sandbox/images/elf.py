"""Which shared libraries a program needs, read from its file and never by running it; knows this host's library folders."""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
from collections.abc import Iterator
from functools import lru_cache

import msgspec

_DYNAMIC, _INTERP, _LOAD = 2, 3, 1
_NEEDED, _STRTAB, _RPATH, _RUNPATH = 1, 5, 15, 29
_HEAD = struct.Struct("<16sHHIQQQIHHHHHH")
_PROGRAM = struct.Struct("<IIQQQQQQ")
_ENTRY = struct.Struct("<qQ")


class Links(msgspec.Struct, frozen=True):
    """What the loader reads of one file."""

    machine: int
    loader: str
    needed: tuple[str, ...]
    folders: tuple[str, ...]
    """Where it asks for its libraries to be looked for, `$ORIGIN` filled in."""


def links_of(path: str) -> Links | None:
    """None: not a 64-bit little-endian ELF file, or one that is not well formed."""
    with open(path, "rb") as file:
        data = file.read(64)
        if len(data) < 64 or data[:6] != b"\x7fELF\x02\x01":
            return None
        data += file.read()
    try:
        return _read(data, os.path.dirname(os.path.realpath(path)))
    except (struct.error, IndexError, ValueError):
        return None


def _read(data: bytes, origin: str) -> Links:
    head = _HEAD.unpack_from(data)
    parts = [_PROGRAM.unpack_from(data, head[5] + i * head[9]) for i in range(head[10])]
    loader = next((_text(data, part[2]) for part in parts if part[0] == _INTERP), "")
    entries: list[tuple[int, int]] = []
    for part in parts:
        if part[0] == _DYNAMIC:
            entries = [_ENTRY.unpack_from(data, part[2] + at) for at in range(0, part[5] - _ENTRY.size + 1, _ENTRY.size)]
    strings = next((value for tag, value in entries if tag == _STRTAB), None)
    if strings is None:
        return Links(head[2], loader, (), ())
    # The table's address is where it is loaded; the segment that holds it says where it lies in the file.
    base = next(part[2] + strings - part[3] for part in parts if part[0] == _LOAD and part[3] <= strings < part[3] + part[5])
    needed = tuple(_text(data, base + value) for tag, value in entries if tag == _NEEDED)
    wanted = ":".join(_text(data, base + value) for tag, value in entries if tag in (_RPATH, _RUNPATH))
    folders = tuple(re.sub(r"\$(ORIGIN|\{ORIGIN\})", lambda _: origin, folder) for folder in wanted.split(":") if folder)
    return Links(head[2], loader, needed, folders)


def _text(data: bytes, at: int) -> str:
    return os.fsdecode(data[at : data.index(b"\0", at)])


def libraries_of(path: str) -> Iterator[str]:
    """The paths of the loader and of the libraries that a file names itself; those this host lacks are left out."""
    links = links_of(path)
    if links is None:
        return
    if links.loader and os.path.exists(links.loader):
        yield links.loader
    for name in links.needed:
        places = (
            [f"{folder}/{name}" for folder in links.folders] + _cache().get(name, []) + [f"{folder}/{name}" for folder in default_folders()]
        )
        found = next((place for place in places if os.path.exists(place) and _machine(place) == links.machine), None)
        if found is not None:
            yield found


@lru_cache(maxsize=4096)
def _machine(path: str) -> int:
    with open(path, "rb") as file:
        head = file.read(20)
    return int.from_bytes(head[18:20], "little") if head[:5] == b"\x7fELF\x02" else -1


@lru_cache(maxsize=1)
def _cache() -> dict[str, list[str]]:
    """Name -> paths, as the loader's own cache lists them."""
    program = shutil.which("ldconfig", path="/sbin:/usr/sbin:/bin:/usr/bin")
    found: dict[str, list[str]] = {}
    if program is not None:
        done = subprocess.run([program, "-p"], capture_output=True, text=True, timeout=60, check=False)
        for name, path in re.findall(r"^\s+(\S+) \(.*\) => (\S+)$", done.stdout, re.MULTILINE):
            found.setdefault(name, []).append(path)
    return found


@lru_cache(maxsize=1)
def default_folders() -> tuple[str, ...]:
    """Where the loader looks without a cache, the one that new links should go to first."""
    triple = f"{os.uname().machine}-linux-gnu"
    folders = (f"/usr/lib/{triple}", f"/lib/{triple}", "/usr/lib64", "/lib64", "/usr/lib", "/lib")
    return tuple(folder for folder in folders if os.path.isdir(folder))
