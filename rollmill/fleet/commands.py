"""`rollmill gateway` and `rollmill serve`: verbs only; what they need is imported inside, so `--help` is instant."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[Path, typer.Argument(help="the model directory: tokenizer and chat template")]
Host = Annotated[str, typer.Option(help="address to listen on")]
Port = Annotated[int, typer.Option(help="port to listen on; 0 chooses a free one")]
Name = Annotated[str, typer.Option(help="what clients call the model; default: the directory's name")]
Keys = Annotated[Path | None, typer.Option(help="TOML file of API keys and quotas; also ROLLMILL_GATEWAY_KEYS")]
Record = Annotated[Path | None, typer.Option(help="folder to keep every call in; open episodes survive a restart")]
Store = Annotated[str, typer.Option(help="weight store: its tags are model names (name@tag)")]
ToolFormat = Annotated[str, typer.Option(help="how the model writes tool calls; auto reads it from the template")]
Open = Annotated[bool, typer.Option("--open", help="listen beyond this machine without any keys")]


def gateway_command(
    model: Model,
    replica: Annotated[list[str], typer.Option(help="base URL of an engine; repeat it for several")],
    host: Host = "127.0.0.1",
    port: Port = 8000,
    name: Name = "",
    keys: Keys = None,
    record: Record = None,
    store: Store = "",
    tool_format: ToolFormat = "auto",
    is_open: Open = False,
) -> None:
    """Serve the OpenAI and Anthropic APIs in front of engines that run already."""
    from rollmill.fleet.serve import GatewaySettings, run_gateway
    from rollmill.gateway.front.run import run

    settings = GatewaySettings(
        model=model, host=host, port=port, name=name, keys=keys, record=record, store=store, tool_format=tool_format, is_open=is_open
    )
    run(lambda: run_gateway(settings, replica, typer.echo))


def serve_command(
    model: Model,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    name: Name = "",
    keys: Keys = None,
    record: Record = None,
    store: Store = "",
    tool_format: ToolFormat = "auto",
    is_open: Open = False,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    num_slots: Annotated[int, typer.Option(help="sequences that run at once")] = 32,
    max_len: Annotated[int | None, typer.Option(help="context length; default: the model's own")] = None,
    num_threads: Annotated[int | None, typer.Option(help="CPU threads of the engine")] = None,
) -> None:
    """Serve one model: an engine and, in front of it, the OpenAI and Anthropic APIs."""
    from rollmill.fleet.serve import EngineSettings, GatewaySettings, run_serve
    from rollmill.gateway.front.run import run

    settings = GatewaySettings(
        model=model, host=host, port=port, name=name, keys=keys, record=record, store=store, tool_format=tool_format, is_open=is_open
    )
    engine = EngineSettings(model=str(model), store=store, device=device, num_slots=num_slots, max_len=max_len, num_threads=num_threads)
    run(lambda: run_serve(settings, engine, typer.echo))
