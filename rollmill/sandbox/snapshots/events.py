"""What a command log says: the calls that change a box, and what came of them; plain data."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from rollmill.sandbox.records import SandboxSpec, Service

SCHEMA = 1


class Payload(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that went in or came out."""

    digest: str
    """BLAKE3."""
    num_bytes: int
    data: bytes | None = None
    """None: too long for a line, a blob beside the log."""


class Op(msgspec.Struct, frozen=True, kw_only=True, tag=str.lower, tag_field="op"):
    """A call that may change the box."""


class Exec(Op, frozen=True, kw_only=True):
    argv: tuple[str, ...] | str
    timeout_s: float
    stdin: Payload
    cwd: str = ""
    env: Mapping[str, str] | None = None
    max_output_bytes: int
    stderr_apart: bool = False


class Write(Op, frozen=True, kw_only=True):
    path: str
    data: Payload
    mode: int


class Start(Op, frozen=True, kw_only=True):
    argv: tuple[str, ...] | str
    cwd: str = ""
    env: Mapping[str, str] | None = None
    pty: bool = False


class Serve(Op, frozen=True, kw_only=True):
    service: Service


class Input(Op, frozen=True, kw_only=True):
    process: int
    """The call that started it."""
    data: Payload


class CloseInput(Op, frozen=True, kw_only=True):
    process: int


class Kill(Op, frozen=True, kw_only=True):
    process: int
    signal: int


class Wait(Op, frozen=True, kw_only=True):
    process: int
    timeout_s: float


class Suspend(Op, frozen=True, kw_only=True):
    pass


class Resume(Op, frozen=True, kw_only=True):
    pass


AnyOp = Exec | Write | Start | Serve | Input | CloseInput | Kill | Wait | Suspend | Resume


class Result(msgspec.Struct, frozen=True, kw_only=True, tag=str.lower, tag_field="result"):
    """What came of a call."""


class Fine(Result, frozen=True, kw_only=True):
    pass


class Refused(Result, frozen=True, kw_only=True):
    """An `OSError` that the program in the box was to see."""

    errno: int
    message: str


class Ran(Result, frozen=True, kw_only=True):
    exit_code: int
    timed_out: bool
    num_output_bytes: int
    stdout: Payload
    stderr: Payload
    wall_s: float


AnyResult = Fine | Refused | Ran


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=str.lower, tag_field="event"):
    """One line of the log."""


class Head(Event, frozen=True, kw_only=True):
    """The first line: the state in which the log begins."""

    schema: int = SCHEMA
    spec: SandboxSpec
    store: str = ""
    snapshot: str = ""
    """Digest of a saved snapshot in `store`; empty: a fresh box of the spec, or the parent's state."""
    parent: str = ""
    """File name of the log, in the same folder, whose first `position` lines come before this one's."""
    position: int = 0


class Began(Event, frozen=True, kw_only=True):
    call: int
    op: AnyOp


class Ended(Event, frozen=True, kw_only=True):
    """A call without this line was cut off: its owner died, it was cancelled, or the box was lost."""

    call: int
    result: AnyResult


class Output(Event, frozen=True, kw_only=True):
    """How much a started command had printed, and its reader taken, before the next event."""

    process: int
    num_stdout_bytes: int
    num_stderr_bytes: int
    stdout: str
    """BLAKE3 of all so far."""
    stderr: str


class Mark(Event, frozen=True, kw_only=True):
    """A snapshot was taken here."""

    mark: int
    live: bool


class Saved(Event, frozen=True, kw_only=True):
    """The snapshot of a mark was saved."""

    mark: int
    store: str
    snapshot: str


AnyEvent = Head | Began | Ended | Output | Mark | Saved
