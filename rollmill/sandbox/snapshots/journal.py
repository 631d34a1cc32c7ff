"""A box that writes down every call that changes it, in order and with its result, so that its state can be made again by `replay`.

The log says what was asked and what came back; it knows nothing of how the box does it. Reading calls pass through unseen. Variables and
files are written as they were given: a log is as secret as what went into its box.
"""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from blake3 import blake3

from rollmill.sandbox.group import fork_by_snapshot
from rollmill.sandbox.interface import Process, Sandbox, Snapshot
from rollmill.sandbox.records import Argv, Change, Chunk, Env, ExecResult, FileStat, SandboxSpec, Service
from rollmill.sandbox.snapshots.events import (
    AnyOp,
    AnyResult,
    Began,
    CloseInput,
    Ended,
    Exec,
    Fine,
    Head,
    Input,
    Kill,
    Mark,
    Output,
    Ran,
    Refused,
    Resume,
    Saved,
    Serve,
    Start,
    Suspend,
    Wait,
    Write,
)
from rollmill.sandbox.snapshots.log import EventLog
from rollmill.sandbox.snapshots.payloads import keep

T = TypeVar("T")


class Journal:
    """`Sandbox` around a `Sandbox`. Made by `create` for a box in a known state, by `open` to go on in a box that was replayed."""

    def __init__(self, box: Sandbox, log: EventLog, spec: SandboxSpec) -> None:
        self.box = box
        self._log = log
        self._spec = spec
        self._num_calls = 1 + max((event.call for event in log.events if isinstance(event, Began)), default=-1)
        self._num_marks = sum(isinstance(event, Mark) for event in log.events)
        self._processes: list[JournalProcess] = []
        log.events = []  # only needed to go on; a long log is not kept in memory

    @classmethod
    async def create(cls, box: Sandbox, path: Path, *, spec: SandboxSpec, store: str = "", snapshot: str = "") -> Journal:
        """A new log for a box just made from `spec`, or forked from the snapshot saved as `snapshot` in `store`."""
        return cls._begun(box, path, Head(spec=spec, store=store, snapshot=snapshot))

    @classmethod
    async def open(cls, box: Sandbox, path: Path) -> Journal:
        """Go on with a log whose state `box` is in, after `replay`."""
        log = EventLog(path, is_new=False)
        if not log.events:
            await log.close()
            raise ValueError(f"{path} is empty: its owner died before it began; make a new log")
        head = log.events[0]
        assert isinstance(head, Head), "a log begins with its head"
        return cls(box, log, head.spec)

    @classmethod
    def _begun(cls, box: Sandbox, path: Path, head: Head) -> Journal:
        path.parent.mkdir(parents=True, exist_ok=True)
        log = EventLog(path, is_new=True)
        log.append(head)
        return cls(box, log, head.spec)

    @property
    def path(self) -> Path:
        return self._log.path

    @property
    def position(self) -> int:
        """How many lines the log has."""
        return self._log.num_events

    async def exec(
        self, argv: Argv, *, timeout_s: float, stdin: bytes = b"", cwd: str = "", env: Env = None,
        max_output_bytes: int = 1 << 16, stderr_apart: bool = False,
    ) -> ExecResult:  # fmt: skip
        op = Exec(
            argv=_words(argv), timeout_s=timeout_s, stdin=await keep(self.path, stdin), cwd=cwd, env=env,
            max_output_bytes=max_output_bytes, stderr_apart=stderr_apart,
        )  # fmt: skip
        return await self._call(
            op,
            lambda: self.box.exec(
                argv, timeout_s=timeout_s, stdin=stdin, cwd=cwd, env=env, max_output_bytes=max_output_bytes, stderr_apart=stderr_apart
            ),
            self._ran,
        )

    async def start(self, argv: Argv, *, cwd: str = "", env: Env = None, pty: bool = False) -> Process:
        call = self._num_calls
        op = Start(argv=_words(argv), cwd=cwd, env=env, pty=pty)
        process = JournalProcess(await self._call(op, lambda: self.box.start(argv, cwd=cwd, env=env, pty=pty)), self, call)
        self._processes.append(process)
        return process

    async def serve(self, service: Service) -> None:
        await self._call(Serve(service=service), lambda: self.box.serve(service))

    async def write(self, path: str, data: bytes, *, mode: int = 0) -> None:
        op = Write(path=path, data=await keep(self.path, data), mode=mode)
        await self._call(op, lambda: self.box.write(path, data, mode=mode))

    async def suspend(self) -> None:
        await self._call(Suspend(), self.box.suspend)

    async def resume(self) -> None:
        await self._call(Resume(), self.box.resume)

    async def read(self, path: str, *, limit_bytes: int = 1 << 20) -> bytes:
        return await self.box.read(path, limit_bytes=limit_bytes)

    async def list(self, path: str = ".") -> list[str]:
        return await self.box.list(path)

    async def stat(self, path: str) -> FileStat:
        return await self.box.stat(path)

    async def diff(self) -> builtins.list[Change]:
        return await self.box.diff()

    async def snapshot(self, *, live: bool = False) -> Snapshot:
        """A snapshot whose forks have logs of their own, which begin where this one is now."""
        self._note_outputs()
        inner = await self.box.snapshot(live=live)
        mark = self._num_marks
        self._num_marks += 1
        position = self._log.append(Mark(mark=mark, live=live))
        await self._log.sync()
        return JournalSnapshot(inner, self._log.share(), self._spec, mark, position)

    async def fork(self, num: int) -> builtins.list[Sandbox]:
        return await fork_by_snapshot(self, num)

    async def close(self) -> None:
        try:
            await self.box.close()
        finally:
            await self._log.close()

    async def _call(self, op: AnyOp, act: Callable[[], Awaitable[T]], describe: Callable[[T], Awaitable[AnyResult]] | None = None) -> T:
        """Write, act, write. Nothing is awaited between the first line and the act, so lines stand in the order of the acts."""
        self._note_outputs()
        call = self._num_calls
        self._num_calls += 1
        self._log.append(Began(call=call, op=op))
        try:
            value = await act()
        except OSError as refusal:
            self._log.append(Ended(call=call, result=Refused(errno=refusal.errno or 0, message=refusal.strerror or str(refusal))))
            raise
        result = await describe(value) if describe is not None else Fine()
        self._note_outputs()
        self._log.append(Ended(call=call, result=result))
        await self._log.settle()
        return value

    async def _ran(self, result: ExecResult) -> Ran:
        return Ran(
            exit_code=result.exit_code,
            timed_out=result.timed_out,
            num_output_bytes=result.num_output_bytes,
            stdout=await keep(self.path, result.stdout),
            stderr=await keep(self.path, result.stderr),
            wall_s=result.wall_s,
        )

    def _note_outputs(self) -> None:
        """What readers took of running commands by now: a call that follows may depend on having seen it."""
        for process in self._processes:
            event = process.news()
            if event is not None:
                self._log.append(event)

    def _forget(self, process: JournalProcess) -> None:
        if process in self._processes:
            self._processes.remove(process)


class JournalProcess:
    """`Process` whose input and signals are written down, with how much of its output was seen before."""

    def __init__(self, process: Process, journal: Journal, call: int) -> None:
        self._process = process
        self._journal = journal
        self._call = call
        self._num_bytes = [0, 0]
        self._digests = [blake3(), blake3()]
        self._has_news = False

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        async for chunk in self._process:
            self._num_bytes[chunk.is_stderr] += len(chunk.data)
            self._digests[chunk.is_stderr].update(chunk.data)
            self._has_news = True
            yield chunk

    def news(self) -> Output | None:
        if not self._has_news:
            return None
        self._has_news = False
        return Output(
            process=self._call,
            num_stdout_bytes=self._num_bytes[0],
            num_stderr_bytes=self._num_bytes[1],
            stdout=self._digests[0].hexdigest(),
            stderr=self._digests[1].hexdigest(),
        )

    async def write(self, data: bytes) -> None:
        op = Input(process=self._call, data=await keep(self._journal.path, data))
        await self._journal._call(op, lambda: self._process.write(data))

    async def close_stdin(self) -> None:
        await self._journal._call(CloseInput(process=self._call), self._process.close_stdin)

    async def kill(self, signal: int = 9) -> None:
        await self._journal._call(Kill(process=self._call, signal=signal), lambda: self._process.kill(signal))

    async def wait(self, *, timeout_s: float) -> ExecResult:
        op = Wait(process=self._call, timeout_s=timeout_s)
        result = await self._journal._call(op, lambda: self._process.wait(timeout_s=timeout_s), self._journal._ran)
        self._journal._forget(self)
        return result


class JournalSnapshot:
    """`Snapshot` that knows its place in the log."""

    def __init__(self, snapshot: Snapshot, log: EventLog, spec: SandboxSpec, mark: int, position: int) -> None:
        self._snapshot = snapshot
        self._log = log
        self._spec = spec
        self._mark = mark
        self._num_forks = 0
        self._is_closed = False
        self.position = position

    async def fork(self, num: int, spec: SandboxSpec | None = None) -> list[Sandbox]:
        boxes = await self._snapshot.fork(num, spec)
        head = Head(spec=spec or self._spec, parent=self._log.path.name, position=self.position)
        forks: list[Sandbox] = []
        try:
            for box in boxes:
                name = f"{self._log.path.stem}-{self._mark}.{self._num_forks}{self._log.path.suffix}"
                self._num_forks += 1
                forks.append(Journal._begun(box, self._log.path.with_name(name), head))
        except BaseException:
            for box in [*forks, *boxes[len(forks) :]]:
                await asyncio.shield(box.close())
            raise
        return forks

    async def save(self, store: str) -> str:
        digest = await self._snapshot.save(store)
        self._log.append(Saved(mark=self._mark, store=store, snapshot=digest))
        await self._log.sync()
        return digest

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            try:
                await self._snapshot.close()
            finally:
                await self._log.close()


def _words(argv: Argv) -> tuple[str, ...] | str:
    return argv if isinstance(argv, str) else tuple(argv)
