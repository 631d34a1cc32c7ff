"""The programs that run beside the agent of one box: started in order, waited for, stopped in reverse; knows no snapshots."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rollmill.records import Boundary, RunFailure
from rollmill.sandbox.agent.process import AgentProcess
from rollmill.sandbox.records import Service

if TYPE_CHECKING:
    from rollmill.sandbox.agent.client import AgentBox

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 0.5
PROBE_TIMEOUT_S = 10.0
"""A question whether it is ready that hangs is asked again."""
SHOWN_BYTES = 4096
"""How much of a service's last output its failure shows."""


class Services:
    """Iterates over what runs, in the order it was started."""

    def __init__(self, box: AgentBox) -> None:
        self._box = box
        self._running: dict[str, tuple[Service, AgentProcess]] = {}

    def __iter__(self) -> Iterator[Service]:
        return iter([service for service, _ in self._running.values()])

    def __len__(self) -> int:
        return len(self._running)

    def running(self) -> list[tuple[Service, AgentProcess]]:
        return list(self._running.values())

    async def adopt(self, service: Service, pid: int) -> None:
        """It runs already, restored with its box."""
        assert self._box.link is not None
        process = AgentProcess.adopted(self._box.link, pid, " ".join(service.argv))
        await process.started()
        process.drain()
        self._running[service.name] = (service, process)

    async def serve(self, service: Service) -> None:
        """Start it and wait until it can be used."""
        if service.name in self._running:
            raise ValueError(f"service {service.name!r} runs already; give the second one a name of its own")
        try:
            process = await self._box.start(service.argv, cwd=service.cwd, env=service.env)
        except OSError as error:
            raise self._failed(f"service {service.name} could not be started: {error}") from None
        process.drain()
        self._running[service.name] = (service, process)
        try:
            await self._until_ready(service, process)
        except BaseException:
            del self._running[service.name]
            await process.kill()
            raise

    async def stop(self) -> None:
        """SIGTERM to each, the last one first, and SIGKILL to what has not ended within its `stop_s`. None is left in the list."""
        while self._running:
            _, (service, process) = self._running.popitem()
            await process.kill(signal.SIGTERM)
            await asyncio.wait((process.ended,), timeout=service.stop_s)
            await process.kill()

    async def _until_ready(self, service: Service, process: AgentProcess) -> None:
        if not service.ready_argv:
            return
        loop = asyncio.get_running_loop()
        deadline = loop.time() + service.ready_s
        pause_s = FIRST_PAUSE_S
        while True:
            if process.ended.done():
                status = (await process.wait(timeout_s=0.0)).exit_code
                words = f"service {service.name} ended with status {status} before it was ready (it must stay in the foreground)"
                raise self._failed(f"{words}: {_tail(process)}")
            left_s = deadline - loop.time()
            if left_s <= 0:
                raise self._failed(f"service {service.name} was not ready within {service.ready_s:g} s: {_tail(process)}")
            probe = await self._box.exec(
                service.ready_argv, timeout_s=min(left_s, PROBE_TIMEOUT_S), cwd=service.cwd, env=service.env, max_output_bytes=0
            )
            if probe.exit_code == 0 and not process.ended.done():
                return
            await asyncio.wait((process.ended,), timeout=min(pause_s, max(0.0, deadline - loop.time())))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _failed(self, words: str) -> RunFailure:
        return RunFailure(Boundary.SANDBOX, f"box {self._box.name}: {words}")


def _tail(process: AgentProcess) -> str:
    return process.kept()[-SHOWN_BYTES:].decode(errors="replace").strip() or "it printed nothing"
