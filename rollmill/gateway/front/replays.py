"""Replies kept by their Idempotency-Key, in bounded memory: a request sent twice is sampled once. No I/O, no clock."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from blake3 import blake3

from rollmill.web import ApiError

MAX_REPLIES = 4096
MAX_REPLY_BYTES = 64 * 2**20
MAX_KEY_CHARS = 256


class Scope(NamedTuple):
    """What an Idempotency-Key is unique within."""

    owner: str
    episode: str
    path: str
    key: str


class Kept(NamedTuple):
    """A reply that was answered whole."""

    body: bytes
    is_stream: bool
    version: int


class _Entry(NamedTuple):
    request: bytes
    kept: Kept | None
    """None while the first request runs."""


class Replays:
    """RUNNING (`begin`) -> kept (`keep`), or forgotten (`drop`) when it failed; the oldest make room."""

    def __init__(self, *, max_replies: int = MAX_REPLIES, max_bytes: int = MAX_REPLY_BYTES) -> None:
        self._max_replies, self._max_bytes = max_replies, max_bytes
        self._entries: OrderedDict[Scope, _Entry] = OrderedDict()
        self.num_bytes = 0

    def begin(self, scope: Scope, body: bytes) -> Kept | None:
        """What was answered to this request before; None: nothing, and it now runs. ApiError when the key cannot be used."""
        if len(scope.key) > MAX_KEY_CHARS:
            raise ApiError(400, f"the Idempotency-Key has {len(scope.key)} characters, at most {MAX_KEY_CHARS} are allowed")
        request = blake3(body).digest()
        entry = self._entries.get(scope)
        if entry is None:
            self._entries[scope] = _Entry(request, None)
            self._trim()
            return None
        if entry.request != request:
            raise ApiError(400, "this Idempotency-Key came with another body before; use a new key for a new request")
        if entry.kept is None:
            text = "the first request with this Idempotency-Key still runs; ask again later"
            raise ApiError(409, text, headers={"retry-after": "1"}, extra={"retryable": True})
        return entry.kept

    def keep(self, scope: Scope, kept: Kept) -> None:
        entry = self._entries.get(scope)
        if entry is not None:
            self._entries[scope] = _Entry(entry.request, kept)
            self.num_bytes += len(kept.body)
            self._trim()

    def drop(self, scope: Scope) -> None:
        """It failed, so it may be tried again."""
        entry = self._entries.pop(scope, None)
        if entry is not None and entry.kept is not None:
            self.num_bytes -= len(entry.kept.body)

    def _trim(self) -> None:
        while len(self._entries) > self._max_replies or (self.num_bytes > self._max_bytes and len(self._entries) > 1):
            self.drop(next(iter(self._entries)))
