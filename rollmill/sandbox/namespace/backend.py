"""Makes boxes through one zygote, admitting a bounded number at a time; owns the table of living boxes and nothing inside them.

The zygote starts with the first box and is started again when it died; its boxes die with it, and their owners hear why.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys

from rollmill.records import Boundary, RunFailure
from rollmill.sandbox.interface import SandboxSpec
from rollmill.sandbox.namespace.box import NamespaceBox
from rollmill.sandbox.namespace.inside import cgroups
from rollmill.sandbox.namespace.link import (
    START_DEADLINE_S,
    STOP_DEADLINE_S,
    ZygoteLink,
    command_line,
    control_pair,
    environment,
    parse_hello,
)

CREATE_DEADLINE_S = 60.0
_MIN_MEMORY_BYTES, _MIN_DISK_BYTES = 32 << 20, 64 << 10


class NamespaceBackend:
    """`SandboxBackend` on Linux namespaces.

    More than 2 x cores creations at once only lengthen the slowest (measured), so the rest waits first come, first served.
    """

    def __init__(self, *, num_creating: int | None = None) -> None:
        self._admission = asyncio.Semaphore(num_creating or 2 * (os.cpu_count() or 1))
        self._starting = asyncio.Lock()
        self._link: ZygoteLink | None = None
        self._boxes: dict[str, NamespaceBox] = {}
        self._num_created = 0
        self._closed = False

    @staticmethod
    def probe() -> str | None:
        """None when boxes can be made on this machine, else one sentence that says why not and what to change. Blocks briefly."""
        if sys.platform != "linux":
            return f"the namespace sandbox needs Linux, this is {sys.platform}; run Rollmill in a Linux virtual machine or container"
        ours, theirs = control_pair()
        with ours, theirs:
            zygote = subprocess.Popen(
                command_line(theirs.fileno()),
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=(theirs.fileno(),), start_new_session=True, env=environment(),
            )  # fmt: skip
            theirs.close()
            ours.settimeout(START_DEADLINE_S)
            try:
                parse_hello(ours.recv(1 << 16))
            except RunFailure as failure:
                return failure.message
            except TimeoutError:
                zygote.kill()
                return f"the namespace sandbox did not start within {START_DEADLINE_S:g} s; look at the load of this machine"
            finally:
                ours.close()
                zygote.wait(timeout=STOP_DEADLINE_S)
        return None

    async def capabilities(self) -> dict[str, str]:
        """What this machine gives: `privilege` (root, rootless), `memory` (cgroup-v1, cgroup-v2: per box; rlimit-as: per process),
        `proc` and `seccomp` (or why they are missing)."""
        return dict((await self._zygote()).capabilities)

    async def start(self) -> None:
        """Start the zygote now and not with the first box."""
        await self._zygote()

    @property
    def zygote_pid(self) -> int | None:
        return self._link.process.pid if self._link is not None and not self._link.lost else None

    async def _zygote(self) -> ZygoteLink:
        """The living zygote, started when there is none."""
        if sys.platform != "linux":
            raise RunFailure(Boundary.SANDBOX, self.probe() or "")
        async with self._starting:
            if self._closed:
                raise RunFailure(Boundary.SANDBOX, "the backend is closed")
            if self._link is None or self._link.lost:
                self._link = await ZygoteLink.start()
                self._link.listen(self._box_gone, self._zygote_lost)
            return self._link

    async def create(self, spec: SandboxSpec) -> NamespaceBox:
        _check(spec)
        async with self._admission:
            link = await self._zygote()
            self._num_created += 1
            box = NamespaceBox(f"box-{self._num_created}", spec, lambda name: link.order({"kill": name}))
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            try:
                await asyncio.get_running_loop().create_unix_connection(lambda: box, sock=ours)
            except BaseException:
                ours.close()
                theirs.close()
                raise
            self._boxes[box.name] = box
            limits = {"memory_bytes": spec.memory_bytes, "disk_bytes": spec.disk_bytes, "num_processes": spec.num_processes}
            link.order({"create": {"box": box.name, **limits, "lifetime_s": spec.lifetime_s}}, theirs)
            if link.lost:
                box.gone("the zygote that made it died")
            try:
                await box.install(CREATE_DEADLINE_S)
            except BaseException:
                await asyncio.shield(box.close())
                raise
            return box

    async def close(self) -> None:
        """Kill every box and the zygote; again is harmless."""
        self._closed = True
        async with self._starting:
            link, self._link = self._link, None
        if link is not None:
            await link.stop()
            if link.process.returncode:  # killed, so it could not clean up
                await asyncio.to_thread(cgroups.sweep_all)

    def _box_gone(self, name: str, why: str, ruined: bool) -> None:
        box = self._boxes.pop(name, None)
        if box is not None:
            box.gone(why, ruined=ruined)

    def _zygote_lost(self) -> None:
        boxes, self._boxes = self._boxes, {}
        for box in boxes.values():
            box.gone("the backend was closed" if self._closed else "the zygote that made it died")


def _check(spec: SandboxSpec) -> None:
    if spec.memory_bytes < _MIN_MEMORY_BYTES or spec.disk_bytes < _MIN_DISK_BYTES:
        raise ValueError(
            f"a box of {spec.memory_bytes} bytes of memory and {spec.disk_bytes} of disk is too small to start; "
            f"give at least {_MIN_MEMORY_BYTES} and {_MIN_DISK_BYTES}"
        )
    if spec.num_processes < 1 or spec.lifetime_s <= 0:
        raise ValueError(f"num_processes {spec.num_processes} and lifetime_s {spec.lifetime_s} must be positive")
