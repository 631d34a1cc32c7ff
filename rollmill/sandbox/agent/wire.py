"""The frames between an owner and the agent of a box, the same over a socket, a pipe or a serial line.

A frame is `<III`: bytes of the body, id, kind; then the body. An answer carries the id of its request. Integers are little-endian,
`str` is a 32-bit length and that many bytes. `docs/formats/agent.md` lists every body. Standard library only.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable, Sequence

HEAD = struct.Struct("<III")
MAX_BODY_BYTES = 64 << 20
WINDOW_BYTES = 256 << 10
"""How much output of one started command may be on its way before the owner has taken it."""

_U32 = struct.Struct("<I")
DONE = struct.Struct("<iIQQdddQ")
"""Exit status, flags, bytes printed, bytes printed apart, wall, user and system seconds, largest resident set; then two `str`."""
STAT = struct.Struct("<IIQd")
"""Kind, mode, bytes, modification time; then the link's target."""
EXEC = struct.Struct("<IIHH")
"""Flags, largest output, number of arguments, number of variables; then those, the folder and the input, each a `str`."""
HELLO = struct.Struct("<III")
"""Protocol version, slot, facts."""
VERSION = 1


class Ask(enum.IntEnum):
    EXEC = 1
    INPUT = 2
    """`u32 target`, bytes; none: the end of the input. Answered once the command has taken them."""
    SIGNAL = 3
    """`u32 target, u32 signal, u32 is_timeout`, to the command's process group. Not answered."""
    RESIZE = 4
    """`u32 target, u32 rows, u32 columns`. Not answered."""
    READ = 5
    """`u64 limit, str path`."""
    WRITE = 6
    """`u32 mode, u32 is_append, str path`, bytes."""
    LIST = 7
    """`u32 most, str path`: the regular files below, each a `str` relative to the path."""
    STAT = 8
    """`str path`."""
    WORLD = 9
    """`u32 number`, then `str path, str data` for each."""
    DIFF = 10
    """`u32 most`: `u32 is_removed, str path` for each change."""
    PROCESSES = 11
    """`u32 pid, str command` for each process but the agent."""
    END_ALL = 12
    """`f64 grace_s`: SIGTERM to all, SIGKILL after the grace; answered `u32 number` when none is left."""
    SUSPEND = 13
    RESUME = 14
    FREEZE = 15
    """The writable layer, as a descriptor beside the answer; the agent ends."""
    PING = 16
    TAKEN = 17
    """`u32 target, u32 bytes`: the owner took so much of the command's output. Not answered."""
    LEAVE = 18
    """Let go of all programs, for a dump: `u32 pid` of their common parent, `str name` under which it waits for an agent."""
    JOIN = 19
    """`str name`: take up the programs that were left, or restored in this box."""
    ADOPT = 20
    """`u32 pid` of such a program: answered as an EXEC that streams."""


class Say(enum.IntEnum):
    DONE = 129
    OUTPUT = 130
    """`u32 is_stderr`, bytes."""
    OK = 131
    ERROR = 132
    """`i32 errno, str message`."""
    HELLO = 133
    LAST_WORDS = 134
    """`i32 errno, str message`: why the box ends before it stood."""
    STARTED = 135
    """`u32 pid`: the command of a streaming EXEC runs."""


class ExecFlag(enum.IntFlag):
    APART = 1
    STREAM = 2
    """Output as it comes, input stays open."""
    PTY = 4


class DoneFlag(enum.IntFlag):
    TIMED_OUT = 1


class Fact(enum.IntFlag):
    """What HELLO tells of the box."""

    PROC = 1
    IDMAP = 2
    MEMORY_GROUP = 4
    SECCOMP = 8


def frame(request: int, kind: int, body: bytes = b"") -> bytes:
    return HEAD.pack(len(body), request, kind) + body


def text(value: bytes) -> bytes:
    return _U32.pack(len(value)) + value


def texts(values: Iterable[bytes]) -> bytes:
    return b"".join(map(text, values))


def exec_body(
    argv: Sequence[bytes], env: Sequence[bytes], cwd: bytes, stdin: bytes, *, flags: int, max_output_bytes: int
) -> bytes:  # fmt: skip
    return EXEC.pack(flags, max_output_bytes, len(argv), len(env)) + texts(argv) + texts(env) + text(cwd) + text(stdin)


class Body:
    """Reads a body from front to back."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._view = memoryview(data)
        self._at = 0

    def take(self, shape: struct.Struct) -> tuple:
        values = shape.unpack_from(self._view, self._at)
        self._at += shape.size
        return values

    def u32(self) -> int:
        (value,) = self.take(_U32)
        return int(value)

    def text(self) -> bytes:
        size = self.u32()
        value = bytes(self._view[self._at : self._at + size])
        if len(value) != size:
            raise ValueError(f"a string of {size} bytes ends after {len(value)}")
        self._at += size
        return value

    def rest(self) -> bytes:
        value = bytes(self._view[self._at :])
        self._at = len(self._view)
        return value

    def __bool__(self) -> bool:
        return self._at < len(self._view)


class Splitter:
    """Cuts a stream into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[int, int, bytes]]:
        """The frames that are whole by now: (id, kind, body)."""
        buffer = self._buffer
        buffer += data
        found = []
        at = 0
        while len(buffer) - at >= HEAD.size:
            size, request, kind = HEAD.unpack_from(buffer, at)
            if size > MAX_BODY_BYTES:
                raise ValueError(f"a frame of {size} bytes is larger than {MAX_BODY_BYTES}: the stream is out of step")
            end = at + HEAD.size + size
            if len(buffer) < end:
                break
            found.append((request, kind, bytes(buffer[at + HEAD.size : end])))
            at = end
        if at:
            del buffer[:at]
        return found
