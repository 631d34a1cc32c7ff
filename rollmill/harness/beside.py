"""Runs a program on this machine, in a session and a scratch folder of its own, and leaves neither behind.

This is no sandbox: the program has the rights of whoever started the run. It keeps order, not safety.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import stat
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import msgspec

from rollmill.harness.program import KEPT_BYTES, Endpoint, Program, ProgramRun, task_facts
from rollmill.records import Boundary, RunFailure, Task

MARK = "ROLLMILL_PROCESS"
"""In the environment of a program and, unless they clear it, of all its children: by it those that left its session are found."""
INHERITED = ("PATH", "LANG", "LC_ALL", "TZ", "SSL_CERT_FILE", "SSL_CERT_DIR")
NUM_SWEEPS = 10
"""A child may start another while it is being killed; after so many rounds whoever is left fights us."""
END_S = 10.0
"""How long the output of killed processes may take to close."""


class Scratch(msgspec.Struct, frozen=True, kw_only=True):
    """The folders of one attempt."""

    root: Path

    @property
    def work(self) -> Path:
        """Where the program starts; what it leaves here is graded."""
        return self.root / "work"

    @property
    def task_file(self) -> Path:
        return self.root / "task.json"

    def files(self, *, most: int, limit_bytes: int) -> dict[str, str]:
        """What it left: plain files, links not followed; oversized or unreadable ones count as absent."""
        found: dict[str, str] = {}
        for folder, folders, names in os.walk(self.work):
            folders.sort()
            for name in sorted(names):
                path = Path(folder, name)
                if len(found) >= most:
                    return found
                with contextlib.suppress(OSError):
                    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
                    with open(fd, "rb") as file:
                        about = os.fstat(fd)
                        if stat.S_ISREG(about.st_mode) and about.st_size <= limit_bytes:
                            found[path.relative_to(self.work).as_posix()] = file.read(limit_bytes + 1).decode("utf-8", "replace")
        return found


@contextlib.asynccontextmanager
async def scratch(task: Task) -> AsyncIterator[Scratch]:
    """A folder with the task's files, gone afterwards."""
    try:
        made = Scratch(root=Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="rollmill-agent-")))
    except OSError as error:
        raise RunFailure(Boundary.SANDBOX, f"no scratch folder could be made: {error}") from error
    try:
        try:
            await asyncio.to_thread(_fill, made, task)
        except (OSError, ValueError) as error:
            raise RunFailure(Boundary.TASK, f"the files of {task.task_id} cannot be written: {error}") from error
        yield made
    finally:
        await asyncio.shield(asyncio.to_thread(_remove, made.root))


async def run_beside(program: Program, task: Task, endpoint: Endpoint, folders: Scratch, *, deadline: float) -> ProgramRun:
    """Until it ends, or `deadline` (`time.monotonic()`): then it and all its children are killed."""
    mark = secrets.token_hex(16)
    env = _environment(endpoint, program.env, folders) | {MARK: mark}
    argv = program.argv(task, task_file=str(folders.task_file), model=endpoint.model)
    started = time.monotonic()
    # Pipes of our own: asyncio's would have us wait for every child that holds them.
    read_fd, write_fd = os.pipe()
    tail = await _Tail.open(read_fd)
    try:
        with contextlib.closing(_input(folders, program.input(task))) as stdin:
            process = await asyncio.create_subprocess_exec(
                *argv, cwd=folders.work, env=env, start_new_session=True, stdin=stdin, stdout=write_fd, stderr=write_fd
            )
    except OSError as error:
        tail.close()
        raise RunFailure(Boundary.HARNESS, f"the agent {argv[0]!r} cannot be started: {error}; look at agent.command") from error
    except ValueError as error:
        # A zero byte or half a character: no command line and no file can hold it.
        tail.close()
        raise RunFailure(Boundary.TASK, f"{task.task_id} cannot be told to a program: {error}") from error
    finally:
        os.close(write_fd)
    try:
        async with asyncio.timeout(max(0.01, deadline - started)) as timer:
            await process.wait()
    except TimeoutError:
        if not timer.expired():
            raise
    finally:
        await asyncio.shield(_end(process, mark))
        output = await tail.text()
    return ProgramRun(
        exit_code=process.returncode if process.returncode is not None else -signal.SIGKILL,
        output=output,
        timed_out=timer.expired(),
        wall_s=time.monotonic() - started,
    )


class _Tail:
    """Reads a program's output to its end and keeps the last of it: a program whose output nobody reads would stand still."""

    def __init__(self, reader: asyncio.StreamReader, transport: asyncio.BaseTransport) -> None:
        self._kept, self._transport = bytearray(), transport
        self._reading = asyncio.create_task(self._read(reader), name="agent output")

    @classmethod
    async def open(cls, fd: int) -> _Tail:
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", buffering=0))
        return cls(reader, transport)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(1 << 16):
            self._kept += data
            del self._kept[:-KEPT_BYTES]

    async def text(self) -> str:
        try:
            await asyncio.wait([self._reading], timeout=END_S)
        finally:
            self.close()
        return self._kept.decode("utf-8", "replace")

    def close(self) -> None:
        self._reading.cancel()
        self._transport.close()


def _input(folders: Scratch, words: bytes) -> BinaryIO:
    """A file: a program is free not to read it."""
    path = folders.root / "stdin"
    path.write_bytes(words)
    return path.open("rb")


async def _end(process: asyncio.subprocess.Process, mark: str) -> None:
    """Kill the session, then whoever left it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for _ in range(NUM_SWEEPS):
        if not await asyncio.to_thread(_kill_marked, mark):
            break
    await process.wait()


def _kill_marked(mark: str) -> int:
    """How many processes carry the mark; all of them are killed. Without /proc there is none to be found."""
    entry, found = f"{MARK}={mark}".encode(), 0
    if not sys.platform.startswith("linux"):
        return 0
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError):
            if entry in Path("/proc", name, "environ").read_bytes().split(b"\0"):
                os.kill(int(name), signal.SIGKILL)
                found += 1
    return found


def _environment(endpoint: Endpoint, more: Mapping[str, str], folders: Scratch) -> dict[str, str]:
    home, tmp = folders.root / "home", folders.root / "tmp"
    inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
    own = {"HOME": str(home), "TMPDIR": str(tmp), "PWD": str(folders.work), "ROLLMILL_TASK": str(folders.task_file)}
    return {"LANG": "C.UTF-8", **inherited, **own, **endpoint.environment(), **more}


def _fill(folders: Scratch, task: Task) -> None:
    for name in ("work", "home", "tmp"):
        (folders.root / name).mkdir()
    folders.task_file.write_bytes(task_facts(task))
    for path, text in task.files.items():
        pure = PurePosixPath(path)
        if pure.is_absolute() or ".." in pure.parts:
            raise RunFailure(Boundary.TASK, f"{task.task_id} has a file {path!r}; a path stays below the working directory")
        target = folders.work / pure
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)


def _remove(root: Path) -> None:
    """Also what the program locked; what cannot be removed even so is left to the machine's own cleaning."""

    def unlock(function: object, path: str, error: object) -> None:
        with contextlib.suppress(OSError):
            os.chmod(os.path.dirname(path), 0o700)
            os.chmod(path, 0o700)
            shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)

    shutil.rmtree(root, onerror=unlock)
