"""The requests of OpenAI's Responses: their records, and how their items become the messages of a conversation; no I/O.

Items that one answer gave (reasoning, text, calls) become one assistant message again, whether or not the client kept their ids.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from rollmill.chat.messages import Call, ChatMessage, ChatRole, Tool
from rollmill.gateway.call import ToolChoice
from rollmill.gateway.dialects.described import one_of
from rollmill.gateway.dialects.dialect import MAX_TOKENS, MAX_TOP_LOGPROBS
from rollmill.web import ApiError

_ITEM_ID = re.compile(r"(?:msg|fc|rs)_([0-9a-f]{32})[0-9a-f]{4}")
_ROLES = {"user": ChatRole.USER, "assistant": ChatRole.ASSISTANT, "system": ChatRole.SYSTEM, "developer": ChatRole.SYSTEM}
_TEXT_PARTS = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})


class ItemPart(msgspec.Struct, frozen=True, kw_only=True):
    type: Annotated[str, one_of("input_text", "output_text", "refusal", "reasoning_text", "summary_text")]
    """`input_text`, `output_text`, `refusal`, or `reasoning_text` and `summary_text` within reasoning."""
    text: str | None = None
    refusal: str | None = None


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """One item of the input; which fields count depends on `type`."""

    type: Annotated[str, one_of("message", "function_call", "function_call_output", "reasoning", "item_reference")] = "message"
    """`message`, `function_call`, `function_call_output`, `reasoning` or `item_reference`."""
    id: str | None = None
    role: Annotated[str, one_of("user", "assistant", "system", "developer")] | None = None
    content: str | list[ItemPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ItemPart] | None = None
    summary: list[ItemPart] | None = None


class FunctionTool(msgspec.Struct, frozen=True, kw_only=True):
    type: Annotated[str, one_of("function")]
    """`function`; tools that OpenAI's own servers would run are refused."""
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolPick(msgspec.Struct, frozen=True, kw_only=True):
    type: Annotated[str, one_of("function")]
    name: str = ""


class TextFormat(msgspec.Struct, frozen=True, kw_only=True):
    type: Annotated[str, one_of("text", "json_object", "json_schema")]
    """`text`, `json_object` or `json_schema`."""
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextConfig(msgspec.Struct, frozen=True, kw_only=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: str = ""
    input: str | list[Item] | None = None
    instructions: str | None = None
    """Of this response alone: those of an earlier one are not carried over."""
    previous_response_id: str | None = None
    store: bool | None = None
    """Kept for `previous_response_id` and `GET`, in bounded memory; default true."""
    tools: list[FunctionTool] | None = None
    tool_choice: str | ToolPick | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] | None = None
    max_tool_calls: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    include: list[str] | None = None
    """`message.output_text.logprobs` asks for logprobs; others are accepted and give nothing."""
    metadata: dict[str, str] | None = None
    reasoning: dict[str, Any] | None = None
    truncation: str | None = None
    """Accepted; nothing is ever cut: an input that does not fit is refused."""
    stream: bool | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    user: str | None = None
    service_tier: str | None = None


def check_supported(request: ResponsesRequest) -> None:
    """ApiError(400) for what would change the answer and cannot be done here."""
    for name in ("conversation", "prompt"):
        if getattr(request, name) is not None:
            raise ApiError(400, f"{name} is not supported; send the items in input, or previous_response_id", extra={"param": name})
    if request.background:
        raise ApiError(400, "background responses are not supported; stream instead", extra={"param": "background"})


def tools_of(request: ResponsesRequest) -> tuple[Tool, ...]:
    for i, tool in enumerate(request.tools or ()):
        if tool.type != "function":
            text = f"tools[{i}] has type {tool.type!r}, which nobody here runs; only function tools are known"
            raise ApiError(400, text, extra={"param": f"tools[{i}].type"})
        if not tool.name:
            raise ApiError(400, f"tools[{i}].name is missing", extra={"param": f"tools[{i}].name"})
    found = tuple(
        Tool(name=t.name, description=t.description or "", parameters=t.parameters or {}, is_strict=bool(t.strict))
        for t in request.tools or ()
    )
    if len({t.name for t in found}) < len(found):
        raise ApiError(400, "tools holds two tools of one name; names must differ", extra={"param": "tools"})
    return found


def choice_of(request: ResponsesRequest, tools: Sequence[Tool]) -> tuple[ToolChoice, str]:
    """How tools are chosen, and the one that must be."""
    choice = request.tool_choice or "auto"
    extra = {"param": "tool_choice"}
    if isinstance(choice, ToolPick):
        if choice.type != "function":
            raise ApiError(400, f"tool_choice.type is {choice.type!r}; only function is known", extra=extra)
        if choice.name not in {t.name for t in tools}:
            raise ApiError(400, f"tool_choice names the tool {choice.name!r}, which tools does not hold", extra=extra)
        return ToolChoice.REQUIRED, choice.name
    if choice not in set(ToolChoice):
        raise ApiError(400, f"tool_choice is {choice!r}, it must be auto, none, required or an object that names a function", extra=extra)
    if choice == ToolChoice.REQUIRED and not tools:
        raise ApiError(400, "tool_choice is required, and tools is empty", extra=extra)
    return ToolChoice(choice), ""


def schema_of(request: ResponsesRequest) -> dict[str, Any] | None:
    form = request.text.format if request.text is not None else None
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {}
    if form.type != "json_schema" or form.schema is None:
        text = f"text.format is {form.type!r}; it must be text, json_object, or json_schema with a schema"
        raise ApiError(400, text, extra={"param": "text.format"})
    return form.schema


def messages_of(items: str | Iterable[Item], *, resolve: Callable[[str], Sequence[Item]]) -> list[ChatMessage]:
    """`resolve` gives the items that an `item_reference` stands for; ApiError(404) when there are none."""
    if isinstance(items, str):
        return [ChatMessage(role=ChatRole.USER, text=items)]
    reader = _Reader()
    for i, item in enumerate(items):
        for real in resolve(item.id or "") if item.type == "item_reference" else (item,):
            reader.read(f"input[{i}]", real)
    return reader.finish()


class _Reader:
    """Items one after the other; those of one answer wait until it is known to be over."""

    def __init__(self) -> None:
        self._found: list[ChatMessage] = []
        self._names: dict[str, str] = {}
        self._turn: str | None = None
        """The response that the waiting items came from, where their ids tell."""
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[Call] = []

    def read(self, where: str, item: Item) -> None:
        match item.type:
            case "message":
                role = _ROLES.get(item.role or "")
                if role is None:
                    raise ApiError(400, f"{where}.role is {item.role!r}, it must be user, assistant, system or developer")
                if role is ChatRole.ASSISTANT:
                    self._join(item)
                    self._texts.append(_text(f"{where}.content", item.content))
                else:
                    self._end_turn()
                    self._found.append(ChatMessage(role=role, text=_text(f"{where}.content", item.content)))
            case "function_call":
                if not item.call_id or not item.name or item.arguments is None:
                    raise ApiError(400, f"{where} is a function_call, it needs call_id, name and arguments")
                self._join(item)
                self._calls.append(Call(id=item.call_id, name=item.name, arguments=item.arguments))
                self._names[item.call_id] = item.name
            case "function_call_output":
                if not item.call_id:
                    raise ApiError(400, f"{where} is a function_call_output, it needs call_id")
                self._end_turn()
                text = _text(f"{where}.output", item.output)
                name = self._names.get(item.call_id, "")
                self._found.append(ChatMessage(role=ChatRole.TOOL, text=text, call_id=item.call_id, name=name))
            case "reasoning":
                self._join(item)
                self._thoughts.append(_text(where, item.content) or _text(where, item.summary))
            case _:
                known = "message, function_call, function_call_output, reasoning or item_reference"
                raise ApiError(400, f"{where} is an item of type {item.type!r}, which this model cannot read; it must be {known}")

    def finish(self) -> list[ChatMessage]:
        self._end_turn()
        return self._found

    def _join(self, item: Item) -> None:
        """Two answers can stand side by side; the ids that we gave their items keep them apart."""
        found = _ITEM_ID.fullmatch(item.id or "")
        if found is None:
            return
        if self._turn is not None and self._turn != found[1]:
            self._end_turn()
        self._turn = found[1]

    def _end_turn(self) -> None:
        if self._texts or self._calls or self._thoughts:
            text, reasoning = "".join(self._texts), "".join(self._thoughts)
            self._found.append(ChatMessage(role=ChatRole.ASSISTANT, text=text, calls=tuple(self._calls), reasoning=reasoning))
        self._turn, self._texts, self._thoughts, self._calls = None, [], [], []


def _text(where: str, content: str | list[ItemPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for i, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text if part.type in _TEXT_PARTS else None
        if text is None:
            raise ApiError(400, f"{where}[{i}] is a part of type {part.type!r}, which this model cannot read; send text")
        texts.append(text)
    return "".join(texts)
