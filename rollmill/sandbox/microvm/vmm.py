"""The driver seam: what a virtual machine monitor must do for a box. Knows nothing of what runs inside the machine."""

from __future__ import annotations

import asyncio
import socket
from typing import Protocol

from rollmill.sandbox.microvm.machine import Ending, MachineConfig, Saved


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
