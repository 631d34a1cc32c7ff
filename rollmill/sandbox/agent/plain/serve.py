"""The agent's loop: takes its owner's requests from one byte stream, answers each, and ends when the owner hangs up.

Every request but SIGNAL, RESIZE and TAKEN is answered exactly once; a malformed one is answered with an error, and a stream out of
step ends the agent. Nothing here waits for a process of the box.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
import struct
import time
from dataclasses import dataclass

from .. import wire
from . import files
from .commands import Commands, Surroundings
from .processes import Descendants, Everyone, Others, command_line

_READ_BYTES = 1 << 18
_LOOK_MS = 10
"""How often the end of all is looked for, besides after every child's death."""
_MANY = struct.Struct("<I")
_LIMIT = struct.Struct("<Q")
_GRACE = struct.Struct("<d")
_ERRNO = struct.Struct("<i")


@dataclass(frozen=True, kw_only=True)
class Box:
    """What the agent is given of the box it serves."""

    surroundings: Surroundings
    others: Others
    slot: int = 0
    facts: int = 0
    hello_fds: tuple[int, ...] = ()
    """Sent with HELLO, then closed: listening sockets inside the box's network."""
    upper_fd: int = -1
    """The folder of the writable layer, for DIFF; -1: there is none."""
    layer_fd: int = -1
    """What FREEZE hands over; -1: nothing."""


@dataclass(kw_only=True)
class _Ending:
    request: int
    num: int
    kill_at: float


class _HungUp(Exception):
    pass


class Agent:
    def __init__(self, box: Box, in_fd: int, out_fd: int) -> None:
        self._box = box
        self._in_fd, self._out_fd = in_fd, out_fd
        self._poll = select.poll()
        self._commands = Commands(box.surroundings, self._say, self._poll)
        self._endings: list[_Ending] = []
        for fd in (in_fd, out_fd, box.upper_fd, box.layer_fd, box.surroundings.oom_fd, *box.hello_fds):
            if fd >= 0:
                os.set_inheritable(fd, False)

    def serve(self) -> None:
        """Until the owner hangs up."""
        os.umask(0o022)
        wake_fd = _wake_on_child()
        self._poll.register(self._in_fd, select.POLLIN)
        self._poll.register(wake_fd, select.POLLIN)
        splitter = wire.Splitter()
        try:
            self._send(wire.frame(0, wire.Say.HELLO, wire.HELLO.pack(wire.VERSION, self._box.slot, self._box.facts)), self._box.hello_fds)
            for fd in self._box.hello_fds:
                os.close(fd)
            while True:
                for fd, _ in self._poll.poll(_LOOK_MS if self._endings else None):
                    if fd == self._in_fd:
                        self._hear(splitter)
                    elif fd == wake_fd:
                        with contextlib.suppress(BlockingIOError):
                            os.read(wake_fd, 4096)
                        self._commands.reap()
                    else:
                        self._commands.ready(fd)
                if self._endings:
                    self._look_for_the_end()
        except _HungUp:
            self._box.others.signal(signal.SIGKILL)

    def _hear(self, splitter: wire.Splitter) -> None:
        try:
            data = os.read(self._in_fd, _READ_BYTES)
        except ConnectionError:
            data = b""
        if not data:
            raise _HungUp
        try:
            frames = splitter.feed(data)
        except ValueError:  # out of step: nothing that follows can be understood
            raise _HungUp from None
        for request, kind, body in frames:
            try:
                answer = self._answer(request, kind, body)
            except OSError as error:
                self._fail(request, error.errno or errno.EIO, error.strerror or str(error))
            except (ValueError, struct.error) as error:
                self._fail(request, errno.EINVAL, f"malformed request: {error}")
            else:
                if answer is not None:
                    self._say(request, wire.Say.OK, answer)

    def _answer(self, request: int, kind: int, body: bytes) -> bytes | None:
        """The body of OK; None when something else answers, or nothing does."""
        match kind:
            case wire.Ask.EXEC:
                self._commands.start(request, body)
            case wire.Ask.INPUT:
                self._commands.input(request, body)
            case wire.Ask.SIGNAL:
                self._commands.signal(body)
            case wire.Ask.RESIZE:
                self._commands.resize(body)
            case wire.Ask.TAKEN:
                self._commands.taken(body)
            case wire.Ask.END_ALL:
                self._end_all(request, body)
            case wire.Ask.FREEZE:
                self._freeze(request)
            case wire.Ask.READ | wire.Ask.WRITE | wire.Ask.LIST | wire.Ask.STAT | wire.Ask.WORLD:
                return self._file(wire.Ask(kind), wire.Body(body))
            case wire.Ask.DIFF:
                if self._box.upper_fd < 0:
                    raise OSError(errno.ENOTSUP, "the box has no writable layer of its own")
                found = files.changes(self._box.upper_fd, wire.Body(body).u32())
                return b"".join(_MANY.pack(is_removed) + wire.text(path) for is_removed, path in found)
            case wire.Ask.PROCESSES:
                lines = [(pid, command_line(pid)) for pid in self._box.others.pids()]
                return b"".join(_MANY.pack(pid) + wire.text(line) for pid, line in lines if line is not None)
            case wire.Ask.SUSPEND | wire.Ask.RESUME:
                self._box.others.signal(signal.SIGSTOP if kind == wire.Ask.SUSPEND else signal.SIGCONT)
                return b""
            case wire.Ask.PING:
                return b""
            case _:
                raise OSError(errno.ENOSYS, f"request of kind {kind} is unknown")
        return None

    def _file(self, kind: wire.Ask, fields: wire.Body) -> bytes:
        if kind == wire.Ask.READ:
            (limit,) = fields.take(_LIMIT)
            return files.read_file(self._path(fields), min(limit, wire.MAX_BODY_BYTES))
        if kind == wire.Ask.WRITE:
            mode, is_append = fields.u32(), fields.u32()
            files.write_file(self._path(fields), fields.rest(), mode & 0o7777, is_append=bool(is_append))
            return b""
        if kind == wire.Ask.LIST:
            most = fields.u32()
            return wire.texts(files.list_files(self._path(fields), most))
        if kind == wire.Ask.STAT:
            *numbers, target = files.stat_file(self._path(fields))
            return wire.STAT.pack(*numbers) + wire.text(target)
        for _ in range(fields.u32()):
            path = self._path(fields)
            files.write_file(path, fields.text(), 0)
        return b""

    def _path(self, fields: wire.Body) -> bytes:
        return os.path.join(self._box.surroundings.workdir, fields.text())

    def _end_all(self, request: int, body: bytes) -> None:
        (grace_s,) = wire.Body(body).take(_GRACE)
        num = 0
        with contextlib.suppress(FileNotFoundError):  # a box without /proc
            num = len(self._box.others.pids())
        self._box.others.signal(signal.SIGTERM)
        # What is suspended could not end otherwise.
        self._box.others.signal(signal.SIGCONT)
        self._endings.append(_Ending(request=request, num=num, kill_at=time.monotonic() + grace_s))

    def _look_for_the_end(self) -> None:
        self._commands.reap()
        for ending in list(self._endings):
            late = time.monotonic() >= ending.kill_at
            if not self._box.others.signal(signal.SIGKILL if late else 0):
                self._endings.remove(ending)
                self._say(ending.request, wire.Say.OK, _MANY.pack(ending.num))

    def _freeze(self, request: int) -> None:
        if self._box.layer_fd < 0:
            raise OSError(errno.ENOTSUP, "the box has no writable layer of its own")
        self._send(wire.frame(request, wire.Say.OK), (self._box.layer_fd,))
        raise _HungUp

    def _fail(self, request: int, number: int, message: str) -> None:
        self._say(request, wire.Say.ERROR, _ERRNO.pack(number) + wire.text(message.encode(errors="replace")))

    def _say(self, request: int, kind: int, body: bytes) -> None:
        self._send(wire.frame(request, kind, body), ())

    def _send(self, data: bytes, fds: tuple[int, ...]) -> None:
        """Waits until the owner took it: an owner never stops reading, it bounds what it asked for."""
        view = memoryview(data)
        try:
            if fds:
                with socket.socket(fileno=os.dup(self._out_fd)) as sock:
                    view = view[socket.send_fds(sock, [view], fds) :]
            while view:
                view = view[os.write(self._out_fd, view) :]
        except ConnectionError:
            raise _HungUp from None


def serve_socket(box: Box, fd: int) -> None:
    """`fd` is above 2: the first three are the commands' own."""
    assert fd > 2
    while (null := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(null)
    os.set_blocking(fd, True)
    Agent(box, fd, fd).serve()


def serve_stdio(box: Box | None = None) -> None:
    """Frames on standard input and output, which commands and stray prints must not reach: both move away."""
    in_fd, out_fd = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)
    os.set_blocking(out_fd, True)
    Agent(box or own_box(), in_fd, out_fd).serve()


def own_box() -> Box:
    """The box this process stands in, as a container's entry finds it: its folder, its environment."""
    surroundings = Surroundings(workdir=os.getcwdb(), env=dict(os.environb))
    return Box(surroundings=surroundings, others=Everyone() if os.getpid() == 1 else Descendants())


def _wake_on_child() -> int:
    wake_fd, signal_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(signal_fd, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    return wake_fd
