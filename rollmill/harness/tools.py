"""The tools an agent may call, strict about their arguments: a bad call is an answer to the model, never an exception to us."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from rollmill.sandbox.interface import ExecResult, Sandbox

NO_OUTPUT = "(no output)"
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)

TOOLS: dict[str, dict[str, str]] = {
    "bash": {"command": "shell command to run in the working directory"},
    "read": {"path": "file to read"},
    "write": {"path": "file to create or replace", "content": "its whole new text"},
    "edit": {"path": "file to change", "old": "text that occurs exactly once", "new": "text to put there"},
    "submit": {},
}
"""Tool -> its arguments, all of them required strings."""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    arguments: dict[str, str]


class CallError(ValueError):
    """A reply that is no valid tool call; the text is what the model is told."""


def schemas(allowed: tuple[str, ...]) -> list[dict[str, Any]]:
    """The tools in the OpenAI function shape, for chat templates that show them to the model."""
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": f"{name} tool",
                "parameters": {
                    "type": "object",
                    "properties": {a: {"type": "string", "description": d} for a, d in TOOLS[name].items()},
                    "required": list(TOOLS[name]),
                },
            },
        }
        for name in allowed
    ]


def parse_calls(text: str, allowed: tuple[str, ...]) -> list[ToolCall]:
    """The tool calls of a reply, in order. Raises CallError with advice when there is none or one is malformed."""
    bodies = _CALL.findall(text)
    if not bodies:
        raise CallError(f"error: no tool call found; answer with <tool_call>{{...}}</tool_call>, tools: {', '.join(allowed)}")
    return [_parse(body, allowed) for body in bodies]


def _parse(body: str, allowed: tuple[str, ...]) -> ToolCall:
    try:
        raw = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise CallError(f"error: the tool call is not valid JSON: {error}") from error
    if not isinstance(raw, dict) or not isinstance(raw.get("name"), str) or not isinstance(raw.get("arguments"), dict):
        raise CallError('error: a tool call needs "name" and "arguments"')
    name, arguments = raw["name"], raw["arguments"]
    if name not in allowed or name not in TOOLS:
        raise CallError(f"error: unknown tool {name[:40]!r}; tools: {', '.join(allowed)}")
    wanted = TOOLS[name]
    if missing := [a for a in wanted if not isinstance(arguments.get(a), str)]:
        raise CallError(f"error: {name} needs the text argument {missing[0]!r}")
    if extra := [a for a in arguments if a not in wanted]:
        raise CallError(f"error: {name} has no argument {str(extra[0])[:40]!r}; it takes: {', '.join(wanted) or 'none'}")
    for a, value in arguments.items():
        # JSON can spell what no file, shell or tokenizer takes: half a surrogate pair, and NUL inside a command.
        if any("\ud800" <= c <= "\udfff" for c in value) or (name == "bash" and "\0" in value):
            raise CallError(f"error: {a!r} of {name} holds a character that is not text")
    return ToolCall(name=name, arguments=arguments)


async def run_tool(call: ToolCall, box: Sandbox, *, timeout_s: float, max_chars: int) -> str:
    """Do what was asked and say what came of it, in at most about `max_chars` characters."""
    a = call.arguments
    if call.name == "bash":
        result = await box.exec(["bash", "-c", a["command"]], timeout_s=timeout_s, max_output_bytes=4 * max_chars)
        return shorten(_say(result, timeout_s), max_chars)
    try:
        if call.name == "read":
            return shorten((await box.read(a["path"])).decode("utf-8", "replace"), max_chars)
        if call.name == "write":
            await box.write(a["path"], a["content"].encode("utf-8", "replace"))
            return "ok"
        assert call.name == "edit", f"tool {call.name!r} is known but has no implementation"
        text = (await box.read(a["path"])).decode("utf-8", "surrogateescape")
        found = text.count(a["old"]) if a["old"] else 0
        if found != 1:
            return f"error: old text {'not found' if not found else f'found {found} times'} in {a['path']}"
        await box.write(a["path"], text.replace(a["old"], a["new"]).encode("utf-8", "surrogateescape"))
        return "ok"
    except (OSError, ValueError) as error:
        # What the agent's path did inside the box; failures of the box itself are RunFailure and pass through.
        reason = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        return f"error: {a['path'][:200]}: {reason}"


def _say(result: ExecResult, timeout_s: float) -> str:
    text = result.stdout.decode("utf-8", "replace")
    if result.timed_out:
        return f"{text}[stopped after {timeout_s:g} s]"
    if result.exit_code != 0:
        return f"{text}[exit {result.exit_code}]"
    return text or NO_OUTPUT


def shorten(text: str, max_chars: int) -> str:
    """Keep head and tail of a long text and say how much is missing."""
    if len(text) <= max_chars:
        return text
    keep = max_chars // 2
    return f"{text[:keep]}\n[{len(text) - 2 * keep} characters left out]\n{text[-keep:]}"
