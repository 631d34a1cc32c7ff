"""A replica that costs nothing: it says the same tokens at a given pace, natively and in OpenAI's shape, so that only what stands in
front of it is measured. Prints its port as one JSON line and serves until its standard input closes."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from starlette.types import Receive, Scope, Send

from rollmill.engine.protocol import (
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
from rollmill.web import Server, bind

TEXT = "the answer to this is that every token takes its turn and none of them is ever sent twice by anyone "


class Stub:
    """An ASGI application. `token_s`: seconds between two tokens of a stream; 0 sends them in one piece each without a pause."""

    def __init__(self, tokenizer: Tokenizer, *, num_tokens: int, token_s: float) -> None:
        ids = tokenizer.encode(TEXT)
        self._ids = (ids * (num_tokens // len(ids) + 1))[: num_tokens - 1] + sorted(tokenizer.stop_ids)[:1]
        self._token_s = token_s
        self._pieces = [tokenizer.decode([t]) for t in self._ids[:-1]]
        self._text = "".join(self._pieces)
        self._logprobs = np.full(num_tokens, -0.5, "<f4").tobytes()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path, body, more = scope["path"], b"", True
        while more:
            part = await receive()
            if part["type"] == "http.disconnect":
                return
            body, more = body + part.get("body", b""), part.get("more_body", False)
        if path == "/v1/generate":
            await self._pause(len(self._ids))
            await _whole(send, msgspec.msgpack.encode(self._reply()), "application/msgpack")
        elif path == "/v1/stream":
            msgspec.msgpack.decode(body, type=GenerateRequest)
            await _parts(send, self._frames(), "application/octet-stream")
        elif path == "/v1/chat/completions":
            asked = msgspec.json.decode(body)
            if asked.get("stream"):
                await _parts(send, self._chunks(), "text/event-stream")
            else:
                await self._pause(len(self._ids))
                await _whole(send, msgspec.json.encode(self._completion()), "application/json")
        elif path == "/v1/pressure":
            load = Pressure(running=0, waiting=0, slots=4096, kv_used_frac=0.0, version=1, tokens_per_s=0.0, max_len=1 << 20)
            await _whole(send, msgspec.json.encode(load), "application/json")
        else:
            health = Health(phase="serving", version=1, fingerprint="", running=0, waiting=0)
            await _whole(send, msgspec.json.encode(health), "application/json")

    async def _pause(self, num: int) -> None:
        if self._token_s:
            await asyncio.sleep(self._token_s * num)

    def _reply(self) -> GenerateReply:
        return GenerateReply(
            token_ids=self._ids,
            logprobs=self._logprobs,
            spans=[VersionSpan(0, len(self._ids), 1)],
            finish_reason=FinishReason.STOP,
            seed=0,
            num_reused=0,
            replica="stub",
            timing=Timing(queue_s=0.0, first_token_s=0.0, total_s=0.0),
        )

    async def _frames(self) -> AsyncIterator[bytes]:
        for token in self._ids:
            await self._pause(1)
            yield StreamFrame(piece=Piece(token_ids=[token], logprobs=[-0.5], version=1)).to_bytes()
        yield StreamFrame(reply=self._reply()).to_bytes()

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {"id": "chatcmpl-stub", "object": kind, "created": int(time.time()), "model": "policy"}

    def _completion(self) -> dict[str, Any]:
        message = {"role": "assistant", "content": self._text}
        usage = {"prompt_tokens": 64, "completion_tokens": len(self._ids), "total_tokens": 64 + len(self._ids)}
        return {
            **self._envelope("chat.completion"),
            "choices": [{"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}],
            "usage": usage,
        }

    async def _chunks(self) -> AsyncIterator[bytes]:
        def event(delta: dict[str, Any], finish: str | None = None) -> bytes:
            choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
            return b"data: " + msgspec.json.encode({**self._envelope("chat.completion.chunk"), "choices": [choice]}) + b"\n\n"

        yield event({"role": "assistant", "content": ""})
        for piece in self._pieces:
            await self._pause(1)
            yield event({"content": piece})
        await self._pause(1)
        yield event({}, "stop")
        yield b"data: [DONE]\n\n"


async def _whole(send: Send, body: bytes, kind: str) -> None:
    headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _parts(send: Send, parts: AsyncIterator[bytes], kind: str) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind.encode())]})
    async for part in parts:
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def serve(stub: Stub) -> None:
    with contextlib.closing(bind("127.0.0.1", 0)) as sock:
        print(json.dumps({"port": sock.getsockname()[1]}), flush=True)
        server = Server(stub)
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        await asyncio.to_thread(sys.stdin.read)
        server.should_exit = True
        await serving


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--num-tokens", type=int, default=32)
    parser.add_argument("--token-s", type=float, default=0.0)
    args = parser.parse_args()
    asyncio.run(serve(Stub(Tokenizer(args.model), num_tokens=args.num_tokens, token_s=args.token_s)))


if __name__ == "__main__":
    main()
