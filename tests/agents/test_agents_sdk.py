"""The OpenAI Agents SDK as it comes, by the Responses API: its own loop and tools; graded, exact, trained."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from agent_stage import EXAMPLES, prove, solves

from rollmill.harness.program import Program
from rollmill.records import StopReason


def test_agents_sdk_is_trained_as_it_is(tmp_path: Path) -> None:
    pytest.importorskip("agents")
    program = Program(command=(sys.executable, str(EXAMPLES / "agents_sdk.py"), "{instruction}"))
    done = prove(tmp_path, program, solves("done"))
    assert {d.trace.stop for d in done} == {StopReason.EXITED} and len(done[0].trace.windows) == 1
