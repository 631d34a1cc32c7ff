"""Messages as people, graders and files take them: whatever a model writes into a call can be kept; pure."""

from __future__ import annotations

from typing import Any

import msgspec

from rollmill.chat.messages import ChatMessage

MAX_DEPTH = 100
"""Of arguments: whoever encodes them later stands deeper in the stack than we do, and must not run out of it."""


def told(message: ChatMessage) -> dict[str, Any]:
    """The shape that chat templates expect. Arguments that JSON can spell and nothing else can hold (half a surrogate pair, a number of
    thirty digits, a hundred brackets in one another) stay the text that was written.

    >>> from rollmill.chat.messages import Call, ChatRole
    >>> said = ChatMessage(role=ChatRole.ASSISTANT, calls=(Call(id="c", name="ls", arguments='{"path": "\\\\ud800"}'),))
    >>> told(said)["tool_calls"][0]["function"]["arguments"]
    '{"path": "\\\\ud800"}'
    """
    out = message.as_template()
    for call, shown in zip(message.calls, out.get("tool_calls", ()), strict=True):
        if not _can_be_kept(shown["function"]["arguments"]):
            shown["function"]["arguments"] = call.arguments
    return out


def _can_be_kept(value: Any) -> bool:
    try:
        msgspec.msgpack.encode(value)
    except (ValueError, OverflowError, RecursionError):
        return False
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [v for one in level if isinstance(one, dict | list) for v in (one.values() if isinstance(one, dict) else one)]
        if not level:
            return True
    return False
