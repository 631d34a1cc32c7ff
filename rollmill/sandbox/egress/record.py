"""What a box asked of the network, written down: frozen records, bounded in memory and in their file, newest kept in memory."""

from __future__ import annotations

import os
import time
from collections import deque
from enum import StrEnum
from pathlib import Path

import msgspec

SCHEMA = 1
MAX_TEXT = 2048


class Kind(StrEnum):
    NAME = "name"
    """A DNS question."""
    HTTP = "http"
    """One request, seen in the clear or opened by intercept."""
    TLS = "tls"
    """One tunnel, from hello to close."""
    OTHER = "other"
    """A connection that never became one of these."""


class Verdict(StrEnum):
    ALLOWED = "allowed"
    DENIED = "denied"
    """By the allow-list, a limit, or because it was malformed."""
    FAILED = "failed"
    """Allowed, but the outside did not answer: not the agent's doing."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds per box. The defaults let a package installer work and make a flood wait."""

    num_connections: int = 64
    """Served at once; more wait in the backlog."""
    head_bytes: int = 32 << 10
    """A request head, a response head or a TLS hello."""
    head_s: float = 15.0
    """From the first byte of a head to its last, and for a new connection to say anything."""
    idle_s: float = 120.0
    """Without a byte in either direction."""
    upstream_idle_s: float = 3600.0
    """The same where a rule names its upstream: a server of the owner's, such as a model that thinks long, keeps deadlines of its own."""
    connect_s: float = 10.0
    """To resolve and reach the outside."""
    total_bytes: int = 8 << 30
    """To and from the box, all connections together, over its life."""
    num_names: int = 4096
    """Different names that get an address."""
    queries_per_s: int = 500
    """DNS questions answered per second; more wait in the socket's buffer, then are dropped."""
    num_records: int = 4096
    """Kept in memory."""
    file_bytes: int = 64 << 20
    """Written to the file."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One thing a box asked of the network.

    `Record(time_s=1731.2, box="b7", kind="http", dialled="198.18.4.9:80", host="api.example.org", method="GET", path="/v1", status=200,
    num_sent_bytes=96, num_received_bytes=512, verdict="allowed", wall_s=0.03)`
    """

    schema: int = SCHEMA
    time_s: float
    """Unix time at its end."""
    box: str
    kind: Kind
    dialled: str
    """Address and port the program dialled, as it saw them."""
    host: str = ""
    """Name in the question, the Host header or the TLS hello."""
    method: str = ""
    """HTTP method, or type of the DNS question."""
    path: str = ""
    """Request target with its query, cut at 2,048 characters."""
    status: int = 0
    """What the box was answered: HTTP status or DNS response code; 0: none."""
    num_sent_bytes: int = 0
    """From the box."""
    num_received_bytes: int = 0
    """To the box."""
    verdict: Verdict
    reason: str = ""
    """Why it was denied or failed."""
    wall_s: float = 0.0


class Journal:
    """The records of one box. The file ends at `file_bytes`; `num_unwritten` says how many records it lacks."""

    def __init__(self, box: str, limits: Limits, path: Path | None = None) -> None:
        self.box, self.limits = box, limits
        self.records: deque[Record] = deque(maxlen=limits.num_records)
        self.counts = dict.fromkeys(Verdict, 0)
        self.num_unwritten = 0
        self._room = limits.file_bytes
        self._encode = msgspec.json.Encoder().encode
        self._fd = -1
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            self._room -= os.fstat(self._fd).st_size

    def write(self, kind: Kind, dialled: str, verdict: Verdict, *, host: str = "", method: str = "", path: str = "", status: int = 0,
              num_sent_bytes: int = 0, num_received_bytes: int = 0, reason: str = "", wall_s: float = 0.0) -> None:  # fmt: skip
        record = Record(time_s=time.time(), box=self.box, kind=kind, dialled=dialled, verdict=verdict, host=host[:MAX_TEXT], method=method,
                        path=path[:MAX_TEXT], status=status, num_sent_bytes=num_sent_bytes, num_received_bytes=num_received_bytes,
                        reason=reason[:MAX_TEXT], wall_s=wall_s)  # fmt: skip
        self.records.append(record)
        self.counts[verdict] += 1
        if self._fd < 0:
            return
        line = self._encode(record) + b"\n"
        if len(line) > self._room:
            self.num_unwritten += 1
            return
        self._room -= len(line)
        os.write(self._fd, line)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
