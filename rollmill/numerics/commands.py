"""`rollmill numerics`: prove on this machine that both sides compute the same bits, or find the first operation that does not."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

numerics_app = typer.Typer(help="Prove that trainer and engine compute the same bits; find where they part.", no_args_is_help=True)

ModelPath = Annotated[Path, typer.Argument(help="A Hugging Face safetensors directory")]
Device = Annotated[str, typer.Option(help="cpu or cuda")]
Profile = Annotated[str, typer.Option(help="A numerics profile: exact, fast, noisy, fp8, nvfp4")]
Tokens = Annotated[int, typer.Option(help="Length of the random text", min=2)]


@numerics_app.command()
def check(
    model: ModelPath,
    device: Device = "cpu",
    profile: Profile = "exact",
    tokens: Tokens = 200,
    sequences: Annotated[int, typer.Option(help="Requests that run together", min=1)] = 12,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout")] = False,
) -> None:
    """Run every gate on a model; exit status 1 when one fails."""
    import msgspec

    from rollmill.model import compute_dtype, load_model
    from rollmill.numerics.gates import run_gates

    loaded, _ = load_model(model, device=device, compute_dtype=compute_dtype(device), numerics=profile)
    screen, gates = Console(stderr=True), []
    for gate in run_gates(loaded, num_tokens=tokens, num_sequences=sequences):
        gates.append(gate)
        screen.print(f"{'holds' if gate.passed else '[red]FAILS[/red]'}  {gate.name}  {gate.detail}")
    if as_json:
        facts = {"model": str(model), "device": device, "profile": profile, "gates": [msgspec.to_builtins(g) for g in gates]}
        print(msgspec.json.encode(facts).decode())
    else:
        table = Table("claim", "compared", "verdict")
        for gate in gates:
            table.add_row(gate.name, f"{gate.num_compared:,}", "holds" if gate.passed else f"fails: {gate.detail}")
        Console().print(table)
    raise typer.Exit(int(not all(g.passed for g in gates)))


@numerics_app.command()
def bisect(
    model: ModelPath,
    against: Annotated[Path | None, typer.Option(help="Another model directory of the same shape; default: the same weights")] = None,
    left: Profile = "exact",
    right: Profile = "exact",
    left_chunk: Annotated[
        int, typer.Option(help="Tokens a step over pages, as the engine does; 0: packed, as the trainer does", min=0)
    ] = 0,
    right_chunk: Annotated[int, typer.Option(help="As left-chunk, for the other side", min=0)] = 1,
    device: Device = "cpu",
    tokens: Tokens = 100,
    seed: int = 0,
) -> None:
    """Name the first operation whose bits differ between two ways of computing the same text; exit status 1 when one does."""
    import numpy as np

    from rollmill.model import compute_dtype, load_model
    from rollmill.numerics.trace import Trace, first_difference, trace_packed, trace_paged

    def run(path: Path, profile: str, chunk: int) -> Trace:
        loaded, config = load_model(path, device=device, compute_dtype=compute_dtype(device), numerics=profile)
        text = np.random.default_rng(seed).integers(0, config.vocab_size, tokens).tolist()
        return trace_paged(loaded, text, chunk=chunk) if chunk else trace_packed(loaded, text)

    apart = first_difference(run(model, left, left_chunk), run(against or model, right, right_chunk))
    print(f"first difference: {apart}" if apart else f"no difference: every operation gave the same bits for all {tokens} tokens")
    raise typer.Exit(int(apart is not None))
