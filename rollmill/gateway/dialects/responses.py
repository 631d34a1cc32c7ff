"""OpenAI's Responses as a dialect: requests to `ChatCall`s, answers and events to bodies and server-sent events.

Every item's id holds the id of its response, by which a client's history is told apart turn by turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rollmill.chat.messages import ChatMessage, ChatRole
from rollmill.gateway.call import Answer, ChatCall, Event, Finish, TextCall
from rollmill.gateway.dialects.blocks import Block, BlockKind, BlockWriter, blocks_of
from rollmill.gateway.dialects.dialect import Envelope, check_number, check_sampling, decode_body, openai_error, sse
from rollmill.gateway.dialects.openai_common import Sampled, chat_logprobs
from rollmill.gateway.dialects.response_store import ResponseStore, StoredResponse, Turn
from rollmill.gateway.dialects.responses_input import (
    Item,
    ResponsesRequest,
    check_supported,
    choice_of,
    messages_of,
    schema_of,
    tools_of,
)
from rollmill.web import ApiError

WANTS_LOGPROBS = "message.output_text.logprobs"
_PREFIX = {BlockKind.TEXT: "msg", BlockKind.CALL: "fc", BlockKind.REASONING: "rs"}
_PART = {BlockKind.TEXT: "output_text", BlockKind.REASONING: "reasoning_text"}
_REQUEST = msgspec.json.Decoder(ResponsesRequest)
_ITEMS = msgspec.json.Decoder(dict[str, Any])
_encode = msgspec.json.Encoder().encode


class ResponsesCall(ChatCall, frozen=True, kw_only=True):
    request: ResponsesRequest
    """Whose settings the response repeats."""
    new: tuple[ChatMessage, ...]
    """What this request adds to the conversation."""
    previous: Turn | None = None
    """What it goes on from."""


class Responses:
    """`POST /v1/responses`, and what `GET` and `DELETE /v1/responses/{id}` answer."""

    name = "responses"

    def __init__(self, store: ResponseStore | None = None) -> None:
        self.store = store if store is not None else ResponseStore()

    def parse(self, body: bytes) -> ResponsesCall:
        request = decode_body(body, _REQUEST)
        check_supported(request)
        check_number("top_logprobs", request.top_logprobs, 0, 20)
        check_sampling(temperature=request.temperature, top_p=request.top_p, top_k=None)
        previous = self._stored(request.previous_response_id).turn if request.previous_response_id else None
        new = tuple(messages_of(request.input if request.input is not None else [], resolve=self._items))
        head = (ChatMessage(role=ChatRole.SYSTEM, text=request.instructions),) if request.instructions else ()
        messages = (*head, *(previous.messages() if previous is not None else ()), *new)
        if not messages:
            raise ApiError(400, "input is empty; send a text or at least one item", extra={"param": "input"})
        tools = tools_of(request)
        choice, forced = choice_of(request, tools)
        return ResponsesCall(
            model=request.model,
            max_tokens=request.max_output_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            num_top_logprobs=(request.top_logprobs or 0) if WANTS_LOGPROBS in (request.include or ()) else None,
            stream=bool(request.stream),
            includes_usage=True,
            messages=messages,
            tools=tools,
            tool_choice=choice,
            forced_tool=forced,
            parallel_calls=request.parallel_tool_calls is not False,
            schema=schema_of(request),
            request=request,
            new=new,
            previous=previous,
        )

    def whole(self, call: ChatCall | TextCall, envelope: Envelope, answers: Sequence[Answer]) -> bytes:
        assert isinstance(call, ResponsesCall)
        (answer,) = answers
        # Which tokens made the text and which the rest is not told apart in an answer as a whole: all of them are listed.
        logprobs = _logprobs(answer, envelope) if call.num_top_logprobs is not None else []
        blocks = blocks_of(answer, shows_reasoning=True)
        if not _speaks(blocks):
            blocks.append(Block(len(blocks), BlockKind.TEXT))
        # Only the last can have been cut.
        output = [_item(envelope, b, "completed" if b is not blocks[-1] else _status(answer), logprobs) for b in blocks]
        return self.keep(call, envelope, answer, output)

    def writer(self, call: ChatCall | TextCall, envelope: Envelope) -> ResponsesWriter:
        assert isinstance(call, ResponsesCall)
        return ResponsesWriter(self, call, envelope)

    def error(self, status: int, message: str, extra: Mapping[str, Any] = {}) -> bytes:
        return openai_error(status, message, extra)

    def keep(self, call: ResponsesCall, envelope: Envelope, answer: Answer, output: list[dict[str, Any]]) -> bytes:
        """The finished response, remembered unless the client asked not to."""
        body = _encode(_response(call, envelope, _status(answer), output, answer))
        if call.request.store is not False:
            said = ChatMessage(role=ChatRole.ASSISTANT, text=answer.text, calls=answer.calls, reasoning=answer.reasoning)
            self.store.put(f"resp_{envelope.id}", StoredResponse(Turn(call.previous, (*call.new, said)), body))
        return body

    def retrieve(self, response_id: str) -> bytes:
        return self._stored(response_id).body

    def delete(self, response_id: str) -> bytes:
        if not self.store.drop(response_id):
            raise _unknown(response_id)
        return _encode({"id": response_id, "object": "response", "deleted": True})

    def _stored(self, response_id: str) -> StoredResponse:
        found = self.store.get(response_id)
        if found is None:
            raise _unknown(response_id)
        return found

    def _items(self, item_id: str) -> list[Item]:
        """What an `item_reference` stands for."""
        stored = self.store.get(f"resp_{item_id.partition('_')[2][:32]}")
        output = _ITEMS.decode(stored.body)["output"] if stored is not None else []
        found = [msgspec.convert(item, Item) for item in output if item["id"] == item_id]
        if not found:
            raise ApiError(404, f"no item {item_id!r} is kept here; send the item itself", extra={"param": "input"})
        return found


class ResponsesWriter(BlockWriter):
    """`response.created`, then items with their parts, then `response.completed` or `response.incomplete`."""

    def __init__(self, dialect: Responses, call: ResponsesCall, envelope: Envelope) -> None:
        super().__init__(shows_reasoning=True)
        self._dialect, self._call, self._envelope = dialect, call, envelope
        # The two of `start` come first, whenever it is called.
        self._num_sent = 2
        self._delta = b""
        """Of the block that is open: all that stays the same from delta to delta."""
        self._closing = "completed"
        """What the next item that closes is: only the last can have been cut."""
        self._output: list[dict[str, Any]] = []
        self._wants_logprobs = call.num_top_logprobs is not None
        self._waiting_tokens: list[Event] = []
        self._logprobs: list[dict[str, Any]] = []

    def start(self, num_prompt: int) -> bytes:
        response = _response(self._call, self._envelope, "in_progress", [], None)
        kinds = ("response.created", "response.in_progress")
        return b"".join(sse(_encode({"type": k, "response": response, "sequence_number": n}), k) for n, k in enumerate(kinds))

    def write(self, event: Event) -> bytes:
        if self._wants_logprobs and event.token_ids:
            self._waiting_tokens.append(event)
        if event.answer is None:
            return super().write(event)
        self._closing = _status(event.answer)
        silent = b"" if _speaks(self.blocks) else self.start_block(BlockKind.TEXT, event)
        return silent + super().write(event)

    def opens(self, block: Block, event: Event) -> bytes:
        item_id = _item_id(self._envelope, block)
        self._logprobs = []
        added = self._send("response.output_item.added", output_index=block.index, item=_item(self._envelope, block, "in_progress", None))
        is_call = block.kind is BlockKind.CALL
        kind = f"response.{'function_call_arguments' if is_call else _PART[block.kind]}.delta"
        place = f'"item_id":"{item_id}","output_index":{block.index}' + ("" if is_call else ',"content_index":0')
        self._delta = f'event: {kind}\ndata: {{"type":"{kind}",{place},"delta":'.encode()
        if is_call:
            return added
        part = _part(block.kind, "", [])
        return added + self._send("response.content_part.added", **self._place(block), part=part)

    def grows(self, block: Block, text: str, event: Event) -> bytes:
        tail = b',"logprobs":%b' % _encode(self._taken()) if block.kind is BlockKind.TEXT else b""
        self._num_sent += 1
        return b'%b%b%b,"sequence_number":%d}\n\n' % (self._delta, _encode(text), tail, self._num_sent - 1)

    def closes(self, block: Block) -> bytes:
        item = _item(self._envelope, block, self._closing, self._logprobs)
        self._output.append(item)
        place, text = self._place(block), block.text
        if block.kind is BlockKind.CALL:
            place.pop("content_index")
            out = self._send("response.function_call_arguments.done", **place, name=block.name, arguments=text)
        else:
            extra = {"logprobs": self._logprobs} if block.kind is BlockKind.TEXT else {}
            out = self._send(f"response.{_PART[block.kind]}.done", **place, text=text, **extra)
            out += self._send("response.content_part.done", **place, part=_part(block.kind, text, self._logprobs))
        return out + self._send("response.output_item.done", output_index=block.index, item=item)

    def finish(self, answers: Sequence[Answer]) -> bytes:
        (answer,) = answers
        out, status = self.close(), _status(answer)
        body = self._dialect.keep(self._call, self._envelope, answer, self._output)
        return out + self._send(f"response.{status}", response=msgspec.Raw(body))

    def fail(self, status: int, message: str) -> bytes:
        response = _response(self._call, self._envelope, "failed", self._output, None)
        code = "rate_limit_exceeded" if status == 429 else "server_error"
        return self._send("response.failed", response={**response, "error": {"code": code, "message": message}})

    def _place(self, block: Block) -> dict[str, Any]:
        return {"item_id": _item_id(self._envelope, block), "output_index": block.index, "content_index": 0}

    def _taken(self) -> list[dict[str, Any]]:
        """Logprobs of the tokens since the last text that was sent."""
        found: list[dict[str, Any]] = []
        for event in self._waiting_tokens:
            found += _logprobs(event, self._envelope)
        self._waiting_tokens.clear()
        self._logprobs += found
        return found

    def _send(self, kind: str, **fields: Any) -> bytes:
        body = _encode({"type": kind, **fields, "sequence_number": self._num_sent})
        self._num_sent += 1
        return sse(body, kind)


def _unknown(response_id: str) -> ApiError:
    text = f"no response {response_id!r} is kept here; it was not stored, or made room for newer ones: send the conversation in input"
    return ApiError(404, text, extra={"param": "previous_response_id", "code": "previous_response_not_found"})


def _status(answer: Answer) -> str:
    return "incomplete" if answer.finish is Finish.LENGTH else "completed"


def _speaks(blocks: Sequence[Block]) -> bool:
    """Whether there is an item that a client sends back; an answer that says nothing gets an empty one, else its turn would be lost."""
    return any(block.kind is not BlockKind.REASONING for block in blocks)


def _item_id(envelope: Envelope, block: Block) -> str:
    return f"{_PREFIX[block.kind]}_{envelope.id}{block.index:04x}"


def _part(kind: BlockKind, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    if kind is BlockKind.REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _item(envelope: Envelope, block: Block, status: str, logprobs: list[dict[str, Any]] | None) -> dict[str, Any]:
    """`logprobs` is None while its content has not begun."""
    item_id, text = _item_id(envelope, block), block.text
    if block.kind is BlockKind.CALL:
        call = {"call_id": block.call_id, "name": block.name, "arguments": text}
        return {"id": item_id, "type": "function_call", "status": status, **call}
    content = [_part(block.kind, text, logprobs)] if logprobs is not None else []
    if block.kind is BlockKind.REASONING:
        return {"id": item_id, "type": "reasoning", "summary": [], "content": content, "status": status}
    return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": content}


def _logprobs(source: Event | Answer, envelope: Envelope) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = chat_logprobs(Sampled.of(source), envelope)["content"]
    return found


def _response(call: ResponsesCall, envelope: Envelope, status: str, output: list[dict[str, Any]], answer: Answer | None) -> dict[str, Any]:
    asked = call.request
    usage = None
    if answer is not None:
        usage = {
            "input_tokens": answer.num_prompt,
            "input_tokens_details": {"cached_tokens": answer.num_reused, "cache_write_tokens": 0},
            "output_tokens": len(answer.token_ids),
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.num_prompt + len(answer.token_ids),
        }
    return {
        "id": f"resp_{envelope.id}",
        "object": "response",
        "created_at": envelope.created,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "max_tool_calls": asked.max_tool_calls,
        "model": envelope.model,
        "output": output,
        "parallel_tool_calls": call.parallel_calls,
        "previous_response_id": asked.previous_response_id,
        "reasoning": asked.reasoning or {"effort": None, "summary": None},
        "service_tier": "default",
        "store": asked.store is not False,
        "temperature": asked.temperature if asked.temperature is not None else 1.0,
        "text": {"format": asked.text.format if asked.text is not None and asked.text.format is not None else {"type": "text"}},
        "tool_choice": asked.tool_choice or "auto",
        "tools": asked.tools or [],
        "top_logprobs": asked.top_logprobs or 0,
        "top_p": asked.top_p if asked.top_p is not None else 1.0,
        "truncation": "disabled",
        "usage": usage,
        "user": asked.user,
        "metadata": asked.metadata or {},
    }
