"""What clients were promised and poll for: PENDING -> KEPT or BROKEN, by request ids that a repeated request has too.

Results are kept for a while after they are there, since an answer can be lost on the way; the oldest go first.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from enum import StrEnum
from typing import Any

import msgspec

from rollmill.tinker.wire import PROTOBUF

JSON_TYPE = "application/json"
MAX_KEPT = 4096
MAX_KEPT_BYTES = 512 * 2**20


class PromiseState(StrEnum):
    """PENDING -> KEPT | BROKEN; neither changes again."""

    PENDING = "pending"
    KEPT = "kept"
    BROKEN = "broken"


class Fault(StrEnum):
    """Whose mistake broke a promise, in the protocol's words."""

    USER = "user"
    SERVER = "server"


class Promise:
    """One request's outcome."""

    def __init__(self, request_id: str) -> None:
        self.request_id, self.state = request_id, PromiseState.PENDING
        self.body, self.content_type = b"", ""
        self._settled = asyncio.Event()

    def keep(self, result: Any) -> None:
        """`result` is a protobuf message's bytes, or anything that JSON can say."""
        is_message = isinstance(result, bytes)
        self._settle(PromiseState.KEPT, result if is_message else msgspec.json.encode(result), PROTOBUF if is_message else JSON_TYPE)

    def break_off(self, message: str, fault: Fault) -> None:
        self._settle(PromiseState.BROKEN, msgspec.json.encode({"error": message, "category": fault}), JSON_TYPE)

    def _settle(self, state: PromiseState, body: bytes, content_type: str) -> None:
        # A cancelled request's own end comes later and says nothing new.
        if self.state is PromiseState.PENDING:
            self.state, self.body, self.content_type = state, body, content_type
            self._settled.set()

    async def settled(self, timeout_s: float) -> bool:
        """Wait for the outcome; False when it is not there in time."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._settled.wait(), timeout_s)
        return self._settled.is_set()


class Promises:
    """All of them by request id."""

    def __init__(self, *, max_kept: int = MAX_KEPT, max_kept_bytes: int = MAX_KEPT_BYTES) -> None:
        self._open: dict[str, Promise] = {}
        self._done: OrderedDict[str, Promise] = OrderedDict()
        self._max_kept, self._max_bytes, self._num_bytes = max_kept, max_kept_bytes, 0

    def get(self, request_id: str) -> Promise | None:
        return self._open.get(request_id) or self._done.get(request_id)

    def make(self, request_id: str) -> Promise:
        assert self.get(request_id) is None, f"{request_id} was promised before"
        promise = self._open[request_id] = Promise(request_id)
        return promise

    def retire(self, promise: Promise) -> None:
        """Count a settled promise among the done ones, and let the oldest go."""
        assert promise.state is not PromiseState.PENDING
        if self._open.pop(promise.request_id, None) is None:
            return
        self._done[promise.request_id] = promise
        self._num_bytes += len(promise.body)
        while len(self._done) > self._max_kept or (self._num_bytes > self._max_bytes and len(self._done) > 1):
            self._num_bytes -= len(self._done.popitem(last=False)[1].body)

    @property
    def num_open(self) -> int:
        return len(self._open)
