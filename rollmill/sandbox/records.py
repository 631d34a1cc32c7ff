"""The nouns of a sandbox: what a box must look like, what a command did, what a file is; plain data, known to every backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

Argv = Sequence[str] | str
"""A program and its arguments; a string goes to the shell."""
Env = Mapping[str, str] | None


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """A program that runs beside the agent, such as a database: started, waited for, and started again in every fork."""

    name: str
    argv: tuple[str, ...]
    ready_argv: tuple[str, ...] = ()
    """Succeeds once the service can be used, e.g. `("pg_isready",)`; empty: ready as soon as it runs."""
    ready_s: float = 60.0
    """How long it may take to become ready."""
    stop_s: float = 10.0
    """How long it may take to end after SIGTERM, before a snapshot kills it."""
    cwd: str = ""
    env: Mapping[str, str] = {}


class Allow(msgspec.Struct, frozen=True, kw_only=True):
    """One line of an allow-list: which requests may leave the box."""

    host: str
    """A host name, or `*.example.org` for every name below one."""
    methods: tuple[str, ...] = ()
    """HTTP methods; empty: all. Over TLS they can be told apart only with `Egress.intercept`."""
    port: int = 443
    upstream: str = ""
    """`address:port` that the owner really connects to, e.g. a server of its own on loopback; empty: what the name resolves to, public
    addresses only."""


class Egress(msgspec.Struct, frozen=True, kw_only=True):
    """What may leave a box; everything else is refused and written down."""

    allow: tuple[Allow, ...] = ()
    intercept: bool = False
    """Open TLS with a certificate authority of our own that the box trusts, to see methods."""


class SandboxSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a box must look like."""

    image: str = "host"
    """`host`: this machine's own programs, read-only; else the name or digest of an image made by `rollmill sandbox build`."""
    files: Mapping[str, str] = {}
    """Initial world: path below the working directory -> text."""
    env: Mapping[str, str] = {}
    """Added to the environment of every command."""
    services: tuple[Service, ...] = ()
    """Started in this order once the files are written."""
    egress: Egress | None = None
    """None: no network but the box's own loopback."""
    shares: tuple[str, ...] = ()
    """Folders of this machine that the box sees and cannot change, e.g. installed packages: the first at `/mnt/view/0`, and so on.
    Mounts below them are not shown."""
    root: bool = False
    """Commands run as root of the box's own user namespace, with rights over its files and users, never over its mounts or network."""
    live: bool = False
    """Built so that `snapshot(live=True)` can continue its processes; a virtual machine always is, a namespace box starts slower for it."""
    hostname: str = ""
    """Empty: the image's own."""
    memory_bytes: int = 512 << 20
    disk_bytes: int = 64 << 20
    num_processes: int = 64
    cpus: float = 0.0
    """Bound on CPU time per second of wall time; 0: none."""
    lifetime_s: float = 600.0
    """The box is killed from outside after this long, whatever its owner does."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What a command and the children it waited for used."""

    user_s: float = 0.0
    system_s: float = 0.0
    max_rss_bytes: int = 0


class ExecResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one command did."""

    exit_code: int
    """The command's status; -N when signal N ended it."""
    stdout: bytes
    """Standard output, with standard error in it unless asked apart: head and tail, when longer than the limit."""
    stderr: bytes = b""
    """Standard error, when asked apart."""
    num_output_bytes: int
    """How much it printed in all."""
    timed_out: bool
    wall_s: float
    usage: Usage = Usage()


class FileKind(StrEnum):
    FILE = "file"
    FOLDER = "folder"
    LINK = "link"
    OTHER = "other"
    """A socket, pipe or device."""


class FileStat(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    kind: FileKind
    num_bytes: int
    mode: int
    """Permission bits."""
    mtime_s: float
    target: str = ""
    """Where a link leads."""


class ChangeKind(StrEnum):
    WRITTEN = "written"
    """Made or changed."""
    REMOVED = "removed"


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One file that differs from what the box was made from. Folders appear when they were made, removed or replaced."""

    path: str
    """Absolute."""
    kind: ChangeKind


Changes = list[Change]


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a running command's output."""

    data: bytes
    is_stderr: bool = False


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a backend gives on this machine; a request beyond it raises before anything starts."""

    backend: str
    isolation: str
    """`namespace`, `container` or `microvm`."""
    fork: bool
    live_fork: bool = False
    """Whether forks continue running processes."""
    save: bool = False
    """Whether snapshots can be stored and restored on another machine."""
    suspend: bool = False
    diff: bool = True
    egress: bool = False
    images: bool = False
    shares: bool = False
    """Whether boxes can see folders of this machine."""
    facts: Mapping[str, str] = {}
    """What the machine gave, in words: `privilege`, `memory`, `helper`, ..."""
