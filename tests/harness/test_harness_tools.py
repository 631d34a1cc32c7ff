"""The default tools: a bad call is an answer to the model, and nothing a policy writes or a program does raises on our side."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.harness import TOOLS, BoxTools, CallError
from rollmill.harness import tools as tools_module
from rollmill.harness.tools import shorten
from rollmill.records import Boundary, RunFailure
from rollmill.sandbox import Sandbox, SandboxSpec
from rollmill.sandbox.namespace import NamespaceBackend

DEADLINE_S = 60.0
NOWHERE: Any = None

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda v: st.lists(v) | st.dictionaries(st.text(), v), max_leaves=6
)


@settings(derandomize=True)
@given(
    st.sampled_from(TOOLS) | st.text(max_size=5),
    st.dictionaries(st.sampled_from(["command", "path", "content", "pattern", "depth", "x\ud800"]), json_values | st.just("\udc80")),
    st.booleans(),
)
def test_any_json_call_is_either_valid_or_refused_with_sayable_words(name: str, arguments: dict[str, Any], strict: bool) -> None:
    try:
        found = BoxTools(NOWHERE, strict=strict).checked(name, arguments)
    except CallError as error:
        assert str(error).startswith("error: ")
        str(error).encode()
    else:
        assert name in TOOLS and (not strict or found == arguments)
        str(found).encode()


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("rm", {}, "error: unknown tool 'rm'; tools: bash, read, submit"),
        ("write", {"path": "a", "content": "b"}, "error: unknown tool 'write'; tools: bash, read, submit"),
        ("bash", {}, "error: bash needs the text argument 'command'"),
        ("bash", {"command": 3}, "error: bash needs the text argument 'command'"),
        ("bash", {"command": None, "cwd": "/"}, "error: bash needs the text argument 'command'"),
        ("bash", {"command": "ls", "cwd": "/"}, "error: bash has no argument 'cwd'; it takes: command, timeout_s"),
        ("submit", {"answer": "3"}, "error: submit has no argument 'answer'; it takes: none"),
        ("bash", {"command": "echo \0"}, "error: 'command' of bash holds a character that is not text"),
        ("read", {"path": "\ud800"}, "error: 'path' of read holds a character that is not text"),
        ("bash", {"command": "ls", "timeout_s": -1}, "error: 'timeout_s' of bash: Input should be greater than 0, got -1"),
        ("read", {"path": "a", "first_line": "3"}, "error: read needs the whole number argument 'first_line'"),
    ],
)
def test_each_bad_call_is_told_what_is_wrong(name: str, arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(CallError) as caught:
        asyncio.run(BoxTools(NOWHERE, ("bash", "read", "submit")).call(name, arguments))
    assert str(caught.value) == told


def test_lenient_tools_coerce_and_ignore_what_is_not_theirs() -> None:
    found = BoxTools(NOWHERE, strict=False).checked("read", {"path": "a", "first_line": "3", "why": "to see"})
    assert found == {"path": "a", "first_line": 3}


def test_schemas_offer_exactly_the_allowed_tools() -> None:
    shown = BoxTools(NOWHERE, ("bash", "submit")).tools()
    assert [t.name for t in shown] == ["bash", "submit"]
    assert shown[0].parameters["required"] == ["command"] and shown[0].description == "Run a shell command in the working directory."
    assert set(shown[0].parameters["properties"]) == {"command", "timeout_s"} and shown[1].parameters["properties"] == {}
    with pytest.raises(ValueError, match="there is no tool 'fly'; known: bash"):
        BoxTools(NOWHERE, ("fly",))


@given(st.text(max_size=200), st.integers(2, 50))
def test_shortened_text_keeps_head_and_tail_and_says_what_is_missing(text: str, limit: int) -> None:
    short = shorten(text, limit)
    if len(text) <= limit:
        assert short == text
    else:
        keep = limit // 2
        assert short == f"{text[:keep]}\n[{len(text) - 2 * keep} characters left out]\n{text[-keep:]}"


Use = Callable[..., Awaitable[str]]


def in_box(scene: Callable[[Use, Sandbox], Awaitable[None]], files: dict[str, str]) -> None:
    if (reason := NamespaceBackend.probe()) is not None:
        pytest.skip(reason)

    async def whole() -> None:
        backend = NamespaceBackend()
        try:
            async with asyncio.timeout(DEADLINE_S):
                box = await backend.create(SandboxSpec(files=files))

                async def use(name: str, tool_s: float = 10.0, max_chars: int = 2000, **arguments: Any) -> str:
                    return await BoxTools(box, tool_s=tool_s, max_chars=max_chars).call(name, arguments)

                await scene(use, box)
        finally:
            await backend.close()

    asyncio.run(whole())


def test_bash_tells_output_status_and_silence() -> None:
    async def scene(use: Use, box: Sandbox) -> None:
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
    async def scene(use: Use, box: Sandbox) -> None:
        said = await use("bash", command="echo first; head -c 100000000 /dev/zero | tr '\\0' x; echo last", tool_s=30.0)
        assert len(said) < 2200 and said.startswith("first\nxxx") and said.endswith("xxxlast\n") and "left out]" in said

    in_box(scene, {})


def test_tool_that_never_returns_is_stopped_and_the_box_lives_on() -> None:
    async def scene(use: Use, box: Sandbox) -> None:
        assert await use("bash", command="echo begun; sleep 1000", tool_s=0.3) == "begun\n[stopped after 0.3 s]"
        assert await use("bash", command="echo begun; sleep 1000", timeout_s=0.2) == "begun\n[stopped after 0.2 s]"
        assert await use("bash", command="sleep 1000", timeout_s=900, tool_s=0.3) == "[stopped after 0.3 s]"
        assert await use("bash", command="trap '' TERM INT; (sleep 1000 &) ; while :; do :; done", tool_s=0.3) == "[stopped after 0.3 s]"
        assert await use("bash", command="echo fine") == "fine\n"

    in_box(scene, {})


def test_file_tools_report_what_the_path_did() -> None:
    async def scene(use: Use, box: Sandbox) -> None:
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
        assert await use("edit", path="a.txt", old="two", new="2", all=True) == "ok, 2 places"
        assert await use("read", path="a.txt") == "\\1 ü 2 2\n"

    in_box(scene, {"a.txt": "one two two\n", "d/x": ""})


def test_some_lines_of_a_file_are_read_as_they_are() -> None:
    async def scene(use: Use, box: Sandbox) -> None:
        assert await use("read", path="a", first_line=2, num_lines=2) == "two\nthree\n"
        assert await use("read", path="a", first_line=4) == "four"
        assert await use("read", path="a", num_lines=1) == "one\n"
        assert await use("read", path="a", first_line=5) == "error: a has 4 lines"
        assert await use("read", path="none", first_line=5) == "error: none: No such file or directory"

    in_box(scene, {"a": "one\ntwo\nthree\nfour"})


def test_edit_keeps_bytes_that_are_no_text() -> None:
    async def scene(use: Use, box: Sandbox) -> None:
        await box.write("b", b"\xff\xfe one \x80")
        assert await use("edit", path="b", old="one", new="two") == "ok"
        assert await box.read("b") == b"\xff\xfe two \x80"
        assert await use("read", path="b") == "\ufffd\ufffd two \ufffd"

    in_box(scene, {})


FILES = {"a.py": "def f():\n    return 1\n", "d/b.py": "def g(x):\n    pass\n", "d/e/c.txt": "def in text é\n", ".git/x": "def hidden\n"}


def test_search_finds_lines_and_passes_over_what_is_no_text() -> None:
    async def scene(use: Use, box: Sandbox) -> None:
        await box.write("binary", b"def \0 x")
        await use("bash", command="ln -s / root; ln -s a.py link; mkfifo pipe; head -c 9000000 /dev/zero | tr '\\0' d > big")
        assert await use("search", pattern=r"def \w") == "a.py:1:def f():\nd/b.py:1:def g(x):\nd/e/c.txt:1:def in text é\n"
        assert await use("search", pattern="def", glob="*.py", path="d") == "d/b.py:1:def g(x):\n"
        assert await use("search", pattern="[é]$") == "d/e/c.txt:1:def in text é\n"
        assert await use("search", pattern="def", path="a.py") == "a.py:1:def f():\n"
        assert await use("search", pattern="nothing") == "(no hits)\n"
        cut = "[only the first 1 hits; narrow the pattern, the path or the glob]\n"
        assert await use("search", pattern="def", max_hits=1) == f"a.py:1:def f():\n{cut}"
        assert (await use("search", pattern="(")).startswith("error: pattern: ")
        assert await use("search", pattern="x", path="-none") == "error: -none: No such file or directory\n"
        assert "[stopped after 0.5 s]" in await use("search", pattern="(x+x+)+y", path="xs", tool_s=0.5)

    in_box(scene, {**FILES, "xs": "x" * 40 + "\n"})


def test_list_shows_folders_and_links_to_the_depth_asked_for() -> None:
    async def scene(use: Use, box: Sandbox) -> None:
        await use("bash", command="rm -r .git; ln -s a.py link; mkdir empty")
        assert await use("list") == "a.py\nd/\nempty/\nlink -> a.py\n"
        assert await use("list", path="d", depth=9) == "b.py\ne/\ne/c.txt\n"
        assert await use("list", path="empty") == "(empty)\n"
        assert await use("list", path="none") == "error: none: No such file or directory\n"
        await use("bash", command="mkdir many; cd many; touch $(seq 600)")
        assert (await use("list", path="many", max_chars=9000)).endswith("[only the first 500 entries]\n")

    in_box(scene, FILES)


@pytest.mark.parametrize(
    ("script", "words", "said"),
    [
        ("_SEARCH_SH", ["def .", ".", "*.py", "5"], {"./a.py:1:def f():", "./d/b.py:1:def g(x):"}),
        ("_SEARCH_SH", ["def .", "d", "", "5"], {"d/b.py:1:def g(x):", "d/e/c.txt:1:def in text é"}),
        ("_LIST_SH", [".", "1"], {"./.git", "./a.py", "./d", "./link"}),
    ],
)
def test_boxes_without_python_search_and_list_with_grep_and_find(script: str, words: list[str], said: set[str], tmp_path: Path) -> None:
    programs, world = tmp_path / "bin", tmp_path / "world"
    programs.mkdir()
    for program in ("grep", "find", "sort", "head"):
        (programs / program).symlink_to(str(shutil.which(program)))
    for path, text in FILES.items():
        (world / path).parent.mkdir(parents=True, exist_ok=True)
        (world / path).write_text(text)
    (world / "link").symlink_to("a.py")
    argv = [str(shutil.which("sh")), "-c", getattr(tools_module, script), "tool", "no python", *words]
    done = subprocess.run(argv, cwd=world, env={"PATH": str(programs)}, capture_output=True, text=True, timeout=20, check=True)
    assert set(done.stdout.splitlines()) == said, done.stderr


def test_dead_box_is_a_failure_of_the_sandbox_not_an_answer() -> None:
    async def scene(use: Use, box: Sandbox) -> None:
        await box.close()
        for arguments in ({"name": "bash", "command": "true"}, {"name": "read", "path": "a"}, {"name": "list"}):
            with pytest.raises(RunFailure) as caught:
                await use(**arguments)
            assert caught.value.boundary is Boundary.SANDBOX

    in_box(scene, {})
