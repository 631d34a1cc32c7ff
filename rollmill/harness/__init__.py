"""The default agent loop and its tools over a sandbox."""

from rollmill.harness.agent import AgentRun, Limits, run_agent
from rollmill.harness.tools import TOOLS, CallError, ToolCall, parse_calls, run_tool

__all__ = ["TOOLS", "AgentRun", "CallError", "Limits", "ToolCall", "parse_calls", "run_agent", "run_tool"]
