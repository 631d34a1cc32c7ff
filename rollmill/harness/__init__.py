"""The default agent loop, the toolsets it may use, and the default tools over a sandbox.

Names are looked up when first used: a task family needs the toolset seam and neither the loop nor the gateway behind it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollmill.harness.agent import AgentRun, AtTurn, Limits, Turn, first_turn, go_on, run_agent
    from rollmill.harness.tools import TOOLS, BoxTools
    from rollmill.harness.toolset import SYSTEM, AgentSpec, CallError, FunctionTools, NoTools, Toolset

__all__ = [
    "SYSTEM", "TOOLS", "AgentRun", "AgentSpec", "AtTurn", "BoxTools", "CallError", "FunctionTools", "Limits", "NoTools", "Toolset", "Turn",
    "first_turn", "go_on", "run_agent",
]  # fmt: skip

_HOMES = {"tools": ("TOOLS", "BoxTools"), "toolset": ("SYSTEM", "AgentSpec", "CallError", "FunctionTools", "NoTools", "Toolset")}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = next((home for home, names in _HOMES.items() if name in names), "agent")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
