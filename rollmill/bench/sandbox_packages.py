"""Sandboxes that are Python packages, by their own calls: sandlock and SWE-ReX.

Run by `sandbox_driver` with the interpreter that has the package; standard library only besides.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from typing import Any

from rollmill.bench.sandbox_driver import ANSWER_S, Cannot, Peer, turns_of
from rollmill.bench.sandbox_programs import memory_folder


class Sandlock(Peer):
    """Landlock and seccomp around one process; a state is the folder it may branch, thrown away at the end."""

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self._package = __import__("sandlock")
        self._branches = tempfile.TemporaryDirectory(prefix="sandlock-", dir=memory_folder())

    def _box(self, state: str) -> Any:
        readable = [p for p in ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/proc", "/dev") if os.path.exists(p)]
        if not state:
            return self._package.Sandbox(fs_readable=readable, fs_writable=["/tmp"])
        return self._package.Sandbox(
            fs_readable=[*readable, state], fs_writable=["/tmp", state], workdir=state, cwd=state, fs_storage=self._branches.name,
            on_exit=self._package.BranchAction.ABORT,
        )  # fmt: skip

    def start(self, state: str) -> Any:
        pipe = self._package.StdioMode.PIPED
        process = self._box(state).popen(["cat"], stdin=pipe, stdout=pipe)
        process.stdin.write(b"x")
        process.stdin.flush()
        if process.stdout.read(1) != b"x":
            raise Cannot("it did not start")
        return process

    def end(self, box: Any) -> None:
        box.stdin.close()
        box.stdout.close()
        box.wait(ANSWER_S)

    def once(self) -> None:
        done = self._box("").run(["true"], timeout=ANSWER_S)
        if not done.success:
            raise Cannot(f"true failed: {done.error or done.exit_code}")

    def run_in(self, box: Any) -> None:
        raise Cannot("a sandbox holds one process: it has no way to run a second command in it")

    def num_files(self, state: str) -> int:
        done = self._box(state).run(["sh", "-c", f"find {state} -type f | wc -l"], timeout=ANSWER_S)
        return int(done.stdout.split()[-1])

    def close(self) -> None:
        self._branches.cleanup()


class SweRex(Peer):
    """SWE-ReX on this machine: a bash session, without isolation. Its answers come from one event loop."""

    def __init__(self, *, is_session: bool = True, **_: Any) -> None:
        super().__init__()
        __import__("logging").disable(100)
        self._local = __import__("swerex.deployment.local", fromlist=["LocalDeployment"])
        self._ask = __import__("swerex.runtime.abstract", fromlist=["BashAction"])
        self._runner = asyncio.Runner()
        self._is_session = is_session

    async def _start(self) -> Any:
        deployment = self._local.LocalDeployment()
        await deployment.start()
        await deployment.runtime.create_session(self._ask.CreateBashSessionRequest(startup_timeout=ANSWER_S))
        return deployment

    async def _once(self) -> None:
        deployment = await self._start()
        await deployment.runtime.run_in_session(self._ask.BashAction(command="true"))
        await deployment.stop()

    def start(self, state: str) -> Any:
        if state:
            raise Cannot("it has neither snapshots nor forks")
        return self._runner.run(self._start())

    def end(self, box: Any) -> None:
        self._runner.run(box.stop())

    def once(self) -> None:
        self._runner.run(self._once())

    def cycles(self, num: int, limit_s: float, at_once: int) -> dict[str, Any]:
        begun = time.perf_counter()
        done = self._runner.run(gathered(self._once, num, limit_s, at_once))
        return {"num": done, "seconds": time.perf_counter() - begun}

    def hold(self, num: int, limit_s: float, state: str = "") -> dict[str, Any]:
        begun = time.perf_counter()
        for _ in turns_of(num, limit_s):
            self._held.append(self.start(state))
        if len(self._held) < num:
            held = len(self._held)
            self.drop()
            raise Cannot(f"only {held} of {num} sessions were ready after {limit_s:g} s")
        return {"seconds": time.perf_counter() - begun}

    def drop(self) -> dict[str, Any]:
        held, self._held = self._held, []
        begun = time.perf_counter()
        for box in held:
            self.end(box)
        return {"seconds": time.perf_counter() - begun}

    def run_in(self, box: Any) -> None:
        if self._is_session:
            self._runner.run(box.runtime.run_in_session(self._ask.BashAction(command="true")))
        else:
            self._runner.run(box.runtime.execute(self._ask.Command(command=["true"])))

    def num_files(self, state: str) -> int:
        raise Cannot("it has neither snapshots nor forks")


async def gathered(act: Callable[[], Awaitable[None]], num: int, limit_s: float, at_once: int) -> int:
    turns, done = turns_of(num, limit_s), 0

    async def work() -> None:
        nonlocal done
        for _ in turns:
            await act()
            done += 1

    await asyncio.gather(*(work() for _ in range(at_once)))
    return done
