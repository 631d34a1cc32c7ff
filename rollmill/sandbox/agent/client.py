"""The owner's end of a box that has an agent: everything of `Sandbox` but snapshot and fork, with time-outs enforced here, outside.

What the agent's program does to its own box is an observation; what else ends the box raises `RunFailure`. Knows no backend.
"""

from __future__ import annotations

import contextlib
import errno
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from rollmill.records import Boundary, RunFailure
from rollmill.sandbox.agent import link as links
from rollmill.sandbox.agent import wire
from rollmill.sandbox.agent.link import BoxRuined, Hello, Link, Overdue
from rollmill.sandbox.agent.process import AgentProcess, result_of, ruined
from rollmill.sandbox.agent.services import Services
from rollmill.sandbox.agent.streams import Stream
from rollmill.sandbox.records import Argv, Change, ChangeKind, Env, ExecResult, FileKind, FileStat, SandboxSpec, Service

Changes = list[Change]
FILE_DEADLINE_S = 60.0
MAX_STDIN_BYTES = 16 << 20
MAX_OUTPUT_BYTES = 16 << 20
"""Of each stream: both must fit into one frame."""
MAX_READ_BYTES = 32 << 20
PIECE_BYTES = 4 << 20
"""A long file travels in pieces, so that the agent, which lives under the box's memory bound, never holds more."""
MAX_LISTED = 10_000
MAX_CHANGES = 100_000
_MAX_WORDS = 65_535
_KINDS = (FileKind.FILE, FileKind.FOLDER, FileKind.LINK, FileKind.OTHER)
_READ = struct.Struct("<Q")
_WRITE = struct.Struct("<II")
_MOST = struct.Struct("<I")
_GRACE = struct.Struct("<d")


class AgentBox:
    """One sandbox; a backend subclasses it, attaches a stream and says when the box is `gone`."""

    def __init__(self, name: str, spec: SandboxSpec, *, kill: Callable[[], None]) -> None:
        self.name = name
        self.spec = spec
        self.shell: tuple[str, ...] = ("/bin/bash", "-c")
        self.services = Services(self)
        self._kill = kill
        self._link: Link | None = None

    # The backend's side

    def attach(self, stream: Stream, *, kill: Callable[[], None] | None = None) -> None:
        """Begin a life with the agent at the other end; again after `freeze`, for the successor, in which no service runs yet."""
        if self._link is not None:
            self._link.leave()
            self.services = Services(self)
        self._kill = kill or self._kill
        self._link = Link(self.name, stream, self._kill, self.hung_up)

    async def ready(self, deadline_s: float) -> Hello:
        """Until the agent has said that the box stands."""
        link = self._life()
        try:
            return await link.ready(deadline_s)
        except BoxRuined as ruin:  # no agent has run yet
            raise RunFailure(Boundary.SANDBOX, f"{ruin}; give the box more memory") from None
        except RunFailure:
            if link.last_words is None:
                raise
            raise RunFailure(Boundary.SANDBOX, f"box {self.name} could not be made: {link.last_words}") from None

    async def install(self, files: Mapping[str, str], *, deadline_s: float = FILE_DEADLINE_S) -> None:
        """Write the initial world, each frame within the deadline. May be called before `ready`: the frames wait in the stream."""
        link = self._life()
        try:
            for body in _worlds(files):
                await link.call(wire.Ask.WORLD, body, deadline_s=deadline_s)
            for path, text in files.items():
                if len(text) > PIECE_BYTES // 4:
                    await self._write(path, text.encode(errors="surrogatepass"), 0)
        except OSError as error:
            raise RunFailure(Boundary.SANDBOX, f"box {self.name} could not be made: {error}") from None
        except BoxRuined as ruin:
            raise RunFailure(Boundary.SANDBOX, f"{ruin}; give the box more memory") from None

    def gone(self, why: str, *, ruined: bool = False) -> None:
        """The box ended; `ruined`: its memory ran out, by the doing of its own programs."""
        self._life().gone(why, ruined=ruined)

    def hung_up(self) -> None:
        """The stream ended. A backend that has no other news of its boxes calls `gone` here."""

    async def freeze(self, *, deadline_s: float = FILE_DEADLINE_S) -> int:
        """The writable layer as a descriptor; the agent ends, and the box takes no calls until it is attached again."""
        link = self._life()
        try:
            layer = await link.freeze(deadline_s)
        except OSError as error:
            raise self._lacks("a layer that can be frozen", error) from None
        except BoxRuined as ruin:
            raise RunFailure(Boundary.SANDBOX, str(ruin)) from None
        link.leave()
        return layer

    async def processes(self) -> list[tuple[int, str]]:
        """Every process of the box but its agent: its number there, and its command line."""
        fields, found = wire.Body(await self._control(wire.Ask.PROCESSES)), []
        with self._understood():
            while fields:
                found.append((fields.u32(), _word(fields.text())))
        return found

    async def end_all(self, grace_s: float) -> int:
        """SIGTERM to every process but the agent, SIGKILL after the grace; how many there were."""
        body = await self._control(wire.Ask.END_ALL, _GRACE.pack(grace_s), deadline_s=FILE_DEADLINE_S + grace_s)
        with self._understood():
            return wire.Body(body).u32()

    async def end(self, why: str) -> None:
        """Have the box killed and wait until the backend says it is gone; again is harmless."""
        await self._life().end(why)

    # Sandbox

    @property
    def link(self) -> Link | None:
        """The life it has now."""
        return self._link

    @property
    def alive(self) -> bool:
        return self._link is not None and self._link.alive

    async def exec(
        self,
        argv: Argv,
        *,
        timeout_s: float,
        stdin: bytes = b"",
        cwd: str = "",
        env: Env = None,
        max_output_bytes: int = 1 << 16,
        stderr_apart: bool = False,
    ) -> ExecResult:
        if len(stdin) > MAX_STDIN_BYTES:
            raise ValueError(f"{len(stdin)} bytes of standard input are more than {MAX_STDIN_BYTES}; write them to a file first")
        if not 0 <= max_output_bytes <= MAX_OUTPUT_BYTES:
            raise ValueError(f"max_output_bytes {max_output_bytes} is not in 0..{MAX_OUTPUT_BYTES}; send longer output to a file")
        begun = time.monotonic()
        flags = wire.ExecFlag.APART if stderr_apart else wire.ExecFlag(0)
        try:
            body = self._command(argv, cwd, env, stdin, flags, max_output_bytes)
        except UnicodeEncodeError as error:
            words = f"{error.object!r}: not text that a program can be given\n".encode()
            return ExecResult(exit_code=126, stdout=words[:max_output_bytes], num_output_bytes=len(words), timed_out=False, wall_s=0.0)
        link = self._life()
        try:
            kind, body = await link.finish(*link.ask(wire.Ask.EXEC, body), timeout_s)
        except Overdue:
            await link.end(f"it did not end a command within {links.KILL_GRACE_S:g} s of its time-out")
            return ExecResult(exit_code=-9, stdout=b"", num_output_bytes=0, timed_out=True, wall_s=time.monotonic() - begun)
        except BoxRuined as ruin:
            return ruined(ruin, begun, max_output_bytes)
        if kind == wire.Say.ERROR:
            raise RunFailure(Boundary.SANDBOX, f"box {self.name} could not start a command: {links.error_of(body)[1]}")
        with self._understood():
            return result_of(body)

    async def start(self, argv: Argv, *, cwd: str = "", env: Env = None, pty: bool = False) -> AgentProcess:
        flags = wire.ExecFlag.STREAM | (wire.ExecFlag.PTY if pty else wire.ExecFlag.APART)
        if pty:
            env = {"TERM": "xterm-256color", **(env or {})}
        program = argv if isinstance(argv, str) else " ".join(argv)
        try:
            body = self._command(argv, cwd, env, b"", flags, 0)
        except UnicodeEncodeError:
            raise OSError(errno.EINVAL, "not text that a program can be given", program) from None
        try:
            process = AgentProcess(self._life(), body, program)
        except BoxRuined as ruin:
            raise OSError(errno.EIO, str(ruin), program) from None
        await process.started()
        return process

    async def serve(self, service: Service) -> None:
        await self.services.serve(service)

    async def read(self, path: str, *, limit_bytes: int = 1 << 20) -> bytes:
        if not 0 <= limit_bytes <= MAX_READ_BYTES:
            raise ValueError(f"limit_bytes {limit_bytes} is not in 0..{MAX_READ_BYTES}; read longer files in pieces, with exec")
        return await self._file(wire.Ask.READ, path, _READ.pack(limit_bytes))

    async def write(self, path: str, data: bytes, *, mode: int = 0) -> None:
        if len(data) > self.spec.disk_bytes:
            raise OSError(errno.ENOSPC, f"{len(data)} bytes do not fit on a disk of {self.spec.disk_bytes}", path)
        await self._write(path, data, mode)

    async def list(self, path: str = ".") -> list[str]:
        fields, found = wire.Body(await self._file(wire.Ask.LIST, path, _MOST.pack(MAX_LISTED))), []
        with self._understood():
            while fields:
                found.append(_word(fields.text()))
        return found

    async def stat(self, path: str) -> FileStat:
        fields = wire.Body(await self._file(wire.Ask.STAT, path))
        with self._understood():
            kind, mode, num_bytes, mtime_s = fields.take(wire.STAT)
            return FileStat(path=path, kind=_KINDS[kind], num_bytes=num_bytes, mode=mode, mtime_s=mtime_s, target=_word(fields.text()))

    async def diff(self) -> Changes:
        fields, found = wire.Body(await self._control(wire.Ask.DIFF, _MOST.pack(MAX_CHANGES))), []
        with self._understood():
            while fields:
                kind = ChangeKind.REMOVED if fields.u32() else ChangeKind.WRITTEN
                found.append(Change(path=_word(fields.text()), kind=kind))
        return sorted(found, key=lambda change: change.path)

    async def suspend(self) -> None:
        await self._control(wire.Ask.SUSPEND)

    async def resume(self) -> None:
        await self._control(wire.Ask.RESUME)

    async def close(self) -> None:
        await self.end("its owner closed it")

    # Inside

    def _life(self) -> Link:
        assert self._link is not None, f"box {self.name} was never attached"
        return self._link

    def _command(self, argv: Argv, cwd: str, env: Env, stdin: bytes, flags: wire.ExecFlag, max_output_bytes: int) -> bytes:
        words: Sequence[str] = (*self.shell, argv) if isinstance(argv, str) else argv
        if not words or any("\0" in word for word in words):
            raise ValueError(f"argv {list(words)!r} must name a program and contain no NUL byte")
        variables = {**self.spec.env, **env} if env else self.spec.env
        for name, value in variables.items():
            if not name or "=" in name or "\0" in name or "\0" in value:
                raise ValueError(f"environment variable {name!r}={value!r} must have a name without '=' and contain no NUL byte")
        if "\0" in cwd:
            raise ValueError(f"cwd {cwd!r} must contain no NUL byte")
        if len(words) > _MAX_WORDS or len(variables) > _MAX_WORDS:
            raise ValueError(f"{len(words)} arguments and {len(variables)} variables: a command has at most {_MAX_WORDS} of each")
        return wire.exec_body(
            [_bytes(word) for word in words],
            [_bytes(f"{name}={value}") for name, value in variables.items()],
            _bytes(cwd),
            stdin,
            flags=flags,
            max_output_bytes=max_output_bytes,
        )

    async def _write(self, path: str, data: bytes, mode: int) -> None:
        for start in range(0, len(data) or 1, PIECE_BYTES):
            await self._file(wire.Ask.WRITE, path, _WRITE.pack(mode, start > 0), data[start : start + PIECE_BYTES])

    async def _file(self, kind: wire.Ask, path: str, before: bytes = b"", after: bytes = b"") -> bytes:
        try:
            name = wire.text(_bytes(path))
        except UnicodeEncodeError:
            raise OSError(errno.EINVAL, "not a path that text can name", path) from None
        if "\0" in path:
            raise OSError(errno.EINVAL, "a path cannot contain a NUL byte", path)
        try:
            return await self._life().call(kind, before + name + after, deadline_s=FILE_DEADLINE_S)
        except BoxRuined as ruin:
            raise OSError(errno.EIO, str(ruin), path) from None
        except OSError as error:
            raise OSError(error.errno, error.strerror, path) from None

    async def _control(self, kind: wire.Ask, body: bytes = b"", *, deadline_s: float = FILE_DEADLINE_S) -> bytes:
        what = kind.name.lower().replace("_", " ")
        try:
            return await self._life().call(kind, body, deadline_s=deadline_s)
        except BoxRuined as ruin:
            raise OSError(errno.EIO, str(ruin)) from None
        except OSError as error:
            if error.errno == errno.ENOTSUP:
                raise self._lacks(what, error) from None
            raise

    @contextlib.contextmanager
    def _understood(self) -> Iterator[None]:
        """Around the reading of an answer: one that is no such answer is the agent's fault, not the caller's."""
        try:
            yield
        except (ValueError, IndexError, struct.error) as error:
            raise RunFailure(Boundary.SANDBOX, f"box {self.name} answered what cannot be read: {error}") from None

    def _lacks(self, what: str, error: OSError) -> ValueError:
        return ValueError(f"box {self.name} does not offer {what}: {error.strerror}")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _word(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _worlds(files: Mapping[str, str]) -> list[bytes]:
    """Bodies of WORLD, each about `PIECE_BYTES` at most; a file that is too long for one travels by itself."""
    bodies: list[bytes] = []
    parts: list[bytes] = []
    size = 0

    def flush() -> None:
        nonlocal parts, size
        if parts:
            bodies.append(_MOST.pack(len(parts)) + b"".join(parts))
            parts, size = [], 0

    for path, text in files.items():
        if len(text) > PIECE_BYTES // 4:
            continue
        part = wire.text(_bytes(path)) + wire.text(text.encode(errors="surrogatepass"))
        if size + len(part) > PIECE_BYTES:
            flush()
        parts.append(part)
        size += len(part)
    flush()
    return bodies
