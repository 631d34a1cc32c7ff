"""mini-swe-agent's own command line, inside the box and beside it, over litellm: graded, exact, trained; set up by environment alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from agent_stage import SITE, call, prove, solves

from rollmill.harness.program import Program
from rollmill.sandbox.namespace import NamespaceBackend

MINI = ("-m", "minisweagent.run.mini", "-m", "openai/{model}", "-y", "--exit-immediately", "-t", "{instruction}")
ENV = {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
SUBMIT = call("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")


def test_mini_swe_agent_inside_a_box_is_trained_as_it_is(tmp_path: Path) -> None:
    pytest.importorskip("minisweagent")
    if (reason := NamespaceBackend.probe()) is not None:
        pytest.skip(reason)
    program = Program(command=("python3", *MINI), env=ENV)
    done = prove(tmp_path, program, solves(SUBMIT), is_inside=True, site=SITE, memory_bytes=1 << 30)
    assert all(len(d.trace.windows) == 1 and d.trace.windows[0].num_tokens > 1000 for d in done)


@pytest.mark.slow
def test_mini_swe_agent_beside_is_trained_as_it_is(tmp_path: Path) -> None:
    pytest.importorskip("minisweagent")
    prove(tmp_path, Program(command=(sys.executable, *MINI), env=ENV), solves(SUBMIT))
