"""The commands of a box: starts them, moves their input and output, answers when they end; nothing here waits for one.

A command's pipes are read while it runs and once more when it ends; what its children print later is thrown away.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import select
import signal
import struct
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from .. import wire
from .output import HeadTail
from .pipes import Pipes, resize

Say = Callable[[int, int, bytes], None]
"""Sends a frame: request, kind, body."""

_CHUNK_BYTES = 1 << 16
_MAX_LATE_BYTES = 1 << 20
"""How much is still read of a pipe after its command ended: it holds no more, so more can only come from what was left behind."""
_MAX_LEFT_PIPES = 256
"""Pipes held only by what ended commands left behind, beyond which the oldest is closed: descriptors are finite."""
_END_OF_INPUT = b"\x04"
_PID = struct.Struct("<I")
_ERRNO = struct.Struct("<i")
_STREAM = (_PID.pack(0), _PID.pack(1))


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What every command of a box starts with."""

    workdir: bytes
    env: Mapping[bytes, bytes]
    num_processes: int = 0
    """Bound on the processes of one user, given to each command; 0: none."""
    oom_fd: int = -1
    """The agent's own OOM score, writable: commands inherit the worst one, so that the kernel takes them and never the agent."""


@dataclass(kw_only=True, eq=False)
class Command:
    request: int
    pid: int
    flags: int
    started: float
    outputs: dict[int, int]
    """Open descriptor -> 0 for standard output, 1 for standard error."""
    kept: tuple[HeadTail, HeadTail]
    input_fd: int = -1
    pending: deque[tuple[int, memoryview]] = field(default_factory=deque)
    """Request to answer, 0 for none, and the bytes still to be written; none: the end of the input."""
    timed_out: bool = False
    num_untaken: int = 0
    is_held: bool = False
    """Its window is full: its output is not read."""

    @property
    def streams(self) -> bool:
        return bool(self.flags & wire.ExecFlag.STREAM)


class Commands:
    def __init__(self, surroundings: Surroundings, say: Say, poll: select.poll) -> None:
        self._surroundings = surroundings
        self._say = say
        self._poll = poll
        self._by_pid: dict[int, Command] = {}
        self._by_request: dict[int, Command] = {}
        self._readers: dict[int, Command | None] = {}
        """None once the command ended and only what it left behind still holds the pipe."""
        self._writers: dict[int, Command] = {}

    # Requests

    def start(self, request: int, body: bytes) -> None:
        fields = wire.Body(body)
        flags, max_output_bytes, num_words, num_variables = fields.take(wire.EXEC)
        argv = [fields.text() for _ in range(num_words)]
        variables = [fields.text() for _ in range(num_variables)]
        cwd, stdin = fields.text(), fields.text()
        if not argv:
            raise ValueError("no program")
        if request in self._by_request:
            raise ValueError(f"request {request} runs already")
        started = time.monotonic()
        env = {**self._surroundings.env, **{name: value for name, _, value in (v.partition(b"=") for v in variables)}}
        limit = 0 if flags & wire.ExecFlag.STREAM else max_output_bytes
        pipes = Pipes(flags, has_input=bool(stdin))
        try:
            pid = self._spawn(argv, env, cwd, pipes)
        except (OSError, ValueError) as error:
            pipes.close()
            number = error.errno if isinstance(error, OSError) and error.errno else errno.EINVAL
            name = error.filename if isinstance(error, OSError) and isinstance(error.filename, bytes) else argv[0]
            words = name + b": " + os.strerror(number).encode()
            if flags & wire.ExecFlag.STREAM:
                self._say(request, wire.Say.ERROR, _ERRNO.pack(number) + wire.text(words))
                return
            # The two statuses a shell gives to what it cannot find and to what it cannot run.
            status = 127 if number == errno.ENOENT else 126
            kept = (HeadTail(max_output_bytes), HeadTail(max_output_bytes))
            kept[bool(flags & wire.ExecFlag.APART)].feed(words + b"\n")
            self._say(request, wire.Say.DONE, _done(status, 0, kept, time.monotonic() - started, None))
            return
        finally:
            pipes.close_theirs()
        command = Command(
            request=request, pid=pid, flags=flags, started=started, outputs=pipes.outputs, kept=(HeadTail(limit), HeadTail(limit)),
            input_fd=pipes.input_fd,
        )  # fmt: skip
        self._by_pid[pid] = self._by_request[request] = command
        for fd in command.outputs:
            self._readers[fd] = command
            self._poll.register(fd, select.POLLIN)
        if command.streams:
            self._say(request, wire.Say.STARTED, _PID.pack(pid))
        if stdin:
            self._queue(command, 0, stdin)
        if not command.streams and command.input_fd >= 0:
            self._queue(command, 0, b"")

    def input(self, request: int, body: bytes) -> None:
        command = self._by_request.get(wire.Body(body).u32())
        if command is None or command.input_fd < 0:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
        self._queue(command, request, body[_PID.size :])

    def signal(self, body: bytes) -> None:
        fields = wire.Body(body)
        target, number, is_timeout = fields.u32(), fields.u32(), fields.u32()
        if (command := self._by_request.get(target)) is not None:
            command.timed_out |= bool(is_timeout)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(command.pid, number)
                if number in (signal.SIGTERM, signal.SIGKILL):
                    os.killpg(command.pid, signal.SIGCONT)  # what is suspended could not end otherwise

    def resize(self, body: bytes) -> None:
        fields = wire.Body(body)
        target, rows, columns = fields.u32(), fields.u32(), fields.u32()
        command = self._by_request.get(target)
        if command is not None and command.flags & wire.ExecFlag.PTY:
            for fd in command.outputs:
                resize(fd, min(rows, 0xFFFF), min(columns, 0xFFFF))

    def taken(self, body: bytes) -> None:
        fields = wire.Body(body)
        target, num_bytes = fields.u32(), fields.u32()
        if (command := self._by_request.get(target)) is not None:
            command.num_untaken = max(0, command.num_untaken - num_bytes)
            if command.is_held and command.num_untaken < wire.WINDOW_BYTES:
                self._hold(command, False)

    # Events

    def ready(self, fd: int) -> None:
        if fd in self._readers:
            command = self._readers[fd]
            if command is None or not command.is_held:  # the other stream may have filled the window in this very turn
                self._drain(fd)
        elif fd in self._writers:
            self._feed(self._writers[fd])

    def reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._by_pid:
                self._finish(self._by_pid.pop(pid), os.waitstatus_to_exitcode(status), usage)

    # Inside

    def _spawn(self, argv: list[bytes], env: Mapping[bytes, bytes], cwd: bytes, pipes: Pipes) -> int:
        self._enter(cwd)
        program = _find(argv[0], env.get(b"PATH", b""))
        oom_fd = self._surroundings.oom_fd
        if oom_fd >= 0:
            os.pwrite(oom_fd, b"1000", 0)
        try:
            pid = os.posix_spawn(
                program, argv, env, file_actions=pipes.actions, setsid=True, setsigdef=(signal.SIGPIPE, signal.SIGXFSZ), setsigmask=()
            )
        except OSError as error:
            raise OSError(error.errno, error.strerror, argv[0]) from None
        finally:
            if oom_fd >= 0:
                os.pwrite(oom_fd, b"0", 0)
        most = self._surroundings.num_processes
        if most:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # gone already, or a program that may not be read
                resource.prlimit(pid, resource.RLIMIT_NPROC, (most, most))
        return pid

    def _enter(self, cwd: bytes) -> None:
        """The folder of the next command. One that was asked for must be there; the usual one may have been removed."""
        if cwd:
            os.chdir(os.path.join(self._surroundings.workdir, cwd))
            return
        try:
            os.chdir(self._surroundings.workdir)
        except OSError:
            os.chdir("/")

    def _finish(self, command: Command, exit_code: int, usage: resource.struct_rusage) -> None:
        del self._by_request[command.request]
        self._close_input(command)
        if command.is_held:
            self._hold(command, False)
        for fd in list(command.outputs):
            late = 0
            while fd in self._readers and late < _MAX_LATE_BYTES and (got := self._drain(fd, is_late=True)):
                late += got
            if fd in self._readers:
                self._readers[fd] = None
        left = [fd for fd, owner in self._readers.items() if owner is None]
        for fd in left[: max(0, len(left) - _MAX_LEFT_PIPES)]:
            self._close_output(fd)
        flags = wire.DoneFlag.TIMED_OUT if command.timed_out else 0
        self._say(command.request, wire.Say.DONE, _done(exit_code, flags, command.kept, time.monotonic() - command.started, usage))

    def _drain(self, fd: int, *, is_late: bool = False) -> int:
        """Read once; how many bytes there were. The window does not bind what is read late: the pipe itself bounds it."""
        command = self._readers[fd]
        most = _CHUNK_BYTES
        if command is not None and command.streams and not is_late:
            most = min(most, wire.WINDOW_BYTES - command.num_untaken)
        try:
            chunk = os.read(fd, most)
        except BlockingIOError:
            return 0
        except OSError:  # a terminal whose other end is closed
            chunk = b""
        if not chunk:
            self._close_output(fd)
        elif command is not None:
            which = command.outputs[fd]
            command.kept[which].feed(chunk)
            if command.streams:
                command.num_untaken += len(chunk)
                self._say(command.request, wire.Say.OUTPUT, _STREAM[which] + chunk)
                if not is_late and command.num_untaken >= wire.WINDOW_BYTES:
                    self._hold(command, True)
        return len(chunk)

    def _hold(self, command: Command, is_held: bool) -> None:
        command.is_held = is_held
        for fd in command.outputs:
            if is_held:
                self._poll.unregister(fd)
            else:
                self._poll.register(fd, select.POLLIN)

    def _close_output(self, fd: int) -> None:
        command = self._readers.pop(fd)
        if command is not None:
            del command.outputs[fd]
        self._poll.unregister(fd)
        os.close(fd)

    def _queue(self, command: Command, request: int, data: bytes) -> None:
        if not command.pending:
            self._writers[command.input_fd] = command
            self._poll.register(command.input_fd, select.POLLOUT)
        command.pending.append((request, memoryview(data)))

    def _feed(self, command: Command) -> None:
        request, data = command.pending[0]
        if data:
            try:
                data = data[os.write(command.input_fd, data[:_CHUNK_BYTES]) :]
            except BlockingIOError:
                return
            except OSError:  # the command closed its input
                self._close_input(command)
                return
            if data:
                command.pending[0] = (request, data)
                return
            self._answer_input(command)
        else:
            if command.flags & wire.ExecFlag.PTY:
                with contextlib.suppress(OSError):  # a terminal has no other end of input while its output is still read
                    os.write(command.input_fd, _END_OF_INPUT)
            self._answer_input(command)
            self._close_input(command)

    def _answer_input(self, command: Command) -> None:
        request, _ = command.pending.popleft()
        if not command.pending:
            del self._writers[command.input_fd]
            self._poll.unregister(command.input_fd)
        if request:
            self._say(request, wire.Say.OK, b"")

    def _close_input(self, command: Command) -> None:
        """What still waits to be written is answered: nobody reads it."""
        if command.input_fd < 0:
            return
        fd, command.input_fd = command.input_fd, -1
        if command.pending:
            del self._writers[fd]
            self._poll.unregister(fd)
        os.close(fd)
        while command.pending:
            request, _ = command.pending.popleft()
            if request:
                words = os.strerror(errno.EPIPE).encode()
                self._say(request, wire.Say.ERROR, _ERRNO.pack(errno.EPIPE) + wire.text(words))


def _find(name: bytes, path: bytes) -> bytes:
    """The file to run: searched for in the command's own PATH, which need not be the agent's."""
    if b"/" in name:
        return name
    number = errno.ENOENT
    for folder in path.split(b":"):
        candidate = os.path.join(folder or b".", name)
        if os.path.isfile(candidate):
            if os.access(candidate, os.X_OK):
                return candidate
            number = errno.EACCES
    raise OSError(number, os.strerror(number), name)


def _done(status: int, flags: int, kept: tuple[HeadTail, HeadTail], wall_s: float, usage: resource.struct_rusage | None) -> bytes:
    user_s, system_s, max_rss_bytes = (usage.ru_utime, usage.ru_stime, usage.ru_maxrss << 10) if usage else (0.0, 0.0, 0)
    merged, apart = kept
    head = wire.DONE.pack(status, flags, merged.num_bytes, apart.num_bytes, wall_s, user_s, system_s, max_rss_bytes)
    return head + wire.text(merged.render()) + wire.text(apart.render())
