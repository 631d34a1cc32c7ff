"""From the text of one block to the calls in it, format by format: lenient about white space and strict about the rest.

What is no call raises Malformed with one line of advice for the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rollmill.chat.messages import Tool

_MAX_HEAD_CHARS = 1024
"""A tool's name is shorter; past this, what follows an opening is no call."""


class Draft(NamedTuple):
    """A call as read; `id` where the format writes one itself."""

    name: str
    arguments: str
    id: str = ""


class Malformed(ValueError):
    """The text is no valid call; the message is what the model is told."""


class Block(NamedTuple):
    """Where a call begins and, unless its JSON tells, where it ends."""

    opening: str
    closing: str = ""


def dump(value: Any) -> str:
    """JSON that every client can read: no NaN, and half a surrogate pair stays an escape."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise Malformed(f"error: the tool call is not valid JSON: {error}") from error
    return text if _is_text(text) else json.dumps(value)


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _load(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"error: the tool call is not valid JSON: {error}") from error


def _draft(raw: Any, key: str) -> Draft:
    if not isinstance(raw, dict) or not isinstance(raw.get("name"), str) or not isinstance(raw.get(key), dict) or not _is_text(raw["name"]):
        raise Malformed(f'error: a tool call needs "name" and "{key}"')
    return Draft(raw["name"], dump(raw[key]))


def arguments_of(text: str) -> str:
    """Of a call whose arguments stand by themselves."""
    raw = _load(text)
    if not isinstance(raw, dict):
        raise Malformed("error: the arguments of a tool call must be a JSON object")
    return dump(raw)


_WS = r"[ \t\r\n]*"
_OBJECT = rf"{_WS}(?=\{{)"
"""Before arguments, as JSON has white space."""
HERMES_HEAD = re.compile(rf'<tool_call>{_WS}\{{{_WS}"name"{_WS}:{_WS}"(?P<name>[^"\\]+)"{_WS},{_WS}"arguments"{_WS}:{_OBJECT}')
"""A block's text up to its arguments; such patterns let a call be shown while it is written."""


def parse_hermes(block: str, tools: Mapping[str, Tool]) -> list[Draft]:
    return [_draft(_load(block.removeprefix("<tool_call>").removesuffix("</tool_call>")), "arguments")]


def parse_llama(block: str, tools: Mapping[str, Tool]) -> list[Draft]:
    raw = _load(block.removeprefix("<|python_tag|>"))
    return [_draft(raw, "arguments" if isinstance(raw, dict) and "parameters" not in raw and "arguments" in raw else "parameters")]


def parse_list(block: str, tools: Mapping[str, Tool]) -> list[Draft]:
    raw = _load(block[block.index("[") :])
    if not raw:
        raise Malformed("error: the list of tool calls is empty")
    return [_draft(call, "arguments") for call in raw]


_MISTRAL_HEAD = re.compile(r"\s*([^\s\[\]{}]+)\s*(?:\[CALL_ID\]\s*([^\s\[\]{}]+)\s*)?(?:\[ARGS\]\s*)?")


def parse_mistral(block: str, tools: Mapping[str, Tool]) -> list[Draft]:
    body = block.removeprefix("[TOOL_CALLS]")
    if body.lstrip().startswith("["):
        return parse_list(body, tools)
    found = _MISTRAL_HEAD.match(body)
    if found is None:
        raise Malformed("error: a tool call needs a name before its arguments")
    return [Draft(found[1], arguments_of(body[found.end() :]), found[2] or "")]


_DEEPSEEK_FENCE = re.compile(r"\s*(\S+)\s*```(?:json)?\s*(.*?)\s*```\s*", re.DOTALL)
DEEPSEEK_BLOCK = Block("<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>")
DEEPSEEK_SEP = "<\uff5ctool\u2581sep\uff5c>"
DEEPSEEK_V3_HEAD = re.compile(rf"{DEEPSEEK_BLOCK.opening}\w*{DEEPSEEK_SEP}\s*(?P<name>\S+?)\s*```(?:json)?\s*(?=\{{)")
DEEPSEEK_V31_HEAD = re.compile(rf"{DEEPSEEK_BLOCK.opening}\s*(?P<name>\S+?)\s*{DEEPSEEK_SEP}{_OBJECT}")
DEEPSEEK_SECTION = ("<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>")


def parse_deepseek(block: str, tools: Mapping[str, Tool]) -> list[Draft]:
    body = block.removeprefix(DEEPSEEK_BLOCK.opening).removesuffix(DEEPSEEK_BLOCK.closing)
    head, _, rest = body.partition(DEEPSEEK_SEP)
    fenced = _DEEPSEEK_FENCE.fullmatch(rest)
    if fenced is not None:
        return [Draft(fenced[1], arguments_of(fenced[2]))]
    if not head.strip() or not rest.strip():
        raise Malformed(f"error: a tool call needs a name, {DEEPSEEK_SEP} and its arguments")
    return [Draft(head.strip(), arguments_of(rest))]


KIMI_BLOCK = Block("<|tool_call_begin|>", "<|tool_call_end|>")
_KIMI_SEP = "<|tool_call_argument_begin|>"
_KIMI_NAME = re.compile(r"\s*(?P<id>(?:functions\.)?(?P<name>\S+?)(?::\d+)?)\s*")
KIMI_HEAD = re.compile(rf"{re.escape(KIMI_BLOCK.opening)}{_KIMI_NAME.pattern}{re.escape(_KIMI_SEP)}{_OBJECT}")


def parse_kimi(block: str, tools: Mapping[str, Tool]) -> list[Draft]:
    body = block.removeprefix(KIMI_BLOCK.opening).removesuffix(KIMI_BLOCK.closing)
    head, sep, rest = body.partition(_KIMI_SEP)
    found = _KIMI_NAME.fullmatch(head)
    if not sep or found is None:
        raise Malformed(f"error: a tool call needs functions.NAME:NUMBER, {_KIMI_SEP} and its arguments")
    return [Draft(found["name"], arguments_of(rest), found["id"])]


_QWEN_FUNCTION = re.compile(r"<function=([^>\s]+)\s*>(.*)</function>", re.DOTALL)
_QWEN_PARAMETER = re.compile(r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def parse_qwen_coder(block: str, tools: Mapping[str, Tool]) -> list[Draft]:
    found = _QWEN_FUNCTION.search(block)
    if found is None:
        raise Malformed("error: a tool call needs <function=NAME> ... </function>")
    if _QWEN_PARAMETER.sub("", found[2]).strip():
        raise Malformed("error: a tool call holds nothing but <parameter=NAME> ... </parameter>")
    return [_typed_draft(found[1], _QWEN_PARAMETER.findall(found[2]), tools)]


_GLM_CALL = re.compile(r"<tool_call>\s*([^\s<]+)\s*(.*)</tool_call>", re.DOTALL)
_GLM_PAIR = re.compile(r"<arg_key>\s*(.*?)\s*</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def parse_glm(block: str, tools: Mapping[str, Tool]) -> list[Draft]:
    found = _GLM_CALL.fullmatch(block)
    if found is None or _GLM_PAIR.sub("", found[2]).strip():
        raise Malformed("error: a tool call needs a name, then <arg_key> and <arg_value> for each argument")
    return [_typed_draft(found[1], _GLM_PAIR.findall(found[2]), tools)]


def _typed_draft(name: str, pairs: Sequence[tuple[str, str]], tools: Mapping[str, Tool]) -> Draft:
    """Values are bare text in these formats: the tool's schema says which of them are text."""
    known = tools[name].parameters.get("properties", {}) if name in tools else {}
    return Draft(name, dump({key: _typed(text, known.get(key)) for key, text in pairs}))


def _typed(text: str, schema: Any) -> Any:
    if not isinstance(schema, dict) or is_text_schema(schema):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def is_text_schema(schema: Mapping[str, Any]) -> bool:
    """Whether a value of this schema is written without quotes in formats of bare text."""
    kind = schema.get("type", "string" if all(isinstance(v, str) for v in schema.get("enum", [None])) else None)
    return kind == "string" or (isinstance(kind, list) and "string" in kind)


def object_at(text: str) -> int | None:
    return _first_of(text, "{")


def list_at(text: str) -> int | None:
    return _first_of(text, "[")


def _first_of(text: str, wanted: str) -> int | None:
    bare = text.lstrip()
    return None if not bare else len(text) - len(bare) if bare[0] == wanted else -1


def mistral_at(text: str) -> int | None:
    """A list of calls, or a name and then an object."""
    bare = text.lstrip()
    if bare.startswith("["):
        inner = bare[1:].lstrip()
        return None if not inner else len(text) - len(bare) if inner[0] in "{]" else -1
    at = text.find("{")
    return at if at >= 0 else None if len(text) < _MAX_HEAD_CHARS else -1
