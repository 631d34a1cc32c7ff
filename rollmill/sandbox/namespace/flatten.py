"""Makes deep stacks shallow in the background: one flattening at a time, and whoever stands on the old layers stands on the new one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from rollmill.records import RunFailure
from rollmill.sandbox.namespace.courier import NamespaceCourier
from rollmill.sandbox.namespace.layers import Layer, Machine, Stack, let_go, use
from rollmill.sandbox.records import SandboxSpec
from rollmill.sandbox.snapshots import saved
from rollmill.sandbox.snapshots.chains import MAX_DEPTH, ChainBook

log = logging.getLogger(__name__)


class Deep(Protocol):
    """A box or a snapshot: its stack may be replaced by one that shows the same, because it is mounted anew each time it is used."""

    spec: SandboxSpec
    machine: Machine
    stack: Stack


class Flattener:
    def __init__(self, courier: Callable[[SandboxSpec, int], NamespaceCourier], *, max_depth: int = MAX_DEPTH) -> None:
        self._courier, self._max_depth = courier, max_depth
        self._book: ChainBook[Layer] = ChainBook(max_depth=max_depth)
        self._owners: dict[int, Deep] = {}
        self._working: asyncio.Task[None] | None = None
        self.num_flattened = 0

    def watch(self, owner: Deep) -> None:
        """The owner has a new stack."""
        self.forget(owner)
        chain = tuple(reversed(owner.stack[: owner.machine.num_own(len(owner.stack))]))
        if len(chain) <= self._max_depth:
            return
        self._owners[id(owner)] = owner
        self._book.add(id(owner), chain)
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._work(owner.spec), name="flatten layers")

    def forget(self, owner: Deep) -> None:
        if self._owners.pop(id(owner), None) is not None:
            self._book.drop(id(owner))

    async def close(self) -> None:
        if self._working is not None:
            self._working.cancel()
            await asyncio.gather(self._working, return_exceptions=True)

    async def _work(self, spec: SandboxSpec) -> None:
        while (flattening := self._book.next()) is not None:
            held = use(flattening.layers)
            try:
                whole = await saved.flatten(self._courier(spec, len(flattening.layers)), flattening.layers)
            except (RunFailure, ValueError, OSError) as failure:
                # Deep stacks work, only slower: what cannot be made shallow is left as it is.
                log.warning("%d layers stay apart: %s", len(flattening.layers), failure)
                self._book.failed(flattening)
                continue
            finally:
                let_go(held)
            for key, chain in self._book.done(flattening, whole).chains.items():
                assert isinstance(key, int)
                owner = self._owners[key]
                old, image = owner.stack, owner.stack[owner.machine.num_own(len(owner.stack)) :]
                owner.stack = use((*reversed(chain), *image))
                let_go(old)
                if len(chain) <= self._max_depth:
                    self.forget(owner)
            whole.let_go()
            self.num_flattened += 1
