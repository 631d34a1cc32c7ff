"""A box of Linux namespaces: an agent's box that can also be frozen into a layer, go on above it, and be forked."""

from __future__ import annotations

import asyncio
import errno
from typing import TYPE_CHECKING, Any

from rollmill.records import Boundary, RunFailure
from rollmill.sandbox.agent import wire
from rollmill.sandbox.agent.client import AgentBox
from rollmill.sandbox.agent.link import Listener
from rollmill.sandbox.agent.process import AgentProcess
from rollmill.sandbox.group import fork_by_snapshot
from rollmill.sandbox.namespace.layers import Layer, Machine, Stack, let_go, use
from rollmill.sandbox.records import SandboxSpec, Service

if TYPE_CHECKING:
    from rollmill.sandbox.egress.guard import EgressGuard
    from rollmill.sandbox.namespace.backend import NamespaceBackend
    from rollmill.sandbox.namespace.snapshot import NamespaceSnapshot

END_GRACE_S = 2.0
"""How long processes that are no service may take to end after SIGTERM, before a snapshot kills them."""


class NamespaceBox(AgentBox):
    """One sandbox; made by `NamespaceBackend` only."""

    def __init__(self, name: str, spec: SandboxSpec, backend: NamespaceBackend, machine: Machine, stack: Stack) -> None:
        super().__init__(name, spec, kill=self._kill_by_zygote)
        self.shell = machine.shell
        self.machine = machine
        self.stack: Stack = use(stack)
        """What it is stacked on, its own writable layer not counted."""
        self.guard: EgressGuard | None = None
        self.slot: int | None = None
        self.changing = asyncio.Lock()
        """Held by a snapshot: a second one waits."""
        self.pid = 0
        """Its first process, as this machine counts; of boxes that can be forked live."""
        self._moving: list[Listener] = []
        self._backend = backend
        self._closed = False

    def _kill_by_zygote(self) -> None:
        if self.slot is not None:
            self._backend.kill(self.slot)
        else:
            self.gone("its owner closed it before it stood")

    def hung_up(self) -> None:
        if self.slot is None:
            self.gone("it ended before it stood")

    async def snapshot(self, *, live: bool = False) -> NamespaceSnapshot:
        return await self._backend.snapshot(self, live=live)

    async def leave_programs(self) -> tuple[int, bytes] | None:
        """Take the agent's hands off all programs: their common parent's number, and its name for `join_programs`; None: there are none."""
        link = self._life()
        if link.busy:
            raise ValueError(f"box {self.name} runs a call; wait for it before snapshot(live=True), or start() what is to go on")
        try:
            body = wire.Body(await self._control(wire.Ask.LEAVE))
        except OSError as error:
            if error.errno == errno.ESRCH:
                return None
            raise RunFailure(Boundary.SANDBOX, f"box {self.name} cannot be forked live: {error.strerror}") from None
        self._moving = link.release()
        return body.u32(), body.text()

    async def join_programs(self, name: bytes) -> None:
        """Take up programs that were left or restored; who held one that this box started goes on holding it."""
        moving, self._moving = self._moving, []
        try:
            await self._control(wire.Ask.JOIN, wire.text(name))
        except OSError as error:
            raise RunFailure(Boundary.SANDBOX, f"box {self.name} lost its programs: {error.strerror}") from None
        for process in moving:
            assert isinstance(process, AgentProcess)
            process.move(self._life())

    async def fork(self, num: int) -> list[Any]:
        return await fork_by_snapshot(self, num)

    async def quiesce(self) -> tuple[Service, ...]:
        """End every process, services by their own time; which services there were."""
        services = tuple(self.services)
        await self.services.stop()
        await self.end_all(END_GRACE_S)
        return services

    def restack(self, layer: Layer) -> None:
        self.stack = (layer, *self.stack)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            if self.link is not None:
                await super().close()
        finally:
            self._backend.flattener.forget(self)
            let_go(self.stack)
            self.stack = ()
            if self.guard is not None:
                await self.guard.close()

    def check_open(self) -> None:
        if self._closed:
            raise RunFailure(Boundary.SANDBOX, f"box {self.name} is gone: its owner closed it")
