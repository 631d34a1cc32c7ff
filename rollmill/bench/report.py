"""The shape of a benchmark's result: rows with a name, a peer, a value and a unit, and what it was measured on."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from rollmill import __version__


class Row(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    peer: str
    """What was measured: ours or the thing beside it."""
    value: float
    unit: str


def result(command: str, rows: Sequence[Row], **facts: Any) -> dict[str, Any]:
    """One JSON object: rows, plus everything needed to judge and repeat them."""
    return {
        "command": command,
        "rows": [msgspec.to_builtins(row) for row in rows],
        "versions": {"rollmill": __version__, "python": platform.python_version(), "torch": torch.__version__},
        "hardware": {"machine": platform.machine(), "num_cores": os.cpu_count(), "gpu": None, "load_average": os.getloadavg()[0]},
        **facts,
    }


def show(found: dict[str, Any], *, as_json: bool) -> None:
    """JSON on standard output, or a table for people."""
    if as_json:
        print(json.dumps(found, indent=2))
        return
    width = max(len(r["name"]) for r in found["rows"])
    for row in found["rows"]:
        print(f"{row['name']:{width}}  {row['peer']:10}  {row['value']:10.3f} {row['unit']}")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
