"""`rollmill tinker`: the verb only; what it needs is imported inside, so `--help` is instant."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def tinker_command(
    model: Annotated[Path, typer.Argument(help="model directory: what is trained and sampled from", file_okay=False, exists=True)],
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port to listen on; 0 chooses a free one")] = 8800,
    name: Annotated[str, typer.Option(help="what clients call the model, besides its path and the directory's name")] = "",
    state: Annotated[Path, typer.Option(help="folder that checkpoints are kept in")] = Path("runs/tinker"),
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    numerics: Annotated[str, typer.Option(help="numerics profile of trainer and engines")] = "exact",
    num_engines: Annotated[int, typer.Option(help="snapshots that can be sampled from at once; each holds the weights once", min=1)] = 1,
    num_slots: Annotated[int, typer.Option(help="sequences that one engine runs at once", min=1)] = 32,
    num_threads: Annotated[int | None, typer.Option(help="CPU threads of an engine")] = None,
    max_len: Annotated[int | None, typer.Option(help="context length; default: the model's own")] = None,
    tokens_per_pass: Annotated[int, typer.Option(help="padded tokens of one forward and backward pass; bounds memory", min=1)] = 8192,
    alpha: Annotated[float, typer.Option(help="adapters are scaled by alpha / rank")] = 32.0,
    key: Annotated[str, typer.Option(help="API key that clients must send; needed beyond this machine", envvar="ROLLMILL_TINKER_KEY")] = "",
) -> None:
    """Serve the Tinker API: training and sampling for loops written with the `tinker` SDK."""
    import asyncio
    import contextlib

    from rollmill.tinker.run import run_tinker

    def on_ready(bound: int) -> None:
        typer.echo(f"tinker endpoint on http://{host}:{bound}, model {name or str(model)!r}, checkpoints in {state}")
        shown = "KEY" if key else "tml-local"
        typer.echo(f'  tinker.ServiceClient(base_url="http://{host}:{bound}", api_key="{shown}")')

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(
            run_tinker(
                model,
                state_dir=state,
                host=host,
                port=port,
                name=name or None,
                device=device,
                numerics=numerics,
                num_engines=num_engines,
                num_slots=num_slots,
                num_threads=num_threads,
                max_len=max_len,
                tokens_per_pass=tokens_per_pass,
                alpha=alpha,
                key=key or None,
                on_ready=on_ready,
            )
        )
