"""`FolderBackend`: the sandbox interface without isolation, a folder for a box, for tests of what drives boxes."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from rollmill.records import Boundary, RunFailure
from rollmill.sandbox.records import Argv, Capabilities, ExecResult, SandboxSpec


class FolderBox:
    def __init__(self, backend: FolderBackend, source: Path | None = None) -> None:
        self._backend = backend
        self.folder = Path(tempfile.mkdtemp(dir=backend.root))
        backend.num_alive += 1
        if source:
            shutil.copytree(source, self.folder, dirs_exist_ok=True)

    async def exec(self, argv: Argv, *, timeout_s: float, **_: Any) -> ExecResult:
        words = ["/bin/sh", "-c", argv] if isinstance(argv, str) else list(argv)
        begun = time.monotonic()
        process = await asyncio.create_subprocess_exec(*words, cwd=self.folder, stdout=asyncio.subprocess.PIPE)
        out, _ = await asyncio.wait_for(process.communicate(), timeout_s)
        return ExecResult(
            exit_code=process.returncode or 0, stdout=out, num_output_bytes=len(out), timed_out=False, wall_s=time.monotonic() - begun
        )

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)

    async def read(self, path: str, *, limit_bytes: int = 1 << 20) -> bytes:
        return (self.folder / path).read_bytes()

    async def list(self, path: str = ".") -> list[str]:
        return sorted(str(p.relative_to(self.folder)) for p in (self.folder / path).rglob("*") if p.is_file())

    async def snapshot(self, *, live: bool = False) -> FolderSnapshot:
        if live:
            raise ValueError("folders hold no processes")
        return FolderSnapshot(self._backend, self.folder)

    async def close(self) -> None:
        if self.folder.exists():
            shutil.rmtree(self.folder)
            self._backend.num_alive -= 1


class FolderSnapshot:
    def __init__(self, backend: FolderBackend, folder: Path) -> None:
        self._backend = backend
        self._folder = Path(shutil.copytree(folder, Path(tempfile.mkdtemp(dir=backend.root)) / "state"))

    async def fork(self, num: int, spec: SandboxSpec | None = None) -> list[FolderBox]:
        return [FolderBox(self._backend, self._folder) for _ in range(num)]

    async def close(self) -> None:
        shutil.rmtree(self._folder)


class FolderBackend:
    """With `most` given, the box after it cannot be made."""

    def __init__(self, root: Path, *, most: int = 1 << 30) -> None:
        self.root, self._most = root, most
        self.num_alive = 0
        self.is_closed = False

    async def capabilities(self) -> Capabilities:
        return Capabilities(backend="folder", isolation="none", fork=True, facts={"privilege": "none"})

    async def create(self, spec: SandboxSpec) -> FolderBox:
        if self.num_alive >= self._most:
            raise RunFailure(Boundary.SANDBOX, f"there are {self._most} folders already")
        box = FolderBox(self)
        for path, text in spec.files.items():
            await box.write(path, text.encode())
        return box

    async def close(self) -> None:
        self.is_closed = True
