"""One message of a conversation as every dialect, template and session means it; knows no wire format and no token.

Two clients that say the same thing in different words (null or empty content, arguments as text or object, spaces in JSON) give equal
messages, so that what a client repeats can be recognised as what was sampled.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import msgspec


class ChatRole(StrEnum):
    SYSTEM = "system"
    """Also what some clients call `developer`."""
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One tool call of an answer."""

    id: str
    """Minted by whoever parsed the answer; a result names it."""
    name: str
    arguments: str
    """JSON text, as written: it may be malformed when a model wrote it."""


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool that the model is told of."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    """JSON schema of the arguments."""
    is_strict: bool = False
    """The caller asked for arguments that follow the schema without exception."""

    def as_template(self) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """
    >>> a = ChatMessage(role=ChatRole.ASSISTANT, calls=(Call(id="c1", name="ls", arguments='{"path": "."}'),))
    >>> b = ChatMessage(role=ChatRole.ASSISTANT, calls=(Call(id="c1", name="ls", arguments='{"path":"."}'),))
    >>> a.key() == b.key()
    True
    """

    role: ChatRole
    text: str = ""
    calls: tuple[Call, ...] = ()
    """Assistant only."""
    call_id: str = ""
    """Tool only: the call that this is the result of."""
    name: str = ""
    """Tool only: the tool's name, where the client tells it."""
    reasoning: str = ""
    """Assistant only: what it thought aloud, set apart. Clients drop it at will, so it is no part of the key."""

    def key(self) -> bytes:
        """What makes two messages the same: role, text, and calls by name, id and meaning of their arguments.

        White space around an assistant's text does not count: clients strip it.
        """
        text = self.text.strip() if self.role is ChatRole.ASSISTANT else self.text
        calls = [(c.id, c.name, _meaning(c.arguments)) for c in self.calls]
        return msgspec.msgpack.encode((self.role, text, calls, self.call_id))

    def as_template(self) -> dict[str, Any]:
        """The shape that Hugging Face chat templates expect."""
        out: dict[str, Any] = {"role": str(self.role), "content": self.text}
        if self.reasoning:
            out["reasoning_content"] = self.reasoning
        if self.calls:
            out["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": _parsed(c.arguments)}} for c in self.calls
            ]
        if self.call_id:
            out["tool_call_id"] = self.call_id
        if self.name:
            out["name"] = self.name
        return out


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def _meaning(arguments: str) -> str:
    """Equal for texts that mean the same JSON value."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True, ensure_ascii=True)
    except (ValueError, RecursionError):
        return arguments


def templated(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    return [m.as_template() for m in messages]
