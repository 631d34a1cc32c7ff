"""A box that is a folder and ordinary subprocesses in it: the whole interface, no isolation; snapshots are copies."""

from __future__ import annotations

import asyncio
import builtins
import os
import shutil
import signal as signals
import stat
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

from rollmill.sandbox.interface import Sandbox
from rollmill.sandbox.records import Argv, Change, Chunk, Env, ExecResult, FileKind, FileStat, SandboxSpec, Service

BASE = {"PATH": os.environ["PATH"], "LC_ALL": "C"}


def words(argv: Argv) -> list[str]:
    return ["/bin/sh", "-c", argv] if isinstance(argv, str) else [*argv]


def end(process: asyncio.subprocess.Process, signal: int) -> None:
    """It may have ended by itself a moment ago."""
    with suppress(ProcessLookupError):
        if process.returncode is None:
            os.killpg(process.pid, signal)


class FolderProcess:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self._begun = time.monotonic()

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        assert self.process.stdout is not None
        while data := await self.process.stdout.read(7):
            yield Chunk(data=data)

    async def write(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        await self.process.stdin.drain()

    async def close_stdin(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    async def kill(self, signal: int = 9) -> None:
        end(self.process, signal)

    async def wait(self, *, timeout_s: float) -> ExecResult:
        async with asyncio.timeout(timeout_s):
            code = await self.process.wait()
        return ExecResult(exit_code=code, stdout=b"", num_output_bytes=0, timed_out=False, wall_s=time.monotonic() - self._begun)


class FolderBox:
    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)
        self.num_execs = 0
        self.served: list[str] = []
        self._running: list[FolderProcess] = []
        self._num_copies = 0

    async def _spawn(self, argv: Argv, cwd: str, env: Env, *, stderr: int) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(
            *words(argv), stdin=pipe, stdout=pipe, stderr=stderr, cwd=self.root / cwd, env=BASE | dict(env or {}), start_new_session=True
        )

    async def exec(
        self, argv: Argv, *, timeout_s: float, stdin: bytes = b"", cwd: str = "", env: Env = None,
        max_output_bytes: int = 1 << 16, stderr_apart: bool = False,
    ) -> ExecResult:  # fmt: skip
        self.num_execs += 1
        begun = time.monotonic()
        process = await self._spawn(argv, cwd, env, stderr=asyncio.subprocess.PIPE if stderr_apart else asyncio.subprocess.STDOUT)
        timed_out = False
        talk = asyncio.ensure_future(process.communicate(stdin))
        try:
            async with asyncio.timeout(timeout_s):
                out, err = await asyncio.shield(talk)
        except TimeoutError:
            timed_out = True
            end(process, signals.SIGKILL)
            out, err = await talk
        except asyncio.CancelledError:
            end(process, signals.SIGKILL)
            await talk
            raise
        assert process.returncode is not None
        return ExecResult(
            exit_code=process.returncode, stdout=out[:max_output_bytes], stderr=(err or b"")[:max_output_bytes],
            num_output_bytes=len(out), timed_out=timed_out, wall_s=time.monotonic() - begun,
        )  # fmt: skip

    async def start(self, argv: Argv, *, cwd: str = "", env: Env = None, pty: bool = False) -> FolderProcess:
        process = FolderProcess(await self._spawn(argv, cwd, env, stderr=asyncio.subprocess.STDOUT))
        self._running.append(process)
        return process

    async def serve(self, service: Service) -> None:
        self.served.append(service.name)

    async def read(self, path: str, *, limit_bytes: int = 1 << 20) -> bytes:
        return (self.root / path).read_bytes()

    async def write(self, path: str, data: bytes, *, mode: int = 0) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        if mode:
            target.chmod(mode)

    async def list(self, path: str = ".") -> list[str]:
        return sorted(str(found.relative_to(self.root / path)) for found in (self.root / path).rglob("*") if found.is_file())

    async def stat(self, path: str) -> FileStat:
        facts = (self.root / path).lstat()
        mode = stat.S_IMODE(facts.st_mode)
        return FileStat(path=path, kind=FileKind.FILE, num_bytes=facts.st_size, mode=mode, mtime_s=facts.st_mtime)

    async def diff(self) -> builtins.list[Change]:
        return []

    async def snapshot(self, *, live: bool = False) -> FolderSnapshot:
        await self._end_processes()
        self._num_copies += 1
        copy = self.root.with_name(f"{self.root.name}~{self._num_copies}")
        shutil.copytree(self.root, copy, symlinks=True)
        return FolderSnapshot(copy)

    async def fork(self, num: int) -> builtins.list[Sandbox]:
        return await (await self.snapshot()).fork(num)

    async def suspend(self) -> None:
        self.served.append("suspended")

    async def resume(self) -> None:
        self.served.append("resumed")

    async def close(self) -> None:
        await self._end_processes()

    async def _end_processes(self) -> None:
        for process in self._running:
            await process.kill()
            await process.process.wait()
        self._running.clear()

    def files(self) -> dict[str, bytes]:
        return {str(path.relative_to(self.root)): path.read_bytes() for path in sorted(self.root.rglob("*")) if path.is_file()}


class FolderSnapshot:
    def __init__(self, root: Path) -> None:
        self._root = root
        self._num = 0

    async def fork(self, num: int, spec: SandboxSpec | None = None) -> list[Sandbox]:
        boxes: list[Sandbox] = []
        for _ in range(num):
            self._num += 1
            root = self._root.with_name(f"{self._root.name}.{self._num}")
            shutil.copytree(self._root, root, symlinks=True)
            boxes.append(FolderBox(root))
        return boxes

    async def save(self, store: str) -> str:
        shutil.copytree(self._root, Path(store), symlinks=True)
        return "d" * 64

    async def close(self) -> None:
        shutil.rmtree(self._root)
