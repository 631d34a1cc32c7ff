"""`rollmill agent`: the default agent in production, over a copy of a folder. What a verb needs is imported inside it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rollmill.harness.agent import Limits, Turn
    from rollmill.records import StopReason
    from rollmill.sandbox.records import SandboxSpec

agent_app = typer.Typer(no_args_is_help=True, help="Let a trained model work on a folder.")


@agent_app.command("run")
def agent_run(
    model: Annotated[Path, typer.Argument(help="model directory: its tokenizer and chat template", file_okay=False, exists=True)],
    instruction: Annotated[str, typer.Argument(help="what is to be done")],
    replica: Annotated[list[str], typer.Option(help="base URL of a replica that serves the model; may be given several times")],
    folder: Annotated[Path, typer.Option(help="copied into a box; stays as it is", file_okay=False, exists=True)],
    out: Annotated[Path | None, typer.Option(help="file for the diff; none: it is printed")] = None,
    tools: Annotated[str, typer.Option(help="comma separated; none: all of them")] = "",
    system: Annotated[str, typer.Option(help="system prompt; none: the one that models are trained with")] = "",
    show_tools: Annotated[bool, typer.Option(help="put the tools' schemas into the prompt")] = True,
    temperature: Annotated[float, typer.Option(min=0.0)] = 1.0,
    seed: int = 0,
    max_turns: Annotated[int, typer.Option(min=1)] = 50,
    max_tokens: Annotated[int, typer.Option(min=1, help="per turn")] = 2048,
    max_context: Annotated[int, typer.Option(min=0, help="0: what the replica holds")] = 0,
    tool_s: Annotated[float, typer.Option(min=0.1, help="seconds that one tool call may take")] = 60.0,
    wall_s: Annotated[float, typer.Option(min=1.0, help="seconds after which no further turn begins")] = 900.0,
    backend: Annotated[str, typer.Option(help="what makes the box")] = "namespace",
    image: Annotated[str, typer.Option(help="`host`, or the name of an image that `rollmill sandbox build` made")] = "host",
    disk: Annotated[str, typer.Option(help="what it may write, e.g. 1GiB")] = "256MiB",
) -> None:
    """Work on a copy of a folder, print each turn, write what changed as a diff. Status 0 when the agent handed in or answered."""
    from rollmill.harness import SYSTEM, AgentSpec, Limits
    from rollmill.harness.tools import TOOLS
    from rollmill.records import RunFailure, StopReason
    from rollmill.sandbox import SandboxSpec
    from rollmill.sandbox.commands import parse_size

    names = tuple(tools.split(",")) if tools else TOOLS
    spec = AgentSpec(system=system or SYSTEM, show_tools=show_tools)
    limits = Limits(
        max_turns=max_turns, max_tokens_per_turn=max_tokens, max_context=max_context, tool_s=tool_s, tools_s=wall_s, wall_s=wall_s
    )  # fmt: skip
    box = SandboxSpec(image=image, lifetime_s=wall_s + 120.0, disk_bytes=parse_size(disk))
    import asyncio

    try:
        stop, diff = asyncio.run(_run(model, instruction, replica, folder, names, spec, limits, box, backend, temperature, seed))
    except RunFailure as failure:
        raise ValueError(failure.message) from failure
    typer.echo(f"[{stop}]")
    if out is None:
        typer.echo(diff, nl=False)
    else:
        out.write_text(diff)
        typer.echo(f"wrote {out}; apply it with `git apply {out}` or `patch -p1 < {out}` in {folder}")
    raise typer.Exit(0 if stop in (StopReason.SUBMITTED, StopReason.ANSWERED) else 1)


async def _run(
    model: Path,
    instruction: str,
    urls: list[str],
    folder: Path,
    names: tuple[str, ...],
    spec: Any,
    limits: Limits,
    box_spec: SandboxSpec,
    backend_name: str,
    temperature: float,
    seed: int,
) -> tuple[StopReason, str]:
    import random
    import time
    import uuid

    import msgspec

    from rollmill.chat.format import ChatFormat
    from rollmill.gateway import Gateway
    from rollmill.gateway.routing.replicas import Replicas
    from rollmill.harness import BoxTools, run_agent
    from rollmill.model.tokenizer import Tokenizer
    from rollmill.records import Task
    from rollmill.sandbox import open_backend
    from rollmill.sandbox.commands import read_files
    from rollmill.telemetry import Waits

    world = read_files(folder)
    gateway = Gateway(ChatFormat(Tokenizer(model)), Replicas(lambda: urls, Waits()))
    sandboxes = open_backend(backend_name)
    try:
        max_len = min((p.max_len for p in await gateway.replicas.pressures()), default=0)
        if not (max_context := limits.max_context or max_len):
            raise ValueError(f"none of {', '.join(urls)} tells how much context it holds; is it up? Otherwise set --max-context")
        limits = msgspec.structs.replace(limits, max_context=max_context)
        box = await sandboxes.create(box_spec)
        for path, data, mode in world:
            await box.write(path, data, mode=mode)
        task = Task(
            task_id="agent", family="", kind="", level=1, seed=seed, split="", instruction=instruction, files={}, tools=names
        )  # fmt: skip
        session = gateway.open_session(uuid.uuid4().hex, seed=seed, temperature=temperature)
        screen = _Screen()
        run = await run_agent(
            task,
            session,
            limits,
            spec=spec,
            tools=BoxTools(box, names, tool_s=limits.tool_s, max_chars=limits.max_result_chars),
            deadline=time.monotonic() + (limits.wall_s or 0.0) + 60.0,
            rng=random.Random(seed),
            at_turn=screen.at_turn,
        )
        screen.show(session.messages)
        after = {path: await box.read(path, limit_bytes=16 << 20) for path in await box.list()}
        await box.close()
        return run.stop, difference({path: data for path, data, _ in world}, after)
    finally:
        await gateway.close()
        await sandboxes.close()


class _Screen:
    """Prints each message of a conversation once, as it comes."""

    def __init__(self) -> None:
        self._num_shown = 0

    async def at_turn(self, turn: Turn) -> None:
        self.show([*turn.session.messages, *(m.as_template() for m in turn.pending)])

    def show(self, messages: list[dict[str, Any]]) -> None:
        import json

        for message in messages[self._num_shown :]:
            if message["content"]:
                typer.echo(f"{message['role']}: {message['content'].rstrip()}")
            for call in message.get("tool_calls", ()):
                typer.echo(f"{message['role']}: {call['function']['name']} {json.dumps(call['function']['arguments'], ensure_ascii=False)}")
        self._num_shown = max(self._num_shown, len(messages))


def difference(before: dict[str, bytes], after: dict[str, bytes]) -> str:
    """What changed, as a unified diff; files that are no text are named only."""
    import difflib
    import io

    lines: list[str] = []
    for path in sorted(before.keys() | after.keys()):
        old, new = before.get(path), after.get(path)
        if old == new:
            continue
        names = f"a/{path}" if old is not None else "/dev/null", f"b/{path}" if new is not None else "/dev/null"
        try:
            # Not `splitlines`, which would also cut at form feeds and at rarer signs.
            was, now = ([*io.StringIO((data or b"").decode(), newline="\n")] for data in (old, new))
        except UnicodeDecodeError:
            lines.append(f"Binary files {names[0]} and {names[1]} differ\n")
            continue
        for line in difflib.unified_diff(was, now, *names):
            lines.append(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n")
    return "".join(lines)
