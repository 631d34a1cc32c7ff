"""The nouns of a virtual machine: what it is made of, how it ended, what is left of it when it was saved. Known to every driver."""

from __future__ import annotations

import os

import msgspec

VSOCK_PORT = 1024
"""Where the agent listens in machines that are reached by vsock; the warden has the next one."""


class MachineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine is made of."""

    name: str
    kernel: str = ""
    """An uncompressed kernel; this and the next are unused when a machine is restored."""
    initrd: bytes = b""
    """A cpio archive."""
    disk: str
    """The read-only root disk."""
    memory_bytes: int


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """Why a machine is no more."""

    why: str
    by_guest: bool
    """Its own doing (panic, power off), not an order from outside and no accident of the monitor."""


def last_words(console: str, limit: int = 1000) -> str:
    """The end of what a guest printed; of a panic its first line as well, which the trace below it would push out."""
    panic = next((line.strip() for line in console.splitlines() if "Kernel panic" in line), "")
    tail = console[-limit:].strip()
    return f"{panic} ...\n{tail}" if panic and panic not in tail else tail


class Saved:
    """Memory and devices of a stopped machine, in files without a name: what a killed owner leaves is nothing."""

    def __init__(self, files: dict[str, int], config: MachineConfig) -> None:
        self.files = files
        self.config = config

    def close(self) -> None:
        while self.files:
            os.close(self.files.popitem()[1])
