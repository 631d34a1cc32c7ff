"""Speaks the native protocol to one engine, with errors that say whether trying again can help; imports no torch."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import suppress
from types import TracebackType
from typing import Any

import msgspec

from rollmill.engine.connection import Connections
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
_encode = msgspec.msgpack.Encoder().encode
_FRAME = msgspec.msgpack.Decoder(StreamFrame)
_REPLY = msgspec.msgpack.Decoder(GenerateReply)
_SCORED = msgspec.msgpack.Decoder(ScoreReply)
_PRESSURE = msgspec.json.Decoder(Pressure)
_HEALTH = msgspec.json.Decoder(Health)


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


class Frames:
    """Frames out of the bytes of a stream, however they are cut."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._num_missing = 4
        """Bytes without which no frame is whole."""

    def feed(self, data: bytes) -> list[bytes]:
        """The frames that these bytes complete."""
        if self._parts or len(data) < self._num_missing:
            self._parts.append(data)
            self._num_missing -= len(data)
            if self._num_missing > 0:
                # Joined once per frame and not once per part: a reply with routes has many.
                return []
            data, self._parts = b"".join(self._parts), []
        frames, at = [], 0
        while (start := at + 4) <= len(data):
            end = start + int.from_bytes(data[at:start], "little")
            if end > len(data):
                break
            frames.append(data[start:end])
            at = end
        self._num_missing = 4
        if at < len(data):
            self._parts = [data[at:]]
            self._num_missing = (end if start <= len(data) else start) - len(data)
        return frames


class EngineClient:
    """An engine at `base_url`. Use as an async context manager, or call `aclose`."""

    def __init__(self, base_url: str, *, timeout_s: float = 600.0) -> None:
        self._base_url, self._timeout_s = base_url, timeout_s
        self._http = Connections(base_url, connect_s=CONNECT_TIMEOUT_S)

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._http.close()

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """Sample one continuation. Cancelling the awaiting task frees the engine's row."""
        read_s = self._timeout_s if request.deadline_s is None else request.deadline_s + GRACE_S
        return self._decode(await self._post("/v1/generate", read_s, request), GenerateReply, _REPLY.decode)

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Piece | GenerateReply, None]:
        """Pieces as they are sampled, then the whole reply, which is the last item. Closing the generator frees the engine's row."""
        read_s = self._timeout_s if request.deadline_s is None else request.deadline_s + GRACE_S
        frames, frame = Frames(), None
        try:
            connection = await self._http.send("POST", "/v1/stream", read_s, body=_encode(request), content_type=MSGPACK)
            try:
                if connection.status != 200:
                    self._refuse_reply(connection.status, connection.retry_after, await connection.rest())
                while frame is None or frame.piece is not None:
                    if not (data := await connection.read()):
                        raise EngineUnavailable(f"the stream from {self._base_url} ended without a reply")
                    for body in frames.feed(data):
                        frame = _FRAME.decode(body)
                        if frame.piece is None:
                            break
                        yield frame.piece
                # To the end, so that the connection can be used again; what is wanted has come.
                with suppress(OSError):
                    await connection.rest()
            finally:
                self._http.give_back(connection)
        except OSError as error:
            raise EngineUnavailable(f"the stream from {self._base_url} was cut: {type(error).__name__} {error}") from error
        except msgspec.DecodeError as error:
            raise EngineUnavailable(f"{self._base_url} sent what is not a frame: {error}") from error
        if frame.error is not None:
            self._refuse(frame.error.status, "1", frame.error.message, version=frame.error.version)
        if frame.reply is None:
            raise EngineUnavailable(f"{self._base_url} sent a frame without content")
        yield frame.reply

    async def score(self, request: ScoreRequest) -> ScoreReply:
        """Logprobs of given tokens under the served weights."""
        read_s = self._timeout_s if request.deadline_s is None else request.deadline_s + GRACE_S
        return self._decode(await self._post("/v1/score", read_s, request), ScoreReply, _SCORED.decode)

    async def pressure(self) -> Pressure:
        status, retry_after, body = await self._send("GET", "/v1/pressure", PROBE_S)
        if status != 200:
            self._refuse_reply(status, retry_after, body)
        return self._decode(body, Pressure, _PRESSURE.decode)

    async def health(self) -> Health:
        """The engine's own account, whether it serves or not."""
        _, _, body = await self._send("GET", "/health", PROBE_S)
        return self._decode(body, Health, _HEALTH.decode)

    async def _post(self, path: str, read_s: float, request: GenerateRequest | ScoreRequest) -> bytes:
        status, retry_after, body = await self._send("POST", path, read_s, body=_encode(request), content_type=MSGPACK)
        if status != 200:
            self._refuse_reply(status, retry_after, body)
        return body

    async def _send(self, method: str, path: str, read_s: float, **options: Any) -> tuple[int, str, bytes]:
        try:
            connection = await self._http.send(method, path, read_s, **options)
            try:
                return connection.status, connection.retry_after, await connection.rest()
            finally:
                self._http.give_back(connection)
        except OSError as error:
            raise EngineUnavailable(f"no answer from {self._base_url}{path}: {type(error).__name__} {error}") from error

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
            return decode(body)
        except msgspec.DecodeError as error:
            raise EngineUnavailable(f"{self._base_url} gave an answer that is not a {shape.__name__}: {error}") from error
