"""A box sees the folders it is given, cannot change them, and sees them after a fork; nothing else of the host comes with them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from rollmill.sandbox import SandboxSpec
from rollmill.sandbox.namespace import NamespaceBackend

DEADLINE_S = 60.0


@pytest.fixture(scope="module", autouse=True)
def machine() -> None:
    if (reason := NamespaceBackend.probe()) is not None:
        pytest.skip(reason)


def play(scene: Callable[[NamespaceBackend], Awaitable[None]]) -> None:
    async def whole() -> None:
        backend = NamespaceBackend(num_prepared=2)
        try:
            async with asyncio.timeout(DEADLINE_S):
                await scene(backend)
        finally:
            await backend.close()

    asyncio.run(whole())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for parent in (tmp_path, *tmp_path.parents[:2]):
        os.chmod(parent, 0o755)
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "a.py").write_text("x = 7\n")
    return tmp_path


def test_shared_folder_is_read_by_boxes_and_changed_by_none(folder: Path) -> None:
    async def scene(backend: NamespaceBackend) -> None:
        assert (await backend.capabilities()).shares
        spec = SandboxSpec(shares=(str(folder), str(folder / "inner")), env={"PYTHONPATH": "/mnt/view/1"}, root=True)
        boxes = [await backend.create(spec) for _ in range(3)]
        for box in boxes:
            assert (await box.exec(["python3", "-c", "import a; print(a.x)"], timeout_s=30)).stdout == b"7\n"
            result = await box.exec("echo y >> /mnt/view/0/inner/a.py; rm -rf /mnt/view/1/a.py; touch /mnt/view/0/new", timeout_s=10)
            assert result.exit_code != 0 and result.stdout.count(b"Read-only file system") == 3
            assert (await box.exec("ls /mnt/view", timeout_s=10)).stdout == b"0\n1\n"
        assert (folder / "inner" / "a.py").read_text() == "x = 7\n" and not (folder / "new").exists()

    play(scene)


def test_forks_and_a_box_that_goes_on_above_its_snapshot_see_it_too(folder: Path) -> None:
    async def scene(backend: NamespaceBackend) -> None:
        box = await backend.create(SandboxSpec(shares=(str(folder),)))
        snapshot = await box.snapshot()
        for seen in (box, *await snapshot.fork(2)):
            assert await seen.read("/mnt/view/0/inner/a.py") == b"x = 7\n"
        (alone,) = await snapshot.fork(1, SandboxSpec())
        assert (await alone.exec("ls /mnt/view/0", timeout_s=10)).stdout == b"", "a fork with another spec sees what that spec shows"

    play(scene)


@pytest.mark.parametrize("path", ["relative/folder", "/no/such/folder", "/etc/passwd"])
def test_share_that_is_no_folder_is_refused_with_its_name(path: str) -> None:
    async def scene(backend: NamespaceBackend) -> None:
        with pytest.raises(ValueError, match=f"shares names '{path}'"):
            await backend.create(SandboxSpec(shares=(path,)))

    play(scene)
