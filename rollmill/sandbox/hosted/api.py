"""Requests to a provider: its control interface and the daemon inside each sandbox, both JSON over HTTP under deadlines.

A provider that is busy (429, 5xx at a gateway) is asked again until the deadline, so a burst waits and does not fail. Knows no boxes.
"""

from __future__ import annotations

import asyncio
import json
import random
import struct
from collections.abc import AsyncIterator, Container, Mapping
from typing import Any

import aiohttp

from rollmill.records import Boundary, RunFailure

Json = dict[str, Any]
ENVELOPE = struct.Struct(">BI")
"""Flags and length before each message of a stream."""
END_OF_STREAM = 2
REQUEST_DEADLINE_S = 60.0
BUSY = frozenset((429, 502, 503, 504))
"""How a control interface says that it has done nothing yet. A sandbox's 502 says that it is gone: it is not asked again."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 10.0
_MAX_MESSAGE_BYTES = 64 << 20
_KEEPALIVE_S = "50"


class Missing(RunFailure):
    """The provider has no such thing (any more)."""


class Client:
    """One address with its headers; the session is shared and closed by whoever opened it."""

    def __init__(self, session: aiohttp.ClientSession, url: str, headers: Mapping[str, str], *, busy: Container[int] = ()) -> None:
        self._session = session
        self._url = url.rstrip("/")
        self._headers = dict(headers)
        self._busy = busy

    async def call(self, method: str, path: str, body: Json | None = None, *, deadline_s: float = REQUEST_DEADLINE_S) -> Json:
        """The answer's body; asked again while the far side is busy."""
        pause_s = _FIRST_PAUSE_S
        try:
            async with asyncio.timeout(deadline_s):
                while True:
                    async with self._session.request(method, self._url + path, json=body, headers=self._headers) as answer:
                        data = await answer.read()
                        if answer.status not in self._busy:
                            return _decoded(self._named(method, path), answer.status, data)
                        wait_s = _seconds(answer.headers.get("Retry-After"), pause_s)
                    # Spread, or all that were refused together come back together.
                    await asyncio.sleep(wait_s * random.uniform(1.0, 1.5))
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        except TimeoutError:
            raise RunFailure(Boundary.SANDBOX, f"{self._named(method, path)} took longer than {deadline_s:g} s") from None
        except aiohttp.ClientError as error:
            raise RunFailure(Boundary.SANDBOX, f"{self._named(method, path)} failed: {error or type(error).__name__}") from None

    async def upload(self, path: str, data: bytes, *, user: str, deadline_s: float = REQUEST_DEADLINE_S) -> None:
        form = aiohttp.FormData()
        form.add_field("file", data, filename=path, content_type="application/octet-stream")
        try:
            async with (
                asyncio.timeout(deadline_s),
                self._session.post(
                    f"{self._url}/files", params={"path": path} | ({"username": user} if user else {}), data=form, headers=self._headers
                ) as answer,
            ):
                _decoded(f"upload of {path}", answer.status, await answer.read())
        except TimeoutError:
            raise RunFailure(Boundary.SANDBOX, f"upload of {path} took longer than {deadline_s:g} s") from None
        except aiohttp.ClientError as error:
            raise RunFailure(Boundary.SANDBOX, f"upload of {path} failed: {error or type(error).__name__}") from None

    async def stream(self, path: str, body: Json) -> AsyncIterator[Json]:
        """The messages of a call that answers with many, until the far side ends it; an end without a word is a failure too."""
        message = json.dumps(body).encode()
        headers = {
            **self._headers,
            "Content-Type": "application/connect+json",
            "Connect-Protocol-Version": "1",
            "Keepalive-Ping-Interval": _KEEPALIVE_S,
        }
        # It lasts as long as the box: whoever consumes it has the deadline.
        patience = aiohttp.ClientTimeout(total=None, sock_connect=REQUEST_DEADLINE_S)
        try:
            async with self._session.post(
                self._url + path, data=ENVELOPE.pack(0, len(message)) + message, headers=headers, timeout=patience
            ) as answer:
                if answer.status != 200:
                    _decoded(path, answer.status, await answer.read())
                while True:
                    flags, size = ENVELOPE.unpack(await answer.content.readexactly(ENVELOPE.size))
                    if size > _MAX_MESSAGE_BYTES:
                        raise RunFailure(Boundary.SANDBOX, f"{path} sent a message of {size} bytes")
                    content = json.loads(await answer.content.readexactly(size) or b"{}")
                    if flags & END_OF_STREAM:
                        if "error" in content:
                            raise RunFailure(Boundary.SANDBOX, f"{path} ended: {content['error']}")
                        return
                    yield content
        except (aiohttp.ClientError, asyncio.IncompleteReadError, TimeoutError) as error:
            raise RunFailure(Boundary.SANDBOX, f"the connection of {path} was lost: {error or type(error).__name__}") from None

    def _named(self, method: str, path: str) -> str:
        return f"{method} {self._url}{path}"


def _decoded(what: str, status: int, data: bytes) -> Json:
    if status < 300:
        content = json.loads(data) if data.strip() else {}
        return content if isinstance(content, dict) else {"list": content}
    words = data.decode(errors="replace").strip()[:500]
    raise (Missing if status == 404 else RunFailure)(Boundary.SANDBOX, f"{what} was answered with {status}: {words}")


def _seconds(header: str | None, otherwise: float) -> float:
    return float(header) if header is not None and header.isdigit() else otherwise
