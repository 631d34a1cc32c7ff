"""`rollmill template`: what can be known of a model's chat template without its weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rollmill.chat.check import BadTurn, TemplateReport

template_app = typer.Typer(help="Prove that a model's chat template can be continued token by token.", no_args_is_help=True)


@template_app.callback()
def main() -> None:
    """Prove that a model's chat template can be continued token by token."""


@template_app.command()
def check(
    model: Annotated[Path, typer.Argument(help="A model directory with tokenizer.json and a chat template")],
    turns: Annotated[int, typer.Option(help="Most answers per conversation", min=2)] = 4,
    conversations: Annotated[int, typer.Option(help="Conversations of each kind", min=1)] = 40,
    seed: Annotated[int, typer.Option(help="Seed of the conversations")] = 0,
    tool_format: Annotated[str, typer.Option(help="auto, or a tool format by name")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout")] = False,
) -> None:
    """Compare what the template writes with what the gateway does, turn by turn; exit status 1 when a claim does not hold."""
    import msgspec

    from rollmill.chat.check import check_template
    from rollmill.chat.format import ChatFormat
    from rollmill.model.tokenizer import Tokenizer

    try:
        chat = ChatFormat(Tokenizer(model), tool_format=tool_format)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if not chat.tokenizer.chat_template.texts:
        raise typer.BadParameter(f"{model} has no chat template; add chat_template.jinja or `chat_template` in tokenizer_config.json")
    report = check_template(chat, num_per_kind=conversations, num_turns=turns, seed=seed)
    if as_json:
        facts = {"model": str(model), "seed": seed, "passed": report.passed, **msgspec.to_builtins(report)}
        print(msgspec.json.encode(facts).decode())
    else:
        _show(model, report)
    raise typer.Exit(int(not report.passed))


def _show(model: Path, report: TemplateReport) -> None:
    from rich.console import Console
    from rich.table import Table

    screen = Console(highlight=False)
    cost = "what is new" if report.is_local else "the whole conversation (its template looks back)"
    screen.print(f"{model}: tool format {report.tool_format}, reasoning {report.reasoning or 'none'}; a turn costs {cost}", markup=False)
    for note in report.notes:
        screen.print(f"note: {note}", markup=False)
    for reason, num in report.refused.items():
        screen.print(f"{num} of {report.num_conversations} conversations not compared: {reason}", markup=False)
    table = Table("claim", "compared", "verdict")
    for claim in report.claims:
        where = ", ".join(f"{kind} ({num})" for kind, num in claim.kinds.items())
        table.add_row(claim.name, f"{claim.num_compared:,}", "holds" if claim.passed else f"fails: {where}" if where else "not shown")
    screen.print(table)
    for claim in report.claims:
        if claim.first is not None:
            screen.print(f"\n{claim.name}: {claim.num_failed} of {claim.num_compared} comparisons fail. First:", markup=False)
            screen.print(_told(claim.first), markup=False)
        if claim.meaning:
            screen.print(f"  so {claim.meaning}", markup=False)


def _told(bad: BadTurn) -> str:
    where = f"  conversation {bad.conversation} with {bad.kind}"
    if bad.message is not None:
        where += f", message {bad.message} ({bad.role})"
    lines = [f"\n    written by line {line} of the template" if line else "" for line in (bad.wanted_line, bad.found_line)]
    return f"{where}\n  was  {bad.wanted!r}{lines[0]}\n  then {bad.found!r}{lines[1]}"
