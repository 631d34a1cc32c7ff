"""A scripted policy and a box that echoes, for tests of the agent loop."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rollmill.chat.messages import Call, ChatMessage, ChatRole, Tool
from rollmill.gateway.sessions.session import ContextFull, Reply
from rollmill.sandbox import ExecResult

Said = str | Reply | Exception | Sequence[Call]


def call(name: str, /, **arguments: Any) -> Call:
    return Call(id=f"call_{name}", name=name, arguments=json.dumps(arguments))


def reply(text: str = "", *calls: Call, problems: tuple[str, ...] = (), is_complete: bool = True, num_tokens: int = 1) -> Reply:
    message = ChatMessage(role=ChatRole.ASSISTANT, text=text, calls=calls)
    return Reply(text=text, message=message, problems=problems, is_complete=is_complete, num_tokens=num_tokens)


class ScriptedSession:
    """Says what it was told to say; a token is a character. Remembers what it heard, and so does a branch."""

    def __init__(self, *said: Said, heard: Sequence[Sequence[ChatMessage]] = ()) -> None:
        self._left = list(said)
        self.num_tokens = 0
        self.heard = [list(new) for new in heard]
        self.asked: list[dict[str, Any]] = []

    def branch(self, *said: Said) -> ScriptedSession:
        return ScriptedSession(*said, heard=self.heard)

    async def reply(
        self,
        new: Sequence[ChatMessage],
        *,
        max_tokens: int,
        max_context: int,
        deadline: float,
        tools: Sequence[Tool] = (),
        reads_calls: bool = True,
    ) -> Reply:
        size = self.num_tokens + sum(len(m.text) for m in new)
        if size >= max_context:
            raise ContextFull(size, max_context)
        self.heard.append(list(new))
        self.asked.append({"max_tokens": max_tokens, "tools": [t.name for t in tools], "reads_calls": reads_calls})
        said = self._left.pop(0)
        if isinstance(said, Exception):
            raise said
        if isinstance(said, str):
            said = reply(said)
        elif not isinstance(said, Reply):
            said = reply("", *said)
        self.num_tokens = size + said.num_tokens
        return said

    @property
    def told(self) -> list[list[str]]:
        """The texts it heard after the opening, turn by turn."""
        return [[m.text for m in new] for new in self.heard[1:]]


class EchoBox:
    """Echoes commands instead of running them."""

    def __init__(self, error: Exception | None = None) -> None:
        self.commands: list[str] = []
        self._error = error

    async def exec(self, argv: Sequence[str], *, timeout_s: float, stdin: bytes = b"", max_output_bytes: int = 1 << 16) -> ExecResult:
        self.commands.append(argv[-1])
        if self._error:
            raise self._error
        return ExecResult(exit_code=0, stdout=argv[-1].encode(), num_output_bytes=len(argv[-1]), timed_out=False, wall_s=0.0)
