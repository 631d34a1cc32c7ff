"""What a model's chat template writes around an answer: everything before it, and everything between it and the next one.

An answer's own text is never rendered: a mark stands in its place, so what was sampled cannot drift. Messages come from outside, so
control tokens in them are broken up here, on their way into the template.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from blake3 import blake3

from rollmill.chat.messages import Call, ChatMessage, ChatRole, Tool
from rollmill.chat.text_stream import held_suffix
from rollmill.chat.tool_formats import ToolFormat
from rollmill.model.chat_template import ChatTemplate

Rendered = dict[str, Any]
_NUM_SHORT_ID = 9
_PROBE_CALL = Call(id="call00000", name="probe_call", arguments='{"probe_key": "probe_value"}')
_PROBE_TOOL = Tool(
    name="probe_tool",
    description="d",
    parameters={"type": "object", "properties": {"probe_key": {"type": "string", "description": "d"}}, "required": ["probe_key"]},
)


def user(text: str) -> ChatMessage:
    return ChatMessage(role=ChatRole.USER, text=text)


def assistant(text: str = "", *calls: Call, reasoning: str = "") -> ChatMessage:
    return ChatMessage(role=ChatRole.ASSISTANT, text=text, calls=calls, reasoning=reasoning)


def result(text: str, call: Call = _PROBE_CALL) -> ChatMessage:
    return ChatMessage(role=ChatRole.TOOL, text=text, call_id=call.id, name=call.name)


class Turns:
    """A template, with what it can and cannot say found out by trying."""

    def __init__(
        self,
        template: ChatTemplate,
        tool_format: ToolFormat,
        *,
        neutral: Callable[[str], str],
        markers: Iterable[str] = (),
        stop_texts: Sequence[str] = (),
        options: Mapping[str, Any] = {},
    ) -> None:
        self.template, self._format, self._neutral = template, tool_format, neutral
        self._markers = tuple(markers)
        self._marker_starts = {m[0] for m in self._markers}
        self._stop_texts, self._options = tuple(stop_texts), dict(options)
        # Nobody outside ever sees the mark, so no message can hold it.
        self._mark = f"mark{secrets.token_hex(12)}"
        self.has_system = self.has_tool_role = self.shows_calls = True
        self._wants_text_arguments = False
        self._needs_calls = self._needs_tools = False
        self.is_local = False
        """The text after an answer depends on the new messages and the system prompt alone, so that a turn costs what is new."""
        self._find_abilities()
        self._needs_calls = any(
            self._try_after(h, n, (), with_calls=True) not in ("", self._try_after(h, n, (), with_calls=False))
            for h in _HISTORIES
            for n in _NEWS
            if n and n[0].role is ChatRole.TOOL
        )
        self._find_locality()

    def opening(self, messages: Sequence[ChatMessage], tools: Sequence[Tool] = ()) -> str:
        """The whole conversation and the beginning of the next answer."""
        return self._render(self._shaped(messages), self._shaped_tools(tools))

    def try_opening(self, messages: Sequence[ChatMessage], tools: Sequence[Tool] = ()) -> str:
        """Empty when the template refuses."""
        return self._try(lambda: self.opening(messages, tools))

    def closed(self, messages: Sequence[ChatMessage], tools: Sequence[Tool] = ()) -> str:
        """The whole conversation, as it stands when nobody is about to speak."""
        return self._render(self._shaped(messages), self._shaped_tools(tools), add_generation_prompt=False)

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
                return self._after_marked(history, new, tools, with_calls=True)
            except ValueError:
                # Some templates cannot write several calls in one answer.
                pass
        return self._after_marked(history, new, tools, with_calls=False)

    def _after_marked(self, history: Sequence[ChatMessage], new: Sequence[ChatMessage], tools: Sequence[Tool], *, with_calls: bool) -> str:
        answer: Rendered = {"role": "assistant", "content": self._mark}
        num_results = next((n for n, m in enumerate(new) if m.role is not ChatRole.TOOL), len(new)) if with_calls else 0
        if num_results:
            arguments = json.dumps({"a": self._mark})
            calls = [Call(id=m.call_id, name=m.name or "tool", arguments=arguments) for m in new[:num_results]]
            answer = self._shape(assistant("", *calls))
        before, after = self._shaped(history), self._shaped(new)
        text = self._render([*before, answer, *after], self._shaped_tools(tools))
        if text.count(self._mark) != max(1, num_results):
            raise ValueError("the chat template alters assistant text, so a sampled answer cannot be continued token by token")
        rest = text.rpartition(self._mark)[2]
        if not num_results:
            return rest
        # What is left of the last call goes before the end of the turn, which only a stop token shows.
        found = [at for at in (rest.find(stop) for stop in self._stop_texts) if at >= 0]
        if not found:
            raise ValueError("the chat template ends a turn of tool calls without a stop token")
        return rest[min(found) :]

    def _render(self, messages: Sequence[Rendered], tools: Sequence[Rendered], *, add_generation_prompt: bool = True) -> str:
        return self.template.render(messages, tools, add_generation_prompt=add_generation_prompt, **self._options)

    def _shaped(self, messages: Sequence[ChatMessage]) -> list[Rendered]:
        """As the template takes them. A system prompt it has no place for goes into the next user message."""
        shaped = [self._shape(m) for m in messages]
        if self.has_system:
            return shaped
        out: list[Rendered] = []
        for message in shaped:
            if out and out[-1]["role"] == "system" and message["role"] == "user":
                message = {**message, "content": f"{out.pop()['content']}\n\n{message['content']}"}
            out.append(message)
        return [{**m, "role": "user"} if m["role"] == "system" else m for m in out]

    def _shape(self, message: ChatMessage) -> Rendered:
        text, role = self._neutral(message.text), message.role
        if message.calls and not self.shows_calls:
            written = self._format.write([self._clean(c) for c in message.calls])
            text = f"{text}\n{written}" if text else written
        if role is ChatRole.TOOL and not self.has_tool_role:
            role = ChatRole.USER
        out: Rendered = {"role": str(role), "content": text}
        if message.reasoning:
            out["reasoning_content"] = self._neutral(message.reasoning)
        if message.calls and self.shows_calls:
            out["tool_calls"] = [self._shape_call(self._clean(c)) for c in message.calls]
        if message.call_id:
            out["tool_call_id"] = self._id(message.call_id)
        if message.name:
            out["name"] = self._clean_name(message.name)
        return out

    def _clean(self, call: Call) -> Call:
        try:
            arguments = json.dumps(self._clean_json(json.loads(call.arguments)), ensure_ascii=False)
        except (ValueError, RecursionError):
            arguments = self._neutral(call.arguments)
        return Call(id=self._neutral(call.id), name=self._clean_name(call.name), arguments=arguments)

    def _shape_call(self, call: Call) -> Rendered:
        arguments: Any = call.arguments
        if not self._wants_text_arguments:
            # A template written for objects prints text that is none as it is, or refuses.
            with suppress(ValueError, RecursionError):
                arguments = json.loads(call.arguments)
        return {"id": self._id(call.id), "type": "function", "function": {"name": call.name, "arguments": arguments}}

    def _id(self, call_id: str) -> str:
        if not self._format.has_short_ids or (len(call_id) == _NUM_SHORT_ID and call_id.isalnum()):
            return self._neutral(call_id)
        return blake3(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:_NUM_SHORT_ID]

    def _shaped_tools(self, tools: Sequence[Tool]) -> list[Rendered]:
        return [self._clean_json(t.as_template()) for t in tools]

    def _clean_json(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._neutral(value)
        if isinstance(value, dict):
            return {self._clean_name(str(k)): self._clean_json(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self._clean_json(v) for v in value]
        return value

    def _clean_name(self, name: str) -> str:
        """Templates write names right before their own brackets, with which half a marker would become a whole one."""
        name = self._neutral(name)
        if not self._marker_starts.isdisjoint(name) and (num_held := held_suffix(name, self._markers)):
            at = len(name) - num_held + 1
            name = f"{name[:at]} {name[at:]}"
        return name

    def _try(self, render: Callable[[], str]) -> str:
        try:
            return render()
        except ValueError:
            return ""

    def _find_abilities(self) -> None:
        self.has_system = "probe_system" in self._try(
            lambda: self.closed([ChatMessage(role=ChatRole.SYSTEM, text="probe_system"), user("u")])
        )
        called = [user("u"), assistant("", _PROBE_CALL), result("probe_result")]
        for self._wants_text_arguments in (False, True):
            self.shows_calls = True
            text = self._try(lambda: self.closed(called, [_PROBE_TOOL]))
            self.shows_calls = _PROBE_CALL.name in text and "probe_value" in text and "{'probe_key'" not in text
            if self.shows_calls:
                break
        self.has_tool_role = "probe_result" in text
        self.shows_tools = _PROBE_TOOL.name in self._try(lambda: self.closed([user("u")], [_PROBE_TOOL]))
        if not self.shows_calls:
            self._wants_text_arguments = False
            self.has_tool_role = "probe_result" in self._try(lambda: self.closed(called, [_PROBE_TOOL]))

    def _find_locality(self) -> None:
        """Compare what follows an answer after a battery of histories with what follows it after a short one."""
        pairs = [
            (
                self._try(lambda h=h, n=n, t=t: self._after(h, n, t)),  # type: ignore[misc]
                self._try(lambda h=h, n=n, t=t: self._after(_short(h), n, t)),  # type: ignore[misc]
                self._try(lambda h=h, n=n: self._after(_short(h), n, ())),  # type: ignore[misc]
            )
            for h in _HISTORIES
            for n in _NEWS
            for t in ((), (_PROBE_TOOL,))
        ]
        both = [p for p in pairs if p[0] and p[1]]
        self.is_local = bool(both) and all(full == short for full, short, _ in both)
        self._needs_tools = any(short != bare for _, short, bare in both)

    def _try_after(self, history: Sequence[ChatMessage], new: Sequence[ChatMessage], tools: Sequence[Tool], *, with_calls: bool) -> str:
        return self._try(lambda: self._after_marked(history, new, tools, with_calls=with_calls))


def _short(history: Sequence[ChatMessage]) -> list[ChatMessage]:
    """The system prompt, since some templates take switches from it, and one question."""
    num_system = next((n for n, m in enumerate(history) if m.role is not ChatRole.SYSTEM), len(history))
    return [*history[:num_system], user("u")]


def _histories() -> Iterable[list[ChatMessage]]:
    system = ChatMessage(role=ChatRole.SYSTEM, text="s")
    called = [assistant("a", _PROBE_CALL), result("r")]
    yield [user("q")]
    yield [system, user("q")]
    yield [user("q"), assistant("a"), user("q")]
    yield [system, user("q"), *called]
    yield [user("q"), assistant("a", reasoning="t"), user("q"), *called, assistant("b", reasoning="t"), user("q")]
    yield [user("q"), *called, *called, *called]
    yield [system, *[user("q"), assistant("a")] * 5, user("q")]


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
