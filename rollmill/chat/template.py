"""What a model's chat template writes around an answer: everything before it, and everything between it and the next one.

An answer's own text is never rendered: a mark stands in its place, so what was sampled cannot drift.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rollmill.chat.messages import Call, ChatMessage, ChatRole, Tool
from rollmill.chat.shape import Abilities, Shape, Shaped
from rollmill.chat.tool_formats import ToolFormat
from rollmill.model.tokenizer import Tokenizer

_PROBE_CALL = Call(id="call00000", name="probe_call", arguments='{"probe_key": "probe_value"}')
_PROBE_TOOL = Tool(
    name="probe_tool",
    description="d",
    parameters={"type": "object", "properties": {"probe_key": {"type": "string", "description": "d"}}, "required": ["probe_key"]},
)


def system(text: str) -> ChatMessage:
    return ChatMessage(role=ChatRole.SYSTEM, text=text)


def user(text: str) -> ChatMessage:
    return ChatMessage(role=ChatRole.USER, text=text)


def assistant(text: str = "", *calls: Call, reasoning: str = "") -> ChatMessage:
    return ChatMessage(role=ChatRole.ASSISTANT, text=text, calls=calls, reasoning=reasoning)


def result(text: str, call: Call = _PROBE_CALL) -> ChatMessage:
    return ChatMessage(role=ChatRole.TOOL, text=text, call_id=call.id, name=call.name)


class Turns:
    """A template, with what it can and cannot say found out by trying."""

    def __init__(self, tokenizer: Tokenizer, tool_format: ToolFormat, *, options: Mapping[str, Any] = {}) -> None:
        self._template, self._options = tokenizer.chat_template, dict(options)
        self._stop_texts = [tokenizer.decode([i]) for i in sorted(tokenizer.stop_ids)]
        # Nobody outside ever sees the mark, so no message can hold it.
        self._mark = f"mark{secrets.token_hex(12)}"

        def shaped_by(can: Abilities) -> Shape:
            return Shape(tool_format, neutral=tokenizer.neutral, markers=tokenizer.markers, can=can)

        self.shape = shaped_by(self._abilities(shaped_by))
        self._needs_calls = self._finds_calls_needed()
        self.is_local, self._needs_tools = self._locality()
        """`is_local`: the text after an answer depends on the new messages and the system prompt alone (and on the tools where they
        are needed), so that a turn costs what is new."""

    @property
    def can(self) -> Abilities:
        return self.shape.can

    def opening(self, messages: Sequence[ChatMessage], tools: Sequence[Tool] = ()) -> str:
        """The whole conversation and the beginning of the next answer."""
        return self._render(self.shape.messages(messages, tools), self.shape.tools(tools))

    def try_opening(self, messages: Sequence[ChatMessage], tools: Sequence[Tool] = ()) -> str:
        """Empty when the template refuses."""
        return _try(lambda: self.opening(messages, tools))

    def closed(self, messages: Sequence[ChatMessage], tools: Sequence[Tool] = ()) -> str:
        """The whole conversation, as it stands when nobody is about to speak."""
        return self._render(self.shape.messages(messages, tools), self.shape.tools(tools), add_generation_prompt=False)

    def lines(self, messages: Sequence[ChatMessage], tools: Sequence[Tool] = (), *, add_generation_prompt: bool) -> list[tuple[int, str]]:
        """The same in pieces, each with the line of the template that wrote it."""
        shaped, shaped_tools = self.shape.messages(messages, tools), self.shape.tools(tools)
        return self._template.lines(shaped, shaped_tools, add_generation_prompt=add_generation_prompt, **self._options)

    def after(self, history: Sequence[ChatMessage], new: Sequence[ChatMessage], tools: Sequence[Tool] = ()) -> str:
        """The text that follows an answer: its closing, the `new` messages and the beginning of the next answer.

        `history` ends just before the answer.
        """
        if self.is_local:
            try:
                return self._after(_short(history), new, tools if self._needs_tools else ())
            except ValueError:
                # The short history may be what the template objects to; with the whole one it has the last word.
                pass
        return self._after(history, new, tools)

    def _after(self, history: Sequence[ChatMessage], new: Sequence[ChatMessage], tools: Sequence[Tool]) -> str:
        if self._needs_calls and new and new[0].role is ChatRole.TOOL:
            try:
                return self._after_calls(history, new, tools)
            except ValueError:
                # Some templates cannot write several calls in one answer.
                pass
        return self._after_text(history, new, tools)

    def _after_text(self, history: Sequence[ChatMessage], new: Sequence[ChatMessage], tools: Sequence[Tool]) -> str:
        return self._after_mark(history, {"role": "assistant", "content": self._mark}, new, tools, num_marks=1)

    def _after_calls(self, history: Sequence[ChatMessage], new: Sequence[ChatMessage], tools: Sequence[Tool]) -> str:
        """For templates that write results by the calls before them: the answer is shown with one call per result."""
        results = new[: next((n for n, m in enumerate(new) if m.role is not ChatRole.TOOL), len(new))]
        arguments = json.dumps({"a": self._mark})
        answer = assistant("", *(Call(id=m.call_id, name=m.name or "tool", arguments=arguments) for m in results))
        rest = self._after_mark(history, self.shape.message(answer), new, tools, num_marks=len(results))
        # What is left of the last call goes before the end of the turn, which only a stop token shows.
        found = [at for at in (rest.find(stop) for stop in self._stop_texts) if at >= 0]
        if not found:
            raise ValueError("the chat template ends a turn of tool calls without a stop token")
        return rest[min(found) :]

    def _after_mark(
        self, history: Sequence[ChatMessage], answer: Shaped, new: Sequence[ChatMessage], tools: Sequence[Tool], *, num_marks: int
    ) -> str:
        text = self._render([*self.shape.messages(history, tools), answer, *self.shape.messages(new)], self.shape.tools(tools))
        if text.count(self._mark) != num_marks:
            raise ValueError("the chat template alters assistant text, so a sampled answer cannot be continued token by token")
        return text.rpartition(self._mark)[2]

    def _render(self, messages: Sequence[Shaped], tools: Sequence[Shaped], *, add_generation_prompt: bool = True) -> str:
        return self._template.render(messages, tools, add_generation_prompt=add_generation_prompt, **self._options)

    def _abilities(self, shaped_by: Callable[[Abilities], Shape]) -> Abilities:
        def text(messages: Sequence[ChatMessage], can: Abilities, tools: Sequence[Tool] = ()) -> str:
            shape = shaped_by(can)
            return _try(lambda: self._render(shape.messages(messages), shape.tools(tools), add_generation_prompt=False))

        has_system = "probe_system" in text([system("probe_system"), user("u")], Abilities())
        can = Abilities(has_system=has_system)
        asked = [[user("u")], [system("s"), user("u")]]
        shows_tools = all(_PROBE_TOOL.name in text(messages, can, (_PROBE_TOOL,)) for messages in asked)
        called = [user("u"), assistant("", _PROBE_CALL), result("probe_result")]
        for can in (Abilities(), Abilities(wants_text_arguments=True), Abilities(shows_calls=False)):
            shown = text(called, can, (_PROBE_TOOL,) if shows_tools else ())
            if _PROBE_CALL.name in shown and "probe_value" in shown and "{'probe_key'" not in shown:
                break
        return Abilities(
            has_system=has_system,
            shows_tools=shows_tools,
            has_tool_role="probe_result" in shown,
            shows_calls=can.shows_calls,
            wants_text_arguments=can.wants_text_arguments,
        )

    def _finds_calls_needed(self) -> bool:
        """Whether what follows results depends on the calls that the answer made."""
        for history in _HISTORIES:
            for new in _NEWS:
                if new and new[0].role is ChatRole.TOOL:
                    told = _try(lambda h=history, n=new: self._after_calls(h, n, ()))  # type: ignore[misc]
                    if told and told != _try(lambda h=history, n=new: self._after_text(h, n, ())):  # type: ignore[misc]
                        return True
        return False

    def _locality(self) -> tuple[bool, bool]:
        """Compare what follows an answer after a battery of histories with what follows it after a short one, with and without tools."""
        # What is written into the system prompt may hold a switch as much as the client's own words do.
        is_local, needs_tools = False, self.shape.writes_tools
        for history in _HISTORIES:
            for new in _NEWS:
                bare = ""
                for tools in ((), (_PROBE_TOOL,)):
                    whole = _try(lambda h=history, n=new, t=tools: self._after(h, n, t))  # type: ignore[misc]
                    short = _try(lambda h=history, n=new, t=tools: self._after(_short(h), n, t))  # type: ignore[misc]
                    bare = bare or short
                    if whole and short:
                        if whole != short:
                            return False, True
                        is_local, needs_tools = True, needs_tools or short != bare
        return is_local, needs_tools


def _try(render: Callable[[], str]) -> str:
    """Empty when the template refuses."""
    try:
        return render()
    except ValueError:
        return ""


def _short(history: Sequence[ChatMessage]) -> list[ChatMessage]:
    """The system prompt, since some templates take switches from it, and one question."""
    num_system = next((n for n, m in enumerate(history) if m.role is not ChatRole.SYSTEM), len(history))
    return [*history[:num_system], user("u")]


def _histories() -> Iterable[list[ChatMessage]]:
    called = [assistant("a", _PROBE_CALL), result("r")]
    yield [user("q")]
    yield [system("s"), user("q")]
    yield [user("q"), assistant("a"), user("q")]
    yield [system("s"), user("q"), *called]
    yield [user("q"), assistant("a", reasoning="t"), user("q"), *called, assistant("b", reasoning="t"), user("q")]
    yield [user("q"), *called, *called, *called]
    yield [system("s"), *[user("q"), assistant("a")] * 5, user("q")]


_HISTORIES = list(_histories())
_NEWS: list[list[ChatMessage]] = [
    [user("n")],
    [result("n")],
    [result("n"), result("m")],
    [result("n"), user("m")],
    [user("n"), assistant("a"), user("m")],
    [result("n"), assistant("a", _PROBE_CALL), result("m")],
    [],
]
