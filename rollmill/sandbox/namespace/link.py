"""The owner's end of the zygote: starts it, sends it orders in order, hears of boxes that are gone; knows no requests of boxes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollmill.records import Boundary, RunFailure
from rollmill.sandbox.namespace.plan import host_plan

START_DEADLINE_S = 60.0
STOP_DEADLINE_S = 60.0
_MAX_MESSAGE = 1 << 16
_BOOT = "import sys; sys.path.append(sys.argv[1]); from inside.zygote import main; main()"


def command_line(control_fd: int) -> list[str]:
    """Isolated and without site packages: the zygote holds a bare interpreter, whatever the owner has imported."""
    folder = str(Path(__file__).resolve().parent)
    return [sys.executable, "-I", "-S", "-B", "-c", _BOOT, folder, str(control_fd), str(os.getpid())]


def environment() -> dict[str, str]:
    """Nothing of the owner's, whose environment holds keys; only where its interpreter finds its libraries."""
    return {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}


def control_pair() -> tuple[socket.socket, socket.socket]:
    """The owner's and the zygote's end; the plan waits in it as the first message."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.send(json.dumps(host_plan()).encode())
    return ours, theirs


class ZygoteLink:
    """A running zygote. `on_gone(box, why, ruined)` is called for each box that ended, `on_lost()` once when the zygote itself did."""

    def __init__(self, process: asyncio.subprocess.Process, control: socket.socket, capabilities: dict[str, str]) -> None:
        self.process = process
        self.capabilities = capabilities
        self.lost = False
        self._control = control
        self._unsent: deque[tuple[bytes, socket.socket | None]] = deque()
        self._on_gone: Callable[[str, str, bool], None] = lambda box, why, ruined: None
        self._on_lost: Callable[[], None] = lambda: None

    @classmethod
    async def start(cls) -> ZygoteLink:
        ours, theirs = control_pair()
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *command_line(theirs.fileno()),
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=(theirs.fileno(),), start_new_session=True,
                env=environment(),
            )  # fmt: skip
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                hello = parse_hello(await loop.sock_recv(ours, _MAX_MESSAGE))
        except TimeoutError:
            ours.close()
            process.kill()
            raise RunFailure(Boundary.SANDBOX, f"the zygote said nothing for {START_DEADLINE_S:g} s") from None
        except BaseException:
            ours.close()  # the zygote ends when its owner hangs up
            raise
        return cls(process, ours, hello)

    def listen(self, on_gone: Callable[[str, str, bool], None], on_lost: Callable[[], None]) -> None:
        self._on_gone, self._on_lost = on_gone, on_lost
        asyncio.get_running_loop().add_reader(self._control, self._hear)

    def order(self, message: dict[str, Any], passed: socket.socket | None = None) -> None:
        """Send one order, now or as soon as the socket takes it; a passed socket is closed on this side once sent."""
        if self.lost:
            if passed is not None:
                passed.close()
            return
        self._unsent.append((json.dumps(message).encode(), passed))
        if len(self._unsent) == 1:
            self._flush()

    def _flush(self) -> None:
        loop = asyncio.get_running_loop()
        while self._unsent:
            message, passed = self._unsent[0]
            try:
                socket.send_fds(self._control, [message], [passed.fileno()] if passed else [])
            except BlockingIOError:
                loop.add_writer(self._control, self._flush)
                return
            except OSError:
                self._lose()
                return
            self._unsent.popleft()
            if passed is not None:
                passed.close()
        loop.remove_writer(self._control)

    def _hear(self) -> None:
        while not self.lost:
            try:
                message = self._control.recv(_MAX_MESSAGE)
            except BlockingIOError:
                return
            except ConnectionError:
                message = b""
            if not message:
                self._lose()
                return
            news = json.loads(message)
            self._on_gone(news["gone"], news["why"], news["ruined"])

    def _lose(self) -> None:
        if self.lost:
            return
        self.lost = True
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._control)
        loop.remove_writer(self._control)
        self._control.close()
        for _, passed in self._unsent:
            if passed is not None:
                passed.close()
        self._unsent.clear()
        self._on_lost()

    async def stop(self) -> None:
        """Hang up: the zygote kills every box, cleans up and ends."""
        self._lose()
        try:
            async with asyncio.timeout(STOP_DEADLINE_S):
                await self.process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            raise RunFailure(Boundary.SANDBOX, f"the zygote did not end within {STOP_DEADLINE_S:g} s") from None


def parse_hello(message: bytes) -> dict[str, str]:
    """What this machine gives, as the zygote found by making one box; RunFailure with its sentence when it could make none."""
    if not message:
        raise RunFailure(Boundary.SANDBOX, "the zygote ended while it started; its own words are on standard error")
    hello: dict[str, Any] = json.loads(message)
    if "broken" in hello:
        raise RunFailure(Boundary.SANDBOX, hello["broken"])
    ready: dict[str, str] = hello["ready"]
    return ready
