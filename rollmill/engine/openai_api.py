"""`/v1/chat/completions` and `/v1/completions`, streamed or whole, over the native engine; knows no weights."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from rollmill.engine.calls import ApiError, Calls, while_connected
from rollmill.engine.http_edge import EventStream, decode_json, json_response, read_body
from rollmill.engine.openai_wire import ChatRequest, CompletionRequest
from rollmill.engine.protocol import FinishReason
from rollmill.engine.scheduler import Update
from rollmill.engine.service import Service
from rollmill.engine.text import TextStream, ToolCall, ToolGate, split_tool_calls
from rollmill.model import Tokenizer

# Encoding a text of this many characters takes about a millisecond; longer ones leave the event loop.
INLINE_CHARS = 10_000
DEFAULT_COMPLETION_TOKENS = 16


class Choice:
    """What one choice has become so far."""

    def __init__(self, tokenizer: Tokenizer, stops: list[str], stop_ids: frozenset[int]) -> None:
        self._tokenizer, self._stop_ids = tokenizer, stop_ids
        self.stream = TextStream(tokenizer, stops)
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.finish = ""

    def feed(self, update: Update) -> str:
        """Take an update in; the text it releases."""
        self.ids += update.token_ids
        self.logprobs += update.logprobs
        text = self.stream.feed((t for t in update.token_ids if t not in self._stop_ids), last=update.finished is not None)
        if self.stream.stopped or update.finished is FinishReason.STOP:
            self.finish = "stop"
        elif update.finished is not None:
            self.finish = "length"
        return text

    def chat_logprobs(self, start: int = 0) -> dict[str, Any]:
        pieces = [(self._tokenizer.decode([t]), lp) for t, lp in zip(self.ids[start:], self.logprobs[start:], strict=True)]
        return {
            "content": [{"token": p, "logprob": lp, "bytes": list(p.encode()), "top_logprobs": []} for p, lp in pieces],
            "refusal": None,
        }

    def plain_logprobs(self, start: int = 0) -> dict[str, Any]:
        return {
            "tokens": [self._tokenizer.decode([t]) for t in self.ids[start:]],
            "token_logprobs": self.logprobs[start:],
            "top_logprobs": None,
            "text_offset": [],
        }


def _call_json(call: ToolCall, index: int | None = None) -> dict[str, Any]:
    out: dict[str, Any] = {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
    return out if index is None else {"index": index, **out}


class Exchange:
    """One OpenAI request on its way: its engine calls, its choices and the envelope of its replies."""

    def __init__(self, service: Service, request: ChatRequest | CompletionRequest, prompt_ids: list[int]) -> None:
        assert service.tokenizer is not None
        self.request, self.is_chat = request, isinstance(request, ChatRequest)
        room = max(service.engine.max_len - len(prompt_ids), 1)
        wanted = request.max_tokens
        if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
            wanted = request.max_completion_tokens
        if wanted is None:
            wanted = room if self.is_chat else min(room, DEFAULT_COMPLETION_TOKENS)
        try:
            stops = request.stops
            natives = request.to_native(prompt_ids, max_tokens=wanted, stop_ids=service.stop_ids)
        except ValueError as error:
            raise ApiError(400, str(error)) from error
        self.num_prompt = len(prompt_ids)
        self.calls = Calls(service.engine, natives, streams=bool(request.stream or stops))
        self.choices = [Choice(service.tokenizer, stops, service.stop_ids) for _ in natives]
        prefix, kind = ("chatcmpl", "chat.completion") if self.is_chat else ("cmpl", "text_completion")
        self.envelope: dict[str, Any] = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": request.model or service.model_name,
        }
        self.has_tools = isinstance(request, ChatRequest) and bool(request.tools) and request.tool_choice != "none"

    def usage(self) -> dict[str, int]:
        num_sampled = sum(len(c.ids) for c in self.choices)
        return {"prompt_tokens": self.num_prompt, "completion_tokens": num_sampled, "total_tokens": self.num_prompt + num_sampled}

    async def whole(self) -> dict[str, Any]:
        async for index, update in self.calls:
            self.choices[index].feed(update)
            if self.choices[index].stream.stopped:
                self.calls.end(index)
        return {**self.envelope, "choices": [self._whole_choice(i, c) for i, c in enumerate(self.choices)], "usage": self.usage()}

    def _whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        text = choice.stream.text
        if not self.is_chat:
            logprobs = choice.plain_logprobs() if self.request.logprobs is not None else None
            return {"index": index, "text": text, "finish_reason": choice.finish, "logprobs": logprobs}
        text, calls = split_tool_calls(text) if self.has_tools else (text, [])
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
        if calls:
            message["tool_calls"] = [_call_json(c) for c in calls]
        logprobs = choice.chat_logprobs() if self.request.logprobs else None
        return {"index": index, "message": message, "finish_reason": "tool_calls" if calls else choice.finish, "logprobs": logprobs}

    async def events(self) -> AsyncIterator[bytes]:
        """Server-sent events, one per step and choice, closed by `[DONE]`."""
        if self.is_chat:
            self.envelope["object"] += ".chunk"
        gates = [ToolGate(enabled=self.has_tools) for _ in self.choices]
        for index in range(len(self.choices)) if self.is_chat else ():
            yield self._event({"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None, "logprobs": None})
        async for index, update in self.calls:
            choice, start = self.choices[index], len(self.choices[index].ids)
            text = gates[index].feed(choice.feed(update))
            if choice.stream.stopped:
                self.calls.end(index)
            calls: list[ToolCall] = []
            if choice.finish:
                rest, calls = gates[index].finish()
                text += rest
            if text or len(choice.ids) > start:
                yield self._event(self._piece(index, choice, text, start))
            if calls:
                delta = {"tool_calls": [_call_json(c, i) for i, c in enumerate(calls)]}
                yield self._event({"index": index, "delta": delta, "finish_reason": None, "logprobs": None})
            if choice.finish:
                end: dict[str, Any] = {"delta": {}} if self.is_chat else {"text": ""}
                yield self._event({"index": index, **end, "finish_reason": "tool_calls" if calls else choice.finish, "logprobs": None})
        if self.request.includes_usage:
            yield _sse({**self.envelope, "choices": [], "usage": self.usage()})
        yield b"data: [DONE]\n\n"

    def _piece(self, index: int, choice: Choice, text: str, start: int) -> dict[str, Any]:
        if self.is_chat:
            logprobs = choice.chat_logprobs(start) if self.request.logprobs else None
            return {"index": index, "delta": {"content": text}, "finish_reason": None, "logprobs": logprobs}
        logprobs = choice.plain_logprobs(start) if self.request.logprobs is not None else None
        return {"index": index, "text": text, "finish_reason": None, "logprobs": logprobs}

    def _event(self, choice: dict[str, Any]) -> bytes:
        return _sse({**self.envelope, "choices": [choice]})


def _sse(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


async def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text) if len(text) < INLINE_CHARS else await asyncio.to_thread(tokenizer.encode, text)


async def _answer(http: Request, service: Service, request: ChatRequest | CompletionRequest, prompt_ids: list[int]) -> Response:
    exchange = Exchange(service, request, prompt_ids)
    if request.stream:
        return EventStream(exchange.events(), on_end=exchange.calls.cancel)
    return json_response(await while_connected(http, exchange.calls, exchange.whole()))


def _tokenizer(service: Service) -> Tokenizer:
    if service.tokenizer is None:
        raise ApiError(400, "this model has no tokenizer files, so it takes token ids only; use /v1/generate")
    return service.tokenizer


async def chat_completions(http: Request) -> Response:
    service: Service = http.app.state.service
    tokenizer = _tokenizer(service)
    request = decode_json(await read_body(http), ChatRequest)
    try:
        request.check()
        messages = request.plain_messages()
        text = tokenizer.render(messages, request.tools if request.tool_choice != "none" else None)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        # A template runs on whatever shapes the caller sent; what it trips over is the caller's to fix.
        raise ApiError(400, str(error) or type(error).__name__) from error
    return await _answer(http, service, request, await _encode(tokenizer, text))


async def completions(http: Request) -> Response:
    service: Service = http.app.state.service
    tokenizer = _tokenizer(service)
    request = decode_json(await read_body(http), CompletionRequest)
    try:
        request.check()
    except ValueError as error:
        raise ApiError(400, str(error)) from error
    prompt_ids = request.prompt if isinstance(request.prompt, list) else await _encode(tokenizer, request.prompt)
    return await _answer(http, service, request, prompt_ids)
