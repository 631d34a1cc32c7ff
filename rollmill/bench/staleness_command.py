"""`rollmill bench staleness`: the verb only; what it needs is imported inside, so that `--help` is instant."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def bench_staleness_command(
    steps: Annotated[int, typer.Option(min=0, help="optimiser steps of each cell; 0: 160, with a run file 30")] = 0,
    seeds: Annotated[int, typer.Option(min=1, help="runs of each cell")] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="a few steps of one seed: does everything run?")] = False,
    run_file: Annotated[Path | None, typer.Option(help="instead, train this run file with each bound")] = None,
    work: Annotated[Path, typer.Option(help="where those runs are kept")] = Path("runs/bench-staleness"),
    seed: Annotated[int, typer.Option(help="with a run file: its seed")] = 0,
    json_: Annotated[bool, typer.Option("--json", help="one JSON object on standard output")] = False,
) -> None:
    """What old samples cost: bounds 0, 1, 2, 4, 8 and none, with correction and without, on a small task learnt in seconds."""
    import msgspec

    from rollmill.bench.report import show, typed_command
    from rollmill.bench.staleness import QUICK, Sizes, bench_staleness, bench_staleness_run

    if run_file is not None:
        found = bench_staleness_run(run_file, work, command=typed_command(), steps=steps or 30, seed=seed)
    else:
        sizes = QUICK if quick else msgspec.structs.replace(Sizes(num_seeds=seeds), steps=steps or Sizes().steps)
        found = bench_staleness(command=typed_command(), sizes=sizes)
    show(found, as_json=json_)
