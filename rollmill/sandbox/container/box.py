"""One container as a box: its first process is the agent, which ends when its owner hangs up, whatever way the owner ends.

The engine then removes the container. Knows no other box.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from rollmill.records import RunFailure
from rollmill.sandbox.container.held import HANG_UP_S, HeldBox
from rollmill.sandbox.container.tool import Tool
from rollmill.sandbox.group import fork_by_snapshot
from rollmill.sandbox.interface import Sandbox, Snapshot
from rollmill.sandbox.records import Change, ChangeKind, FileKind, SandboxSpec, Service

AGENT = "/.rollmill-box"
"""Where the agent's binary is shown inside."""
ENGINE_DEADLINE_S = 120.0
"""For one short command of the engine; a daemon under a burst answers late."""
END_GRACE_S = 2.0
_ENGINE_PATHS = frozenset("/etc/hosts /etc/hostname /etc/resolv.conf /etc/mtab /run/.containerenv /.dockerenv /run /proc /sys /dev".split())
"""What engines put into every container themselves."""

Commit = Callable[["ContainerBox", tuple[Service, ...]], Awaitable[Snapshot]]


class ContainerBox(HeldBox):
    """Made by `ContainerBackend` only; `commit` keeps the container's files."""

    def __init__(
        self, name: str, spec: SandboxSpec, engine: Tool, commit: Commit,
        *, workdir: str, shell: tuple[str, ...], on_end: Callable[[HeldBox], None],
    ) -> None:  # fmt: skip
        super().__init__(name, spec, shell=shell, on_end=on_end)
        self.workdir = workdir
        self._engine = engine
        self._commit = commit
        self._is_paused = False
        self._changing = asyncio.Lock()

    async def diff(self) -> list[Change]:
        self.check_alive()
        lines = (await self._engine.run("diff", self.name, deadline_s=ENGINE_DEADLINE_S)).decode(errors="surrogateescape").splitlines()
        found = {path: kind for kind, _, path in (line.partition(" ") for line in lines) if path not in _ENGINE_PATHS and path != AGENT}
        parents = {path.rpartition("/")[0] for path in found}
        changes = []
        for path, kind in sorted(found.items()):
            # Engines also name folders in which something changed; what differs is the thing in them.
            if kind == "C" and (path in parents or await self._is_folder(path)):
                continue
            changes.append(Change(path=path, kind=ChangeKind.REMOVED if kind == "D" else ChangeKind.WRITTEN))
        return changes

    async def snapshot(self, *, live: bool = False) -> Snapshot:
        if live:
            raise ValueError("containers give no live snapshot: an engine keeps files, not processes; leave `live` out")
        async with self._changing:
            self.check_alive()
            services = tuple(self.services)
            await self.services.stop()
            await self.end_all(END_GRACE_S)
            taken = await self._commit(self, services)
            try:
                for service in services:
                    await self.serve(service)
            except BaseException:
                await asyncio.shield(taken.close())
                raise
            return taken

    async def fork(self, num: int) -> list[Sandbox]:
        return await fork_by_snapshot(self, num)

    async def suspend(self) -> None:
        """The whole container, its agent too: until `resume` every other call waits."""
        self.check_alive()
        await self._engine.run("pause", self.name, deadline_s=ENGINE_DEADLINE_S)
        self._is_paused = True

    async def resume(self) -> None:
        self.check_alive()
        await self._engine.run("unpause", self.name, deadline_s=ENGINE_DEADLINE_S)
        self._is_paused = False

    async def destroy(self) -> None:
        """The agent ends by the hang-up, and the container with it; one that does not is killed."""
        if self._is_paused:
            with contextlib.suppress(RunFailure):
                await self._engine.run("unpause", self.name, deadline_s=ENGINE_DEADLINE_S)
        if not await self.client_ended(HANG_UP_S):
            await self._engine.run("kill", self.name, deadline_s=ENGINE_DEADLINE_S)

    async def _is_folder(self, path: str) -> bool:
        try:
            return (await self.stat(path)).kind == FileKind.FOLDER
        except OSError:
            return False  # removed since
