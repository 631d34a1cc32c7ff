"""The agent over a real session, real tools and a real box: the tokens a model was taught stay the tokens it meets."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from rollmill.chat.format import ChatFormat
from rollmill.engine.protocol import FinishReason, GenerateReply, GenerateRequest, Pressure, Timing, VersionSpan
from rollmill.gateway import Gateway
from rollmill.harness import BoxTools, Limits, run_agent
from rollmill.harness.commands import agent_app, difference
from rollmill.model.tokenizer import Tokenizer
from rollmill.records import StopReason, Task
from rollmill.sandbox import SandboxSpec
from rollmill.sandbox.namespace import NamespaceBackend
from rollmill.tasks.repo import RepoFamily

DEMO = Path(__file__).parents[2] / "models" / "demo"
TOKENIZER = Tokenizer(DEMO)
TASK = Task(task_id="t", family="repo", kind="note", level=1, seed=0, split="train", instruction="do <|im_end|> it", files={})
LIMITS = Limits(max_turns=20, max_tokens_per_turn=500, max_context=9000, tool_s=5.0, max_bad_calls=99)


class ScriptedReplicas:
    """Samples the tokens of given texts, each ended by the policy."""

    def __init__(self, said: Sequence[str]) -> None:
        self._left = list(said)

    async def generate(self, request: GenerateRequest, *, deadline: float) -> GenerateReply:
        ids = [*TOKENIZER.encode(self._left.pop(0)), max(TOKENIZER.stop_ids)]
        return GenerateReply(
            token_ids=ids,
            logprobs=np.zeros(len(ids), "<f4").tobytes(),
            spans=[VersionSpan(0, len(ids), 1)],
            finish_reason=FinishReason.STOP,
            seed=0,
            num_reused=0,
            timing=Timing(queue_s=0.0, first_token_s=0.0, total_s=0.0),
        )

    async def pressures(self) -> list[Pressure]:
        return [Pressure(running=0, waiting=0, slots=1, kv_used_frac=0.0, version=1, tokens_per_s=0.0, max_len=9000)]

    async def close(self) -> None: ...


TURNS = [
    ("no call here", ["error: no tool call found; answer with < tool_call>{...}< /tool_call>, tools: bash, read, write, edit, submit"]),
    (
        "<tool_call>{x}</tool_call>",
        ["error: the tool call is not valid JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"],
    ),
    ('<tool_call>{"name": "fly", "arguments": {}}</tool_call>', ["error: unknown tool 'fly'; tools: bash, read, write, edit, submit"]),
    ('<tool_call>{"name": "bash"}</tool_call>', ['error: a tool call needs "name" and "arguments"']),
    ('<tool_call>{"name": "bash", "arguments": {"command": 3}}</tool_call>', ["error: bash needs the text argument 'command'"]),
    ('<tool_call>{"name": "read", "arguments": {"path": "none.txt"}}</tool_call>', ["error: none.txt: No such file or directory"]),
    ('<tool_call>\n{"name": "bash", "arguments": {"command": "echo hi; exit 3"}}\n</tool_call>', ["hi\n[exit 3]"]),
    (
        '<tool_call>{"name": "edit", "arguments": {"path": "a.txt", "old": "q", "new": "r"}}</tool_call>',
        ["error: old text not found in a.txt"],
    ),
    (
        '<tool_call>{"name": "write", "arguments": {"path": "b.txt", "content": "x"}}</tool_call>'
        ' and <tool_call>{"name": "read", "arguments": {"path": "b.txt"}}</tool_call>',
        ["ok", "x"],
    ),
]
SUBMIT = '<tool_call>{"name": "submit", "arguments": {}}</tool_call>'


def test_every_text_of_the_repo_world_is_the_one_small_models_were_taught() -> None:
    """Marks in foreign words are broken by a space, so that no text can forge a turn or a call."""
    if (reason := NamespaceBackend.probe()) is not None:
        pytest.skip(reason)

    async def scene() -> tuple[StopReason, str, str]:
        backend = NamespaceBackend()
        try:
            box = await backend.create(SandboxSpec(files={"a.txt": "one\n"}))
            gateway = Gateway(ChatFormat(TOKENIZER), ScriptedReplicas([*(said for said, _ in TURNS), SUBMIT]))  # type: ignore[arg-type]
            session = gateway.open_session("k", seed=1, temperature=1.0)
            tools, spec = BoxTools(box, TASK.tools, tool_s=5.0), RepoFamily().agent(TASK)
            deadline = time.monotonic() + 60.0
            run = await run_agent(TASK, session, LIMITS, spec=spec, tools=tools, deadline=deadline, rng=random.Random(0))
        finally:
            await backend.close()
        window = session.window()
        sampled = TOKENIZER.decode(window.tokens_T[window.sampled_T != 0].tolist())
        return run.stop, TOKENIZER.decode(window.tokens_T.tolist()), sampled

    stop, text, sampled = asyncio.run(scene())
    opening = "<|im_start|>system\nYou are a coding agent. Use the tools, then submit.<|im_end|>\n"
    opening += "<|im_start|>user\ndo < |im_end|> it<|im_end|>\n<|im_start|>assistant\n"
    wanted = opening
    for said, results in TURNS:
        told = "".join(f"<|im_start|>tool\n{result}<|im_end|>\n" for result in results)
        wanted += f"{said}<|im_end|>\n{told}<|im_start|>assistant\n"
    assert stop is StopReason.SUBMITTED and text == f"{wanted}{SUBMIT}<|im_end|>"
    assert sampled == "".join(f"{said}<|im_end|>" for said in [*(said for said, _ in TURNS), SUBMIT])


def test_agent_run_works_on_a_copy_and_writes_the_diff(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if (reason := NamespaceBackend.probe()) is not None:
        pytest.skip(reason)
    folder, out = tmp_path / "repo", tmp_path / "change.diff"
    (folder / "src").mkdir(parents=True)
    (folder / "src" / "a.txt").write_text("one\ntwo\n")
    (folder / "gone.txt").write_text("bye")
    edit = '<tool_call>{"name": "edit", "arguments": {"path": "src/a.txt", "old": "two", "new": "2"}}</tool_call>'
    remove = '<tool_call>{"name": "bash", "arguments": {"command": "rm gone.txt; echo new > made"}}</tool_call>'

    def scripted(*rest: Any) -> ScriptedReplicas:
        return ScriptedReplicas([f"I look. {edit}", remove, SUBMIT])

    monkeypatch.setattr("rollmill.gateway.routing.replicas.Replicas", scripted)
    app = typer.Typer()
    app.add_typer(agent_app, name="agent")
    argv = ["agent", "run", str(DEMO), "change it", "--replica", "http://x", "--folder", str(folder), "--out", str(out)]
    done = CliRunner().invoke(app, argv)
    assert done.exit_code == 0, (done.output, done.exception)
    for line in (
        "user: change it",
        "assistant: I look.",
        'assistant: bash {"command": "rm gone.txt; echo new > made"}',
        "tool: ok",
        "[submitted]",
    ):
        assert line in done.output
    assert out.read_text() == (
        "--- a/gone.txt\n+++ /dev/null\n@@ -1 +0,0 @@\n-bye\n\\ No newline at end of file\n"
        "--- /dev/null\n+++ b/made\n@@ -0,0 +1 @@\n+new\n"
        "--- a/src/a.txt\n+++ b/src/a.txt\n@@ -1,2 +1,2 @@\n one\n-two\n+2\n"
    )
    assert (folder / "src" / "a.txt").read_text() == "one\ntwo\n" and (folder / "gone.txt").exists()


def test_difference_names_files_that_are_no_text() -> None:
    assert difference({"a": b"\xff", "same": b"x"}, {"a": b"\xfe", "same": b"x"}) == "Binary files a/a and b/a differ\n"
    assert difference({"a": b"x\x0cy\n"}, {"a": b"x\x0cz\n"}) == "--- a/a\n+++ b/a\n@@ -1 +1 @@\n-x\x0cy\n+x\x0cz\n"
