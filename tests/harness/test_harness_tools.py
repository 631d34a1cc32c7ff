"""Tools: a bad call is an answer to the model, and nothing a policy writes or a program does raises on our side."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.harness import TOOLS, CallError, ToolCall, parse_calls, run_tool
from rollmill.harness.tools import schemas, shorten
from rollmill.records import Boundary, RunFailure
from rollmill.sandbox import Sandbox, SandboxSpec
from rollmill.sandbox.namespace import NamespaceBackend

ALL = tuple(TOOLS)
DEADLINE_S = 60.0

pieces = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        '{"name": "bash", "arguments": {"command": "ls"}}',
        '{"name"',
        ": ",
        "[" * 3000,
        "null",
        "\\ud800",
        '"',
        "\x00",
    ]
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda v: st.lists(v) | st.dictionaries(st.text(), v), max_leaves=6
)


@given(st.lists(pieces | st.text(max_size=10), max_size=8).map("".join))
def test_any_text_is_either_calls_or_a_call_error(text: str) -> None:
    try:
        calls = parse_calls(text, ALL)
    except CallError as error:
        assert str(error).startswith("error: ")
        str(error).encode()
    else:
        assert calls and all(set(c.arguments) == set(TOOLS[c.name]) for c in calls)


@given(st.sampled_from(ALL) | st.text(max_size=5), st.dictionaries(st.sampled_from(["command", "path", "content", "x"]), json_values))
def test_any_json_call_is_either_valid_or_refused_with_sayable_words(name: str, arguments: dict[str, object]) -> None:
    try:
        [call] = parse_calls(f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>", ALL)
    except CallError as error:
        str(error).encode()
    else:
        assert call.name == name and call.arguments == arguments
        for value in call.arguments.values():
            value.encode()


def call_text(name: object, arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("I am done", "error: no tool call found; answer with <tool_call>{...}</tool_call>, tools: bash, read"),
        ("<tool_call>{}", "error: no tool call found"),
        ("<tool_call>{x}</tool_call>", "error: the tool call is not valid JSON: "),
        ("<tool_call></tool_call>", "error: the tool call is not valid JSON: "),
        (f"<tool_call>{'[' * 100000}</tool_call>", "error: the tool call is not valid JSON: "),
        (f"<tool_call>{'9' * 10000}</tool_call>", "error: the tool call is not valid JSON: "),
        ("<tool_call>[1]</tool_call>", 'error: a tool call needs "name" and "arguments"'),
        (call_text("bash", "ls"), 'error: a tool call needs "name" and "arguments"'),
        (call_text(3, {}), 'error: a tool call needs "name" and "arguments"'),
        (call_text("rm", {}), "error: unknown tool 'rm'; tools: bash, read"),
        (call_text("write", {"path": "a", "content": "b"}), "error: unknown tool 'write'; tools: bash, read"),
        (call_text("bash", {}), "error: bash needs the text argument 'command'"),
        (call_text("bash", {"command": 3}), "error: bash needs the text argument 'command'"),
        (call_text("bash", {"command": "ls", "cwd": "/"}), "error: bash has no argument 'cwd'; it takes: command"),
        (call_text("submit", {"answer": "3"}), "error: submit has no argument 'answer'; it takes: none"),
        (call_text("bash", {"command": "echo \0"}), "error: 'command' of bash holds a character that is not text"),
        (call_text("read", {"path": "\ud800"}), "error: 'path' of read holds a character that is not text"),
    ],
)
def test_each_bad_call_is_told_what_is_wrong(text: str, told: str) -> None:
    with pytest.raises(CallError) as caught:
        parse_calls(text, ("bash", "read", "submit"))
    assert str(caught.value).startswith(told)


def test_one_bad_call_refuses_the_whole_reply() -> None:
    with pytest.raises(CallError):
        parse_calls(call_text("bash", {"command": "rm -rf ."}) + call_text("nope", {}), ALL)


def test_calls_come_in_order_and_text_around_them_is_ignored() -> None:
    calls = parse_calls("first " + call_text("read", {"path": "a"}) + "\nthen\n" + call_text("submit", {}), ALL)
    assert [c.name for c in calls] == ["read", "submit"]


def test_schemas_offer_exactly_the_allowed_tools() -> None:
    shown = schemas(("bash", "submit"))
    assert [s["function"]["name"] for s in shown] == ["bash", "submit"]
    assert shown[0]["function"]["parameters"]["required"] == ["command"]


@given(st.text(max_size=200), st.integers(2, 50))
def test_shortened_text_keeps_head_and_tail_and_says_what_is_missing(text: str, limit: int) -> None:
    short = shorten(text, limit)
    if len(text) <= limit:
        assert short == text
    else:
        keep = limit // 2
        assert short == f"{text[:keep]}\n[{len(text) - 2 * keep} characters left out]\n{text[-keep:]}"


def in_box(scene: Callable[[Callable[..., Awaitable[str]], Sandbox], Awaitable[None]], files: dict[str, str]) -> None:
    if (reason := NamespaceBackend.probe()) is not None:
        pytest.skip(reason)

    async def whole() -> None:
        backend = NamespaceBackend()
        try:
            async with asyncio.timeout(DEADLINE_S):
                box = await backend.create(SandboxSpec(files=files))

                async def use(name: str, timeout_s: float = 10.0, max_chars: int = 2000, **arguments: str) -> str:
                    return await run_tool(ToolCall(name=name, arguments=arguments), box, timeout_s=timeout_s, max_chars=max_chars)

                await scene(use, box)
        finally:
            await backend.close()

    asyncio.run(whole())


def test_bash_tells_output_status_and_silence() -> None:
    async def scene(use: Callable[..., Awaitable[str]], box: Sandbox) -> None:
        assert await use("bash", command="echo hi; echo there >&2") == "hi\nthere\n"
        assert await use("bash", command="true") == "(no output)"
        assert await use("bash", command="echo x; exit 3") == "x\n[exit 3]"
        assert await use("bash", command="false") == "[exit 1]"
        assert await use("bash", command="kill -9 $$") == "[exit -9]"
        assert await use("bash", command="cat /dev/stdin") == "(no output)"
        assert await use("bash", command="printf '\\xff\\x00\\xfe'") == "\ufffd\x00\ufffd"
        assert "[exit 126]" in await use("bash", command="x" * 200_000)

    in_box(scene, {})


def test_flood_of_output_is_cut_to_size() -> None:
    async def scene(use: Callable[..., Awaitable[str]], box: Sandbox) -> None:
        said = await use("bash", command="echo first; head -c 100000000 /dev/zero | tr '\\0' x; echo last", timeout_s=30.0)
        assert len(said) < 2200 and said.startswith("first\nxxx") and said.endswith("xxxlast\n") and "left out]" in said

    in_box(scene, {})


def test_tool_that_never_returns_is_stopped_and_the_box_lives_on() -> None:
    async def scene(use: Callable[..., Awaitable[str]], box: Sandbox) -> None:
        assert await use("bash", command="echo begun; sleep 1000", timeout_s=0.3) == "begun\n[stopped after 0.3 s]"
        assert await use("bash", command="trap '' TERM INT; (sleep 1000 &) ; while :; do :; done", timeout_s=0.3) == "[stopped after 0.3 s]"
        assert await use("bash", command="echo fine") == "fine\n"

    in_box(scene, {})


def test_file_tools_report_what_the_path_did() -> None:
    async def scene(use: Callable[..., Awaitable[str]], box: Sandbox) -> None:
        assert await use("read", path="a.txt") == "one two two\n"
        assert await use("read", path="none.txt") == "error: none.txt: No such file or directory"
        assert await use("read", path="d") == "error: d: Is a directory"
        assert await use("read", path="") == "error: : Is a directory"
        assert (await use("read", path="a\0b")).startswith("error: a\0b: ")
        assert len(await use("read", path="x" * 9000)) < 400
        assert (await use("read", path="../../etc/shadow")).startswith("error: ")
        assert await use("write", path="new/deep/b.txt", content="é\n") == "ok" and await use("read", path="new/deep/b.txt") == "é\n"
        assert (await use("write", path="d", content="x")).startswith("error: d: ")
        assert (await use("write", path="a.txt/b", content="x")).startswith("error: a.txt/b: ")
        assert await use("edit", path="a.txt", old="three", new="x") == "error: old text not found in a.txt"
        assert await use("edit", path="a.txt", old="two", new="x") == "error: old text found 2 times in a.txt"
        assert await use("edit", path="a.txt", old="", new="x") == "error: old text not found in a.txt"
        assert await use("edit", path="none", old="a", new="b") == "error: none: No such file or directory"
        assert await use("edit", path="a.txt", old="one", new="\\1 ü") == "ok" and await use("read", path="a.txt") == "\\1 ü two two\n"

    in_box(scene, {"a.txt": "one two two\n", "d/x": ""})


def test_edit_keeps_bytes_that_are_no_text() -> None:
    async def scene(use: Callable[..., Awaitable[str]], box: Sandbox) -> None:
        await box.write("b", b"\xff\xfe one \x80")
        assert await use("edit", path="b", old="one", new="two") == "ok"
        assert await box.read("b") == b"\xff\xfe two \x80"
        assert await use("read", path="b") == "\ufffd\ufffd two \ufffd"

    in_box(scene, {})


def test_dead_box_is_a_failure_of_the_sandbox_not_an_answer() -> None:
    async def scene(use: Callable[..., Awaitable[str]], box: Sandbox) -> None:
        await box.close()
        for arguments in ({"name": "bash", "command": "true"}, {"name": "read", "path": "a"}):
            with pytest.raises(RunFailure) as caught:
                await use(**arguments)
            assert caught.value.boundary is Boundary.SANDBOX

    in_box(scene, {})
