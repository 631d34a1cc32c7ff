"""The shape of a benchmark's result: rows with a name, a peer, a value and a unit, and what it was measured on."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollmill import __version__

PACKAGES = ("torch", "numpy", "numba", "triton", "transformers")


class Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One measured figure; `ratio` and `note` are left out of the JSON where there is none."""

    name: str
    peer: str
    """What was measured: ours or the thing beside it."""
    value: float | None
    """None when it could not be measured; `note` says why."""
    unit: str
    ratio: float | None = None
    """Against the row that the benchmark names as its yardstick."""
    note: str = ""


def result(command: str, rows: Sequence[Row], **facts: Any) -> dict[str, Any]:
    """One JSON object: rows, plus everything needed to judge and repeat them."""
    # Not imported here: what did not load torch measured nothing that it computes, and need not have it.
    torch = sys.modules.get("torch")
    versions = {"rollmill": __version__, "python": platform.python_version()}
    return {
        "command": command,
        "rows": [msgspec.to_builtins(row) for row in rows],
        "versions": versions | {name: found for name in PACKAGES if (found := _version(name))},
        "hardware": {
            "machine": platform.machine(),
            "cpu": cpu_name(),
            "num_cores": os.cpu_count(),
            "gpu": torch.cuda.get_device_name() if torch and torch.cuda.is_available() else None,
            "load_average": os.getloadavg()[0],
        },
        **facts,
    }


def typed_command() -> str:
    """What was typed, without the folder that the program lies in."""
    return shlex.join(["rollmill", *sys.argv[1:]])


def show(found: dict[str, Any], *, as_json: bool) -> None:
    """JSON on standard output, or a table for people."""
    if as_json:
        print(json.dumps(found, indent=2))
        return
    width, peers = (max(len(r[key]) for r in found["rows"]) for key in ("name", "peer"))
    for row in found["rows"]:
        value = "         -" if row["value"] is None else f"{row['value']:10,.3f}" if abs(row["value"]) >= 1 else f"{row['value']:10.4g}"
        ratio = f"  x {row['ratio']:.2f}" if row.get("ratio") is not None else ""
        print(f"{row['name']:{width}}  {row['peer']:{peers}}  {value} {row['unit']}{ratio}{'  ' + row['note'] if row.get('note') else ''}")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def rounded(value: float, digits: int = 4) -> float:
    """To so many significant digits: the rest is noise."""
    return float(f"{value:.{digits}g}")


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
