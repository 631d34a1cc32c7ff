"""Does again what a command log says, in its order, and says where the outcome first differs.

Calls that overlapped overlap again: each begins where its line stands and is waited for where its result stands. What was cut off the first
time (its owner died, the box was lost) has no known result and is left out. Time is not compared, nor the output of what ran out of time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
from blake3 import blake3

from rollmill.sandbox.interface import Process, Sandbox
from rollmill.sandbox.records import Chunk, ExecResult
from rollmill.sandbox.snapshots.events import (
    AnyOp,
    AnyResult,
    Began,
    CloseInput,
    Ended,
    Exec,
    Fine,
    Input,
    Kill,
    Mark,
    Output,
    Ran,
    Refused,
    Resume,
    Serve,
    Start,
    Suspend,
    Wait,
    Write,
)
from rollmill.sandbox.snapshots.history import History, Step
from rollmill.sandbox.snapshots.payloads import fetch

PATIENCE_S = 60.0
"""How long a started command may take to print what it printed the first time."""
Trust = Callable[[int, AnyOp | None], bool]
"""Of a step, by its place in the history and its call: whether to take what the log says instead of doing it."""
_Key = tuple[Path, int]


def nothing(_place: int, _op: AnyOp | None) -> bool:
    """Do everything again."""
    return False


def everything(_place: int, _op: AnyOp | None) -> bool:
    """Do nothing again: only the recorded results are wanted."""
    return True


def up_to(place: int) -> Trust:
    """For a box that is already in the state after that many steps."""
    return lambda at, _op: at < place


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a call gave."""

    op: AnyOp
    result: ExecResult | Refused | None
    """None: it succeeded, and gives nothing to compare."""
    is_trusted: bool
    """Taken from the log."""


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The first result that is not the recorded one; the box is in another state from here on."""

    place: int
    """Of the step in the history."""
    op: AnyOp
    field: str
    """`exit_code`, `timed_out`, `stdout`, `stderr`, `num_output_bytes` or `errno`."""
    was: str
    now: str


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    answers: tuple[Answer, ...]
    """In the order in which the calls ended, up to the difference."""
    difference: Difference | None
    skipped: tuple[AnyOp, ...]
    """Calls that were cut off the first time, and were left out."""
    processes: Mapping[int, Process]
    """Started commands that were not waited for, by the number of their call in the log replayed last."""


async def replay(history: History, box: Sandbox, *, trust: Trust = nothing, patience_s: float = PATIENCE_S) -> Replay:
    """Bring `box`, which is in the state that `history` begins from, to the state it ends in. Failures of the box itself pass."""
    run = _Run(history, box, trust, patience_s)
    try:
        difference = await run.all_steps()
    finally:
        await run.stop()
    last = history.steps[-1].log if history.steps else None
    processes = {call: process for (log, call), process in run.processes.items() if log == last}
    return Replay(answers=tuple(run.answers), difference=difference, skipped=tuple(run.skipped), processes=processes)


class _Run:
    def __init__(self, history: History, box: Sandbox, trust: Trust, patience_s: float) -> None:
        self._steps = history.steps
        self._box = box
        self._trust = trust
        self._patience_s = patience_s
        self._recorded: dict[_Key, AnyResult] = {
            (step.log, step.event.call): step.event.result for step in self._steps if isinstance(step.event, Ended)
        }
        self._tasks: dict[_Key, asyncio.Task[ExecResult | Process | Refused | None]] = {}
        self._ops: dict[_Key, AnyOp] = {}
        self.processes: dict[_Key, _Replayed] = {}
        self.answers: list[Answer] = []
        self.skipped: list[AnyOp] = []

    async def all_steps(self) -> Difference | None:
        for place, step in enumerate(self._steps):
            difference = None
            match step.event:
                case Began():
                    await self._begin(place, step, step.event)
                case Ended():
                    difference = await self._end(place, step, step.event)
                case Output():
                    difference = await self._output(place, step, step.event)
                case Mark(live=False) if not self._trust(place, None):
                    # It ended processes and restarted services, and does so again.
                    await (await self._box.snapshot()).close()
                    self.processes.clear()
            if difference is not None:
                return difference
        return None

    async def stop(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        for task in self._tasks.values():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([task])
            if task.done() and not task.cancelled():
                task.exception()  # what stopped the replay is the news, not what it left unfinished
        self._tasks.clear()

    async def _begin(self, place: int, step: Step, event: Began) -> None:
        key = (step.log, event.call)
        self._ops[key] = event.op
        if key not in self._recorded:
            self.skipped.append(event.op)
            return
        is_trusted = self._trust(place, event.op)
        if isinstance(event.op, Input | CloseInput | Kill | Wait):
            is_trusted = is_trusted or (step.log, event.op.process) not in self.processes
        if not is_trusted:
            act = await self._act(step, event.op)
            self._tasks[key] = asyncio.create_task(_observed(act))

    async def _act(self, step: Step, op: AnyOp) -> Awaitable[ExecResult | Process | None]:
        """The call, with its bytes at hand, so that tasks begin in the order of the lines."""
        box = self._box
        match op:
            case Exec():
                stdin = await fetch(step.log, op.stdin)
                return box.exec(
                    op.argv, timeout_s=op.timeout_s, stdin=stdin, cwd=op.cwd, env=op.env,
                    max_output_bytes=op.max_output_bytes, stderr_apart=op.stderr_apart,
                )  # fmt: skip
            case Write():
                return box.write(op.path, await fetch(step.log, op.data), mode=op.mode)
            case Start():
                return box.start(op.argv, cwd=op.cwd, env=op.env, pty=op.pty)
            case Serve():
                return box.serve(op.service)
            case Suspend():
                return box.suspend()
            case Resume():
                return box.resume()
            case Input():
                return self.processes[step.log, op.process].write(await fetch(step.log, op.data))
            case CloseInput():
                return self.processes[step.log, op.process].close_stdin()
            case Kill():
                return self.processes[step.log, op.process].kill(op.signal)
            case Wait():
                return self.processes[step.log, op.process].wait(timeout_s=op.timeout_s)

    async def _end(self, place: int, step: Step, event: Ended) -> Difference | None:
        key = (step.log, event.call)
        if key not in self._ops:
            return None  # it began before the state from which we go on
        op, task = self._ops[key], self._tasks.pop(key, None)
        if task is None:
            self.answers.append(Answer(op=op, result=await _from_log(step.log, event.result), is_trusted=True))
            return None
        value = await task
        result = value if isinstance(value, ExecResult | Refused) else None
        found = _compare(op, event.result, result)
        if found is not None:
            field, was, now = found
            return Difference(place=place, op=op, field=field, was=was, now=now)
        if isinstance(op, Wait):
            self.processes.pop((step.log, op.process), None)
        if value is not None and not isinstance(value, ExecResult | Refused):
            self.processes[key] = _Replayed(value)
        self.answers.append(Answer(op=op, result=result, is_trusted=False))
        return None

    async def _output(self, place: int, step: Step, event: Output) -> Difference | None:
        key = (step.log, event.process)
        if key not in self.processes:
            return None
        found = await self.processes[key].read_to(event.num_stdout_bytes, event.num_stderr_bytes, self._patience_s)
        for field, was, now in zip(("stdout", "stderr"), (event.stdout, event.stderr), found, strict=True):
            if was != now:
                return Difference(place=place, op=self._ops[key], field=field, was=was, now=now)
        return None


class _Replayed:
    """`Process` that holds back what was printed beyond what the log knows of."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._chunks = aiter(process)
        self._held = [bytearray(), bytearray()]
        self._num_seen = [0, 0]
        self._digests = [blake3(), blake3()]
        self.write, self.close_stdin, self.kill, self.wait = process.write, process.close_stdin, process.kill, process.wait

    async def read_to(self, num_stdout_bytes: int, num_stderr_bytes: int, patience_s: float) -> tuple[str, str]:
        """Digests of so many bytes of each stream; of fewer, when no more come."""
        wanted = [num - seen for num, seen in zip((num_stdout_bytes, num_stderr_bytes), self._num_seen, strict=True)]
        with suppress(StopAsyncIteration, TimeoutError):
            async with asyncio.timeout(patience_s):
                while any(len(held) < num for held, num in zip(self._held, wanted, strict=True)):
                    chunk = await anext(self._chunks)
                    self._held[chunk.is_stderr] += chunk.data
        for stream, num in enumerate(wanted):
            taken = bytes(self._held[stream][:num])
            del self._held[stream][:num]
            self._digests[stream].update(taken)
            self._num_seen[stream] += len(taken)
        return self._digests[0].hexdigest(), self._digests[1].hexdigest()

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        for stream, held in enumerate(self._held):
            if held:
                data = bytes(held)
                held.clear()
                yield Chunk(data=data, is_stderr=bool(stream))
        async for chunk in self._chunks:
            yield chunk


async def _observed(act: Awaitable[ExecResult | Process | None]) -> ExecResult | Process | Refused | None:
    try:
        return await act
    except OSError as refusal:
        return Refused(errno=refusal.errno or 0, message=refusal.strerror or str(refusal))


async def _from_log(log: Path, result: AnyResult) -> ExecResult | Refused | None:
    match result:
        case Ran():
            return ExecResult(
                exit_code=result.exit_code,
                stdout=await fetch(log, result.stdout),
                stderr=await fetch(log, result.stderr),
                num_output_bytes=result.num_output_bytes,
                timed_out=result.timed_out,
                wall_s=result.wall_s,
            )
        case Refused():
            return result
        case Fine():
            return None


def _compare(op: AnyOp, was: AnyResult, now: ExecResult | Refused | None) -> tuple[str, str, str] | None:
    """The first field that differs, with both values."""
    if isinstance(was, Ran) and isinstance(now, ExecResult):
        pairs = [("timed_out", str(was.timed_out), str(now.timed_out)), ("exit_code", str(was.exit_code), str(now.exit_code))]
        # What a started command printed is compared where its reader took it; a kill may come a few bytes sooner or later.
        if not was.timed_out and not isinstance(op, Wait):
            pairs += [
                ("stdout", was.stdout.digest, blake3(now.stdout).hexdigest()),
                ("stderr", was.stderr.digest, blake3(now.stderr).hexdigest()),
                ("num_output_bytes", str(was.num_output_bytes), str(now.num_output_bytes)),
            ]
    else:
        pairs = [("errno", str(was.errno if isinstance(was, Refused) else 0), str(now.errno if isinstance(now, Refused) else 0))]
    return next(((field, before, after) for field, before, after in pairs if before != after), None)
