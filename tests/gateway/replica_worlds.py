"""Replicas whose every token is a function of seed and context: a broken, continued answer can be compared with the whole one."""

from __future__ import annotations

import asyncio
import contextlib
import random
import struct
import zlib
from collections.abc import AsyncGenerator, Callable, Iterator
from itertools import groupby

import msgspec
import numpy as np
from aiohttp import web

from rollmill.engine.client import EngineUnavailable, VersionUnmet
from rollmill.engine.protocol import (
    MSGPACK,
    FinishReason,
    GenerateReply,
    GenerateRequest,
    Piece,
    Pressure,
    StreamFrame,
    Timing,
    VersionSpan,
)
from rollmill.model.route_record import RouteRecord, RouteShape

STOP, VOCAB = 7, 1000
SHAPE = RouteShape(num_layers=2, layers=(0, 1), num_experts=8, top_k=2)
TIMING = Timing(queue_s=0.0, first_token_s=0.25, total_s=0.5)


class Drawn(msgspec.Struct, frozen=True):
    token_id: int
    logprob: float
    top: list[tuple[int, float]]
    is_forced: bool


def draw(request: GenerateRequest) -> list[Drawn]:
    """All tokens of the answer. Another seed, another context or another beginning of the constrained text gives other tokens."""
    state = zlib.crc32(np.asarray(request.prompt_ids, "<i4").tobytes())
    text_from = len(request.prompt_ids) if request.constraint_from is None else request.constraint_from
    drawn: list[Drawn] = []
    for _ in range(request.max_tokens):
        rng = random.Random(f"{request.seed}/{state}/{text_from if request.constraint else ''}")
        token = STOP if rng.random() < 0.02 else rng.randrange(10, VOCAB)
        logprob = float(np.float32(-rng.random() * 9))
        top = [(rng.randrange(VOCAB), float(np.float32(-rng.random()))) for _ in range(request.num_top)]
        drawn.append(Drawn(token, logprob, top, request.constraint is not None and rng.random() < 0.3))
        state = zlib.crc32(struct.pack("<i", token), state)
        if token in request.stop_ids:
            break
    return drawn


def reply_to(request: GenerateRequest, versions: list[int] | int = 1, *, replica: str = "", stale_from: int | None = None) -> GenerateReply:
    drawn = draw(request)
    versions = [versions] * len(drawn) if isinstance(versions, int) else versions[: len(drawn)]
    spans, forced, at = list[VersionSpan](), list[tuple[int, int]](), 0
    for version, run in groupby(versions):
        spans.append(VersionSpan(at, at := at + len(list(run)), version))
    for i, token in enumerate(drawn):
        if token.is_forced:
            forced = [*forced[:-1], (forced[-1][0], i + 1)] if forced and forced[-1][1] == i else [*forced, (i, i + 1)]
    return GenerateReply(
        token_ids=[d.token_id for d in drawn],
        logprobs=np.asarray([d.logprob for d in drawn], "<f4").tobytes(),
        spans=spans,
        finish_reason=FinishReason.STOP if drawn[-1].token_id in request.stop_ids else FinishReason.LENGTH,
        seed=request.seed or 0,
        # Other than what a later part finds, whose prompt is longer.
        num_reused=len(request.prompt_ids) // 2,
        stale_from=stale_from,
        replica=replica,
        routes=routes_of(request, drawn, versions[0]),
        tops=[d.top for d in drawn] if request.num_top else [],
        forced=forced,
        timing=TIMING,
    )


def routes_of(request: GenerateRequest, drawn: list[Drawn], version: int) -> bytes:
    """Experts by token and version: what the same weights compute again is the same."""
    if request.routes_from is None:
        return b""
    tokens = np.asarray([*request.prompt_ids, *(d.token_id for d in drawn)])[request.routes_from : -1]
    first_T = (tokens + version) % 7
    ids_TLK = np.stack((first_T, first_T + 1), -1)[:, None].repeat(2, axis=1)
    return RouteRecord.of(ids_TLK, SHAPE).to_bytes()


def pieces_of(reply: GenerateReply, rng: random.Random, most: int = 6) -> list[Piece]:
    """The reply's tokens, in pieces of one version and at most so many."""
    pieces = list[Piece]()
    for span in reply.spans:
        start = span.start
        while start < span.end:
            end = min(span.end, start + rng.randint(1, most))
            pieces.append(piece_of(reply, start, end, span.version))
            start = end
    return pieces


def piece_of(reply: GenerateReply, start: int, end: int, version: int) -> Piece:
    forced = [i for first, last in reply.forced for i in range(first, last) if start <= i < end]
    return Piece(
        token_ids=reply.token_ids[start:end],
        logprobs=reply.logprobs_T.tolist()[start:end],
        version=version,
        tops=reply.tops[start:end],
        forced=[(i - start, i + 1 - start) for i in forced],
        stale_from=reply.stale_from - start if reply.stale_from in range(start, end) else None,  # type: ignore[operator]
        replica=reply.replica if start == 0 else "",
        num_reused=reply.num_reused if start == 0 else 0,
    )


class FakeReplica:
    """Stands in for an EngineClient. `break_after`: called for every stream, says after how many pieces it breaks; None: it does not."""

    def __init__(self, name: str = "", *, version: int = 1, break_after: Callable[[], int | None] = lambda: None) -> None:
        self.name, self.version, self.break_after = name, version, break_after
        self.rng = random.Random(name)
        self.requests: list[GenerateRequest] = []
        self.num_open = 0
        self.is_closed = False
        self.num_polls = 0
        self.error: Exception | None = None
        """Raised by every call while it is set."""
        self.gate: asyncio.Event | None = None
        """Streams and calls stand still until it is set."""
        self.slots, self.running = 8, 0

    def _take(self, request: GenerateRequest) -> None:
        self.requests.append(request)
        request.check(vocab_size=VOCAB, max_len=1 << 16)
        if self.error is not None:
            raise self.error
        if request.exact_version not in (None, self.version) or self.version < (request.min_version or 0):
            raise VersionUnmet(f"version {self.version} is served", version=self.version)

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        self._take(request)
        with self._row():
            if self.gate:
                await self.gate.wait()
            if self.break_after() is not None:
                raise EngineUnavailable("it broke", retry_after_s=0.0)
            return reply_to(request, self.version, replica=self.name)

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Piece | GenerateReply, None]:
        self._take(request)
        with self._row():
            reply, num = reply_to(request, self.version, replica=self.name), self.break_after()
            for i, piece in enumerate(pieces_of(reply, self.rng)):
                await asyncio.sleep(0)
                if num is not None and i >= num:
                    raise EngineUnavailable("it broke", retry_after_s=0.0)
                yield piece
                if self.gate:
                    await self.gate.wait()
            if num is not None:
                raise EngineUnavailable("it broke at the end", retry_after_s=0.0)
            yield reply

    @contextlib.contextmanager
    def _row(self) -> Iterator[None]:
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1

    async def pressure(self) -> Pressure:
        self.num_polls += 1
        return Pressure(running=self.running, waiting=0, slots=self.slots, kv_used_frac=0.0, version=self.version, tokens_per_s=0.0)

    async def aclose(self) -> None:
        self.is_closed = True


class WireReplica:
    """The same over HTTP on a port of its own: `/v1/generate`, `/v1/stream` and `/v1/pressure`, with connections that are really cut."""

    def __init__(self, name: str, *, version: int = 1, break_after: Callable[[], int | None] = lambda: None) -> None:
        self.name, self.version, self.break_after = name, version, break_after
        self.rng = random.Random(name)
        self.num_open = 0
        self.url = ""

    async def __aenter__(self) -> WireReplica:
        app = web.Application()
        app.router.add_post("/v1/generate", self._generate)
        app.router.add_post("/v1/stream", self._stream)
        app.router.add_get("/v1/pressure", self._pressure)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        request = msgspec.msgpack.decode(await http.read(), type=GenerateRequest)
        if self.break_after() is not None:
            return self._cut(http)
        return web.Response(body=msgspec.msgpack.encode(reply_to(request, self.version, replica=self.name)), content_type=MSGPACK)

    async def _stream(self, http: web.Request) -> web.StreamResponse:
        request = msgspec.msgpack.decode(await http.read(), type=GenerateRequest)
        reply, num = reply_to(request, self.version, replica=self.name), self.break_after()
        if num == 0:
            return web.json_response({"error": {"message": "the queue is full"}}, status=503, headers={"retry-after": "0"})
        frames = [StreamFrame(piece=piece) for piece in pieces_of(reply, self.rng)] + [StreamFrame(reply=reply)]
        response = web.StreamResponse(headers={"content-type": MSGPACK})
        self.num_open += 1
        try:
            await response.prepare(http)
            for i, frame in enumerate(frames):
                body = msgspec.msgpack.encode(frame)
                body = struct.pack("<I", len(body)) + body
                if num is not None and i >= num:
                    await response.write(body[: self.rng.randrange(len(body))])
                    return self._cut(http)
                await response.write(body)
            await response.write_eof()
            return response
        finally:
            self.num_open -= 1

    @staticmethod
    def _cut(http: web.Request) -> web.StreamResponse:
        if http.transport is not None:
            http.transport.abort()
        raise ConnectionResetError("cut as told")

    async def _pressure(self, http: web.Request) -> web.Response:
        pressure = Pressure(running=self.num_open, waiting=0, slots=8, kv_used_frac=0.0, version=self.version, tokens_per_s=0.0)
        return web.json_response(msgspec.to_builtins(pressure))
