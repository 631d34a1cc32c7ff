"""Head and tail of a stream in bounded memory: a pure accumulator that knows nothing of pipes."""

from __future__ import annotations

_MARK_ROOM = 64
_MIN_MARKED = 256


class HeadTail:
    """Keeps at most `limit` bytes of a stream: all of it, or its head, a line that says how much is missing, and its tail."""

    def __init__(self, limit: int) -> None:
        assert limit >= 0
        self._limit = limit
        # A limit too small for the line is all head and tail.
        kept = limit - _MARK_ROOM if limit >= _MIN_MARKED else limit
        self._num_head = kept - kept // 2
        self._num_tail = kept // 2
        self._head = bytearray()
        self._tail = bytearray()
        self.num_bytes = 0

    def feed(self, chunk: bytes) -> None:
        self.num_bytes += len(chunk)
        room = self._limit - len(self._head)
        if room > 0:
            self._head += chunk[:room]
            chunk = chunk[room:]
        if chunk:
            self._tail += chunk[-self._limit :] if self._limit else b""
            if len(self._tail) > 2 * self._limit:
                del self._tail[: -self._limit]

    def render(self) -> bytes:
        if self.num_bytes <= self._limit:
            return bytes(self._head)
        both = self._head + self._tail
        head, tail = both[: self._num_head], both[len(both) - self._num_tail :]
        missing = self.num_bytes - self._num_head - self._num_tail
        mark = f"\n[... {missing} bytes left out ...]\n".encode() if self._limit >= _MIN_MARKED else b""
        assert len(mark) <= _MARK_ROOM
        return bytes(head + mark + tail)
