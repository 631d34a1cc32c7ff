"""Speaks the native protocol to one engine, with errors that say whether trying again can help; imports no torch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, suppress
from types import TracebackType
from typing import Any

import aiohttp
import msgspec

from rollmill.engine.protocol import (
    MSGPACK,
    GenerateReply,
    GenerateRequest,
    Health,
    Piece,
    Pressure,
    ScoreReply,
    ScoreRequest,
    StreamFrame,
)

CONNECT_TIMEOUT_S = 5.0
# Beyond the engine's own deadline, for the reply to travel.
GRACE_S = 10.0
PROBE_S = 10.0


class EngineUnavailable(RuntimeError):
    """The engine is down, starting, full or cut off; trying again, here or elsewhere, may help."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class VersionUnmet(RuntimeError):
    """The engine serves another weight version than the request asked for."""

    def __init__(self, message: str, *, version: int) -> None:
        super().__init__(message)
        self.version = version


class EngineRejected(ValueError):
    """The request itself is wrong; sending it again gives the same answer."""


def _error_text(body: bytes) -> tuple[str, dict[str, Any]]:
    try:
        facts = msgspec.json.decode(body, type=dict[str, Any])
        return str(facts.get("error", {}).get("message", "")), facts
    except (msgspec.DecodeError, AttributeError):
        return body[:500].decode("utf-8", "replace"), {}


class EngineClient:
    """An engine at `base_url`. Use as an async context manager, or call `aclose`.

    aiohttp, because a rollout holds hundreds of connections and its pool does not scan them on every call.
    """

    def __init__(self, base_url: str, *, timeout_s: float = 600.0, max_connections: int = 1024) -> None:
        self._base_url, self._timeout_s, self._max_connections = base_url, timeout_s, max_connections
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        if self._http is not None:
            await self._http.close()

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """Sample one continuation. Cancelling the awaiting task frees the engine's row."""
        read_s = self._timeout_s if request.deadline_s is None else request.deadline_s + GRACE_S
        body = await self._send("POST", "/v1/generate", read_s, data=msgspec.msgpack.encode(request), headers={"content-type": MSGPACK})
        return self._decode(body, GenerateReply, msgspec.msgpack.decode)

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Piece | GenerateReply, None]:
        """Pieces as they are sampled, then the whole reply, which is the last item. Closing the generator frees the engine's row."""
        read_s = self._timeout_s if request.deadline_s is None else request.deadline_s + GRACE_S
        headers, body = {"content-type": MSGPACK}, msgspec.msgpack.encode(request)
        try:
            async with self._request("POST", "/v1/stream", read_s, data=body, headers=headers) as response:
                if response.status != 200:
                    self._refuse_reply(response.status, response.headers.get("retry-after", "1"), await response.read())
                while (frame := await self._frame(response)).piece is not None:
                    yield frame.piece
                # To the end, so that the connection can be used again; what is wanted has come.
                with suppress(aiohttp.ClientError):
                    await response.read()
        except (aiohttp.ClientError, asyncio.IncompleteReadError, TimeoutError, OSError) as error:
            raise EngineUnavailable(f"the stream from {self._base_url} was cut: {type(error).__name__} {error}") from error
        if frame.error is not None:
            self._refuse(frame.error.status, "1", frame.error.message, version=frame.error.version)
        if frame.reply is None:
            raise EngineUnavailable(f"{self._base_url} sent a frame without content")
        yield frame.reply

    async def _frame(self, response: aiohttp.ClientResponse) -> StreamFrame:
        size = int.from_bytes(await response.content.readexactly(4), "little")
        return self._decode(await response.content.readexactly(size), StreamFrame, msgspec.msgpack.decode)

    async def score(self, request: ScoreRequest) -> ScoreReply:
        """Logprobs of given tokens under the served weights."""
        read_s = self._timeout_s if request.deadline_s is None else request.deadline_s + GRACE_S
        body = await self._send("POST", "/v1/score", read_s, data=msgspec.msgpack.encode(request), headers={"content-type": MSGPACK})
        return self._decode(body, ScoreReply, msgspec.msgpack.decode)

    async def pressure(self) -> Pressure:
        return self._decode(await self._send("GET", "/v1/pressure", PROBE_S), Pressure, msgspec.json.decode)

    async def health(self) -> Health:
        """The engine's own account, whether it serves or not."""
        return self._decode(await self._send("GET", "/health", PROBE_S, is_checked=False), Health, msgspec.json.decode)

    async def _send(self, method: str, path: str, read_s: float, *, is_checked: bool = True, **options: Any) -> bytes:
        try:
            async with self._request(method, path, read_s, **options) as response:
                body = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineUnavailable(f"no answer from {self._base_url}{path}: {type(error).__name__} {error}") from error
        if is_checked and response.status != 200:
            self._refuse_reply(response.status, response.headers.get("retry-after", "1"), body)
        return body

    def _request(self, method: str, path: str, read_s: float, **options: Any) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        if self._http is None:
            self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=self._max_connections))
        timeout = aiohttp.ClientTimeout(total=read_s, sock_connect=CONNECT_TIMEOUT_S)
        return self._http.request(method, self._base_url + path, timeout=timeout, **options)

    def _refuse_reply(self, status: int, retry_after: str, body: bytes) -> None:
        text, facts = _error_text(body)
        self._refuse(status, retry_after, text, version=int(facts.get("version", -1)))

    def _refuse(self, status: int, retry_after: str, text: str, *, version: int) -> None:
        where = f"{self._base_url} answered {status}: {text}"
        if status == 409:
            raise VersionUnmet(where, version=version)
        if 400 <= status < 500:
            raise EngineRejected(where)
        raise EngineUnavailable(where, retry_after_s=float(retry_after) if retry_after.isdigit() else 1.0)

    def _decode(self, body: bytes, shape: Any, decode: Any) -> Any:
        try:
            return decode(body, type=shape)
        except msgspec.DecodeError as error:
            raise EngineUnavailable(f"{self._base_url} gave an answer that is not a {shape.__name__}: {error}") from error
