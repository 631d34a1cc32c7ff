"""A real `rollmill train` in its own processes, small enough for a test, with the means to kill it anywhere."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rollmill.ledger import Ledger
from rollmill.records import EpisodeState

REPO = Path(__file__).parents[2]
ROLES = ("trainer", "engine-0", "rollout", "compactor")


def run_file(folder: Path, **sections: dict[str, object]) -> Path:
    """A run file for a few small steps of the shipped model."""
    merged: dict[str, dict[str, object]] = {
        "run": {"dir": str(folder / "run"), "steps": 6},
        "model": {"path": str(REPO / "models/demo")},
        "tasks": {"kinds": ["note", "move"], "num_heldout": 0},
        "rollout": {"group_size": 4, "max_running": 16},
        "trainer": {"groups_per_batch": 2, "lr": 1e-4, "max_staleness": 4, "checkpoint_every": 2},
    }
    for name, values in sections.items():
        merged.setdefault(name, {}).update(values)
    lines = []
    for name, values in merged.items():
        lines.append(f"[{name}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    path = folder / "run.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


class LiveRun:
    def __init__(self, path: Path) -> None:
        self.path, self.run_dir = path, path.parent / "run"
        self.process: subprocess.Popen[str] | None = None

    def start(self, *extra: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rollmill.cli", "train", str(self.path), *extra],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def pid_of(self, role: str) -> int | None:
        try:
            return int(json.loads((self.run_dir / "roles" / f"{role}.json").read_text())["pid"])
        except (OSError, ValueError, KeyError):
            return None

    def role_pids(self) -> list[int]:
        return [pid for pid in (self.pid_of(role) for role in ROLES) if pid is not None]

    def is_up(self, role: str) -> bool:
        pid = self.pid_of(role)
        return pid is not None and is_alive(pid)

    def kill(self, role: str) -> bool:
        pid = self.pid_of(role)
        if pid is None or not is_alive(pid):
            return False
        os.kill(pid, signal.SIGKILL)
        return True

    def finish(self, deadline_s: float) -> str:
        assert self.process is not None
        output, _ = self.process.communicate(timeout=deadline_s)
        return output

    def graded(self) -> set[str]:
        if not (self.run_dir / "ledger.db").is_file():
            return set()
        with Ledger.open_reader(self.run_dir) as ledger:
            groups = [f"g{i:06d}" for i in range(ledger.progress().num_opened)]
            return {e.episode_id for g in groups for e in ledger.episodes_of(g) if e.state == EpisodeState.GRADED}


def is_alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().split(") ")[1][0] != "Z"
    except OSError:
        return False


def await_until(what: str, condition: Callable[[], bool], deadline_s: float = 60.0) -> None:
    until = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < until, f"waited {deadline_s:.0f} s until {what}"
        time.sleep(0.02)
