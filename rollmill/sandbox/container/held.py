"""A box held through a tool's client (`docker run`, `kubectl exec`): our end of the client's input and output is the stream to its agent.

The client's end is the box's end, whichever came first; what the box leaves outside is destroyed then, once.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

from rollmill.records import RunFailure
from rollmill.sandbox.agent.client import AgentBox
from rollmill.sandbox.agent.streams import SocketStream
from rollmill.sandbox.records import SandboxSpec

HANG_UP_S = 5.0
"""How long a client may take to end once its box was destroyed or its agent was left."""
_KILLED_STATUS = 137
_MAX_WORDS = 2000


class HeldBox(AgentBox):
    """A backend subclasses it and says how to `destroy` what is outside; `on_end` hears once that nothing is left."""

    def __init__(self, name: str, spec: SandboxSpec, *, shell: tuple[str, ...], on_end: Callable[[HeldBox], None]) -> None:
        super().__init__(name, spec, kill=self._begin_end)
        self.shell = shell
        self._on_end = on_end
        self._ending: asyncio.Task[None] | None = None
        self._client: asyncio.subprocess.Process | None = None
        self._watching: asyncio.Task[None] | None = None
        self._lifetime: asyncio.TimerHandle | None = None
        self._outliving: asyncio.Task[None] | None = None

    def enter(self, client: asyncio.subprocess.Process, sock: socket.socket) -> None:
        """Begin the box's life with the client that holds it, and our end of its input and output."""
        self._client = client
        self.attach(SocketStream(sock))
        self._watching = asyncio.ensure_future(self._watch(client))
        self._lifetime = asyncio.get_running_loop().call_later(self.spec.lifetime_s, self._outlive)

    async def destroy(self) -> None:
        """End what is outside; called once, after the owner hung up. A `RunFailure` says that it was gone already."""
        raise NotImplementedError

    async def close(self) -> None:
        if self._link is not None:
            await super().close()
        self._begin_end()
        assert self._ending is not None
        await asyncio.shield(self._ending)

    def check_alive(self) -> None:
        if not self.alive:
            raise self._life().failure()

    async def client_ended(self, within_s: float) -> bool:
        if self._watching is None:
            return True
        done, _ = await asyncio.wait((self._watching,), timeout=within_s)
        return bool(done)

    def _outlive(self) -> None:
        self._outliving = asyncio.ensure_future(self.end(f"its lifetime of {self.spec.lifetime_s:g} s is over"))

    def _begin_end(self) -> None:
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end())

    async def _end(self) -> None:
        with contextlib.suppress(RunFailure):  # the tool does not know it any more, or is gone itself: the client's end tells
            await self.destroy()
        if not await self.client_ended(HANG_UP_S) and self._client is not None and self._client.returncode is None:
            self._client.kill()
            await self.client_ended(HANG_UP_S)
        self._on_end(self)

    async def _watch(self, client: asyncio.subprocess.Process) -> None:
        assert client.stderr is not None and self._lifetime is not None
        words = b""
        while chunk := await client.stderr.read(1 << 16):
            words = (words + chunk)[-_MAX_WORDS:]
        status = await client.wait()
        self._lifetime.cancel()
        if self._ending is None and status == _KILLED_STATUS and self._life().hello is not None:
            # Nobody of ours killed the agent: its programs used up the memory, and the kernel took it with them.
            self.gone("its memory ran out", ruined=True)
        else:
            said = words.decode(errors="replace").strip()
            self.gone(f"its client ended with status {status}" + (f": {said}" if said else ""))
        self._begin_end()
