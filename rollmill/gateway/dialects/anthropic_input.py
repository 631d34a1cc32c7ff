"""The requests of Anthropic's Messages: their records, and how they become calls; no I/O.

Call ids are `call_` + 24 hex inside and `toolu_` + the same hex outside; every other id passes as it is, so a client's history names
the calls that were sampled.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from rollmill.chat.messages import Call, ChatMessage, ChatRole, Tool
from rollmill.gateway.call import ChatCall, ToolChoice
from rollmill.gateway.dialects.described import one_of
from rollmill.gateway.dialects.dialect import MAX_TOKENS
from rollmill.gateway.dialects.response_store import StoredResponse, Turn
from rollmill.web import ApiError

_CALL_ID = re.compile(r"call_([0-9a-f]{24})")
_USE_ID = re.compile(r"toolu_([0-9a-f]{24})")
# Some agents open their system prompt with a block for the biller that changes with every request; a prompt that holds it shares no
# prefix with the one before.
_BILLING = "x-anthropic-billing-header:"
_THINKS = frozenset({"enabled", "adaptive", "between_tools"})


class ContentBlock(msgspec.Struct, frozen=True, kw_only=True):
    """One block of a message; which fields count depends on `type`."""

    type: Annotated[str, one_of("text", "tool_use", "tool_result", "thinking", "redacted_thinking")]
    """`text`, `tool_use`, `tool_result`, `thinking` or `redacted_thinking`."""
    text: str | None = None
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: Annotated[msgspec.Raw, Meta(extra_json_schema={"type": "object"})] = msgspec.field(default_factory=msgspec.Raw)
    """Arguments of a `tool_use`."""
    tool_use_id: str = ""
    content: str | list[ContentBlock] | None = None
    """Of a `tool_result`."""
    is_error: bool | None = None


class InputMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: Annotated[str, one_of("user", "assistant", "system")]
    """`user`, `assistant` or `system`."""
    content: str | list[ContentBlock]


class InputTool(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    type: Annotated[str, one_of("custom")] | None = None
    """Absent or `custom`: tools that Anthropic's own servers would run are refused."""
    description: str = ""
    input_schema: dict[str, Any] = {}
    strict: bool | None = None


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    type: Annotated[str, one_of("auto", "any", "tool", "none")]
    """`auto`, `any`, `tool` or `none`."""
    name: str = ""
    disable_parallel_tool_use: bool = False


class Thinking(msgspec.Struct, frozen=True, kw_only=True):
    type: Annotated[str, one_of("enabled", "adaptive", "between_tools", "disabled")]
    """`enabled`, `adaptive`, `between_tools`: reasoning is shown in blocks of its own; `disabled` or absent: it is left out."""


class OutputFormat(msgspec.Struct, frozen=True, kw_only=True):
    type: Annotated[str, one_of("json_schema")]
    schema: dict[str, Any] = {}


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True):
    format: OutputFormat | None = None


class ThreadPlace(msgspec.Struct, frozen=True, kw_only=True):
    type: Annotated[str, one_of("create", "continue")]
    """`create`: the conversation is kept under the answer's id. `continue`: `messages` follow the answer that is named, and system
    and tools are those of then."""
    previous_message_id: str = ""


class CountRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The conversation: what `count_tokens` takes, and what every request for a message has."""

    messages: list[InputMessage]
    model: str = ""
    system: str | list[ContentBlock] | None = None
    tools: list[InputTool] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """The older place of `output_config.format`."""


class Metadata(msgspec.Struct, frozen=True, kw_only=True):
    user_id: str | None = None


class MessagesRequest(CountRequest, frozen=True, kw_only=True):
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    metadata: Metadata | None = None
    thread: ThreadPlace | None = None
    compaction: Any = None
    """Refused: nobody here summarises."""
    mcp_servers: list[Any] | None = None
    """Refused, unless empty."""


class MessagesCall(ChatCall, frozen=True, kw_only=True):
    shows_thinking: bool = False
    """Reasoning is told in blocks of its own; clients that did not ask for it take the first block for the text."""
    is_kept: bool = False
    """The conversation may be gone on from by the answer's id."""
    head: tuple[ChatMessage, ...] = ()
    """The system prompt."""
    new: tuple[ChatMessage, ...] = ()
    """What this request adds to the conversation."""
    previous: Turn | None = None
    """What it goes on from."""


def use_id(call_id: str) -> str:
    """Our call id as a client of this dialect sees it."""
    found = _CALL_ID.fullmatch(call_id)
    return f"toolu_{found[1]}" if found else call_id


def call_id_of(use_id: str) -> str:
    """The way back."""
    found = _USE_ID.fullmatch(use_id)
    return f"call_{found[1]}" if found else use_id


def call_of(request: CountRequest, before: StoredResponse | None = None) -> MessagesCall:
    """`before`: the answer that the request goes on from by its id."""
    tools = before.tools if before is not None else tuple(_tool(t) for t in request.tools or ())
    choice = request.tool_choice or Choice(type="auto")
    names = {t.name for t in tools}
    if len(names) < len(tools):
        raise ApiError(400, "tools holds two tools of one name; names must differ")
    if choice.type not in ("auto", "any", "tool", "none"):
        raise ApiError(400, f"tool_choice.type is {choice.type!r}, it must be auto, any, tool or none")
    if choice.type == "any" and not tools:
        raise ApiError(400, "tool_choice asks for a tool, and tools is empty")
    if choice.type == "tool" and choice.name not in names:
        raise ApiError(400, f"tool_choice names the tool {choice.name!r}, which tools does not hold")
    form = (request.output_config and request.output_config.format) or request.output_format
    if form is not None and form.type != "json_schema":
        raise ApiError(400, f"output_config.format.type is {form.type!r}, it must be json_schema")
    head = before.head if before is not None else _head(request)
    past = before.turn.messages() if before is not None else []
    new = _messages(request, past)
    return MessagesCall(
        model=request.model,
        messages=(*head, *past, *new),
        tools=tools,
        tool_choice={"auto": ToolChoice.AUTO, "none": ToolChoice.NONE}.get(choice.type, ToolChoice.REQUIRED),
        forced_tool=choice.name if choice.type == "tool" else "",
        parallel_calls=not choice.disable_parallel_tool_use,
        schema=form.schema if form is not None else None,
        shows_thinking=request.thinking is not None and request.thinking.type in _THINKS,
        head=head,
        new=new,
        previous=before.turn if before is not None else None,
    )


def _tool(tool: InputTool) -> Tool:
    if tool.type not in (None, "custom"):
        raise ApiError(400, f"the tool {tool.name!r} has type {tool.type!r}, which nobody here runs; only custom tools are known")
    if not tool.name:
        raise ApiError(400, "a tool has an empty name")
    return Tool(name=tool.name, description=tool.description, parameters=tool.input_schema, is_strict=bool(tool.strict))


def _head(request: CountRequest) -> tuple[ChatMessage, ...]:
    if not request.system:
        return ()
    blocks = request.system if isinstance(request.system, list) else [ContentBlock(type="text", text=request.system)]
    text = "\n".join(t for t in _texts("system", blocks) if not t.startswith(_BILLING))
    return (ChatMessage(role=ChatRole.SYSTEM, text=text),) if text else ()


def _messages(request: CountRequest, past: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
    if not request.messages:
        raise ApiError(400, "messages is empty; send at least one message")
    found: list[ChatMessage] = []
    names = {c.id: c.name for m in past for c in m.calls}
    for i, message in enumerate(request.messages):
        where = f"messages[{i}].content"
        content = message.content
        blocks = content if isinstance(content, list) else [ContentBlock(type="text", text=content)]
        match message.role:
            case "user":
                found += _user(where, blocks, names)
            case "assistant":
                found.append(_assistant(where, blocks))
                names.update((c.id, c.name) for c in found[-1].calls)
            case "system":
                found.append(ChatMessage(role=ChatRole.SYSTEM, text="\n".join(_texts(where, blocks))))
            case _:
                raise ApiError(400, f"messages[{i}].role is {message.role!r}, it must be user, assistant or system")
    if found[-1].calls:
        raise ApiError(400, f"{where} calls tools and nothing follows; send their results")
    return tuple(found)


def _texts(where: str, blocks: Iterable[ContentBlock]) -> list[str]:
    return [_text(f"{where}[{i}]", block) for i, block in enumerate(blocks)]


def _text(where: str, block: ContentBlock) -> str:
    if block.type != "text":
        raise ApiError(400, f"{where} is a block of type {block.type!r}, which this model cannot read here; send text")
    if block.text is None:
        raise ApiError(400, f"{where}.text is missing")
    return block.text


def _user(where: str, blocks: list[ContentBlock], names: Mapping[str, str]) -> list[ChatMessage]:
    """Results and texts in the order they stand; texts side by side are one message."""
    found: list[ChatMessage] = []
    texts: list[str] = []

    def flush() -> None:
        if texts or not blocks:
            found.append(ChatMessage(role=ChatRole.USER, text="\n".join(texts)))
            texts.clear()

    for i, block in enumerate(blocks):
        if block.type != "tool_result":
            texts.append(_text(f"{where}[{i}]", block))
            continue
        flush()
        if not block.tool_use_id:
            raise ApiError(400, f"{where}[{i}].tool_use_id is missing")
        inner = block.content
        text = "\n".join(_texts(f"{where}[{i}].content", inner)) if isinstance(inner, list) else inner or ""
        if block.is_error and not text.lower().startswith("error"):
            text = f"Error: {text}" if text else "Error"
        call_id = call_id_of(block.tool_use_id)
        found.append(ChatMessage(role=ChatRole.TOOL, text=text, call_id=call_id, name=names.get(call_id, "")))
    flush()
    return found


def _assistant(where: str, blocks: list[ContentBlock]) -> ChatMessage:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Call] = []
    for i, block in enumerate(blocks):
        match block.type:
            case "tool_use":
                arguments = _arguments(f"{where}[{i}].input", block.input)
                if not block.id or not block.name:
                    raise ApiError(400, f"{where}[{i}] is a tool_use, it needs an id and a name")
                calls.append(Call(id=call_id_of(block.id), name=block.name, arguments=arguments))
            case "thinking":
                thoughts.append(block.thinking)
            case "redacted_thinking":
                pass
            case _:
                texts.append(_text(f"{where}[{i}]", block))
    return ChatMessage(role=ChatRole.ASSISTANT, text="".join(texts), calls=tuple(calls), reasoning="".join(thoughts))


def _arguments(where: str, raw: msgspec.Raw) -> str:
    """The object as the client spelled it; what is inside a raw value was never checked to be UTF-8."""
    try:
        text = bytes(raw).decode().strip()
    except UnicodeDecodeError as error:
        raise ApiError(400, f"{where} is not UTF-8: {error}") from error
    if not text.startswith("{"):
        raise ApiError(400, f"{where} must be an object")
    return text
