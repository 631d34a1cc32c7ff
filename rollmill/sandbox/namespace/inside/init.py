"""PID 1 of a box: serves its owner's requests, starts and reaps processes, and ends when the owner hangs up.

Every request is answered exactly once; nothing here waits for a process of the box.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import select
import signal
import socket
import stat
import time
from dataclasses import dataclass, field
from typing import Any

from . import root, wire
from .cage import Inside
from .output import HeadTail

ENVIRON = {
    "PATH": f"{root.HOME}/.local/bin:{root.PYTHON_BIN}:/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin",
    "HOME": root.HOME,
    "USER": root.USER,
    "LOGNAME": root.USER,
    "SHELL": "/bin/bash",
    "LANG": "C.UTF-8",
    "PWD": root.WORK,
    "TERM": "dumb",
}
MAX_LISTED = 10_000
_CHUNK = 1 << 16
_MAX_LATE_BYTES = 1 << 20
"""How much is still read after a command ended: its pipe holds less, so more can only come from what it left behind."""

_MAX_LEFT_PIPES = 256
"""Pipes held only by what ended commands left behind, beyond which the oldest is closed: descriptors are finite."""


@dataclass(kw_only=True)
class Command:
    """A running command of one `exec` request."""

    request: int
    pid: int
    output_fd: int
    input_fd: int
    pending: memoryview
    output: HeadTail
    started: float
    timed_out: bool = False


@dataclass(kw_only=True)
class Init:
    sock: socket.socket
    inside: Inside
    wake_fd: int
    poll: select.poll = field(default_factory=select.poll)
    commands: dict[int, Command] = field(default_factory=dict)
    """By pid."""
    readers: dict[int, Command | None] = field(default_factory=dict)
    """By output descriptor; None once the command ended and only what it left behind still holds the pipe."""
    writers: dict[int, Command] = field(default_factory=dict)

    def serve(self) -> None:
        self.poll.register(self.sock.fileno(), select.POLLIN)
        self.poll.register(self.wake_fd, select.POLLIN)
        while True:
            for fd, _ in self.poll.poll():
                if fd == self.sock.fileno():
                    frame = wire.receive(self.sock)
                    if frame is None:
                        return
                    self._answer(*frame)
                elif fd == self.wake_fd:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self.wake_fd, 4096)
                    self._reap()
                elif fd in self.readers:
                    self._drain(fd)
                elif fd in self.writers:
                    self._feed(self.writers[fd])

    def _answer(self, header: dict[str, Any], payload: bytes) -> None:
        try:
            match header["op"]:
                case "exec":
                    self._start(header, payload)
                case "kill":
                    self._kill(header["target"])
                case "world":
                    for path, text in header["files"].items():
                        write_file(path, text.encode(errors="surrogatepass"))
                    self._reply(header["id"], {"has_proc": self.inside.has_proc})
                case "read":
                    self._reply(header["id"], {}, read_file(header["path"], header["limit"]))
                case "write":
                    write_file(header["path"], payload, append=header["append"])
                    self._reply(header["id"], {})
                case "list":
                    self._reply(header["id"], {}, json.dumps(list_files()).encode())
        except OSError as error:
            self._reply(header["id"], {"errno": error.errno or errno.EIO, "message": error.strerror or str(error)})

    def _reply(self, request: int, header: dict[str, Any], payload: bytes = b"") -> None:
        self.sock.sendall(wire.pack({"id": request, **header}, payload))

    def _start(self, header: dict[str, Any], stdin: bytes) -> None:
        started = time.monotonic()
        output = HeadTail(header["max_output_bytes"])
        out_read, out_write = os.pipe2(os.O_CLOEXEC)
        in_read, in_write = os.pipe2(os.O_CLOEXEC) if stdin else (os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC), -1)
        try:
            pid = self._spawn(header["argv"], in_read, out_write)
        except (OSError, ValueError) as error:
            for fd in (out_read, in_write):
                if fd >= 0:
                    os.close(fd)
            number = error.errno if isinstance(error, OSError) and error.errno else errno.EINVAL
            # The two statuses a shell gives to what it cannot find and to what it cannot run.
            status = 127 if number == errno.ENOENT else 126
            output.feed(f"{header['argv'][0]}: {os.strerror(number)}\n".encode(errors="replace"))
            self._reply_exec(header["id"], status, output, False, time.monotonic() - started)
            return
        finally:
            os.close(out_write)
            os.close(in_read)
        command = Command(
            request=header["id"], pid=pid, output_fd=out_read, input_fd=in_write, pending=memoryview(stdin), output=output, started=started
        )
        self.commands[pid] = command
        self.readers[out_read] = command
        os.set_blocking(out_read, False)
        self.poll.register(out_read, select.POLLIN)
        if in_write >= 0:
            os.set_blocking(in_write, False)
            self.writers[in_write] = command
            self.poll.register(in_write, select.POLLOUT)

    def _spawn(self, argv: list[str], stdin: int, stdout: int) -> int:
        with contextlib.suppress(OSError):  # the agent may have removed it: then the command starts where we stand
            os.chdir(root.WORK)
        actions = [(os.POSIX_SPAWN_DUP2, stdin, 0), (os.POSIX_SPAWN_DUP2, stdout, 1), (os.POSIX_SPAWN_DUP2, stdout, 2)]
        # The command inherits the worst OOM score, so that the kernel takes it and never PID 1.
        os.pwrite(self.inside.oom_fd, b"1000", 0)
        try:
            pid = os.posix_spawnp(
                argv[0], argv, ENVIRON, file_actions=actions, setsid=True, setsigdef=(signal.SIGPIPE, signal.SIGXFSZ), setsigmask=()
            )
        finally:
            os.pwrite(self.inside.oom_fd, b"0", 0)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # gone already, or a program that may not be read
            resource.prlimit(pid, resource.RLIMIT_NPROC, (self.inside.num_processes, self.inside.num_processes))
        return pid

    def _kill(self, request: int) -> None:
        for command in self.commands.values():
            if command.request == request:
                command.timed_out = True
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(command.pid, signal.SIGKILL)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self.commands:
                self._finish(self.commands.pop(pid), os.waitstatus_to_exitcode(status))

    def _finish(self, command: Command, exit_code: int) -> None:
        if command.input_fd in self.writers:
            self._close_input(command)
        late = 0
        while command.output_fd in self.readers and late < _MAX_LATE_BYTES:
            got = self._drain(command.output_fd)
            if got == 0:
                break
            late += got
        if command.output_fd in self.readers:
            self.readers[command.output_fd] = None
            left = [fd for fd, owner in self.readers.items() if owner is None]
            if len(left) > _MAX_LEFT_PIPES:
                self._close_output(left[0])
        self._reply_exec(command.request, exit_code, command.output, command.timed_out, time.monotonic() - command.started)

    def _reply_exec(self, request: int, exit_code: int, output: HeadTail, timed_out: bool, wall_s: float) -> None:
        header = {"exit_code": exit_code, "num_output_bytes": output.num_bytes, "timed_out": timed_out, "wall_s": wall_s}
        self._reply(request, header, output.render())

    def _drain(self, fd: int) -> int:
        try:
            chunk = os.read(fd, _CHUNK)
        except BlockingIOError:
            return 0
        command = self.readers[fd]
        if not chunk:
            self._close_output(fd)
        elif command is not None:
            command.output.feed(chunk)
        return len(chunk)

    def _close_output(self, fd: int) -> None:
        del self.readers[fd]
        self.poll.unregister(fd)
        os.close(fd)

    def _feed(self, command: Command) -> None:
        try:
            command.pending = command.pending[os.write(command.input_fd, command.pending[:_CHUNK]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            command.pending = memoryview(b"")
        if not command.pending:
            self._close_input(command)

    def _close_input(self, command: Command) -> None:
        del self.writers[command.input_fd]
        self.poll.unregister(command.input_fd)
        os.close(command.input_fd)


def read_file(path: str, limit: int) -> bytes:
    fd = os.open(_inside(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _refuse_special(fd)
        chunks = []
        left = limit + 1
        # By chunks until the end, because files of /proc say they are empty.
        while left > 0 and (chunk := os.read(fd, min(left, 1 << 20))):
            chunks.append(chunk)
            left -= len(chunk)
        if left == 0:
            raise OSError(errno.EFBIG, f"larger than {limit} bytes")
        return b"".join(chunks)
    finally:
        os.close(fd)


def write_file(path: str, payload: bytes, *, append: bool = False) -> None:
    target = _inside(path)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    try:
        _refuse_special(fd)
        if append:
            os.lseek(fd, 0, os.SEEK_END)
        else:
            os.ftruncate(fd, 0)
        view = memoryview(payload)
        while view:
            view = view[os.write(fd, view) :]
    finally:
        os.close(fd)


def list_files() -> list[str]:
    """Regular files below the working directory; links are neither followed nor listed."""
    found, folders = [], [""]
    while folders:
        folder = folders.pop()
        try:
            with os.scandir(f"{root.WORK}/{folder}") as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(f"{folder}{entry.name}/")
                    elif entry.is_file(follow_symlinks=False):
                        found.append(folder + entry.name)
        except OSError:
            continue  # removed meanwhile, closed to its own user, or nested deeper than a path can say
    return sorted(found)[:MAX_LISTED]


def _inside(path: str) -> str:
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        raise OSError(errno.EINVAL, "not a path that text can name") from None
    if "\0" in path:
        raise OSError(errno.EINVAL, "a path cannot contain a NUL byte")
    return os.path.join(root.WORK, path)


def _refuse_special(fd: int) -> None:
    mode = os.fstat(fd).st_mode
    if stat.S_ISDIR(mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "not a regular file")
