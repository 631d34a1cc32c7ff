"""JSON over HTTP to an engine that is not ours, with the errors of our own client; knows no endpoint."""

from __future__ import annotations

from typing import Any

import aiohttp
import msgspec

from rollmill.engine.client import CONNECT_TIMEOUT_S, EngineRejected, EngineUnavailable


class JsonHttp:
    """One server. Connections are made on first use and closed by `aclose`."""

    def __init__(self, base_url: str, *, max_connections: int = 1024) -> None:
        self.base_url = base_url.rstrip("/")
        self._max_connections = max_connections
        self._http: aiohttp.ClientSession | None = None

    async def get(self, path: str, *, timeout_s: float) -> Any:
        return await self._send("GET", path, None, timeout_s)

    async def post(self, path: str, body: Any = None, *, timeout_s: float) -> Any:
        return await self._send("POST", path, body, timeout_s)

    async def text(self, path: str, *, timeout_s: float) -> str:
        return (await self._read("GET", path, None, timeout_s)).decode("utf-8", "replace")

    async def aclose(self) -> None:
        if self._http is not None:
            await self._http.close()
            self._http = None

    async def _send(self, method: str, path: str, body: Any, timeout_s: float) -> Any:
        raw = await self._read(method, path, body, timeout_s)
        try:
            return msgspec.json.decode(raw) if raw else None
        except msgspec.DecodeError as error:
            raise EngineUnavailable(f"{self.base_url}{path} gave an answer that is not JSON: {error}") from error

    async def _read(self, method: str, path: str, body: Any, timeout_s: float) -> bytes:
        if self._http is None:
            self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=self._max_connections))
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        data = None if body is None else msgspec.json.encode(body)
        headers = {} if body is None else {"content-type": "application/json"}
        try:
            async with self._http.request(method, self.base_url + path, timeout=timeout, data=data, headers=headers) as response:
                raw = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineUnavailable(f"no answer from {self.base_url}{path}: {type(error).__name__} {error}") from error
        if response.status >= 400:
            where = f"{self.base_url}{path} answered {response.status}: {raw[:500].decode('utf-8', 'replace')}"
            # 408 and 429 are about now, not about the request.
            if response.status < 500 and response.status not in (408, 429):
                raise EngineRejected(where)
            raise EngineUnavailable(where)
        return raw
