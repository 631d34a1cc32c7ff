"""A plain loop on the `openai` package, beside and inside the box: graded, exact, trained; only its base URL is ours."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from agent_stage import EXAMPLES, SITE, prove, solves

from rollmill.harness.program import Program
from rollmill.records import StopReason
from rollmill.sandbox.namespace import NamespaceBackend


def test_openai_loop_beside_is_trained_as_it_is(tmp_path: Path) -> None:
    pytest.importorskip("openai")
    program = Program(command=(sys.executable, str(EXAMPLES / "openai_loop.py"), "{instruction}"))
    done = prove(tmp_path, program, solves("done"))
    assert {d.trace.stop for d in done} == {StopReason.EXITED} and len(done[0].trace.windows) == 1
    assert [m["role"] for m in done[0].trace.messages] == ["system", "user", "assistant", "tool", "assistant", "tool", "assistant"]


def test_openai_loop_inside_reaches_nothing_but_its_model(tmp_path: Path) -> None:
    pytest.importorskip("openai")
    if (reason := NamespaceBackend.probe()) is not None:
        pytest.skip(reason)
    code = (EXAMPLES / "openai_loop.py").read_text()
    program = Program(command=("python3", "-c", code, "{instruction}"))
    prove(tmp_path, program, solves("done"), is_inside=True, site=SITE, memory_bytes=1 << 30)
