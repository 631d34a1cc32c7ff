"""The driver seam: what a virtual machine monitor must do for a box. Knows nothing of what runs inside the machine."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Protocol

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


class Saved:
    """Memory and devices of a stopped machine, in files without a name: what a killed owner leaves is nothing."""

    def __init__(self, files: dict[str, int], config: MachineConfig) -> None:
        self.files = files
        self.config = config

    def close(self) -> None:
        while self.files:
            os.close(self.files.popitem()[1])


class Machine(Protocol):
    """One running monitor. `agent` and `warden` are connected sockets to the two listeners inside; their new owner closes them."""

    agent: socket.socket
    warden: socket.socket
    ended: asyncio.Future[Ending]

    async def pause(self) -> None: ...
    async def resume(self) -> bool: ...  # whether `agent` and `warden` are new ones, the old having been cut by `save`
    async def save(self) -> Saved: ...  # paused before, and paused after
    def kill(self) -> None: ...
    def console(self) -> str: ...  # the last lines


class Vmm(Protocol):
    maker: str  # program, version and accelerator: what can read what it saved
    accelerator: str
    is_vsock: bool  # whether the agent is reached by vsock; else by serial ports

    async def prepare(self) -> None: ...  # once, before the first machine
    async def boot(self, config: MachineConfig) -> Machine: ...
    async def restore(self, saved: Saved, name: str) -> Machine: ...  # running
