"""A frozen state of a box: a stack of layers and what must run above it; forking it copies no file."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from rollmill.records import Boundary, RunFailure
from rollmill.sandbox.group import all_or_none
from rollmill.sandbox.namespace.layers import Machine, Stack, let_go, use
from rollmill.sandbox.records import SandboxSpec, Service

if TYPE_CHECKING:
    from rollmill.sandbox.interface import Sandbox
    from rollmill.sandbox.namespace.backend import NamespaceBackend
    from rollmill.sandbox.namespace.live import LiveImage


class NamespaceSnapshot:
    """OPEN -> CLOSED. Forks keep the layers they stand on, so closing it takes nothing from them."""

    def __init__(
        self, backend: NamespaceBackend, spec: SandboxSpec, machine: Machine, stack: Stack, services: tuple[Service, ...],
        *, created: float | None = None, live: LiveImage | None = None,
    ) -> None:  # fmt: skip
        self.spec, self.machine, self.services = spec, machine, services
        self.created = time.time() if created is None else created
        self.stack: Stack = use(stack)
        self.live = live
        """Its processes; None: services are started anew."""
        self._backend = backend
        self._closed = False

    async def fork(self, num: int, spec: SandboxSpec | None = None) -> list[Sandbox]:
        """`num` boxes in this state, all or none; `spec` gives other limits, its files and services are not used."""
        if num < 1:
            raise ValueError(f"fork({num}): a fork has at least one child")
        if self._closed:
            raise RunFailure(Boundary.SANDBOX, "the snapshot is closed")
        limits = self.spec if spec is None else spec
        if self.live is not None and not limits.live:
            limits = msgspec.structs.replace(limits, live=True)
        stack = use(self.stack)  # the snapshot may be closed, or its stack be made shallower, meanwhile
        live = None if self.live is None else self.live.use()
        try:
            return list(await all_or_none([self._backend.stand(limits, self.machine, stack, self.services, live=live) for _ in range(num)]))
        finally:
            let_go(stack)
            if live is not None:
                live.let_go()

    async def save(self, store: str) -> str:
        if self._closed:
            raise RunFailure(Boundary.SANDBOX, "the snapshot is closed")
        if self.live is not None:
            raise ValueError("a live snapshot of a namespace box cannot be saved, its processes belong to this machine; save snapshot()")
        return await self._backend.save(self, store)

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._backend.flattener.forget(self)
            let_go(self.stack)
            self.stack = ()
            if self.live is not None:
                self.live.let_go()
