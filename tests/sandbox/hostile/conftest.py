"""A stage for attacks: a victim box with the attacking program, a sibling that must go on working, a host that must stay as it was."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from rollmill.sandbox import ExecResult, SandboxSpec
from rollmill.sandbox.namespace import NamespaceBackend
from tests.sandbox.conftest import NUM_PREPARED, settled

SOURCE = Path(__file__).with_name("attacks.c")
DEADLINE_S = 120.0
_SETTINGS = ("core_pattern", "hostname", "panic", "sysrq", "modprobe", "pid_max", "printk")
_ENGINES = ("/var/lib/containers", "/var/lib/docker", "/run/")
Attack = Callable[["Stage"], Awaitable[None]]


class Stage:
    """One victim at a time, and a sibling that was there before it."""

    def __init__(self, backend: NamespaceBackend, program: bytes) -> None:
        self.backend, self._program = backend, program
        self.sibling: Any = None

    async def box(self, **limits: Any) -> Any:
        if limits.get("root") and not (await self.backend.capabilities()).facts["ids"].startswith("the image"):
            pytest.skip("an ordinary user has one user id, and its boxes no root")
        box = await self.backend.create(SandboxSpec(**limits))
        await box.write("/tmp/attacks", self._program, mode=0o755)
        return box

    async def sibling_works(self) -> None:
        result = await self.sibling.exec("echo fine > note; cat note", timeout_s=60)
        assert (result.exit_code, result.stdout) == (0, b"fine\n")


async def attack(box: Any, *words: str, timeout_s: float = 60.0) -> ExecResult:
    result: ExecResult = await box.exec(["/tmp/attacks", *words], timeout_s=timeout_s)
    return result


async def works(box: Any) -> None:
    result = await box.exec(["echo", "fine"], timeout_s=60)
    assert (result.exit_code, result.stdout) == (0, b"fine\n"), result


async def works_or_is_ruined(box: Any) -> None:
    """Memory that ran out may take the first process along; then every later command says so."""
    result = await box.exec(["echo", "fine"], timeout_s=60)
    assert result.stdout == b"fine\n" or (result.exit_code == -9 and b"used up its memory" in result.stdout), result


@pytest.fixture(scope="session")
def program(machine: None, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("the attacks are written in C and this machine has no compiler")
    built = tmp_path_factory.mktemp("attacks") / "attacks"
    subprocess.run([compiler, "-O1", "-w", "-o", built, SOURCE], check=True, timeout=DEADLINE_S)
    return built.read_bytes()


@contextlib.contextmanager
def host_unharmed(canary: Path):
    """Files, mounts, settings, devices and processes of the host are after the attack what they were before it."""
    canary.write_text("alive")
    before = _host()
    with subprocess.Popen(["sleep", "1000"]) as bystander:
        try:
            yield
            assert bystander.poll() is None, "a process of the host died"
        finally:
            bystander.kill()
    assert canary.read_text() == "alive" and os.listdir(canary.parent) == [canary.name]
    assert _host() == before


def host_mounts() -> list[str]:
    """Those of this process, without what container engines mount and unmount meanwhile."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line for line in lines if not line.split()[4].startswith(_ENGINES)]


def _host() -> dict[str, object]:
    settings = {name: path.read_text() for name in _SETTINGS if (path := Path("/proc/sys/kernel", name)).exists()}
    devices = {
        name: (os.stat(f"/dev/{name}").st_mode, os.stat(f"/dev/{name}").st_uid) for name in ("null", "zero", "full", "random", "tty")
    }
    return {"mounts": host_mounts(), "nice": os.getpriority(os.PRIO_PROCESS, 0), **settings, **devices}


@contextlib.asynccontextmanager
async def _stage(program: bytes) -> AsyncIterator[Stage]:
    backend = NamespaceBackend(num_prepared=NUM_PREPARED)
    try:
        stage = Stage(backend, program)
        stage.sibling = await backend.create(SandboxSpec())
        yield stage
        await stage.sibling_works()
        await stage.sibling.close()
    finally:
        await backend.close()


@pytest.fixture
def perform(program: bytes, tmp_path: Path) -> Callable[[Attack], None]:
    """Runs the attack; afterwards the sibling works, no process is left and the host is as it was."""

    async def whole(act: Attack) -> None:
        async with asyncio.timeout(DEADLINE_S), _stage(program) as stage:
            await act(stage)
            await stage.sibling_works()

    def run(act: Attack) -> None:
        folder = tmp_path / "host"
        folder.mkdir()
        with host_unharmed(folder / "canary"):
            asyncio.run(whole(act))

    return run


async def nothing_left(stage: Stage, *boxes: Any) -> None:
    """The boxes can be closed whatever runs in them, and take their processes along."""
    for box in boxes:
        await box.close()
    await settled(stage.backend, num_boxes=1)
