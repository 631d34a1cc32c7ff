"""`rollmill track`: the verb only; what it needs is imported inside, so that `--help` is instant."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def track_command(
    run_dir: Annotated[Path, typer.Argument(help="the run directory")],
    to: Annotated[str, typer.Option(help="wandb, tensorboard or trackio")],
    follow: Annotated[bool, typer.Option("--follow", help="go on until the run has ended")] = False,
    names: Annotated[str, typer.Option(help="trl or verl: the names that its users chart already; default: our own")] = "",
    project: Annotated[str, typer.Option(help="wandb and trackio: the project")] = "rollmill",
    name: Annotated[str, typer.Option(help="of the run in the tracker; default: the directory's name")] = "",
    out: Annotated[Path | None, typer.Option(help="where the tracker keeps its files; default: in the run directory")] = None,
    every: Annotated[float, typer.Option(min=0.05, help="seconds between two looks")] = 2.0,
) -> None:
    """Copy a run's metrics into a tracker; called again, or after a crash, it goes on where it was."""
    import signal
    import threading

    from rollmill.trackers.track import is_over, track

    stop = threading.Event()
    if follow:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
    # One look more after the end: the last lines may have come between our look and the summary.
    was_over = False

    def wait() -> bool:
        nonlocal was_over
        if not follow or was_over or stop.is_set():
            return False
        was_over = is_over(run_dir)
        stop.wait(0.0 if was_over else every)
        return True

    done = track(run_dir, to, project=project, name=name, aliases=names, out=out, wait=wait)
    damaged = f", {done.num_bad} damaged lines skipped" if done.num_bad else ""
    typer.echo(f"sent {done.num_rows:,} rows to {to} as run {done.run_id}{damaged}")
