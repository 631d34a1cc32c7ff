"""Speaks the native protocol to one engine, with errors that say whether trying again can help; imports no torch."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import httpx
import msgspec

from rollmill.engine.protocol import MSGPACK, GenerateReply, GenerateRequest, Health, Pressure

CONNECT_TIMEOUT_S = 5.0
# Beyond the engine's own deadline, for the reply to travel.
GRACE_S = 10.0


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


def _error_text(response: httpx.Response) -> tuple[str, dict[str, Any]]:
    try:
        body = msgspec.json.decode(response.content, type=dict[str, Any])
        return str(body.get("error", {}).get("message", "")), body
    except (msgspec.DecodeError, AttributeError):
        return response.text[:500], {}


class EngineClient:
    """An engine at `base_url`. Use as an async context manager, or call `aclose`."""

    def __init__(self, base_url: str, *, timeout_s: float = 600.0, max_connections: int = 1024) -> None:
        self._base_url, self._timeout_s = base_url, timeout_s
        self._http = httpx.AsyncClient(
            base_url=base_url,
            timeout=httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=max_connections, max_keepalive_connections=max_connections),
        )

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._http.aclose()

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """Sample one continuation. Cancelling the awaiting task frees the engine's row."""
        read_s = self._timeout_s if request.deadline_s is None else request.deadline_s + GRACE_S
        response = await self._send(
            "POST",
            "/v1/generate",
            content=msgspec.msgpack.encode(request),
            headers={"content-type": MSGPACK},
            timeout=httpx.Timeout(read_s, connect=CONNECT_TIMEOUT_S),
        )
        self._check(response)
        return self._decode(response, GenerateReply, msgspec.msgpack.decode)

    async def pressure(self) -> Pressure:
        response = await self._send("GET", "/v1/pressure")
        self._check(response)
        return self._decode(response, Pressure, msgspec.json.decode)

    async def health(self) -> Health:
        """The engine's own account, whether it serves or not."""
        return self._decode(await self._send("GET", "/health"), Health, msgspec.json.decode)

    async def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            return await self._http.request(method, path, **options)
        except httpx.TransportError as error:
            raise EngineUnavailable(f"no answer from {self._base_url}{path}: {type(error).__name__} {error}") from error

    def _check(self, response: httpx.Response) -> None:
        if response.status_code == 200:
            return
        text, body = _error_text(response)
        where = f"{self._base_url} answered {response.status_code}: {text}"
        if response.status_code == 409:
            raise VersionUnmet(where, version=int(body.get("version", -1)))
        if 400 <= response.status_code < 500:
            raise EngineRejected(where)
        retry_after = response.headers.get("retry-after", "1")
        raise EngineUnavailable(where, retry_after_s=float(retry_after) if retry_after.isdigit() else 1.0)

    def _decode(self, response: httpx.Response, shape: Any, decode: Any) -> Any:
        try:
            return decode(response.content, type=shape)
        except msgspec.DecodeError as error:
            raise EngineUnavailable(f"{self._base_url} gave an answer that is not a {shape.__name__}: {error}") from error
