"""The default agent loop and its tools over a sandbox."""

from rollmill.harness.agent import AgentRun, Limits, Turn, go_on, run_agent
from rollmill.harness.tools import TOOLS, CallError, ToolCall, parse_calls, run_tool

__all__ = ["TOOLS", "AgentRun", "CallError", "Limits", "ToolCall", "Turn", "go_on", "parse_calls", "run_agent", "run_tool"]
