"""Boxes for the tests of the wire: an agent in a process of its own, isolated by nothing but a PID namespace."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import rollmill.sandbox
from rollmill.sandbox.agent.client import AgentBox
from rollmill.sandbox.agent.native.build import binary
from rollmill.sandbox.agent.streams import SocketStream
from rollmill.sandbox.records import SandboxSpec

SANDBOX = Path(rollmill.sandbox.__file__).resolve().parent
BOOT = f"import sys; sys.path.append({str(SANDBOX)!r}); from agent.plain.serve import serve_stdio; serve_stdio()"
PLAIN = [sys.executable, "-I", "-S", "-B", "-c", BOOT]
ENV = {"PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin", "HOME": "/root", "LANG": "C.UTF-8", "WHO": "base"}
READY_S = 30.0


@lru_cache(maxsize=1)
def alone() -> list[str] | None:
    """What to put before a command so that it is the first process of a PID namespace; None where that is refused."""
    if shutil.which("unshare") is None:
        return None
    words = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    for prefix in (words, [*words, "--user", "--map-root-user"]):
        if subprocess.run([*prefix, "true"], capture_output=True, timeout=READY_S, check=False).returncode == 0:
            return prefix
    return None


def command_line(kind: str, folder: Path) -> list[str] | str:
    """How to start an agent of that kind, or why it cannot be."""
    prefix = alone()
    if prefix is None:
        return "this machine gives no PID namespace, and without one the agents' commands would outlive the test"
    if kind == "plain":
        return [*prefix, *PLAIN]
    if kind == "plain-beside":
        return [*prefix, "sh", "-c", '"$@"; exit', "sh", *PLAIN]
    assert kind == "native"
    program = binary()
    return [*prefix, str(program), "serve", "--contained", str(folder)] if program else "there is no native agent on this machine"


class LocalBox(AgentBox):
    """An agent in a folder of this machine, gone when its process is."""

    def __init__(self, argv: list[str], folder: Path, spec: SandboxSpec) -> None:
        super().__init__("local", spec, kill=self._kill_now)
        self.folder = folder
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(argv, stdin=theirs, stdout=theirs, cwd=folder, env=ENV)
        self._pidfd = os.pidfd_open(self.process.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._ended)
        self.attach(SocketStream(ours))

    @classmethod
    async def open(cls, argv: list[str], folder: Path, spec: SandboxSpec | None = None) -> LocalBox:
        box = cls(argv, folder, spec or SandboxSpec(disk_bytes=1 << 30))
        await box.ready(READY_S)
        return box

    def _kill_now(self) -> None:
        self.process.kill()

    def _ended(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.process.wait()
        self.gone(self.why_gone, ruined=self.ruin)

    why_gone = "its process ended"
    ruin = False
