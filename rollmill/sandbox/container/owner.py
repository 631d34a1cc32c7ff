"""Names the process that owns boxes kept by someone else (an engine, a cluster), so that what a dead owner left can be told apart.

A name is machine, process and start time: none of the three alone is unique for long.
"""

from __future__ import annotations

import hashlib
import os
import socket
from pathlib import Path

LABEL = "rollmill-owner"


def machine() -> str:
    """Fits a label or a tag: lower-case letters and digits only."""
    words = f"{socket.gethostname()} {_read('/etc/machine-id')} {_pid_namespace()}"
    return hashlib.blake2s(words.encode(), digest_size=6).hexdigest()


def owner() -> str:
    """The name of this process."""
    return f"{machine()}.{os.getpid()}.{_started(os.getpid())}"


def is_orphan(name: str) -> bool:
    """Whether the process of that name certainly is dead; one on another machine, or a name that is none of ours, never is."""
    parts = name.split(".")
    if len(parts) != 3 or parts[0] != machine() or not parts[1].isdigit():
        return False
    return _started(int(parts[1])) != parts[2]


def _started(pid: int) -> str:
    """Clock ticks after boot at which a process began; empty when there is none."""
    stat = _read(f"/proc/{pid}/stat")
    return stat.rpartition(")")[2].split()[19] if stat else ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
