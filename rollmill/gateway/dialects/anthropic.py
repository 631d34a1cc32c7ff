"""Anthropic's Messages as a dialect: answers and events to bodies and server-sent events; no I/O."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from blake3 import blake3

from rollmill.chat.messages import ChatMessage, ChatRole
from rollmill.gateway.call import Answer, ChatCall, Event, Finish, TextCall
from rollmill.gateway.dialects.anthropic_input import CountRequest, MessagesCall, MessagesRequest, call_of, use_id
from rollmill.gateway.dialects.blocks import Block, BlockKind, BlockWriter, blocks_of
from rollmill.gateway.dialects.dialect import Envelope, check_sampling, checked_stops, decode_body, sse
from rollmill.gateway.dialects.response_store import ResponseStore, StoredResponse, Turn
from rollmill.web import ApiError

_STOPS = {Finish.STOP: "end_turn", Finish.LENGTH: "max_tokens", Finish.CALLS: "tool_use"}
_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_encode = msgspec.json.Encoder().encode


_REQUEST = msgspec.json.Decoder(MessagesRequest)
_COUNT = msgspec.json.Decoder(CountRequest)


class Messages:
    """`POST /v1/messages`, and the two halves of `POST /v1/messages/count_tokens`."""

    name = "anthropic"

    def __init__(self, store: ResponseStore | None = None) -> None:
        self.store = store if store is not None else ResponseStore()

    def parse(self, body: bytes) -> MessagesCall:
        request = decode_body(body, _REQUEST)
        check_sampling(temperature=request.temperature, top_p=request.top_p, top_k=request.top_k)
        if request.compaction is not None:
            raise ApiError(400, "compaction is not supported; ask for a summary in a message of your own")
        if request.mcp_servers:
            raise ApiError(400, "mcp_servers is not supported: nobody here calls them; give their tools as tools")
        return msgspec.structs.replace(
            call_of(request, self._before(request)),
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            stops=checked_stops("stop_sequences", request.stop_sequences),
            stream=bool(request.stream),
            includes_usage=True,
            is_kept=request.thread is not None,
        )

    def parse_count(self, body: bytes) -> MessagesCall:
        """The conversation whose prompt tokens are to be counted."""
        return call_of(decode_body(body, _COUNT))

    def counted(self, num_tokens: int) -> bytes:
        return b'{"input_tokens":%d}' % num_tokens

    def whole(self, call: ChatCall | TextCall, envelope: Envelope, answers: Sequence[Answer]) -> bytes:
        assert isinstance(call, MessagesCall)
        (answer,) = answers
        self.keep(call, envelope, answer)
        content = [_content(block) for block in blocks_of(answer, shows_reasoning=call.shows_thinking)]
        return _encode(_message(envelope, content, *_stop_of(answer), _usage(answer)))

    def writer(self, call: ChatCall | TextCall, envelope: Envelope) -> MessagesWriter:
        assert isinstance(call, MessagesCall)
        return MessagesWriter(self, call, envelope)

    def error(self, status: int, message: str, extra: Mapping[str, Any] = {}) -> bytes:
        kind = _ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
        error = {"type": kind, "message": message}
        if "details" in extra:
            error["details"] = extra["details"]
        return _encode({"type": "error", "error": error, **{k: v for k, v in extra.items() if k != "details"}})

    def keep(self, call: MessagesCall, envelope: Envelope, answer: Answer) -> None:
        """For a thread that goes on from this answer."""
        if call.is_kept:
            said = ChatMessage(role=ChatRole.ASSISTANT, text=answer.text, calls=answer.calls, reasoning=answer.reasoning)
            turn = Turn(call.previous, (*call.new, said))
            self.store.put(f"msg_{envelope.id}", StoredResponse(turn, head=call.head, tools=call.tools))

    def _before(self, request: MessagesRequest) -> StoredResponse | None:
        if request.thread is None or request.thread.type == "create":
            return None
        if request.thread.type != "continue":
            raise ApiError(400, f"thread.type is {request.thread.type!r}, it must be create or continue")
        if request.system is not None or request.tools is not None:
            extra = {"details": {"error_code": "thread_fingerprint_mismatch"}}
            raise ApiError(400, "a thread keeps the system and tools it was created with; leave them out, or create another", extra=extra)
        name = request.thread.previous_message_id
        found = self.store.get(name)
        if found is None:
            text = f"no thread with the message {name!r} is kept here; send the whole conversation with thread.type create"
            raise ApiError(404, text, extra={"details": {"error_code": "thread_not_found"}})
        return found


class MessagesWriter(BlockWriter):
    """`message_start`, then blocks, then `message_delta` and `message_stop`."""

    def __init__(self, dialect: Messages, call: MessagesCall, envelope: Envelope) -> None:
        super().__init__(shows_reasoning=call.shows_thinking)
        self._dialect, self._call, self._envelope = dialect, call, envelope
        self._delta = b""

    def start(self, num_prompt: int) -> bytes:
        usage = {"input_tokens": num_prompt, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": 0}
        message = _message(self._envelope, [], None, None, usage)
        return sse(_encode({"type": "message_start", "message": message}), "message_start") + sse(b'{"type":"ping"}', "ping")

    def opens(self, block: Block, event: Event) -> bytes:
        kind, field = {
            BlockKind.TEXT: ("text_delta", "text"),
            BlockKind.REASONING: ("thinking_delta", "thinking"),
            BlockKind.CALL: ("input_json_delta", "partial_json"),
        }[block.kind]
        # All that stays the same from delta to delta, written once: a delta then costs one string.
        self._delta = (
            f'event: content_block_delta\ndata: {{"type":"content_block_delta","index":{block.index},"delta":{{"type":"{kind}","{field}":'
        ).encode()
        body = {"type": "content_block_start", "index": block.index, "content_block": _content(block, is_start=True)}
        return sse(_encode(body), "content_block_start")

    def grows(self, block: Block, text: str, event: Event) -> bytes:
        return b"%b%b}}\n\n" % (self._delta, _encode(text))

    def closes(self, block: Block) -> bytes:
        out = b""
        if block.kind is BlockKind.REASONING:
            delta = {"type": "signature_delta", "signature": _signature(block.text)}
            out = sse(_encode({"type": "content_block_delta", "index": block.index, "delta": delta}), "content_block_delta")
        return out + sse(b'{"type":"content_block_stop","index":%d}' % block.index, "content_block_stop")

    def finish(self, answers: Sequence[Answer]) -> bytes:
        (answer,) = answers
        self._dialect.keep(self._call, self._envelope, answer)
        reason, stop = _stop_of(answer)
        body = {"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": stop}, "usage": _usage(answer)}
        return self.close() + sse(_encode(body), "message_delta") + sse(b'{"type":"message_stop"}', "message_stop")

    def fail(self, status: int, message: str) -> bytes:
        return sse(self._dialect.error(status, message), "error")


def _message(
    envelope: Envelope, content: list[dict[str, Any]], reason: str | None, stop: str | None, usage: dict[str, Any]
) -> dict[str, Any]:
    return {
        "id": f"msg_{envelope.id}",
        "type": "message",
        "role": "assistant",
        "model": envelope.model,
        "content": content,
        "stop_reason": reason,
        "stop_sequence": stop,
        "usage": usage,
    }


def _stop_of(answer: Answer) -> tuple[str, str | None]:
    return ("stop_sequence", answer.stop_string) if answer.stop_string is not None else (_STOPS[answer.finish], None)


def _usage(answer: Answer) -> dict[str, Any]:
    """Anthropic's input tokens are those that no cache had."""
    return {
        "input_tokens": answer.num_prompt - answer.num_reused,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": answer.num_reused,
        "output_tokens": len(answer.token_ids),
    }


def _signature(thinking: str) -> str:
    """Clients want one and send it back; nobody checks it, reasoning that comes back is no part of what identifies a message."""
    return base64.b64encode(blake3(thinking.encode()).digest()).decode()


def _content(block: Block, *, is_start: bool = False) -> dict[str, Any]:
    text = block.text
    if block.kind is BlockKind.TEXT:
        return {"type": "text", "text": text}
    if block.kind is BlockKind.REASONING:
        return {"type": "thinking", "thinking": text, "signature": "" if is_start else _signature(text)}
    return {"type": "tool_use", "id": use_id(block.call_id), "name": block.name, "input": {} if is_start else _as_object(text)}


def _as_object(arguments: str) -> msgspec.Raw | dict[str, Any]:
    """Arguments as the model wrote them, down to the spelling of numbers; an empty object when they are none."""
    try:
        # Not msgspec: half a surrogate pair is no reason to call a tool without its arguments.
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        found = None
    return msgspec.Raw(arguments.encode()) if isinstance(found, dict) else {}
