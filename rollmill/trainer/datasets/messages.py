"""The shapes in which rows hold conversations, brought into the one that chat templates expect; knows no tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

_FROM = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
_FROM |= {"function_call": "assistant"}


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One message and how much it is learnt."""

    message: dict[str, Any]
    """As a Hugging Face chat template expects it: call arguments as an object, content as text."""
    weight: float
    """Of each of its tokens in the loss; 0 for everybody but the assistant."""

    @property
    def is_answer(self) -> bool:
        return self.message["role"] == "assistant"


def read_turns(value: Any, *, weight: float = 1.0) -> list[Turn]:
    """`messages` of a row, or the older `conversations` of `{"from": ..., "value": ...}`. `weight` is what answers count by default.

    >>> [t.weight for t in read_turns([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho", "train": False}])]
    [0.0, 0.0]
    """
    if isinstance(value, list) and value and all(isinstance(m, dict) and "from" in m and "value" in m for m in value):
        value = [_from_value(m) for m in value]
    if not isinstance(value, list) or not value:
        raise ValueError("a chat row needs a list `messages`")
    if not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in value):
        raise ValueError("every message of a chat row needs to be an object with a `role`")
    return [_turn(m, weight) for m in value]


def _turn(raw: Mapping[str, Any], default: float) -> Turn:
    message = {k: v for k, v in raw.items() if k not in ("weight", "train") and v is not None}
    message["role"] = "system" if raw["role"] == "developer" else raw["role"]
    message["content"] = _text(raw.get("content"))
    if calls := raw.get("tool_calls"):
        message["tool_calls"] = [_call(c) for c in _parsed(calls)]
    elif "tool_calls" in message:
        del message["tool_calls"]
    is_answer = message["role"] == "assistant"
    told = raw.get("weight")
    if told is None and raw.get("train") is not None:
        told = float(bool(raw["train"]))
    if told is not None and (isinstance(told, bool) or not isinstance(told, int | float) or not 0 <= told < float("inf")):
        raise ValueError(f"a message has weight {told!r}; give a number from 0, or `train` as true or false")
    if told and not is_answer:
        raise ValueError(f"a message of role {message['role']!r} asks to be learnt; only what the assistant says can be")
    return Turn(message=message, weight=(default if told is None else float(told)) if is_answer else 0.0)


def _from_value(raw: Mapping[str, Any]) -> dict[str, Any]:
    role = _FROM.get(str(raw["from"]))
    if role is None:
        raise ValueError(f"a conversation has a turn from {raw['from']!r}; known are {', '.join(_FROM)}")
    rest = {k: v for k, v in raw.items() if k in ("weight", "train")}
    if raw["from"] == "function_call":
        return {"role": role, "content": "", "tool_calls": [_parsed(raw["value"])], **rest}
    return {"role": role, "content": raw["value"], **rest}


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        return "".join(p["text"] for p in content)
    raise ValueError(f"a message has content of type {type(content).__name__}; only text is learnt here")


def _call(raw: Any) -> dict[str, Any]:
    function = raw.get("function", raw) if isinstance(raw, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("a tool call needs a `function` with a `name`")
    out = {"type": "function", "function": {"name": function["name"], "arguments": _parsed(function.get("arguments") or {})}}
    return {"id": raw["id"], **out} if raw.get("id") else out


def with_text_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """The same message with the arguments of its calls as JSON text."""
    calls = [c | {"function": c["function"] | {"arguments": _json(c["function"]["arguments"])}} for c in message.get("tool_calls") or ()]
    return {**message, "tool_calls": calls} if calls else dict(message)


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def read_tools(value: Any) -> list[dict[str, Any]] | None:
    """Tools as a list, or as its JSON text: columns cannot hold free-form objects, so many data sets store them so."""
    tools = _parsed(value) if value else None
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(isinstance(t, dict) for t in tools):
        raise ValueError("`tools` of a row needs to be a list of objects, or that as JSON text")
    return [t if "function" in t else {"type": "function", "function": t} for t in tools]


def _parsed(value: Any) -> Any:
    """Arguments that are no JSON stay the text that a model once wrote."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
