"""One tool call whose arguments are shown while they are written.

What is shown is no whole JSON value before the call is known to be whole, since its last bracket waits for the end of the block: a call
that turns out malformed stays visibly unfinished, and nobody can act on it.
"""

from __future__ import annotations

from collections.abc import Mapping

from rollmill.chat.call_parsers import Draft, Malformed, arguments_of
from rollmill.chat.json_extent import JsonExtent
from rollmill.chat.messages import Tool
from rollmill.chat.tool_formats import ToolFormat

_MAX_HEAD_CHARS = 1024
"""A call that has not come to its arguments by then is read when it is whole."""


class CallStream:
    """Feed it the text of a block from its arguments on; `finish` at the closing."""

    def __init__(self, tool_format: ToolFormat, head: str, draft: Draft) -> None:
        self.head, self.draft = head, draft
        """The text before the arguments, and what it says: the name, and the id where there is one."""
        self._format, self._extent = tool_format, JsonExtent()
        self._shown: list[str] = []
        self._rest: list[str] = []

    @classmethod
    def begin(cls, tool_format: ToolFormat, text: str, size: int, tools: Mapping[str, Tool]) -> CallStream | None:
        """The call that begins in `text`, of which `size` characters are its block's; None unless a known tool's arguments are there."""
        found = tool_format.streamed.match(text, 0, min(size, _MAX_HEAD_CHARS)) if tool_format.streamed is not None else None
        if found is None or found["name"] not in tools:
            return None
        return cls(tool_format, found[0], Draft(found["name"], "", found.groupdict().get("id", "")))

    @property
    def arguments(self) -> str:
        """As shown."""
        return "".join(self._shown)

    def feed(self, piece: str) -> str:
        """What of it can be shown."""
        if self._rest:
            self._rest.append(piece)
            return ""
        end = self._extent.feed(piece)
        if end is not None:
            self._rest.append(piece[end - 1 :])
            piece = piece[: end - 1]
        self._shown.append(piece)
        return piece

    def finish(self, closing: str, tools: Mapping[str, Tool]) -> str:
        """The last bracket of the arguments. Raises Malformed unless the block is, as a whole, this very call."""
        shown, rest = self.arguments, "".join(self._rest)
        drafts = self._format.parse(f"{self.head}{shown}{rest}{closing}", tools)
        if drafts != [self.draft._replace(arguments=arguments_of(shown + rest[:1]))]:
            raise Malformed("error: a tool call has one name and one object of arguments")
        self._shown.append(rest[:1])
        return rest[:1]
