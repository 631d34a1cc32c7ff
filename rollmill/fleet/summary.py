"""What a run achieved, read from its directory alone: `summary.json` for programs, plain English for people."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from rollmill.config import load_config
from rollmill.fleet.rundir import write_atomic
from rollmill.ledger import Ledger
from rollmill.records import EpisodeState
from rollmill.telemetry import read_metrics

BARS = "▁▂▃▄▅▆▇█"


def summarise(run_dir: Path) -> dict[str, Any]:
    """Numbers of a finished or unfinished run; what is not known yet is null."""
    config = load_config(run_dir / "run.toml")
    trainer = read_metrics(run_dir, "trainer")
    steps = {row["step"]: row for row in trainer if "reward/mean" in row}
    versions = [row for row in trainer if "weights/bytes" in row]
    rollout = [row for row in read_metrics(run_dir, "rollout") if "rollout/idle_frac" in row]
    ordered = [steps[k] for k in sorted(steps)]
    waited = sum(row["timing_s/wait_batch"] for row in ordered[1:])
    worked = sum(row["timing_s/step"] for row in ordered[1:])
    deltas = [row["weights/bytes"] for row in versions if not row["weights/is_full"]]
    with Ledger.open_reader(run_dir) as ledger:
        progress = ledger.progress()
        before, after = ledger.eval_summary("before"), ledger.eval_summary("after")
    lives = {row["life"]: row["run/wall_s"] for row in read_metrics(run_dir, "supervisor")}
    return {
        "heldout_success_before": before[0].mean_success if before else None,
        "heldout_success_after": after[-1].mean_success if after else None,
        "num_heldout": before[0].num_episodes if before else 0,
        "num_steps": progress.num_steps_committed,
        "num_episodes": progress.num_episodes_by_state.get(EpisodeState.GRADED, 0),
        "trainer_idle_frac": waited / (waited + worked) if waited + worked else None,
        "rollout_idle_frac": rollout[-1]["rollout/idle_frac"] if rollout else None,
        "staleness_mean": float(np.mean([r["staleness/mean"] for r in ordered])) if ordered else None,
        "staleness_max": max((r["staleness/max"] for r in ordered), default=None),
        "delta_bytes_mean": float(np.mean(deltas)) if deltas else None,
        "full_bytes": versions[-1]["weights/full_bytes"] if versions else None,
        "wall_s": round(sum(lives.values()), 1) if lives else None,
        "seed": config.run.seed,
        "mode": config.run.mode,
        "timing_s": {
            "trainer_wait_batch": waited,
            "trainer_work": worked,
            "episodes_wait_policy": rollout[-1]["timing_s/wait_policy"] if rollout else 0.0,
            "episodes_wait_sandbox": rollout[-1]["timing_s/wait_sandbox"] if rollout else 0.0,
        },
        "mismatch": {
            "abs_diff_mean": float(np.mean([r["mm/abs_diff_mean"] for r in ordered])) if ordered else None,
            "same_version_abs_diff_max": max((r["mm/single_version_abs_diff_max"] for r in ordered), default=None),
        },
        "num_failed": {str(k): v for k, v in progress.num_failed_by_boundary.items()},
        "num_cancelled": {str(k): v for k, v in progress.num_cancelled_by_reason.items()},
        "num_groups_dropped": {str(k): v for k, v in progress.num_dropped_by_reason.items()},
        "success_in_trained_groups": progress.trained_outcome.mean_success,
        "success_in_dropped_groups": progress.dropped_outcome.mean_success,
        "reward_curve": [round(r["reward/mean"], 4) for r in ordered],
    }


def write_summary(run_dir: Path) -> Path:
    path = run_dir / "summary.json"
    write_atomic(path, json.dumps(summarise(run_dir), indent=2) + "\n")
    return path


def sparkline(values: list[float], width: int = 60) -> str:
    """Values between 0 and 1 as a row of bars.

    >>> sparkline([0.0, 0.5, 1.0])
    '▁▅█'
    """
    if not values:
        return ""
    cells = np.array_split(np.asarray(values), min(width, len(values)))
    return "".join(BARS[min(7, max(0, round(float(c.mean()) * 7 + 1e-9)))] for c in cells)


def describe(summary: dict[str, Any], run_dir: Path, me: str = "rollmill") -> str:
    """The summary for a person, ending in what to type next."""

    def pct(value: float | None) -> str:
        return "not measured" if value is None else f"{100 * value:.0f} %"

    s, curve = summary, summary["reward_curve"]
    lines = [
        f"Held-out success went from {pct(s['heldout_success_before'])} to {pct(s['heldout_success_after'])} "
        f"on {s['num_heldout']} tasks the model was never trained on.",
        f"It took {s['num_steps']} optimiser steps over {s['num_episodes']:,} graded episodes, "
        f"{s['wall_s'] or 0:.0f} s in all, {s['mode']} mode.",
    ]
    if curve:
        lines.append(f"Reward per step   {sparkline(curve)}   {curve[0]:.2f} -> {curve[-1]:.2f}")
        lines.append(f"Staleness         {s['staleness_mean']:.1f} weight versions on average, {s['staleness_max']:.0f} at most.")
        lines.append(
            f"Waiting           the trainer waited {pct(s['trainer_idle_frac'])} of its time for a batch; "
            f"{pct(s['rollout_idle_frac'])} of the rollout slots stood empty at the pacing gate."
        )
    if s["full_bytes"] and s["delta_bytes_mean"]:
        ratio = s["full_bytes"] / s["delta_bytes_mean"]
        lines.append(
            f"Weights           {s['delta_bytes_mean'] / 1e6:.2f} MB shipped per version "
            f"instead of {s['full_bytes'] / 1e6:.2f} MB ({ratio:.1f} times less)."
        )
    failed, dropped = sum(s["num_failed"].values()), sum(s["num_groups_dropped"].values())
    lines.append(
        f"Faults            {failed} episodes failed outside the agent's control (none became a reward), {dropped} groups were dropped."
    )
    lines += [
        "",
        "Next:",
        f"  {me} show {run_dir}            # one episode, turn by turn",
        f"  {me} audit {run_dir}           # prove that every group was trained exactly once",
        f"  {me} weights log {run_dir}     # the chain of weight versions",
    ]
    return "\n".join(lines)
