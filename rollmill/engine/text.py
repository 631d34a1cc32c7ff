"""Turns sampled tokens into text as they arrive: whole characters only, nothing past a stop string, tool calls set apart.

Text made here is for people and OpenAI clients; nothing is ever trained on it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import msgspec

_TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
TOOL_OPEN = "<tool_call>"
# A character has at most four bytes, so at most three tokens at the end can be the beginning of one.
_MAX_PARTIAL_TOKENS = 3


class Decoder(Protocol):
    """Token ids to text."""

    def decode(self, ids: Sequence[int]) -> str: ...


def held_suffix(text: str, markers: Iterable[str]) -> int:
    """Length of the longest end of `text` that may be the beginning of a marker."""
    return max((n for m in markers for n in range(1, min(len(m), len(text) + 1)) if text.endswith(m[:n])), default=0)


class TextStream:
    """Feed token ids, get text that is safe to show. `stopped` turns true at the first stop string."""

    def __init__(self, decoder: Decoder, stops: Sequence[str] = ()) -> None:
        self._decoder, self._stops = decoder, stops
        self._ids: list[int] = []
        self._start = self._read = 0
        self._held = ""
        self.text = ""
        self.stopped = False

    def feed(self, ids: Iterable[int], *, last: bool = False) -> str:
        """The text these tokens release; with `last`, everything that was held back."""
        if self.stopped:
            return ""
        self._ids += ids
        # The tokens before `_read` give the decoder its context; only what they do not explain is new.
        known = self._decoder.decode(self._ids[self._start : self._read])
        end = len(self._ids) if last else self._whole_end()
        self._held += self._decoder.decode(self._ids[self._start : end])[len(known) :]
        self._start, self._read = self._read, end
        found = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.stopped = True
            return self._release(min(found))
        return self._release(len(self._held) - (0 if last else held_suffix(self._held, self._stops)))

    def _whole_end(self) -> int:
        """How many tokens can be shown: all, or those before the tokens at the end that may be the beginning of a character."""
        full, count = self._decoder.decode(self._ids[self._start :]), len(self._ids)
        if not full.endswith("\ufffd"):
            return count
        # A cut inside an earlier character shows: its two halves, decoded apart, are not the whole.
        for end in range(max(count - _MAX_PARTIAL_TOKENS, self._read), count):
            if full == self._decoder.decode(self._ids[self._start : end]) + self._decoder.decode(self._ids[end:]):
                return end
        return self._read

    def _release(self, size: int) -> str:
        out, self._held = self._held[:size], self._held[size:]
        self.text += out
        return out


class ToolGate:
    """Lets text pass up to the first tool call; the rest waits until it can be parsed."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled, self._held = enabled, ""

    def feed(self, text: str) -> str:
        if not self._enabled:
            return text
        self._held += text
        at = self._held.find(TOOL_OPEN)
        size = at if at >= 0 else len(self._held) - held_suffix(self._held, [TOOL_OPEN])
        out, self._held = self._held[:size], self._held[size:]
        return out

    def finish(self) -> tuple[str, list[ToolCall]]:
        """What is left: text that turned out not to be a call, and the calls."""
        return split_tool_calls(self._held)


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call the model asked for."""

    name: str
    arguments: str
    """A JSON object, as text."""


def _parse_call(raw: str) -> ToolCall | None:
    try:
        call: Any = msgspec.json.decode(raw.strip())
    except (msgspec.DecodeError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    if isinstance(arguments, str):
        return ToolCall(name=call["name"], arguments=arguments)
    return ToolCall(name=call["name"], arguments=json.dumps(arguments, ensure_ascii=False))


def split_tool_calls(text: str) -> tuple[str, list[ToolCall]]:
    """Text without its well-formed tool calls, and those calls; a malformed one stays in the text, for the agent to see.

    >>> split_tool_calls('on it <tool_call>{"name": "ls", "arguments": {"path": "."}}</tool_call>')
    ('on it ', [ToolCall(name='ls', arguments='{"path": "."}')])
    """
    calls: list[ToolCall] = []

    def cut(match: re.Match[str]) -> str:
        call = _parse_call(match.group(1))
        if call is None:
            return match.group(0)
        calls.append(call)
        return ""

    left = _TOOL_CALL.sub(cut, text)
    return (left.rstrip("\n") if calls else left), calls
