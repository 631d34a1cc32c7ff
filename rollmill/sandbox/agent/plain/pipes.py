"""The pipes or the terminal between the agent and one command: ours never block, the command's own are closed once it runs."""

from __future__ import annotations

import fcntl
import os
import struct
import termios

from .. import wire

_ROWS, _COLUMNS = 24, 80


class Pipes:
    """The descriptors of one command: ours, which do not block, and its own until it runs."""

    def __init__(self, flags: int, *, has_input: bool) -> None:
        self.outputs: dict[int, int] = {}
        self.input_fd = -1
        self.actions: list[tuple[int, ...]] = []
        self._theirs: list[int] = []
        try:
            if flags & wire.ExecFlag.PTY:
                self._open_terminal()
            else:
                self._open_pipes(flags, has_input=has_input or bool(flags & wire.ExecFlag.STREAM))
        except BaseException:
            self.close()
            self.close_theirs()
            raise
        for fd in (*self.outputs, self.input_fd):
            if fd >= 0:
                os.set_blocking(fd, False)

    def close(self) -> None:
        for fd in (*self.outputs, self.input_fd):
            if fd >= 0:
                os.close(fd)

    def close_theirs(self) -> None:
        while self._theirs:
            os.close(self._theirs.pop())

    def _open_pipes(self, flags: int, *, has_input: bool) -> None:
        if has_input:
            stdin, self.input_fd = os.pipe2(os.O_CLOEXEC)
        else:
            stdin = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        self._theirs.append(stdin)
        out, stdout = os.pipe2(os.O_CLOEXEC)
        self._theirs.append(stdout)
        self.outputs[out] = 0
        stderr = stdout
        if flags & wire.ExecFlag.APART:
            err, stderr = os.pipe2(os.O_CLOEXEC)
            self._theirs.append(stderr)
            self.outputs[err] = 1
        self.actions = [(os.POSIX_SPAWN_DUP2, fd, which) for which, fd in enumerate((stdin, stdout, stderr))]

    def _open_terminal(self) -> None:
        master, slave = os.openpty()
        self.outputs[master] = 0
        self._theirs.append(slave)
        self.input_fd = os.dup(master)
        resize(master, _ROWS, _COLUMNS)
        # Opened by the command itself, after it began its session: that makes it the controlling terminal.
        opened = (os.POSIX_SPAWN_OPEN, 0, os.ttyname(slave), os.O_RDWR, 0)
        self.actions = [opened, (os.POSIX_SPAWN_DUP2, 0, 1), (os.POSIX_SPAWN_DUP2, 0, 2)]  # type: ignore[list-item]


def resize(fd: int, rows: int, columns: int) -> None:
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
