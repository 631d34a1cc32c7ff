"""Every process of a box but its agent: who they are, and one signal to all of them."""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import Protocol

_MAX_COMMAND_BYTES = 4096
_PR_SET_CHILD_SUBREAPER = 36


class Others(Protocol):
    def pids(self) -> list[int]: ...
    def signal(self, number: int) -> bool:
        """Whether there was anyone to send it to; 0 only asks."""
        ...


class Everyone:
    """For PID 1 of its own namespace only: anywhere else this signals the whole machine."""

    def __init__(self) -> None:
        assert os.getpid() == 1, "only PID 1 may signal everyone"

    def pids(self) -> list[int]:
        return [pid for pid, _ in _table() if pid != 1]

    def signal(self, number: int) -> bool:
        try:
            os.kill(-1, number)
        except ProcessLookupError:
            return False
        return True


class Descendants:
    """For an agent beside others, as in a container: what it started, and what that left behind."""

    def __init__(self) -> None:
        # Orphans come to us and not to the first process, so that they stay descendants.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def pids(self) -> list[int]:
        children: dict[int, list[int]] = {}
        for pid, parent in _table():
            children.setdefault(parent, []).append(pid)
        found, next_of = [], [os.getpid()]
        while next_of:
            below = children.get(next_of.pop(), [])
            found += below
            next_of += below
        return found

    def signal(self, number: int) -> bool:
        told: set[int] = set()
        # Again until nobody new is there: a process may fork while its siblings are told.
        while new := set(self.pids()) - told:
            for pid in new:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
            told |= new
        return bool(told)


def command_line(pid: int) -> bytes | None:
    """None: it has ended."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read(_MAX_COMMAND_BYTES).rstrip(b"\0")
        if words:
            return words.replace(b"\0", b" ")
        with open(f"/proc/{pid}/comm", "rb") as file:
            return b"[" + file.read().strip() + b"]"
    except OSError:
        return None


def _table() -> list[tuple[int, int]]:
    """(pid, parent) of every process that runs; what has ended and waits to be reaped is not among them."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    # The name in brackets may hold anything, also spaces and brackets.
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
            except (OSError, ValueError):
                continue  # ended meanwhile
            if state not in (b"Z", b"X"):
                found.append((int(name), int(parent)))
    return found
