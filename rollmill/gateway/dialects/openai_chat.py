"""The `/v1/chat/completions` wire format: bodies in, bodies and chunks out; knows no episode and no replica.

A chunk is three constant pieces of bytes around the one thing that changed, since a thousand streams write one per step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rollmill.chat.messages import Call, ChatMessage, ChatRole, Tool
from rollmill.gateway.call import Answer, ChatCall, Event, EventKind, TextCall, ToolChoice
from rollmill.gateway.dialects.dialect import MAX_TOP_LOGPROBS, Envelope, check_number, decode_body, openai_error
from rollmill.gateway.dialects.openai_common import DONE, Sampled, SamplingFields, chat_logprobs, encode, usage, version_runs
from rollmill.web import ApiError

_ROLES = {
    "system": ChatRole.SYSTEM,
    "developer": ChatRole.SYSTEM,
    "user": ChatRole.USER,
    "assistant": ChatRole.ASSISTANT,
    "tool": ChatRole.TOOL,
    "function": ChatRole.TOOL,
}


class Part(msgspec.Struct, frozen=True, kw_only=True):
    type: str = "text"
    text: str | None = None
    refusal: str | None = None


class CallFunction(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    arguments: str | dict[str, Any] = ""


class CallEntry(msgspec.Struct, frozen=True, kw_only=True):
    id: str | None = None
    type: str = "function"
    function: CallFunction | None = None


class Message(msgspec.Struct, frozen=True, kw_only=True):
    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[CallEntry] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ToolFunction(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolEntry(msgspec.Struct, frozen=True, kw_only=True):
    type: str = "function"
    function: ToolFunction | None = None


class NamedFunction(msgspec.Struct, frozen=True, kw_only=True):
    name: str


class NamedTool(msgspec.Struct, frozen=True, kw_only=True):
    type: str = "function"
    function: NamedFunction | None = None


class SchemaEntry(msgspec.Struct, frozen=True, kw_only=True):
    schema: dict[str, Any] | None = None
    name: str | None = None


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    json_schema: SchemaEntry | None = None


class ChatRequest(SamplingFields, frozen=True, kw_only=True):
    """The request body."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    tools: list[ToolEntry] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    modalities: list[str] | None = None
    functions: list[dict[str, Any]] | None = None


_decoder = msgspec.json.Decoder(ChatRequest)


class OpenAIChat:
    """The dialect."""

    name = "openai_chat"

    def parse(self, body: bytes) -> ChatCall:
        request = decode_body(body, _decoder)
        if not request.messages:
            raise ApiError(400, "messages is empty; send at least one", extra={"param": "messages"})
        if request.functions:
            raise ApiError(400, "functions is not supported; send the same as tools", extra={"param": "functions"})
        if request.modalities and request.modalities != ["text"]:
            raise ApiError(400, f"modalities is {request.modalities}; this model writes text only", extra={"param": "modalities"})
        check_number("top_logprobs", request.top_logprobs, 0, MAX_TOP_LOGPROBS)
        if request.top_logprobs and not request.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true", extra={"param": "top_logprobs"})
        tools = tuple(_tool(i, t) for i, t in enumerate(request.tools or ()))
        choice, forced = _tool_choice(request.tool_choice, tools)
        wanted = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        return ChatCall(
            messages=tuple(_message(i, m) for i, m in enumerate(request.messages)),
            tools=tools,
            tool_choice=choice,
            forced_tool=forced,
            parallel_calls=request.parallel_tool_calls is not False,
            schema=_schema(request.response_format),
            **request.ask(max_tokens=wanted, num_top_logprobs=(request.top_logprobs or 0) if request.logprobs else None),
        )

    def whole(self, call: ChatCall | TextCall, envelope: Envelope, answers: Sequence[Answer]) -> bytes:
        body: dict[str, Any] = {
            "id": f"chatcmpl-{envelope.id}",
            "object": "chat.completion",
            "created": envelope.created,
            "model": envelope.model,
            "choices": [self._choice(i, call, envelope, a) for i, a in enumerate(answers)],
            "usage": usage(answers, call.num_choices),
            "service_tier": None,
            "system_fingerprint": None,
        }
        if call.wants_token_ids:
            body["prompt_token_ids"] = envelope.prompts[0]
        return encode(body)

    def _choice(self, index: int, call: ChatCall | TextCall, envelope: Envelope, answer: Answer) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": answer.text if answer.text or not answer.calls else None,
            "refusal": None,
        }
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in answer.calls
            ]
        out: dict[str, Any] = {
            "index": index,
            "message": message,
            "logprobs": None if call.num_top_logprobs is None else chat_logprobs(Sampled.of(answer), envelope),
            "finish_reason": str(answer.finish),
            "stop_reason": answer.stop_string,
        }
        if call.wants_token_ids:
            out |= {"token_ids": answer.token_ids, "policy_versions": version_runs(answer)}
        return out

    def writer(self, call: ChatCall | TextCall, envelope: Envelope) -> ChatWriter:
        return ChatWriter(call, envelope)

    def error(self, status: int, message: str, extra: Mapping[str, Any] = {}) -> bytes:
        return openai_error(status, message, extra)


class ChatWriter:
    """Chunks of one streamed answer."""

    def __init__(self, call: ChatCall | TextCall, envelope: Envelope) -> None:
        self._call, self._envelope = call, envelope
        head = {"id": f"chatcmpl-{envelope.id}", "object": "chat.completion.chunk", "created": envelope.created, "model": envelope.model}
        self._head = b"data: " + encode(head)[:-1]
        self._tail = (b',"usage":null' if call.includes_usage else b"") + b"}\n\n"
        self._plain_tail = b',"logprobs":null,"finish_reason":null}]' + self._tail
        self._heads = [b'%b,"choices":[{"index":%d,"delta":' % (self._head, i) for i in range(call.num_choices)]
        self._num_calls = [0] * call.num_choices
        self._has_extras = call.wants_token_ids or call.num_top_logprobs is not None

    def start(self, num_prompt: int) -> bytes:
        prompt = b',"prompt_token_ids":' + encode(self._envelope.prompts[0]) if self._call.wants_token_ids else b""
        tail = b',"logprobs":null,"finish_reason":null}]' + prompt + self._tail
        first = self._heads[0] + b'{"role":"assistant","content":"","refusal":null}' + tail
        rest = (h + b'{"role":"assistant","content":"","refusal":null}' + self._plain_tail for h in self._heads[1:])
        return b"".join((first, *rest))

    def write(self, event: Event) -> bytes:
        kind = event.kind
        if kind is EventKind.TEXT:
            delta = b'{"content":%b}' % encode(event.text)
        elif kind is EventKind.REASONING:
            delta = b'{"reasoning_content":%b}' % encode(event.text)
        elif kind is EventKind.CALL:
            number = self._num_calls[event.index]
            self._num_calls[event.index] += 1
            function = {"name": event.name, "arguments": event.text}
            delta = encode({"tool_calls": [{"index": number, "id": event.call_id, "type": "function", "function": function}]})
        elif kind is EventKind.ARGUMENTS:
            delta = b'{"tool_calls":[{"index":%d,"function":{"arguments":%b}}]}' % (self._num_calls[event.index] - 1, encode(event.text))
        elif kind is EventKind.TOKENS and not self._has_extras:
            return b""
        else:
            delta = b"{}"
        if not self._has_extras and kind is not EventKind.END:
            return self._heads[event.index] + delta + self._plain_tail
        return self._heads[event.index] + delta + self._rest(event) + self._tail

    def _rest(self, event: Event) -> bytes:
        """What follows a delta whose chunk also carries tokens or the end of its choice."""
        has_logprobs = self._call.num_top_logprobs is not None and event.token_ids
        rest: dict[str, Any] = {"logprobs": chat_logprobs(Sampled.of(event), self._envelope) if has_logprobs else None}
        rest["finish_reason"] = None
        if event.answer is not None:
            rest |= {"finish_reason": str(event.answer.finish), "stop_reason": event.answer.stop_string}
        if self._call.wants_token_ids:
            rest["token_ids"] = event.token_ids
            if event.answer is not None:
                rest["policy_versions"] = version_runs(event.answer)
        return b"," + encode(rest)[1:] + b"]"

    def finish(self, answers: Sequence[Answer]) -> bytes:
        if not self._call.includes_usage:
            return DONE
        return b'%b,"choices":[],"usage":%b}\n\n%b' % (self._head, encode(usage(answers, self._call.num_choices)), DONE)

    def fail(self, status: int, message: str) -> bytes:
        return b"data: %b\n\n" % openai_error(status, message)


def _message(index: int, message: Message) -> ChatMessage:
    where = f"messages[{index}]"
    role = _ROLES.get(message.role)
    if role is None:
        raise ApiError(400, f"{where}.role is {message.role!r}, it must be one of {', '.join(_ROLES)}", extra={"param": f"{where}.role"})
    is_assistant = role is ChatRole.ASSISTANT
    return ChatMessage(
        role=role,
        text=_text(f"{where}.content", message.content),
        calls=tuple(_call(f"{where}.tool_calls[{i}]", c) for i, c in enumerate(message.tool_calls or ())) if is_assistant else (),
        call_id=(message.tool_call_id or "") if role is ChatRole.TOOL else "",
        name=(message.name or "") if role is ChatRole.TOOL else "",
        reasoning=(message.reasoning_content or message.reasoning or "") if is_assistant else "",
    )


def _text(where: str, content: str | list[Part] | None) -> str:
    if not isinstance(content, list):
        return content or ""
    for i, part in enumerate(content):
        if part.type not in ("text", "refusal") or (part.text is None and part.refusal is None):
            raise ApiError(400, f"{where}[{i}] is of type {part.type!r}; this model reads text only", extra={"param": f"{where}[{i}]"})
    return "".join(part.text or part.refusal or "" for part in content)


def _call(where: str, entry: CallEntry) -> Call:
    if entry.type != "function" or entry.function is None:
        raise ApiError(400, f"{where} is of type {entry.type!r}; only calls of functions are understood", extra={"param": where})
    arguments = entry.function.arguments
    return Call(
        id=entry.id or "", name=entry.function.name, arguments=arguments if isinstance(arguments, str) else encode(arguments).decode()
    )


def _tool(index: int, entry: ToolEntry) -> Tool:
    where = f"tools[{index}]"
    if entry.type != "function" or entry.function is None:
        raise ApiError(400, f"{where} is of type {entry.type!r}; only functions are supported", extra={"param": where})
    function = entry.function
    if not 0 < len(function.name) <= 128:
        raise ApiError(400, f"{where}.function.name has {len(function.name)} characters, it must have 1 to 128", extra={"param": where})
    return Tool(
        name=function.name, description=function.description or "", parameters=function.parameters or {}, is_strict=bool(function.strict)
    )


def _tool_choice(choice: str | NamedTool | None, tools: Sequence[Tool]) -> tuple[ToolChoice, str]:
    if choice is None:
        return ToolChoice.AUTO, ""
    forced = ""
    if isinstance(choice, NamedTool):
        if choice.type != "function" or choice.function is None:
            raise ApiError(400, f"tool_choice is of type {choice.type!r}; only a function can be named", extra={"param": "tool_choice"})
        forced, choice = choice.function.name, "required"
        if forced not in {t.name for t in tools}:
            raise ApiError(400, f"tool_choice names {forced!r}, which is not among tools", extra={"param": "tool_choice"})
    if choice not in ("auto", "none", "required"):
        raise ApiError(400, f"tool_choice is {choice!r}, it must be auto, none, required or a function", extra={"param": "tool_choice"})
    if choice == "required" and not tools:
        raise ApiError(400, "tool_choice is required, but there are no tools", extra={"param": "tool_choice"})
    return ToolChoice(choice), forced


def _schema(form: ResponseFormat | None) -> dict[str, Any] | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {}
    if form.type != "json_schema" or form.json_schema is None:
        text = f"response_format.type is {form.type!r}, it must be text, json_object or json_schema (with json_schema)"
        raise ApiError(400, text, extra={"param": "response_format"})
    return form.json_schema.schema or {}
