"""`rollmill pipeline`: the verb only; what it needs is imported inside, so `--help` is instant."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def pipeline_command(
    file: Annotated[Path, typer.Argument(metavar="FILE.toml", help="the pipeline file")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="check everything, print the plan, then stop")] = False,
) -> None:
    """Run stages in a row (midtrain, sft, dpo, rl); run again, it goes on where it was."""
    from rollmill.fleet.pipeline import describe_plan, load_pipeline, run_pipeline
    from rollmill.fleet.train import train_run

    pipeline = load_pipeline(file)
    if dry_run:
        typer.echo("\n".join(describe_plan(pipeline)))
        return
    if not run_pipeline(pipeline, train=train_run, report=typer.echo):
        typer.echo(f"stopped; nothing is lost. Go on with:  rollmill pipeline {file}")
        raise typer.Exit(130)
