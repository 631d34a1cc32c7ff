"""The state each task starts from: set up once, frozen, and forked for every attempt at it.

Attempts that start together share one set-up; a set-up that failed is tried again by the next attempt. Snapshots of the tasks used
last are kept: the attempts of a group start close together, and a fork keeps what it stands on whether or not the snapshot is kept.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from rollmill.records import Boundary, RunFailure, Task
from rollmill.sandbox import Sandbox, SandboxBackend, SandboxSpec, Snapshot
from rollmill.tasks import TaskFamily, machine_of, set_up

NUM_KEPT = 256


class Worlds:
    def __init__(
        self,
        family: TaskFamily,
        sandboxes: SandboxBackend,
        *,
        num_kept: int = NUM_KEPT,
        machine: Callable[[Task], SandboxSpec] | None = None,
    ) -> None:
        """`machine`: what the box of a task looks like; None: as its family says."""
        self._family, self._sandboxes, self._num_kept = family, sandboxes, num_kept
        self._machine = machine if machine is not None else lambda task: machine_of(family, task)
        self._frozen: OrderedDict[str, asyncio.Task[Snapshot]] = OrderedDict()
        self._can_fork: bool | None = None

    async def box(self, task: Task, *, lifetime_s: float) -> Sandbox:
        """A box in the task's first state, this attempt's alone."""
        spec = msgspec.structs.replace(self._machine(task), lifetime_s=lifetime_s)
        if self._can_fork is None:
            self._can_fork = (await self._sandboxes.capabilities()).fork
        if not self._can_fork:
            return await self._made(task, spec)
        snapshot = await self._snapshot(task, spec)
        (box,) = await snapshot.fork(1, spec)
        return box

    async def close(self) -> None:
        for task_id in list(self._frozen):
            await self._drop(task_id)

    async def _snapshot(self, task: Task, spec: SandboxSpec) -> Snapshot:
        if task.task_id not in self._frozen:
            self._frozen[task.task_id] = asyncio.create_task(self._freeze(task, spec), name=f"set up {task.task_id}")
        self._frozen.move_to_end(task.task_id)
        while len(self._frozen) > self._num_kept:
            await self._drop(next(iter(self._frozen)))
        freezing = self._frozen.get(task.task_id)
        assert freezing is not None
        try:
            # One attempt that is cancelled must not take the set-up from its siblings.
            return await asyncio.shield(freezing)
        except BaseException:
            if freezing.done() and self._frozen.get(task.task_id) is freezing:
                del self._frozen[task.task_id]
            raise

    async def _freeze(self, task: Task, spec: SandboxSpec) -> Snapshot:
        box = await self._made(task, spec)
        try:
            return await box.snapshot()
        finally:
            await box.close()

    async def _made(self, task: Task, spec: SandboxSpec) -> Sandbox:
        box = await self._sandboxes.create(spec)
        try:
            await set_up(self._family, task, box)
        except RunFailure:
            await box.close()
            raise
        except Exception as error:
            # A family is foreign code: whatever its set-up raises is the task's failure, never a reward.
            await box.close()
            raise RunFailure(Boundary.TASK, f"setting up {task.task_id} raised {type(error).__name__}: {error}") from error
        except BaseException:
            await asyncio.shield(box.close())
            raise
        return box

    async def _drop(self, task_id: str) -> None:
        freezing = self._frozen.pop(task_id)
        if not freezing.done():
            freezing.cancel()
        (result,) = await asyncio.gather(freezing, return_exceptions=True)
        if not isinstance(result, BaseException):
            await result.close()
