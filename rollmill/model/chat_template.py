"""The Jinja chat template of a model directory: messages to text as the model's makers wrote it; knows no tokens and no sessions.

The template is foreign code: it runs in a sandbox without attribute access into the interpreter, and whatever it trips over is a
ValueError with its reason.
"""

from __future__ import annotations

import datetime
import json
import traceback
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

if TYPE_CHECKING:
    from jinja2.parser import Parser

Message = Mapping[str, Any]
_FAULTS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What a template can raise: its own refusals, and what wrong shapes of messages make of its expressions."""


class Refusal(ValueError):
    """The template cannot write these messages; `line` is where in its text, when that can be told."""

    def __init__(self, reason: str, line: int | None) -> None:
        super().__init__(f"the chat template refused these messages: {reason}")
        self.line = line


class ChatTemplate:
    """
    >>> ChatTemplate({"default": "{% for m in messages %}{{ m.content }};{% endfor %}"}).render([{"role": "user", "content": "hi"}])
    'hi;'
    """

    def __init__(self, texts: Mapping[str, str], specials: Mapping[str, str | None] = {}) -> None:
        """`texts` by name: `tool_use` is taken when tools are given, `default` otherwise."""
        env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
        env.filters["tojson"] = _tojson
        env.globals |= {"raise_exception": _refuse, "strftime_now": _strftime_now}
        self.texts = dict(texts)
        self._specials = dict(specials)
        try:
            self._compiled = {name: env.from_string(text) for name, text in texts.items()}
        except TemplateError as error:
            raise ValueError(f"the chat template is no Jinja: {error}; correct chat_template.jinja or tokenizer_config.json") from error

    def text(self, *, has_tools: bool) -> str:
        """The source that writes conversations with or without tools; empty when there is none."""
        return self.texts.get(self._name(has_tools), "")

    def render(
        self, messages: Sequence[Message], tools: Sequence[Message] | None = None, *, add_generation_prompt: bool = True, **options: Any
    ) -> str:
        """`options` are the template's own switches, such as `enable_thinking`."""
        template, given = self._chosen(tools), self._given(messages, tools, add_generation_prompt, options)
        try:
            return template.render(given)
        except _FAULTS as error:
            raise Refusal(f"{error}", _line(error, template)) from error

    def lines(
        self, messages: Sequence[Message], tools: Sequence[Message] | None = None, *, add_generation_prompt: bool = True, **options: Any
    ) -> list[tuple[int, str]]:
        """The same text in pieces, each with the line of the template that wrote it; for people who look for a fault."""
        template, given = self._chosen(tools), self._given(messages, tools, add_generation_prompt, options)
        running: Any = template.root_render_func(template.new_context(given))
        out = []
        try:
            for piece in running:
                out.append((template.get_corresponding_lineno(running.gi_frame.f_lineno), piece))
        except _FAULTS as error:
            raise Refusal(f"{error}", _line(error, template)) from error
        return out

    def _chosen(self, tools: Sequence[Message] | None) -> Template:
        template = self._compiled.get(self._name(bool(tools)))
        if template is None:
            raise ValueError("this model has no chat template; add chat_template.jinja to its directory or use /v1/completions")
        return template

    def _given(
        self, messages: Sequence[Message], tools: Sequence[Message] | None, add_generation_prompt: bool, options: Mapping[str, Any]
    ) -> dict[str, Any]:
        return {
            **self._specials,
            **options,
            "messages": [dict(m) for m in messages],
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }

    def _name(self, has_tools: bool) -> str:
        return "tool_use" if has_tools and "tool_use" in self._compiled else "default"


class _Generation(Extension):
    """`{% generation %}` marks what the assistant says for others' loss masks; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own, without HTML escapes: models were trained on plain JSON."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _line(error: BaseException, template: Template) -> int | None:
    """Jinja rewrites tracebacks so that its frames carry lines of the template; the last of them is where it stopped."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == (template.filename or "<template>")]
    return lines[-1] if lines else getattr(error, "lineno", None)
