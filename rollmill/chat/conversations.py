"""Made-up conversations of every kind a template has to write: system prompts or none, tools, several calls, reasoning, hostile text."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from enum import StrEnum

import msgspec

from rollmill.chat.messages import Call, ChatMessage, ChatRole, Tool

_WORDS = (
    "yes",
    "the file",
    "caf\u00e9",
    "\u6f22\u5b57",
    "\U0001f9ea\u200d\U0001f52c",
    "a\u0301",
    "x = {1: [2]}",
    "'\"\\",
    "<b>",
    "1 < 2 | 3",
)
_TEXTS = ("", " ", "\n", "ends in space ", "\n\nstarts below", "tab\there")
TOOLS = (
    Tool(
        name="read_file",
        description="Read a file.",
        parameters={"type": "object", "properties": {"path": {"type": "string", "description": "which"}}, "required": ["path"]},
    ),
    Tool(
        name="add",
        description="Add numbers.",
        parameters={"type": "object", "properties": {"a": {"type": "integer"}, "note": {"type": "string"}}, "required": ["a"]},
    ),
)


class Kind(StrEnum):
    """What is in a conversation besides questions and answers."""

    TEXT = "text"
    TOOLS = "tool calls"
    PARALLEL = "several calls per answer"
    REASONING = "reasoning"
    TOOL_REASONING = "tool calls and reasoning"


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    kind: Kind
    messages: tuple[ChatMessage, ...]
    """Ends with an answer."""
    tools: tuple[Tool, ...] = ()


def conversation(kind: Kind, rng: random.Random, *, num_turns: int, control: Sequence[str] = ()) -> Conversation:
    """`num_turns` answers; `control` are texts of control tokens, which some messages try to smuggle in."""
    has_tools = kind in (Kind.TOOLS, Kind.PARALLEL, Kind.TOOL_REASONING)
    thinks = kind in (Kind.REASONING, Kind.TOOL_REASONING)
    messages = [ChatMessage(role=ChatRole.SYSTEM, text=_text(rng, control))] if rng.random() < 0.5 else []
    messages.append(ChatMessage(role=ChatRole.USER, text=_text(rng, control)))
    for turn in range(num_turns):
        is_last = turn == num_turns - 1
        calls: list[Call] = []
        if has_tools and not is_last and rng.random() < 0.7:
            calls = [_call(rng, control) for _ in range(rng.randint(2, 3) if kind is Kind.PARALLEL else 1)]
        reasoning = " ".join(rng.choices(_WORDS, k=3)) if thinks and rng.random() < 0.8 else ""
        text = "" if calls and rng.random() < 0.5 else _text(rng, ())
        messages.append(ChatMessage(role=ChatRole.ASSISTANT, text=text, calls=tuple(calls), reasoning=reasoning))
        if is_last:
            break
        messages += [ChatMessage(role=ChatRole.TOOL, text=_text(rng, control), call_id=c.id, name=c.name) for c in calls]
        if not calls:
            messages.append(ChatMessage(role=ChatRole.USER, text=_text(rng, control)))
    return Conversation(kind=kind, messages=tuple(messages), tools=TOOLS if has_tools else ())


def _text(rng: random.Random, control: Sequence[str]) -> str:
    if rng.random() < 0.15:
        return rng.choice(_TEXTS)
    words = rng.choices(_WORDS, k=rng.randint(1, 5))
    if control and rng.random() < 0.3:
        words.insert(rng.randrange(len(words) + 1), rng.choice(control))
    return rng.choice((" ", "\n")).join(words)


def _call(rng: random.Random, control: Sequence[str]) -> Call:
    tool = rng.choice(TOOLS)
    arguments = {"path": _text(rng, control)} if tool is TOOLS[0] else {"a": rng.randint(-9, 9), "note": _text(rng, ())}
    return Call(id=f"call_{rng.randrange(16**24):024x}", name=tool.name, arguments=json.dumps(arguments, ensure_ascii=False))
