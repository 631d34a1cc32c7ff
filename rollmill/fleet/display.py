"""The live progress of a run: a panel on a terminal, one plain line every few seconds elsewhere. Only reads."""

from __future__ import annotations

import json
import sqlite3
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rollmill.config import RunConfig
from rollmill.fleet.disk import room_for
from rollmill.fleet.summary import sparkline
from rollmill.ledger import Ledger
from rollmill.records import EpisodeState
from rollmill.telemetry import Metrics

REFRESH_S, LINE_EVERY_S = 0.5, 5.0


class _Tail:
    """The newest values of a role's metrics stream, reading only what was appended."""

    def __init__(self, path: Path) -> None:
        self._path, self._at, self.last = path, 0, dict[str, Any]()
        self.rewards: list[float] = []

    def read(self) -> None:
        if not self._path.is_file():
            return
        with self._path.open("rb") as file:
            file.seek(self._at)
            body = file.read()
        whole = body[: body.rfind(b"\n") + 1]
        self._at += len(whole)
        for line in whole.splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                # Torn by a full disk; the process after it wrote on behind the tear.
                continue
            self.last |= row
            if "reward/mean" in row:
                self.rewards.append(row["reward/mean"])


class Display:
    """Call `tick` often; it decides when to draw."""

    def __init__(self, config: RunConfig) -> None:
        self._config, self._run_dir = config, config.run.dir
        self._trainer, self._rollout = _Tail(self._run_dir / "metrics/trainer.jsonl"), _Tail(self._run_dir / "metrics/rollout.jsonl")
        self._started, self._drawn, self._lined = time.monotonic(), 0.0, 0.0
        self._console = Console(stderr=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True) if sys.stdout.isatty() else None
        self._ledger: Ledger | None = None
        with room_for(self._run_dir / "metrics"):
            self._metrics, self._life = Metrics(self._run_dir, "supervisor"), time.time()
        self.num_missed = 0
        """Looks at the run that its disk or its ledger refused; the roles tell what that means."""
        self._note = "starting"

    def __enter__(self) -> Display:
        if self._live:
            self._live.start()
        return self

    def record(self) -> None:
        """How long this life of the run has lasted, for the summary."""
        wall_s = round(time.monotonic() - self._started, 3)
        self._metrics.write({"run/wall_s": wall_s, "life": self._life}, step=0)

    def __exit__(self, *_: object) -> None:
        self.record()
        if self._live:
            self._live.stop()
        if self._ledger:
            self._ledger.close()

    def say(self, text: str) -> None:
        self._note = text
        self._console.print(f"[{time.monotonic() - self._started:6.1f} s] {text}", highlight=False)

    def tick(self) -> None:
        now = time.monotonic()
        if now - self._drawn < REFRESH_S:
            return
        self._drawn = now
        try:
            self._look(now)
        except (OSError, sqlite3.Error):
            self.num_missed += 1

    def _look(self, now: float) -> None:
        if self._ledger is None:
            if not (self._run_dir / "ledger.db").is_file():
                return
            self._ledger = Ledger.open_reader(self._run_dir)
        self._trainer.read()
        self._rollout.read()
        if self._live:
            self._live.update(self._panel(now), refresh=True)
        elif now - self._lined >= LINE_EVERY_S:
            self._lined = now
            self.record()
            print(f"[{now - self._started:6.1f} s] {self._line()}", flush=True)

    def _facts(self) -> dict[str, Any]:
        assert self._ledger is not None
        progress = self._ledger.progress()
        t, r = self._trainer.last, self._rollout.last
        before = self._ledger.eval_summary("before")
        after = self._ledger.eval_summary("after")
        return {
            "step": progress.num_steps_committed,
            "steps": self._config.run.steps,
            "reward": sum(self._trainer.rewards[-5:]) / max(1, len(self._trainer.rewards[-5:])),
            "staleness": t.get("staleness/mean", 0.0),
            "staleness_max": t.get("staleness/max", 0.0),
            "staleness_bound": int(t.get("staleness/bound", self._config.max_staleness)),
            "wait_batch": t.get("timing_s/wait_batch", 0.0),
            "step_s": t.get("timing_s/step", 0.0),
            "running": int(r.get("rollout/num_running", 0)),
            "limit": int(r.get("rollout/limit", 0)),
            "tokens_per_s": r.get("engine/tokens_per_s", 0.0),
            "idle": r.get("rollout/idle_frac", 0.0),
            "version": progress.version,
            "served": int(r.get("engine/version", -1)),
            "bytes": t.get("weights/bytes", 0.0),
            "episodes": progress.num_episodes_by_state.get(EpisodeState.GRADED, 0),
            "ready": progress.num_ready,
            "failed": sum(progress.num_failed_by_boundary.values()),
            "dropped": progress.num_dropped,
            "before": before[0] if before else None,
            "after": after[-1] if after else None,
        }

    def _line(self) -> str:
        f = self._facts()
        if f["after"]:
            return f"held-out tasks after training: {f['after'].num_success} of {f['after'].num_episodes} solved so far"
        if f["version"] < 0:
            return "starting; the trainer is loading the model"
        if not f["episodes"]:
            so_far = f"{f['before'].num_success} of {f['before'].num_episodes} solved so far" if f["before"] else "starting"
            return f"held-out tasks before training: {so_far}"
        return (
            f"step {f['step']}/{f['steps']}  reward {f['reward']:.2f}  staleness {f['staleness']:.1f} (max {f['staleness_max']:.0f})  "
            f"trainer waited {f['wait_batch']:.1f} s of {f['wait_batch'] + f['step_s']:.1f} s  "
            f"rollouts {f['running']}/{f['limit']} running, {100 * f['idle']:.0f} % idle  "
            f"{f['tokens_per_s']:,.0f} tokens/s  version {f['version']} ({f['bytes'] / 1e6:.2f} MB)  "
            f"episodes {f['episodes']}"
        )

    def _panel(self, now: float) -> Group:
        f = self._facts()
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold")
        grid.add_column()
        if f["before"]:
            grid.add_row("held-out before", f"{f['before'].num_success} of {f['before'].num_episodes} solved")
        grid.add_row("reward", f"{f['reward']:.2f}  {sparkline(self._trainer.rewards, 48)}")
        grid.add_row("staleness", f"{f['staleness']:.1f} versions, at most {f['staleness_max']:.0f} (bound {f['staleness_bound']})")
        grid.add_row("trainer", f"waited {f['wait_batch']:.1f} s for the last batch, worked {f['step_s']:.1f} s on it")
        busy = f"{f['running']} of {f['limit']} slots busy, {100 * f['idle']:.0f} % idle at the gate"
        grid.add_row("rollouts", f"{busy}, {f['ready']} groups ready")
        grid.add_row("engine", f"{f['tokens_per_s']:,.0f} tokens/s, serves version {f['served']} of {f['version']}")
        grid.add_row("weights", f"{f['bytes'] / 1e6:.2f} MB for the last version")
        grid.add_row("episodes", f"{f['episodes']:,} graded, {f['failed']} failed outside the agent, {f['dropped']} groups dropped")
        if f["after"]:
            grid.add_row("held-out after", f"{f['after'].num_success} of {f['after'].num_episodes} solved")
        head = Text(f"step {f['step']} of {f['steps']}   {now - self._started:.0f} s   {self._note}", style="bold cyan")
        return Group(head, ProgressBar(total=f["steps"], completed=f["step"], width=60), grid)
