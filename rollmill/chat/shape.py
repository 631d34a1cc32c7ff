"""Messages and tools in the shape a chat template takes, with the control tokens in them broken up: all of it comes from outside.

What a template has no place for (a system prompt, tools, calls, results) is said in a way it has; which those are is the caller's to find
out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from blake3 import blake3

from rollmill.chat.messages import Call, ChatMessage, ChatRole, Tool
from rollmill.chat.text_stream import held_suffix
from rollmill.chat.tool_formats import ToolFormat

Shaped = dict[str, Any]
_NUM_SHORT_ID = 9


class Abilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a template can say."""

    has_system: bool = True
    """Else a system prompt goes into the next user message."""
    has_tool_role: bool = True
    """Else results are user messages."""
    shows_calls: bool = True
    """Else calls are written into the text."""
    wants_text_arguments: bool = False
    """Arguments as JSON text, not as an object."""
    shows_tools: bool = True
    """Else they are written into the system prompt."""


class Shape:
    """How foreign messages are put to one template."""

    def __init__(self, tool_format: ToolFormat, *, neutral: Callable[[str], str], markers: Iterable[str], can: Abilities) -> None:
        self._format, self._neutral, self.can = tool_format, neutral, can
        self._markers = tuple(markers)
        self._marker_starts = {m[0] for m in self._markers}

    @property
    def writes_tools(self) -> bool:
        """The model is told of tools here and not by its template."""
        return not self.can.shows_tools and bool(self._format.blocks)

    def messages(self, messages: Sequence[ChatMessage], tools: Sequence[Tool] = ()) -> list[Shaped]:
        """`tools`: those of a conversation from its beginning."""
        shaped = [self.message(m) for m in messages]
        if tools and self.writes_tools:
            shaped = _with_system(self._format.prompt(tools, self._neutral), shaped)
        if self.can.has_system:
            return shaped
        out: list[Shaped] = []
        for message in shaped:
            if out and out[-1]["role"] == "system" and message["role"] == "user":
                message = {**message, "content": f"{out.pop()['content']}\n\n{message['content']}"}
            out.append(message)
        return [{**m, "role": "user"} if m["role"] == "system" else m for m in out]

    def message(self, message: ChatMessage) -> Shaped:
        text, role = self._neutral(message.text), message.role
        calls = [self.clean_call(c) for c in message.calls]
        if calls and not self.can.shows_calls:
            text = f"{text}\n{self._format.write(calls)}" if text else self._format.write(calls)
        if role is ChatRole.TOOL and not self.can.has_tool_role:
            role = ChatRole.USER
        out: Shaped = {"role": str(role), "content": text}
        if message.reasoning:
            out["reasoning_content"] = self._neutral(message.reasoning)
        if calls and self.can.shows_calls:
            out["tool_calls"] = [self._call(c) for c in calls]
        if message.call_id or (message.role is ChatRole.TOOL and self._format.has_short_ids):
            out["tool_call_id"] = self._id(message.call_id)
        if message.name:
            out["name"] = self._clean_name(message.name)
        return out

    def tools(self, tools: Sequence[Tool]) -> list[Shaped]:
        """As the template takes them; none when it has no place for them, since it may refuse what it does not know."""
        if not self.can.shows_tools:
            return []
        shaped = [t.as_template() for t in tools]
        # Hardly any tool talks about control tokens, and one look at the whole text is cheaper than one at each string.
        if self._marker_starts.isdisjoint(msgspec.json.encode(shaped).decode()):
            return shaped
        return [self._clean(t) for t in shaped]

    def _call(self, call: Call) -> Shaped:
        arguments: Any = call.arguments
        if not self.can.wants_text_arguments:
            # A template written for objects prints text that is none as it is, or refuses.
            with suppress(ValueError, RecursionError):
                arguments = json.loads(call.arguments)
        return {"id": self._id(call.id), "type": "function", "function": {"name": call.name, "arguments": arguments}}

    def _id(self, call_id: str) -> str:
        if not self._format.has_short_ids or (len(call_id) == _NUM_SHORT_ID and call_id.isalnum()):
            return self._neutral(call_id)
        return blake3(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:_NUM_SHORT_ID]

    def clean_call(self, call: Call) -> Call:
        """Without control tokens in name and arguments."""
        try:
            arguments = json.dumps(self._clean(json.loads(call.arguments)), ensure_ascii=False)
        except (ValueError, RecursionError):
            arguments = self._neutral(call.arguments)
        return Call(id=call.id, name=self._clean_name(call.name), arguments=arguments)

    def _clean(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._neutral(value)
        if isinstance(value, dict):
            return {self._clean_name(str(k)): self._clean(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self._clean(v) for v in value]
        return value

    def _clean_name(self, name: str) -> str:
        """Templates write names right before their own brackets, with which half a marker would become a whole one."""
        name = self._neutral(name)
        if not self._marker_starts.isdisjoint(name) and (num_held := held_suffix(name, self._markers)):
            at = len(name) - num_held + 1
            name = f"{name[:at]} {name[at:]}"
        return name


def _with_system(text: str, shaped: list[Shaped]) -> list[Shaped]:
    """`text` at the end of the system prompt; as the system prompt where there is none."""
    if not shaped or shaped[0]["role"] != "system":
        return [{"role": "system", "content": text}, *shaped]
    first = shaped[0]["content"]
    return [{**shaped[0], "content": f"{first}\n\n{text}" if first else text}, *shaped[1:]]
