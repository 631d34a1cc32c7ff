"""`rollmill model import`: the verb that takes in a model from elsewhere; what it needs is imported inside, so `--help` is instant."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def import_model(
    file: Annotated[Path, typer.Argument(metavar="FILE.gguf", help="the GGUF file")],
    out: Annotated[Path, typer.Argument(help="directory to make")],
    dtype: Annotated[str, typer.Option(help="what to store the weights in: bfloat16, float16 or float32")] = "bfloat16",
    tokenizer: Annotated[Path | None, typer.Option(help="directory with a tokenizer to take instead of the file's own")] = None,
) -> None:
    """Make a model directory from a GGUF file."""
    from rollmill.model.gguf import import_gguf

    config = import_gguf(file, out, dtype=dtype, tokenizer=tokenizer)
    size = sum(p.stat().st_size for p in out.glob("*.safetensors"))
    typer.echo(
        f"wrote {out}: {config.family}, {config.num_layers} layers, {config.max_position:,} tokens of context, {size / 1e6:,.0f} MB {dtype}"
    )
