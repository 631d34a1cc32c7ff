"""Finds the sandboxes that can be measured beside ours and talks to each in its own process; a missing one has a reason, not a gap."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from rollmill.bench.beside import PeerFailed, Spoken

ANSWER_S = 300.0
"""More than any question may take: each carries a limit of its own."""
PROGRAMS = ("bwrap", "crun", "runsc")
PACKAGES = {"sandlock": "sandlock", "swe-rex": "swerex"}
EXECUTE = "swe-rex execute"
"""SWE-ReX's other way to run a command: not in a session."""
PEERS = ("subprocess", *PROGRAMS, *PACKAGES, EXECUTE, "cp")
_ROOT = Path(__file__).parents[2]
_SETUP = "scripts/setup_peers.sh DIR, then --peers DIR"


class Driven:
    """One peer; a question is a method of `sandbox_driver.Peer`."""

    def __init__(self, interpreter: str, kind: str, options: dict[str, Any]) -> None:
        start = (
            f"import sys; sys.path.insert(0, {str(_ROOT)!r}); from rollmill.bench.sandbox_driver import main; main({kind!r}, {options!r})"
        )
        self._driver = Spoken([interpreter, "-I", "-B", "-c", start])

    def ask(self, what: str, **options: Any) -> dict[str, Any]:
        answer = self._driver.ask(answer_s=ANSWER_S, ask=what, **options)
        if "reason" in answer:
            raise PeerFailed(answer["reason"])
        return answer

    def close(self) -> None:
        self._driver.close()


def open_peer(name: str, folder: Path | None) -> Driven:
    """Starts what drives the peer; its programs are looked for in the folder that `setup_peers.sh` filled, then on the path."""
    if name in PROGRAMS:
        return Driven(sys.executable, name, {"program": _program(name, folder), "kind": name})
    kind = "swe-rex" if name == EXECUTE else name
    if kind not in PACKAGES:
        return Driven(sys.executable, kind, {})
    python = folder / "venv" / "bin" / "python" if folder else None
    if python is None or not python.exists():
        raise PeerFailed(f"{kind} is not installed: {_SETUP}")
    return Driven(str(python), kind, {"is_session": name != EXECUTE})


def _program(name: str, folder: Path | None) -> str:
    ours = folder / "bin" / name if folder else None
    found = str(ours) if ours and os.access(ours, os.X_OK) else shutil.which(name)
    if not found:
        raise PeerFailed(f"{name} is not installed: {_SETUP}")
    return found


def version(name: str, folder: Path | None) -> str | None:
    """What the peer calls itself, None where it is not there."""
    try:
        if name in PROGRAMS:
            return _said([_program(name, folder), "--version"]).removeprefix(name).replace("version", "").strip()
        if name in PACKAGES and folder:
            code = f"import importlib.metadata; print(importlib.metadata.version({name!r}))"
            return _said([str(folder / "venv" / "bin" / "python"), "-c", code])
    except (PeerFailed, OSError, subprocess.SubprocessError):
        return None
    return None


def _said(argv: list[str]) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=True)
    return done.stdout.splitlines()[0].strip()
