"""An append-only file of events, one JSON object per line, each sealed by a digest over all before it.

A line is in the file when `append` returns, and survives the death of the process; every few lines, and when asked, the file is synced, so
that it survives the machine's. A last line that was torn is cut off when the file is opened; damage anywhere else is refused.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

import msgspec
from blake3 import blake3

from rollmill.sandbox.snapshots.events import SCHEMA, AnyEvent, Head
from rollmill.sandbox.snapshots.store import sync_folder, working
from rollmill.sandbox.snapshots.threads import in_thread

SYNC_EVERY = 64
"""Lines: what a power cut can take."""
_SEAL_DIGITS = 16


class EventLog:
    """The writing end; one process at a time. Shared by the journal and its snapshots, and closed with the last of them."""

    def __init__(self, path: Path, *, is_new: bool) -> None:
        self.path = path
        flags = os.O_RDWR | os.O_APPEND | (os.O_CREAT | os.O_EXCL if is_new else 0)
        try:
            self._file = os.open(path, flags, 0o644)
        except FileExistsError:
            raise ValueError(f"{path} exists already; go on with it, or choose another name") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.events, whole_bytes, self._seal = _parse(path)
            os.ftruncate(self._file, whole_bytes)
        except BlockingIOError:
            os.close(self._file)
            raise ValueError(f"{path} is being written by another process; end that one first") from None
        except BaseException:
            os.close(self._file)
            raise
        self.num_events = len(self.events)
        self._num_unsynced = 0
        self._num_users = 1
        self._is_named = not is_new

    def append(self, event: AnyEvent) -> int:
        """Write one line; how many there are now."""
        text = json.dumps(msgspec.to_builtins(event), separators=(",", ":"))
        self._seal = _sealed(self._seal, text)
        line = f'{{"at":{self.num_events},"seal":"{self._seal}","body":{text}}}\n'.encode()
        view = memoryview(line)
        with working(str(self.path)):
            while view:
                view = view[os.write(self._file, view) :]
        self.num_events += 1
        self._num_unsynced += 1
        return self.num_events

    async def settle(self) -> None:
        """Sync when enough lines wait for it."""
        if self._num_unsynced >= SYNC_EVERY:
            await self.sync()

    async def sync(self) -> None:
        if self._num_unsynced:
            self._num_unsynced = 0
            with working(str(self.path)):
                await in_thread(os.fsync, self._file)
                if not self._is_named:
                    await in_thread(sync_folder, self.path.parent)
                    self._is_named = True

    def share(self) -> EventLog:
        self._num_users += 1
        return self

    async def close(self) -> None:
        """Sync, and close with the last user."""
        await self.sync()
        self._num_users -= 1
        assert self._num_users >= 0, f"{self.path} was closed more often than shared"
        if not self._num_users:
            os.close(self._file)


def read_events(path: Path) -> list[AnyEvent]:
    """Every whole line of a log, which another process may be writing."""
    return _parse(path)[0]


def _parse(path: Path) -> tuple[list[AnyEvent], int, str]:
    """The events, how many bytes they fill, and the last seal."""
    events: list[AnyEvent] = []
    seal, num_bytes = "", 0
    data = path.read_bytes()
    while num_bytes < len(data):
        end = data.find(b"\n", num_bytes) + 1
        event, next_seal = _read_line(data[num_bytes:end], len(events), seal) if end else (None, seal)
        if event is None:
            if end and end < len(data):
                raise ValueError(f"line {len(events) + 1} of {path} is damaged; restore the file, or begin from a snapshot")
            break
        events.append(event)
        seal, num_bytes = next_seal, end
    if events and not (isinstance(events[0], Head) and events[0].schema == SCHEMA):
        raise ValueError(f"{path} is no command log of schema {SCHEMA}; use the version that wrote it")
    return events, num_bytes, seal


def _read_line(line: bytes, at: int, seal: str) -> tuple[AnyEvent | None, str]:
    front = f'{{"at":{at},"seal":"'
    text = line.decode(errors="replace")
    found, body = text[len(front) : len(front) + _SEAL_DIGITS], text[len(front) + _SEAL_DIGITS + len('","body":') : -len("}\n")]
    if not text.startswith(front) or _sealed(seal, body) != found:
        return None, seal
    # json and not msgspec: a name that is no UTF-8 is a lone surrogate in a Python string.
    event: AnyEvent = msgspec.convert(json.loads(body), AnyEvent)
    return event, found


def _sealed(before: str, text: str) -> str:
    return blake3(f"{before}{text}".encode()).hexdigest(length=_SEAL_DIGITS // 2)
