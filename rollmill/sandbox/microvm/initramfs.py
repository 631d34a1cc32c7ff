"""The archive a guest boots from: the agent as /init, kernel modules, and what this one box must look like. Pure bytes, no tool."""

from __future__ import annotations

import stat
from collections.abc import Iterable, Mapping

Entry = tuple[str, int, bytes]
"""Path without a leading slash, mode with the file type, contents (for a device: `major,minor` in words)."""

_ALIGN = 4


def cpio(entries: Iterable[Entry]) -> bytes:
    """A `newc` archive; several of them in a row are one to the kernel."""
    out = bytearray()
    for number, (path, mode, data) in enumerate((*entries, ("TRAILER!!!", 0, b"")), 1):
        rdev = (0, 0)
        if stat.S_ISCHR(mode):
            major, minor = data.decode().split(",")
            rdev, data = (int(major), int(minor)), b""
        name = path.encode() + b"\0"
        fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, *rdev, len(name), 0)
        out += b"070701" + b"".join(b"%08X" % field for field in fields) + name
        out += b"\0" * (-len(out) % _ALIGN)
        out += data
        out += b"\0" * (-len(out) % _ALIGN)
    return bytes(out)


def base(agent: bytes, modules: Mapping[str, bytes]) -> bytes:
    """The part every box shares; the modules in the order in which they are loaded."""
    entries: list[Entry] = [
        ("dev", stat.S_IFDIR | 0o755, b""),
        ("dev/console", stat.S_IFCHR | 0o600, b"5,1"),
        ("modules", stat.S_IFDIR | 0o755, b""),
        ("init", stat.S_IFREG | 0o755, agent),
    ]
    entries += [(f"modules/{name}", stat.S_IFREG | 0o644, data) for name, data in modules.items()]
    entries.append(("modules.list", stat.S_IFREG | 0o644, "".join(f"/modules/{name}\n" for name in modules).encode()))
    return cpio(entries)


def box(settings: Mapping[str, str | int], env: Mapping[str, str]) -> bytes:
    """The part of one box: `/box.conf`, which `agent/native/guest.c` reads."""
    lines = [f"{key}={value}" for key, value in settings.items()] + [f"env={name}={value}" for name, value in env.items()]
    for line in lines:
        if "\0" in line:
            raise ValueError(f"{line!r} contains a NUL byte; a guest cannot be told that")
    return cpio([("box.conf", stat.S_IFREG | 0o600, b"".join(line.encode(errors="surrogateescape") + b"\0" for line in lines))])
