"""A grammar under which an answer is nothing but well-formed tool calls, or JSON of a schema, in llguidance's dialect of Lark; the calls
are made from a format's data."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rollmill.chat.call_parsers import is_text_schema
from rollmill.chat.messages import Tool
from rollmill.chat.reader import Thinking
from rollmill.chat.tool_formats import MAYBE_NEWLINE, NUMBER, ToolFormat

_ANYTHING = "/(?s:.*)/"
# JSON allows white space without end, and a model that does not know what to say fills its answer with it.
_BOUNDED = {"x-guidance": {"whitespace_pattern": r"\n? {0,12}"}}


def json_text(schema: Mapping[str, Any]) -> str:
    """A schema as the grammar takes it."""
    return json.dumps({**_BOUNDED, **schema})


class _Rules:
    """Lark rules as they are added; a text becomes literals and, where the vocabulary has them, special tokens."""

    def __init__(self, specials: Mapping[str, int]) -> None:
        self._lines: list[str] = []
        self._specials = specials
        apart = [re.escape(t) for t in sorted(specials, key=len, reverse=True)]
        self._apart = re.compile(f"({'|'.join([*apart, MAYBE_NEWLINE, NUMBER])})")

    def add(self, name: str, body: str) -> str:
        self._lines.append(f"{name}: {body}")
        return name

    def atoms(self, text: str) -> list[str]:
        return [self._atom(part) for part in self._apart.split(text) if part]

    def _atom(self, part: str) -> str:
        if part == MAYBE_NEWLINE:
            return r"/\n?/"
        if part == NUMBER:
            return "/[0-9]+/"
        if part in self._specials:
            return f"<[{self._specials[part]}]>"
        return json.dumps(part, ensure_ascii=False)

    def until(self, name: str, ending: str) -> str:
        """Any text up to and with `ending`."""
        first, *rest = [part for part in self._apart.split(ending) if part]
        more = [self._atom(part) for part in rest]
        if first in self._specials:
            return self.add(name, " ".join([_ANYTHING, self._atom(first), *more]))
        self.add(f"{name}[suffix={json.dumps(first, ensure_ascii=False)}]", _ANYTHING)
        return " ".join([name, *more])

    def text(self) -> str:
        return "%llguidance {}\n" + "\n".join(self._lines) + "\n"


def answer_lark(
    tool_format: ToolFormat,
    tools: Sequence[Tool] = (),
    *,
    schema: Mapping[str, Any] | None = None,
    parallel: bool = True,
    thinking: Thinking | None = None,
    is_thinking: bool = False,
    specials: Mapping[str, int] = {},
) -> str:
    """Calls of `tools` where there are some, or JSON that follows `schema` where there is one.

    `specials`: special tokens by their text; `is_thinking`: the prompt has opened the reasoning, which must end first.
    """
    rules = _Rules(specials)
    ways = []
    if tools:
        one = rules.add("call", " | ".join([_call(rules, tool_format, tool, n) for n, tool in enumerate(tools)]))
        between = " ".join(rules.atoms(tool_format.between))
        more = [f"({between} {one})*"] if parallel else []
        ways.append(rules.add("calls", " ".join([*rules.atoms(tool_format.begin), one, *more, *rules.atoms(tool_format.end)])))
    if schema is not None:
        ways.append(rules.add("answer", f"%json {json_text(schema)}"))
    start = " | ".join(ways)
    if thinking is not None:
        thought = f"{rules.until('thought', thinking.closing)} /\\s*/"
        opening = " ".join(rules.atoms(thinking.opening))
        start = f"{thought} ({start})" if is_thinking else f"({opening} {thought})? ({start})"
    rules.add("start", start)
    return rules.text()


def _call(rules: _Rules, tool_format: ToolFormat, tool: Tool, number: int) -> str:
    head, tail = rules.atoms(tool_format.head_of(tool.name)), rules.atoms(tool_format.tail)
    if tool_format.parameter is None:
        schema = {"type": "object", **tool.parameters}
        arguments = [rules.add(f"args_{number}", f"%json {json_text(schema)}")]
    else:
        arguments = _parameters(rules, tool_format.parameter, tool.parameters, number)
    return rules.add(f"call_{number}", " ".join([*head, *arguments, *tail]))


def _parameters(rules: _Rules, around: tuple[str, str], schema: Mapping[str, Any], number: int) -> list[str]:
    """Arguments in the schema's order, each in its own brackets; those not required may be left out."""
    out = []
    for n, (key, value) in enumerate(schema.get("properties", {}).items()):
        before = " ".join(rules.atoms(around[0].replace("{name}", key)))
        if is_text_schema(value) and "enum" in value:
            words = " | ".join(json.dumps(v, ensure_ascii=False) for v in value["enum"])
            rest = f"({words}) {' '.join(rules.atoms(around[1]))}"
        elif is_text_schema(value):
            rest = rules.until(f"text_{number}_{n}", around[1])
        else:
            rest = f"{rules.add(f'json_{number}_{n}', f'%json {json_text(value)}')} {' '.join(rules.atoms(around[1]))}"
        out.append(f"({before} {rest}){'' if key in schema.get('required', []) else '?'}")
    return out
