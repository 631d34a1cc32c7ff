"""How models write tool calls: one record of data per format, from which calls are read, written and constrained.

Reading is lenient about white space and strict about the rest: what is no call raises Malformed with one line of advice for the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from rollmill.chat.messages import Call, Tool

MAYBE_NEWLINE = "\x0b"
"""In the texts of a format: models of this format write a line feed here or do not."""
NUMBER = "\x0c"
"""In the texts of a format: the number of the call in its answer."""
_NAME = "{name}"
_JSON_NAME = "{json}"
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


class ToolFormat(msgspec.Struct, frozen=True, kw_only=True):
    """One way to write calls.

    An answer's calls are `begin`, each call's `head`, arguments, `tail`, with `between` between them, and `end`.

    >>> FORMATS["llama3_json"].write([Call(id="c", name="ls", arguments='{"path": "."}')])
    '{"name": "ls", "parameters": {"path": "."}}'
    """

    name: str
    about: str
    """Models that write so."""
    hints: tuple[tuple[str, ...], ...]
    """A template that holds all texts of one of these uses the format."""
    blocks: tuple[Block, ...] = ()
    """Texts that begin a call wherever they occur."""
    skips: tuple[str, ...] = ()
    """Texts around calls that mean nothing by themselves."""
    is_bare: bool = False
    """A call is also a JSON object at the beginning of an answer, without any marker."""
    json_at: Callable[[str], int | None] | None = None
    """Where the JSON begins in the text after an opening: None when that cannot be told yet, -1 when there is none."""
    parse: Callable[[str, Mapping[str, Tool]], list[Draft]]
    """The calls of a whole block, its opening and closing included."""
    begin: str = ""
    head: str = ""
    tail: str = ""
    between: str = ""
    end: str = ""
    parameter: tuple[str, str] | None = None
    """What stands around each argument, where arguments are not one JSON object."""
    has_short_ids: bool = False
    """Its templates refuse call ids that are not nine letters and digits."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts to look for in an answer."""
        return (*(b.opening for b in self.blocks), *self.skips)

    def head_of(self, name: str) -> str:
        sign, text = (_JSON_NAME, json.dumps(name, ensure_ascii=False)) if _JSON_NAME in self.head else (_NAME, name)
        return self.head.replace(sign, text)

    def write(self, calls: Sequence[Call]) -> str:
        """As a model of this format would have written them."""
        if not calls:
            return ""
        texts = [
            f"{self.head_of(c.name)}{self._write_arguments(c.arguments)}{self.tail}".replace(NUMBER, str(n)) for n, c in enumerate(calls)
        ]
        return f"{self.begin}{self.between.join(texts)}{self.end}".replace(MAYBE_NEWLINE, "\n")

    def _write_arguments(self, arguments: str) -> str:
        if self.parameter is None:
            return arguments
        before, after = self.parameter
        try:
            values = json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments
        if not isinstance(values, dict):
            return arguments
        return "".join(before.replace(_NAME, k) + (v if isinstance(v, str) else dump(v)) + after for k, v in values.items())


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


def _arguments(text: str) -> str:
    raw = _load(text)
    if not isinstance(raw, dict):
        raise Malformed("error: the arguments of a tool call must be a JSON object")
    return dump(raw)


def _parse_hermes(block: str, tools: Mapping[str, Tool]) -> list[Draft]:
    return [_draft(_load(block.removeprefix("<tool_call>").removesuffix("</tool_call>")), "arguments")]


def _parse_llama(block: str, tools: Mapping[str, Tool]) -> list[Draft]:
    raw = _load(block.removeprefix("<|python_tag|>"))
    return [_draft(raw, "arguments" if isinstance(raw, dict) and "parameters" not in raw and "arguments" in raw else "parameters")]


def _parse_list(block: str, tools: Mapping[str, Tool]) -> list[Draft]:
    raw = _load(block[block.index("[") :])
    if not raw:
        raise Malformed("error: the list of tool calls is empty")
    return [_draft(call, "arguments") for call in raw]


_MISTRAL_HEAD = re.compile(r"\s*([^\s\[\]{}]+)\s*(?:\[CALL_ID\]\s*([^\s\[\]{}]+)\s*)?(?:\[ARGS\]\s*)?")


def _parse_mistral(block: str, tools: Mapping[str, Tool]) -> list[Draft]:
    body = block.removeprefix("[TOOL_CALLS]")
    if body.lstrip().startswith("["):
        return _parse_list(body, tools)
    found = _MISTRAL_HEAD.match(body)
    if found is None:
        raise Malformed("error: a tool call needs a name before its arguments")
    return [Draft(found[1], _arguments(body[found.end() :]), found[2] or "")]


_DEEPSEEK_FENCE = re.compile(r"\s*(\S+)\s*```(?:json)?\s*(.*?)\s*```\s*", re.DOTALL)
_DEEPSEEK_BLOCK = Block("<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>")
_DEEPSEEK_SEP = "<\uff5ctool\u2581sep\uff5c>"
_DEEPSEEK_SECTION = ("<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>")


def _parse_deepseek(block: str, tools: Mapping[str, Tool]) -> list[Draft]:
    body = block.removeprefix(_DEEPSEEK_BLOCK.opening).removesuffix(_DEEPSEEK_BLOCK.closing)
    head, _, rest = body.partition(_DEEPSEEK_SEP)
    fenced = _DEEPSEEK_FENCE.fullmatch(rest)
    if fenced is not None:
        return [Draft(fenced[1], _arguments(fenced[2]))]
    if not head.strip() or not rest.strip():
        raise Malformed(f"error: a tool call needs a name, {_DEEPSEEK_SEP} and its arguments")
    return [Draft(head.strip(), _arguments(rest))]


_KIMI_BLOCK = Block("<|tool_call_begin|>", "<|tool_call_end|>")
_KIMI_SEP = "<|tool_call_argument_begin|>"
_KIMI_HEAD = re.compile(r"\s*((?:functions\.)?(\S+?)(?::\d+)?)\s*")


def _parse_kimi(block: str, tools: Mapping[str, Tool]) -> list[Draft]:
    body = block.removeprefix(_KIMI_BLOCK.opening).removesuffix(_KIMI_BLOCK.closing)
    head, sep, rest = body.partition(_KIMI_SEP)
    found = _KIMI_HEAD.fullmatch(head)
    if not sep or found is None:
        raise Malformed(f"error: a tool call needs functions.NAME:NUMBER, {_KIMI_SEP} and its arguments")
    return [Draft(found[2], _arguments(rest), found[1])]


_QWEN_FUNCTION = re.compile(r"<function=([^>\s]+)\s*>(.*)</function>", re.DOTALL)
_QWEN_PARAMETER = re.compile(r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def _parse_qwen_coder(block: str, tools: Mapping[str, Tool]) -> list[Draft]:
    found = _QWEN_FUNCTION.search(block)
    if found is None:
        raise Malformed("error: a tool call needs <function=NAME> ... </function>")
    if _QWEN_PARAMETER.sub("", found[2]).strip():
        raise Malformed("error: a tool call holds nothing but <parameter=NAME> ... </parameter>")
    return [_typed_draft(found[1], _QWEN_PARAMETER.findall(found[2]), tools)]


_GLM_CALL = re.compile(r"<tool_call>\s*([^\s<]+)\s*(.*)</tool_call>", re.DOTALL)
_GLM_PAIR = re.compile(r"<arg_key>\s*(.*?)\s*</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def _parse_glm(block: str, tools: Mapping[str, Tool]) -> list[Draft]:
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


def _object_at(text: str) -> int | None:
    return _first_of(text, "{")


def _list_at(text: str) -> int | None:
    return _first_of(text, "[")


def _first_of(text: str, wanted: str) -> int | None:
    bare = text.lstrip()
    return None if not bare else len(text) - len(bare) if bare[0] == wanted else -1


def _mistral_at(text: str) -> int | None:
    """A list of calls, or a name and then an object."""
    bare = text.lstrip()
    if bare.startswith("["):
        inner = bare[1:].lstrip()
        return None if not inner else len(text) - len(bare) if inner[0] in "{]" else -1
    at = text.find("{")
    return at if at >= 0 else None if len(text) < _MAX_HEAD_CHARS else -1


_TOOL_CALL = Block("<tool_call>", "</tool_call>")
_ALL = (
    ToolFormat(
        name="qwen3_coder",
        about="Qwen3-Coder, Qwen3.5",
        hints=(("<function=", "<parameter="),),
        blocks=(_TOOL_CALL, Block("<function=", "</function>")),
        skips=("</tool_call>",),
        parse=_parse_qwen_coder,
        head="<tool_call>\n<function={name}>\n",
        parameter=("<parameter={name}>\n", "\n</parameter>\n"),
        tail="</function>\n</tool_call>",
        between="\n",
    ),
    ToolFormat(
        name="glm45",
        about="GLM-4.5 and later",
        hints=(("<arg_key>",),),
        blocks=(_TOOL_CALL,),
        parse=_parse_glm,
        head="<tool_call>{name}\n",
        parameter=("<arg_key>{name}</arg_key>\n<arg_value>", "</arg_value>\n"),
        tail="</tool_call>",
        between="\n",
    ),
    ToolFormat(
        name="kimi_k2",
        about="Kimi K2",
        hints=(("<|tool_call_begin|>",),),
        blocks=(_KIMI_BLOCK,),
        skips=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        parse=_parse_kimi,
        begin="<|tool_calls_section_begin|>",
        head=f"<|tool_call_begin|>functions.{{name}}:{NUMBER}<|tool_call_argument_begin|>",
        tail="<|tool_call_end|>",
        end="<|tool_calls_section_end|>",
    ),
    ToolFormat(
        name="deepseek_v3",
        about="DeepSeek V3, R1",
        hints=((_DEEPSEEK_SECTION[0], "```json"),),
        blocks=(_DEEPSEEK_BLOCK,),
        skips=_DEEPSEEK_SECTION,
        parse=_parse_deepseek,
        begin=_DEEPSEEK_SECTION[0],
        head=f"{_DEEPSEEK_BLOCK.opening}function{_DEEPSEEK_SEP}{{name}}\n```json\n",
        tail=f"\n```{_DEEPSEEK_BLOCK.closing}",
        between="\n",
        end=_DEEPSEEK_SECTION[1],
    ),
    ToolFormat(
        name="deepseek_v31",
        about="DeepSeek V3.1",
        hints=((_DEEPSEEK_SECTION[0],),),
        blocks=(_DEEPSEEK_BLOCK,),
        skips=_DEEPSEEK_SECTION,
        parse=_parse_deepseek,
        begin=_DEEPSEEK_SECTION[0],
        head=f"{_DEEPSEEK_BLOCK.opening}{{name}}{_DEEPSEEK_SEP}",
        tail=_DEEPSEEK_BLOCK.closing,
        end=_DEEPSEEK_SECTION[1],
    ),
    ToolFormat(
        name="mistral_args",
        about="Mistral from tokenizer v11 on: [TOOL_CALLS]name[ARGS]{...}",
        hints=(("[TOOL_CALLS]", "[ARGS]"),),
        blocks=(Block("[TOOL_CALLS]"),),
        json_at=_mistral_at,
        parse=_parse_mistral,
        head="[TOOL_CALLS]{name}[ARGS]",
        has_short_ids=True,
    ),
    ToolFormat(
        name="mistral",
        about="Mistral before that: [TOOL_CALLS][{...}]",
        hints=(("[TOOL_CALLS]",),),
        blocks=(Block("[TOOL_CALLS]"),),
        json_at=_mistral_at,
        parse=_parse_mistral,
        begin="[TOOL_CALLS][",
        has_short_ids=True,
        head='{"name": {json}, "arguments": ',
        tail="}",
        between=", ",
        end="]",
    ),
    ToolFormat(
        name="json_list",
        about="Granite 3, Phi-4-mini",
        hints=(("<|tool_call|>",), ("functools[",)),
        blocks=(Block("<|tool_call|>"), Block("functools")),
        skips=("<|/tool_call|>",),
        json_at=_list_at,
        parse=_parse_list,
        begin="<|tool_call|>[",
        head='{"name": {json}, "arguments": ',
        tail="}",
        between=", ",
        end="]",
    ),
    ToolFormat(
        name="llama3_json",
        about="Llama 3.1 to 3.3",
        hints=(("<|python_tag|>",), ("<|start_header_id|>", '"parameters"')),
        blocks=(Block("<|python_tag|>"),),
        is_bare=True,
        json_at=_object_at,
        parse=_parse_llama,
        head='{"name": {json}, "parameters": ',
        tail="}",
        between="; ",
    ),
    ToolFormat(
        name="hermes",
        about="Qwen2.5, Qwen3, Hermes, SmolLM, the demo model; taken when a template shows no format",
        hints=(("<tool_call>",),),
        blocks=(_TOOL_CALL,),
        parse=_parse_hermes,
        head=f'<tool_call>{MAYBE_NEWLINE}{{"name": {{json}}, "arguments": ',
        tail=f"}}{MAYBE_NEWLINE}</tool_call>",
        between=MAYBE_NEWLINE,
    ),
    ToolFormat(name="none", about="calls stay text", hints=(), parse=_parse_hermes),
)
FORMATS: Mapping[str, ToolFormat] = {f.name: f for f in _ALL}


def detect(template: str) -> ToolFormat:
    """The format that a template's text writes; the most particular one first."""
    return next((f for f in _ALL if any(all(h in template for h in hint) for hint in f.hints)), FORMATS["hermes"])


def open_format(name: str, template: str) -> ToolFormat:
    if name == "auto":
        return detect(template)
    if name not in FORMATS:
        raise ValueError(f"tool format {name!r} is not known; choose auto or one of {', '.join(FORMATS)}")
    return FORMATS[name]
