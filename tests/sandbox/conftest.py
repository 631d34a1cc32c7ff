"""Runs a scene, an async function of a fresh backend, under a deadline; skips where this machine can make no boxes."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from rollmill.sandbox.namespace import NamespaceBackend

DEADLINE_S = 120.0
NUM_PREPARED = 4
Scene = Callable[[NamespaceBackend], Awaitable[None]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One worker runs all of this folder: some tests look at what the whole machine holds."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("sandbox"))


@pytest.fixture(scope="session")
def machine() -> None:
    reason = NamespaceBackend.probe()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture
def play(machine: None) -> Callable[[Scene], None]:
    async def whole(scene: Scene) -> None:
        backend = NamespaceBackend(num_prepared=NUM_PREPARED)
        try:
            async with asyncio.timeout(DEADLINE_S):
                await scene(backend)
        finally:
            await backend.close()

    return lambda scene: asyncio.run(whole(scene))


def _parent_of(mark: str) -> int | None:
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if mark.encode() in Path(f"/proc/{name}/cmdline").read_bytes():
                return int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    return None


async def first_process(box) -> int:
    """The host's number of the box's PID 1: the parent of a process that carries a name nobody else has."""
    mark = uuid.uuid4().hex
    process = await box.start(["sh", "-c", f"sleep 1000; : {mark}"])
    deadline = time.monotonic() + DEADLINE_S
    try:
        while time.monotonic() < deadline:
            if (found := _parent_of(mark)) is not None:
                return found
            await asyncio.sleep(0.01)
        raise AssertionError("the box has no process on this host")
    finally:
        await process.kill()


def descendants(pid: int) -> list[int]:
    found = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                found += [int(child), *descendants(int(child))]
    except (FileNotFoundError, ProcessLookupError):
        pass
    return found


async def until(is_so: Callable[[], bool]) -> None:
    """Until something that nobody announces is so."""
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline, "it never came to be so"
        await asyncio.sleep(0.01)


async def settled(backend, *, num_boxes: int) -> None:
    """Until the zygote has no processes but the one that opens layers, those it keeps prepared, and the boxes."""
    await until(lambda: len(descendants(backend.zygote_pid)) <= 1 + NUM_PREPARED + num_boxes)
