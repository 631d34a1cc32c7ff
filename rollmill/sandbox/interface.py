"""The sandbox seam: the operating system of an environment, whatever runs it.

A box is isolated (no network, own root file system) and limited (time, memory, processes, disk). What the agent's
program does inside (exit status, time-out, too much output) is an observation in `ExecResult`; what breaks outside
raises `RunFailure(Boundary.SANDBOX)` and is retried, never scored. Files have observations too: a path that is missing, a
folder, too large, not writable or beyond the disk raises `OSError` with its errno and words the agent may be shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec


class SandboxSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a box must look like."""

    files: Mapping[str, str] = {}
    """Initial world: path below the working directory -> text."""
    memory_bytes: int = 512 << 20
    disk_bytes: int = 64 << 20
    num_processes: int = 64
    lifetime_s: float = 600.0
    """The box is killed from outside after this long, whatever its owner does."""


class ExecResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one command did."""

    exit_code: int
    """The command's status; -N when signal N ended it."""
    stdout: bytes
    """Standard output and standard error as one stream: head and tail, when longer than the limit."""
    num_output_bytes: int
    """How much it printed in all."""
    timed_out: bool
    wall_s: float


class Sandbox(Protocol):
    """Paths are relative to the working directory or absolute inside the box; links cannot lead out of it."""

    async def exec(self, argv: Sequence[str], *, timeout_s: float, stdin: bytes = b"", max_output_bytes: int = 1 << 16) -> ExecResult: ...
    async def read(self, path: str, *, limit_bytes: int = 1 << 20) -> bytes: ...
    async def write(self, path: str, data: bytes) -> None: ...
    async def list(self) -> list[str]:
        """The regular files below the working directory, sorted, the first 10,000."""
        ...

    async def close(self) -> None: ...


class SandboxBackend(Protocol):
    async def create(self, spec: SandboxSpec) -> Sandbox: ...
    async def close(self) -> None: ...
