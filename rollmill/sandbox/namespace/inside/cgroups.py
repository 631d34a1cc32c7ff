"""The memory bound of all processes of a box together, by a control group where this process may make one.

Owns one directory per zygote, one below it per box, and removes what it made; knows neither boxes nor their namespaces.
"""

from __future__ import annotations

import contextlib
import os
import time

_PREFIX = "rollmill-"
_CLOSE_S = 2.0
"""How long the kernel may hold the group of a dead box when everything else is done."""


class MemoryGroups:
    """Control groups below this process's own: `name` is `cgroup-v1` or `cgroup-v2`."""

    def __init__(self, *, name: str, parent: str, own: str) -> None:
        self.name = name
        self._parent_fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._own = own
        self.fd = os.open(own, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._parent_fd)
        self._late: set[str] = set()

    def enter(self, box: str, memory_bytes: int) -> None:
        """Called by the box's first process, before it gives up its rights: make its group and move into it."""
        os.mkdir(box, dir_fd=self.fd)
        if self.name == "cgroup-v2":
            self._write(f"{box}/memory.max", str(memory_bytes))
            with contextlib.suppress(OSError):  # absent without swap accounting
                self._write(f"{box}/memory.swap.max", "0")
        else:
            self._write(f"{box}/memory.limit_in_bytes", str(memory_bytes))
            with contextlib.suppress(OSError):  # absent without swap accounting
                self._write(f"{box}/memory.memsw.limit_in_bytes", str(memory_bytes))
        self._write(f"{box}/cgroup.procs", "0")

    def ran_out(self, box: str) -> bool:
        """Whether the kernel killed a process of the group because its memory was used up."""
        name = "memory.events" if self.name == "cgroup-v2" else "memory.oom_control"
        try:
            fd = os.open(f"{box}/{name}", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self.fd)
        except FileNotFoundError:
            return False
        with open(fd) as lines:
            return any(line.startswith("oom_kill ") and int(line.split()[1]) > 0 for line in lines)

    def remove(self, box: str) -> None:
        """Remove the group of a dead box; one that the kernel still holds is tried again with the next."""
        self._late.add(box)
        self._remove_late()

    def _remove_late(self) -> None:
        for name in tuple(self._late):
            try:
                os.rmdir(name, dir_fd=self.fd)
            except FileNotFoundError:
                pass  # its box failed before it made one
            except OSError:
                continue
            self._late.discard(name)

    def close(self) -> None:
        deadline = time.monotonic() + _CLOSE_S
        while self._late and time.monotonic() < deadline:
            time.sleep(0.01)
            self._remove_late()
        with contextlib.suppress(OSError):  # a group the kernel still holds is swept by the next zygote
            os.rmdir(self._own, dir_fd=self._parent_fd)

    def _write(self, path: str, text: str) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC, dir_fd=self.fd)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)


def open_groups() -> MemoryGroups | None:
    """Groups below this process's memory control group; None when the machine lets us make none."""
    for name, parent in _candidates():
        with contextlib.suppress(OSError):
            sweep(parent)
            own = f"{_PREFIX}{os.getpid()}-{os.urandom(4).hex()}"
            os.mkdir(f"{parent}/{own}")
            try:
                if name == "cgroup-v2":
                    _delegate(parent, own)
                elif not os.path.exists(f"{parent}/{own}/memory.limit_in_bytes"):
                    raise FileNotFoundError(f"{parent}/{own}/memory.limit_in_bytes")
                return MemoryGroups(name=name, parent=parent, own=own)
            except OSError:
                os.rmdir(f"{parent}/{own}")
                raise
    return None


def _delegate(parent: str, own: str) -> None:
    with contextlib.suppress(OSError):  # refused where the parent holds processes: then it must be on already
        _enable(f"{parent}/cgroup.subtree_control")
    _enable(f"{parent}/{own}/cgroup.subtree_control")


def _enable(path: str) -> None:
    with open(path, "w") as control:
        control.write("+memory")


def _candidates() -> list[tuple[str, str]]:
    """(kind, directory) of this process's own memory group in each mounted hierarchy, version 1 first."""
    own: dict[str, str] = {}
    with open("/proc/self/cgroup") as lines:
        for line in lines:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            own["cgroup2" if controllers == "" else controllers] = path
    found = []
    with open("/proc/self/mountinfo") as lines:
        for line in lines:
            left, _, right = line.partition(" - ")
            root, point = left.split()[3:5]
            kind, _, options = right.split()[:3]
            if kind == "cgroup" and "memory" in options.split(","):
                path = next((p for names, p in own.items() if "memory" in names.split(",")), "/")
                found.append(("cgroup-v1", _join(point, root, path)))
            elif kind == "cgroup2":
                found.append(("cgroup-v2", _join(point, root, own.get("cgroup2", "/"))))
    return sorted(found)


def _join(point: str, root: str, path: str) -> str:
    below = path[len(root) :] if root != "/" and path.startswith(root) else path
    return os.path.normpath(f"{point}/{below}")


def sweep_all() -> None:
    for _, parent in _candidates():
        with contextlib.suppress(OSError):  # not ours to change
            sweep(parent)


def sweep(parent: str) -> None:
    """Remove the groups of zygotes that were killed before they could; those still dying are left to the next sweep."""
    for name in os.listdir(parent):
        if not name.startswith(_PREFIX) or os.path.exists(f"/proc/{name.split('-')[1]}"):
            continue
        base = f"{parent}/{name}"
        with contextlib.suppress(OSError):  # another zygote may sweep at the same time
            for box in os.listdir(base):
                if os.path.isdir(f"{base}/{box}"):
                    os.rmdir(f"{base}/{box}")
            os.rmdir(base)
