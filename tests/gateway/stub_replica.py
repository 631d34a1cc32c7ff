"""A replica without a model: the native protocol over real HTTP on a port of its own, speaking given texts token by token.

It remembers every request and everything it said, so that a test can compare what was trained with what was sampled.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import numpy as np
from aiohttp import web

from rollmill.engine.protocol import (
    MSGPACK,
    FinishReason,
    GenerateReply,
    GenerateRequest,
    Health,
    Piece,
    Pressure,
    StreamFrame,
    Timing,
    VersionSpan,
)
from rollmill.model.tokenizer import Tokenizer

DEMO = Path(__file__).parents[2] / "models" / "demo"
START_S = 20.0
Say = Callable[[GenerateRequest], str | list[int]]


def logprob_of(token_id: int) -> float:
    """Exact in float32, so that it can be compared with ==."""
    return -(token_id % 97 + 1) / 64


class Sampled(msgspec.Struct, frozen=True, kw_only=True):
    """One request and the ids that were sent for it, whole or until it broke."""

    request: GenerateRequest
    token_ids: list[int]


class StubReplica:
    """Use as a context manager. `say` gives the answer to a request: a text (the stop token is added) or exact ids.

    Same seed and a prompt that goes on from an earlier one by what was said then: the rest of that answer, as an engine's sampler does.
    Replicas that share `memory` continue each other's answers.
    """

    def __init__(
        self,
        say: Say,
        *,
        model: Path = DEMO,
        piece_size: int = 1,
        die_after: int | None = None,
        delay_s: float = 0.0,
        version: int = 0,
        name: str = "stub",
        slots: int = 32,
        max_len: int = 1 << 16,
        memory: dict[int, tuple[list[int], list[int]]] | None = None,
    ) -> None:
        """`piece_size`: tokens per stream frame. `die_after`: the connection is cut after so many tokens. `delay_s`: before a frame."""
        self.tokenizer = Tokenizer(model)
        self.say, self.piece_size, self.die_after, self.delay_s = say, piece_size, die_after, delay_s
        self.version, self.name, self.slots, self.max_len = version, name, slots, max_len
        self.memory = {} if memory is None else memory
        self.requests: list[GenerateRequest] = []
        self.sampled: list[Sampled] = []
        self.num_running = 0
        self.num_cut = 0
        """Requests whose client left before the end."""
        self.refuse_next: list[int] = []
        """Statuses to answer the next requests with, first to last."""
        self._hold_after: int | None = None
        self._idle = threading.Event()
        self._idle.set()
        self._loop = asyncio.new_event_loop()
        self._gate = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=f"stub-{name}", daemon=True)
        self._ready = threading.Event()
        self._stop = asyncio.Event()
        self.port = 0

    @property
    def hold_after(self) -> int | None:
        """Streams stand still after so many tokens until `release`; whole answers until `release`."""
        return self._hold_after

    @hold_after.setter
    def hold_after(self, num: int | None) -> None:
        self._loop.call_soon_threadsafe(self._gate.clear)
        self._hold_after = num

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> StubReplica:
        self._thread.start()
        assert self._ready.wait(START_S), "the stub replica did not start"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(START_S)
        self._loop.close()

    def release(self) -> None:
        """Let what stands still go on."""
        self._hold_after = None
        self._loop.call_soon_threadsafe(self._gate.set)

    def wait_idle(self, deadline_s: float = 10.0) -> None:
        """Until no request runs: what was cancelled has been freed."""
        assert self._idle.wait(deadline_s), f"{self.num_running} requests still run on {self.name}"

    def wait_requests(self, num: int, deadline_s: float = 10.0) -> None:
        until = time.monotonic() + deadline_s
        while len(self.requests) < num:
            assert time.monotonic() < until, f"{len(self.requests)} of {num} requests came"
            time.sleep(0.002)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/v1/generate", self._generate)
        app.router.add_post("/v1/stream", self._stream)
        app.router.add_get("/v1/pressure", self._pressure)
        app.router.add_get("/health", self._health)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.port = runner.addresses[0][1]
        self._ready.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _generate(self, http: web.Request) -> web.Response:
        request, refusal = await self._take(http)
        if refusal is not None:
            return refusal
        reply = self._reply(request)
        with self._row(request) as done:
            if self.hold_after is not None:
                await self._gate.wait()
            await asyncio.sleep(self.delay_s * len(reply.token_ids))
            if self.die_after is not None:
                self._cut(http)
            done(reply.token_ids)
        return web.Response(body=msgspec.msgpack.encode(reply), content_type=MSGPACK)

    async def _stream(self, http: web.Request) -> web.StreamResponse:
        request, refusal = await self._take(http)
        if refusal is not None:
            return refusal
        reply = self._reply(request)
        response = web.StreamResponse(headers={"content-type": MSGPACK})
        with self._row(request) as done:
            await response.prepare(http)
            async for frame, num in self._frames(reply):
                done(reply.token_ids[:num])
                await response.write(struct.pack("<I", len(frame)) + frame)
                if self.die_after is not None and num >= self.die_after:
                    self._cut(http)
            await response.write_eof()
        return response

    async def _frames(self, reply: GenerateReply) -> AsyncIterator[tuple[bytes, int]]:
        ids, logprobs = reply.token_ids, reply.logprobs_T.tolist()
        for start in range(0, len(ids), self.piece_size):
            if self.hold_after is not None and start >= self.hold_after:
                await self._gate.wait()
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            end = min(start + self.piece_size, len(ids))
            piece = Piece(token_ids=ids[start:end], logprobs=logprobs[start:end], version=self.version, tops=reply.tops[start:end])
            yield msgspec.msgpack.encode(StreamFrame(piece=piece)), end
        yield msgspec.msgpack.encode(StreamFrame(reply=reply)), len(ids)

    @contextlib.contextmanager
    def _row(self, request: GenerateRequest) -> Any:
        sent: list[int] = []

        def done(ids: list[int]) -> None:
            sent[:] = ids

        self.num_running += 1
        self._idle.clear()
        try:
            yield done
        except asyncio.CancelledError:
            self.num_cut += 1
            raise
        except ConnectionError:
            # The client left, or the stub died as it was told to: aiohttp has nobody to answer.
            self.num_cut += 1
        finally:
            self.sampled.append(Sampled(request=request, token_ids=list(sent)))
            self.num_running -= 1
            if not self.num_running:
                self._idle.set()

    def _cut(self, http: web.Request) -> None:
        if http.transport is not None:
            http.transport.abort()
        raise ConnectionResetError("the stub died as it was told to")

    async def _take(self, http: web.Request) -> tuple[GenerateRequest, web.Response | None]:
        request = msgspec.msgpack.decode(await http.read(), type=GenerateRequest)
        self.requests.append(request)
        if self.refuse_next:
            return request, _refused(self.refuse_next.pop(0), "refused as told", {"retry-after": "0"})
        try:
            request.check(vocab_size=self.tokenizer.vocab_size, max_len=self.max_len)
        except ValueError as error:
            return request, _refused(400, str(error))
        if request.exact_version not in (None, self.version) or self.version < (request.min_version or 0):
            return request, _refused(409, f"this replica serves version {self.version}", version=self.version)
        return request, None

    def _reply(self, request: GenerateRequest) -> GenerateReply:
        ids = self._ids(request)[: min(request.max_tokens, self.max_len - len(request.prompt_ids))]
        ends = bool(ids) and ids[-1] in request.stop_ids
        tops = [[((i + k) % self.tokenizer.vocab_size, logprob_of(i) - k) for k in range(request.num_top)] for i in ids]
        return GenerateReply(
            token_ids=ids,
            logprobs=np.asarray([logprob_of(i) for i in ids], "<f4").tobytes(),
            spans=[VersionSpan(0, len(ids), self.version)] if ids else [],
            finish_reason=FinishReason.STOP if ends else FinishReason.LENGTH,
            seed=request.seed or 0,
            num_reused=0,
            replica=self.name,
            timing=Timing(queue_s=0.0, first_token_s=0.0, total_s=0.0),
            tops=tops if request.num_top else [],
        )

    def _ids(self, request: GenerateRequest) -> list[int]:
        prompt, seed = request.prompt_ids, request.seed
        if seed is not None and seed in self.memory:
            before, said = self.memory[seed]
            num = len(prompt) - len(before)
            if 0 < num <= len(said) and prompt[: len(before)] == before and prompt[len(before) :] == said[:num]:
                return said[num:]
        words = self.say(request)
        ids = [*self.tokenizer.encode(words), self._stop_id()] if isinstance(words, str) else list(words)
        if seed is not None:
            self.memory[seed] = (list(prompt), ids)
        return ids

    def _stop_id(self) -> int:
        ends = self.tokenizer.encode("<|im_end|>")
        return ends[0] if len(ends) == 1 and ends[0] in self.tokenizer.stop_ids else sorted(self.tokenizer.stop_ids)[0]

    async def _pressure(self, http: web.Request) -> web.Response:
        pressure = Pressure(
            running=self.num_running,
            waiting=0,
            slots=self.slots,
            kv_used_frac=0.0,
            version=self.version,
            tokens_per_s=0.0,
            max_len=self.max_len,
        )
        return web.Response(body=msgspec.json.encode(pressure), content_type="application/json")

    async def _health(self, http: web.Request) -> web.Response:
        health = Health(phase="serving", version=self.version, fingerprint="", running=self.num_running, waiting=0)
        return web.Response(body=msgspec.json.encode(health), content_type="application/json")


def _refused(status: int, message: str, headers: dict[str, str] | None = None, **extra: Any) -> web.Response:
    body = msgspec.json.encode({"error": {"message": message}, **extra})
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)
