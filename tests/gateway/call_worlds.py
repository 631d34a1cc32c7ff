"""The way to the replicas without any: says given ids in given pieces, for calls that never leave the process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import numpy as np
from stub_replica import DEMO, logprob_of

from rollmill.chat.format import ChatFormat
from rollmill.chat.messages import ChatMessage, ChatRole
from rollmill.engine.protocol import FinishReason, GenerateReply, GenerateRequest, Piece, Timing, VersionSpan
from rollmill.gateway.gateway import Gateway
from rollmill.model.tokenizer import Tokenizer

CHAT = ChatFormat(Tokenizer(DEMO))
TOKENIZER = CHAT.tokenizer
END = TOKENIZER.encode("<|im_end|>")[0]
HELLO = (ChatMessage(role=ChatRole.USER, text="Hello"),)


def reply_of(ids: list[int], reason: FinishReason = FinishReason.STOP, version: int = 3, **rest: Any) -> GenerateReply:
    return GenerateReply(
        token_ids=ids,
        logprobs=np.asarray([logprob_of(i) for i in ids], "<f4").tobytes(),
        spans=[VersionSpan(0, len(ids), version)] if ids else [],
        finish_reason=reason,
        seed=0,
        num_reused=0,
        replica="fake",
        timing=Timing(queue_s=0.0, first_token_s=0.0, total_s=0.0),
        **rest,
    )


class FakeReplicas:
    """Says given ids in pieces of given sizes; counts the streams that were not heard to their end."""

    num_retries = num_continued = num_put_aside = 0

    def __init__(self, say: Callable[[GenerateRequest], list[int]], sizes: tuple[int, ...] = (1,)) -> None:
        self.say, self.sizes = say, sizes
        self.reason = FinishReason.STOP
        self.error: Exception | None = None
        self.error_after = 0
        self.requests: list[GenerateRequest] = []
        self.num_open = 0
        self.num_cut = 0

    async def generate(self, request: GenerateRequest, *, deadline: float) -> GenerateReply:
        self.requests.append(request)
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        return reply_of(self.say(request)[: request.max_tokens], self.reason)

    async def stream(self, request: GenerateRequest, *, deadline: float) -> AsyncGenerator[Piece | GenerateReply, None]:
        self.requests.append(request)
        ids, at, turn = self.say(request)[: request.max_tokens], 0, 0
        self.num_open += 1
        try:
            while at < len(ids):
                await asyncio.sleep(0)
                if self.error is not None and at >= self.error_after:
                    raise self.error
                part = ids[at : at + self.sizes[turn % len(self.sizes)]]
                at, turn = at + len(part), turn + 1
                yield Piece(token_ids=part, logprobs=[logprob_of(i) for i in part], version=3)
            yield reply_of(ids, self.reason)
        except GeneratorExit:
            self.num_cut += 1
            raise
        finally:
            self.num_open -= 1

    async def close(self) -> None: ...


def gateway_of(replicas: FakeReplicas, **options: Any) -> Gateway:
    return Gateway(CHAT, replicas, **options)  # type: ignore[arg-type]
