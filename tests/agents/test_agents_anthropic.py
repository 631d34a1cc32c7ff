"""A plain loop on the `anthropic` package, streaming: graded, exact, trained; only its base URL is ours."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from agent_stage import EXAMPLES, SITE, prove, solves

from rollmill.harness.program import Program
from rollmill.records import StopReason
from rollmill.sandbox.namespace import NamespaceBackend


@pytest.mark.slow
def test_anthropic_loop_beside_is_trained_as_it_is(tmp_path: Path) -> None:
    pytest.importorskip("anthropic")
    program = Program(command=(sys.executable, str(EXAMPLES / "anthropic_loop.py"), "{instruction}"))
    done = prove(tmp_path, program, solves("done"))
    assert {d.trace.stop for d in done} == {StopReason.EXITED} and len(done[0].trace.windows) == 1


def test_anthropic_loop_streams_from_inside_a_box(tmp_path: Path) -> None:
    pytest.importorskip("anthropic")
    if (reason := NamespaceBackend.probe()) is not None:
        pytest.skip(reason)
    program = Program(command=("python3", "-c", (EXAMPLES / "anthropic_loop.py").read_text(), "{instruction}"))
    prove(tmp_path, program, solves("done"), is_inside=True, site=SITE, memory_bytes=1 << 30)
