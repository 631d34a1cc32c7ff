"""Object stores that misbehave as real ones do: lost and doubled writes, late lists, damaged reads, dead processes, cut connections."""

from __future__ import annotations

import errno
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from random import Random
from typing import TypeVar

from rollmill.weights.errors import CorruptSnapshot
from rollmill.weights.objects import Objects, StoreUnavailable, SwapLost

T = TypeVar("T")


class Fault(StrEnum):
    LOST_BEFORE = "lost_before"
    """A write fails and did not happen."""
    LOST_AFTER = "lost_after"
    """A write fails although it happened."""
    TWICE = "twice"
    """A write happens two times."""
    UNAVAILABLE = "unavailable"
    """A read, a size or a list fails."""
    FLIPPED = "flipped"
    """One bit of what was read is wrong."""
    TRUNCATED = "truncated"
    """The end of what was read is missing; of ranges, the object ends before them."""


class Death(StrEnum):
    BEFORE = "before"
    AFTER = "after"


class Killed(BaseException):
    """The process is gone: nothing may catch this but the test, and every later call raises it again."""


class FaultyObjects:
    """Objects over `inner` that fail by chance (`rates`, odds per call) and die at write number `die_at` (from 1).

    A key that was written here is left out of the next `list_lag` lists. `injected` counts what was done, `num_writes` the writes begun.
    """

    def __init__(
        self,
        inner: Objects,
        rng: Random,
        *,
        rates: Mapping[Fault, float] | None = None,
        list_lag: int = 0,
        die_at: int | None = None,
        death: Death = Death.AFTER,
    ) -> None:
        self.inner = inner
        self.rates = dict(rates or {})
        self.injected: Counter[Fault] = Counter()
        self.num_writes = 0
        self.dead = False
        self._rng = rng
        self._list_lag = list_lag
        self._hidden: dict[str, int] = {}
        self._die_at = die_at
        self._death = death
        self._lock = threading.Lock()

    def get(self, key: str) -> tuple[bytes, str]:
        self._reading(key)
        data, tag = self.inner.get(key)
        return self._damaged(data), tag

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        self._reading(key)
        found = self.inner.get_ranges(key, ranges)
        if self._strikes(Fault.TRUNCATED):
            raise CorruptSnapshot(f"{key} in {self.describe()} ends too early")
        return [self._flipped(data) for data in found]

    def size(self, key: str) -> int:
        self._reading(key)
        return self.inner.size(key)

    def put(self, key: str, chunks: Iterable[bytes | memoryview]) -> None:
        held = [bytes(chunk) for chunk in chunks]
        self._write(key, lambda: self.inner.put(key, held))

    def create(self, key: str, data: bytes) -> bool:
        return self._write(key, lambda: self.inner.create(key, data))

    def swap(self, key: str, data: bytes, *, expected: str | None) -> str:
        return self._write(key, lambda: self.inner.swap(key, data, expected=expected))

    def list(self, prefix: str, *, after: str = "") -> Iterator[str]:
        self._reading(prefix)
        with self._lock:
            hidden = set(self._hidden)
            self._hidden = {key: left - 1 for key, left in self._hidden.items() if left > 1}
        return iter([key for key in self.inner.list(prefix, after=after) if key not in hidden])

    def delete(self, keys: Sequence[str]) -> None:
        self._write("", lambda: self.inner.delete(keys))

    def describe(self) -> str:
        return f"{self.inner.describe()} with faults"

    def _reading(self, key: str) -> None:
        if self.dead:
            raise Killed
        if self._strikes(Fault.UNAVAILABLE):
            raise StoreUnavailable(errno.EIO, f"{self.describe()}: no answer for {key}")

    def _write(self, key: str, write: Callable[[], T]) -> T:
        with self._lock:
            if self.dead:
                raise Killed
            self.num_writes += 1
            dies = self.num_writes == self._die_at
            self.dead |= dies
        if dies and self._death is Death.BEFORE:
            raise Killed
        if self._strikes(Fault.LOST_BEFORE):
            raise StoreUnavailable(errno.EIO, f"{self.describe()}: {key} was not written")
        result = write()
        if key and self._list_lag:
            with self._lock:
                self._hidden[key] = self._list_lag
        if dies:
            raise Killed
        if self._strikes(Fault.TWICE):
            with suppress(SwapLost):
                write()
        if self._strikes(Fault.LOST_AFTER):
            raise StoreUnavailable(errno.EIO, f"{self.describe()}: no answer for {key}")
        return result

    def _damaged(self, data: bytes) -> bytes:
        if data and self._strikes(Fault.TRUNCATED):
            return data[: self._rng.randrange(len(data))]
        return self._flipped(data)

    def _flipped(self, data: bytes) -> bytes:
        if not data or not self._strikes(Fault.FLIPPED):
            return data
        changed = bytearray(data)
        changed[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)
        return bytes(changed)

    def _strikes(self, fault: Fault) -> bool:
        with self._lock:
            strikes = self._rng.random() < self.rates.get(fault, 0.0)
            self.injected[fault] += strikes
        return strikes


class CuttingProxy:
    """A TCP proxy to a local server that can swallow the next answers: the server acted, and the client only sees its connection end."""

    def __init__(self, endpoint: str) -> None:
        host, port = endpoint.removeprefix("http://").split(":")
        self._upstream = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.num_cut = 0
        self._to_cut = 0
        self._lock = threading.Lock()
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def cut(self, count: int) -> None:
        with self._lock:
            self._to_cut = count

    def close(self) -> None:
        # Closing alone does not wake a thread that waits in accept.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepting.join(timeout=10)

    def __enter__(self) -> CuttingProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._upstream, timeout=30)
                threading.Thread(target=self._upward, args=(client, server), daemon=True).start()
                threading.Thread(target=self._downward, args=(client, server), daemon=True).start()

    def _upward(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError), client, server:
            while data := client.recv(1 << 16):
                server.sendall(data)

    def _downward(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while data := server.recv(1 << 16):
                with self._lock:
                    cut = self._to_cut > 0
                    self._to_cut -= cut
                    self.num_cut += cut
                if cut:
                    break
                client.sendall(data)
        # The other thread then reads the end and closes both.
        with suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)
