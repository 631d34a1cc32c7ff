"""How models write tool calls: one record of data per format, from which calls are read, written, constrained and told of."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from rollmill.chat.call_parsers import (
    DEEPSEEK_BLOCK,
    DEEPSEEK_SECTION,
    DEEPSEEK_SEP,
    DEEPSEEK_V3_HEAD,
    DEEPSEEK_V31_HEAD,
    HERMES_HEAD,
    KIMI_BLOCK,
    KIMI_HEAD,
    Block,
    Draft,
    dump,
    list_at,
    mistral_at,
    object_at,
    parse_deepseek,
    parse_glm,
    parse_hermes,
    parse_kimi,
    parse_list,
    parse_llama,
    parse_mistral,
    parse_qwen_coder,
)
from rollmill.chat.messages import Call, Tool

MAYBE_NEWLINE = "\x0b"
"""In the texts of a format: models of this format write a line feed here or do not."""
NUMBER = "\x0c"
"""In the texts of a format: the number of the call in its answer."""
_NAME = "{name}"
_JSON_NAME = "{json}"


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
    streamed: re.Pattern[str] | None = None
    """A block's text up to its arguments, with groups `name` and perhaps `id`, where a closing ends the block and the arguments are one
    JSON object: they can be shown while they are written."""
    begin: str = ""
    head: str = ""
    tail: str = ""
    between: str = ""
    end: str = ""
    parameter: tuple[str, str] | None = None
    """What stands around each argument, where arguments are not one JSON object."""
    advice: str = "Several calls may follow one another."
    """What a model is told beyond an example of one call."""
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

    def prompt(self, tools: Sequence[Tool], neutral: Callable[[str], str]) -> str:
        """What a model is told of tools by whoever must, since its template does not: the same text for equal tools.

        `neutral` takes the control tokens out of what comes from outside; those of the format are meant.
        """
        known = "\n".join([neutral(_schema(tool)) for tool in tools])
        told = "These tools can be called, each given with the JSON schema of its arguments:"
        return f"{told}\n{known}\n\nTo call a tool, write its name and arguments like this:\n{self.write([_EXAMPLE])}\n{self.advice}"

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


class _Known(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tool as a model is told of it."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}


def _schema(tool: Tool) -> str:
    """On one line. Keys of maps are sorted, since two tools are equal in whatever order a client writes them."""
    return msgspec.json.encode(_Known(tool.name, tool.description, tool.parameters), order="deterministic").decode()


_EXAMPLE = Call(id="", name="NAME", arguments='{"ARGUMENT": "VALUE"}')
_IN_SECTION = "Several calls go between the same outer markers."
_IN_LIST = "Several calls go into the same list."
_TOOL_CALL = Block("<tool_call>", "</tool_call>")
_ALL = (
    ToolFormat(
        name="qwen3_coder",
        about="Qwen3-Coder, Qwen3.5",
        hints=(("<function=", "<parameter="),),
        blocks=(_TOOL_CALL, Block("<function=", "</function>")),
        skips=("</tool_call>",),
        parse=parse_qwen_coder,
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
        parse=parse_glm,
        head="<tool_call>{name}\n",
        parameter=("<arg_key>{name}</arg_key>\n<arg_value>", "</arg_value>\n"),
        tail="</tool_call>",
        between="\n",
    ),
    ToolFormat(
        name="kimi_k2",
        about="Kimi K2",
        hints=(("<|tool_call_begin|>",),),
        blocks=(KIMI_BLOCK,),
        skips=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        parse=parse_kimi,
        streamed=KIMI_HEAD,
        begin="<|tool_calls_section_begin|>",
        head=f"<|tool_call_begin|>functions.{{name}}:{NUMBER}<|tool_call_argument_begin|>",
        tail="<|tool_call_end|>",
        advice=_IN_SECTION,
        end="<|tool_calls_section_end|>",
    ),
    ToolFormat(
        name="deepseek_v3",
        about="DeepSeek V3, R1",
        hints=((DEEPSEEK_SECTION[0], "```json"),),
        blocks=(DEEPSEEK_BLOCK,),
        skips=DEEPSEEK_SECTION,
        parse=parse_deepseek,
        streamed=DEEPSEEK_V3_HEAD,
        begin=DEEPSEEK_SECTION[0],
        head=f"{DEEPSEEK_BLOCK.opening}function{DEEPSEEK_SEP}{{name}}\n```json\n",
        tail=f"\n```{DEEPSEEK_BLOCK.closing}",
        advice=_IN_SECTION,
        between="\n",
        end=DEEPSEEK_SECTION[1],
    ),
    ToolFormat(
        name="deepseek_v31",
        about="DeepSeek V3.1",
        hints=((DEEPSEEK_SECTION[0],),),
        blocks=(DEEPSEEK_BLOCK,),
        skips=DEEPSEEK_SECTION,
        parse=parse_deepseek,
        streamed=DEEPSEEK_V31_HEAD,
        begin=DEEPSEEK_SECTION[0],
        head=f"{DEEPSEEK_BLOCK.opening}{{name}}{DEEPSEEK_SEP}",
        tail=DEEPSEEK_BLOCK.closing,
        advice=_IN_SECTION,
        end=DEEPSEEK_SECTION[1],
    ),
    ToolFormat(
        name="mistral_args",
        about="Mistral from tokenizer v11 on: [TOOL_CALLS]name[ARGS]{...}",
        hints=(("[TOOL_CALLS]", "[ARGS]"),),
        blocks=(Block("[TOOL_CALLS]"),),
        json_at=mistral_at,
        parse=parse_mistral,
        head="[TOOL_CALLS]{name}[ARGS]",
        has_short_ids=True,
    ),
    ToolFormat(
        name="mistral",
        about="Mistral before that: [TOOL_CALLS][{...}]",
        hints=(("[TOOL_CALLS]",),),
        blocks=(Block("[TOOL_CALLS]"),),
        json_at=mistral_at,
        parse=parse_mistral,
        begin="[TOOL_CALLS][",
        advice=_IN_LIST,
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
        json_at=list_at,
        parse=parse_list,
        begin="<|tool_call|>[",
        advice=_IN_LIST,
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
        json_at=object_at,
        parse=parse_llama,
        head='{"name": {json}, "parameters": ',
        tail="}",
        between="; ",
        advice="Write nothing before it. Several calls are separated by semicolons.",
    ),
    ToolFormat(
        name="hermes",
        about="Qwen2.5, Qwen3, Hermes, SmolLM, the demo model; taken when a template shows no format",
        hints=(("<tool_call>",),),
        blocks=(_TOOL_CALL,),
        parse=parse_hermes,
        streamed=HERMES_HEAD,
        head=f'<tool_call>{MAYBE_NEWLINE}{{"name": {{json}}, "arguments": ',
        tail=f"}}{MAYBE_NEWLINE}</tool_call>",
        between=MAYBE_NEWLINE,
    ),
    ToolFormat(name="none", about="calls stay text", hints=(), parse=parse_hermes),
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
