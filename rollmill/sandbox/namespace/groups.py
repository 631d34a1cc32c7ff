"""The control groups of one owner's boxes: finds where they can be made, makes the folder they live in, sweeps what killed owners left."""

from __future__ import annotations

import contextlib
import os
import time

import msgspec

_PREFIX = "rollmill-"
_CLOSE_S = 2.0
"""How long the kernel may hold the group of a dead box when everything else is done."""


class Groups(msgspec.Struct, frozen=True, kw_only=True):
    """Where boxes get their groups: `parent/own`."""

    version: int
    """0: this machine lets us make none; 1 or 2."""
    own: str = ""
    memory: str = ""
    """Parent of our folder in the hierarchy of the memory controller."""
    cpu: str = ""
    """The same for the CPU controller of version 1; empty: none, or part of `memory`."""

    def remove(self) -> None:
        """Remove our folder and what is left in it: the zygote does so itself, unless it was killed."""
        deadline = time.monotonic() + _CLOSE_S
        for parent in filter(None, (self.memory, self.cpu)):
            while not _remove(f"{parent}/{self.own}") and time.monotonic() < deadline:
                time.sleep(0.01)


def open_groups() -> Groups:
    """Groups below this process's own, in the first hierarchy that lets us."""
    own = f"{_PREFIX}{os.getpid()}-{os.urandom(4).hex()}"
    for version, parents in _candidates():
        with contextlib.suppress(OSError):
            return _make(version, parents, own)
    return Groups(version=0)


def _make(version: int, parents: dict[str, str], own: str) -> Groups:
    memory = parents["memory"]
    sweep(memory)
    os.mkdir(f"{memory}/{own}")
    try:
        if version == 2:
            _delegate(memory, own)
            return Groups(version=2, own=own, memory=memory)
        if not os.path.exists(f"{memory}/{own}/memory.limit_in_bytes"):
            raise FileNotFoundError(f"{memory}/{own}/memory.limit_in_bytes")
    except OSError:
        os.rmdir(f"{memory}/{own}")
        raise
    cpu = parents.get("cpu", "")
    try:
        if cpu:
            sweep(cpu)
            os.mkdir(f"{cpu}/{own}")
    except OSError:
        cpu = ""
    return Groups(version=1, own=own, memory=memory, cpu=cpu)


def _delegate(parent: str, own: str) -> None:
    with contextlib.suppress(OSError):  # refused where the parent holds processes: then it must be on already
        _enable(f"{parent}/cgroup.subtree_control", "+memory")
    _enable(f"{parent}/{own}/cgroup.subtree_control", "+memory")  # refused where the parent did not pass it on
    with contextlib.suppress(OSError):  # without it, a bound on CPU time is refused when it is asked for
        with contextlib.suppress(OSError):
            _enable(f"{parent}/cgroup.subtree_control", "+cpu")
        _enable(f"{parent}/{own}/cgroup.subtree_control", "+cpu")


def _enable(path: str, controller: str) -> None:
    with open(path, "w") as control:
        control.write(controller)


def _candidates() -> list[tuple[int, dict[str, str]]]:
    """(version, controller -> a group to make ours in) of the mounted hierarchies, version 1 first.

    Version 2 gives no controllers to the children of a group that holds processes, as this process's own does: then the nearest
    one above it that can.
    """
    own: dict[str, str] = {}
    with open("/proc/self/cgroup") as lines:
        for line in lines:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            own |= dict.fromkeys(controllers.split(",") if controllers else ["unified"], path)
    first: dict[str, str] = {}
    found: list[tuple[int, dict[str, str]]] = []
    with open("/proc/self/mountinfo") as lines:
        for line in lines:
            left, _, right = line.partition(" - ")
            root, point = left.split()[3:5]
            kind, _, options = right.split()[:3]
            if kind == "cgroup":
                for controller in {"memory", "cpu"} & set(options.split(",")):
                    first[controller] = _join(point, root, own.get(controller, "/"))
            elif kind == "cgroup2":
                found += [(2, {"memory": path}) for path in _upwards(point, _join(point, root, own.get("unified", "/")))]
    return [*([(1, first)] if "memory" in first else []), *found]


def _upwards(top: str, path: str) -> list[str]:
    found = [path]
    while path != top and path.startswith(f"{top}/"):
        path = os.path.dirname(path)
        found.append(path)
    return found


def _join(point: str, root: str, path: str) -> str:
    below = path[len(root) :] if root != "/" and path.startswith(root) else path
    return os.path.normpath(f"{point}/{below}")


def sweep_all() -> None:
    for _, parents in _candidates():
        for parent in parents.values():
            with contextlib.suppress(OSError):  # not ours to change
                sweep(parent)


def sweep(parent: str) -> None:
    """Remove the groups of owners that were killed before they could; those still dying are left to the next sweep."""
    for name in os.listdir(parent):
        if name.startswith(_PREFIX) and not os.path.exists(f"/proc/{name.split('-')[1]}"):
            _remove(f"{parent}/{name}")


def _remove(folder: str) -> bool:
    """Whether it is gone."""
    try:
        for box in os.listdir(folder):
            if os.path.isdir(f"{folder}/{box}"):
                os.rmdir(f"{folder}/{box}")
        os.rmdir(folder)
    except FileNotFoundError:
        return True  # another owner sweeps at the same time
    except OSError:
        return False
    return True
