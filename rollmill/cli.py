"""The command line: verbs only, each calls one function. Imports happen inside the verbs, so `--help` is instant."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="Train LLM agents by asynchronous RL.")
tasks_app = typer.Typer(no_args_is_help=True, help="Look at tasks and write data sets from them.")
model_app = typer.Typer(no_args_is_help=True, help="Make and inspect models.")
app.add_typer(tasks_app, name="tasks")
app.add_typer(model_app, name="model")




@tasks_app.command("export")
def tasks_export(
    what: Annotated[str, typer.Argument(help="documents (for midtrain) or traces (for sft)")],
    out: Annotated[Path, typer.Option(help="JSONL file to write")],
    num: Annotated[int, typer.Option(help="how many rows")] = 10000,
    seed: int = 0,
    expert_frac: Annotated[float, typer.Option(help="share of expert traces; the rest are novice ones")] = 1.0,
    levels: Annotated[str, typer.Option(help="difficulty levels, comma separated")] = "1",
) -> None:
    """Write documents or expert/novice traces of the `repo` family as JSONL."""
    from rollmill.harness.agent import SYSTEM
    from rollmill.tasks import open_family
    from rollmill.tasks.repo import corpus

    picked = tuple(int(x) for x in levels.split(","))
    family = open_family("repo")
    if what == "documents":
        rows = corpus.documents(family, num=num, seed=seed, levels=picked)
    elif what == "traces":
        rows = corpus.traces(family, num=num, seed=seed, expert_frac=expert_frac, levels=picked, system=SYSTEM)
    else:
        raise ValueError(f"cannot export {what!r}; choose documents or traces")
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    typer.echo(f"wrote {num:,} {what} to {out}")


@model_app.command("new")
def model_new(
    out: Path,
    text: Annotated[list[Path], typer.Option(help="JSONL files to learn the vocabulary from")],
    vocab_size: int = 1024,
    hidden_size: int = 160,
    num_layers: int = 4,
    head_dim: int = 32,
    max_position: int = 512,
    seed: int = 0,
) -> None:
    """Make a tokenizer and fresh weights of a small Llama-style model."""
    from rollmill.model.build import new_model, train_tokenizer

    lines = (line for path in text for line in path.open())
    train_tokenizer((_plain(json.loads(line)) for line in lines), vocab_size, out)
    new_model(out, hidden_size=hidden_size, num_layers=num_layers, head_dim=head_dim, max_position=max_position, seed=seed)
    typer.echo(f"wrote {out}")


def _plain(row: dict) -> str:
    return row["text"] if "text" in row else "\n".join(json.dumps(m) for m in row["messages"])


Lr = Annotated[float, typer.Option(help="peak learning rate")]
Device = Annotated[str, typer.Option(help="cpu or cuda")]


@app.command()
def midtrain(
    model: Path, data: Annotated[Path, typer.Option()], out: Annotated[Path, typer.Option()], lr: Lr = 2e-3, steps: int = 1000,
    tokens_per_batch: int = 32768, seed: int = 0, device: Device = "cpu",
) -> None:  # fmt: skip
    """Continue pre-training a model on documents (JSONL with `text`)."""
    from rollmill.trainer.supervised import SupervisedConfig, stage_midtrain

    config = SupervisedConfig(lr=lr, num_steps=steps, tokens_per_batch=tokens_per_batch, seed=seed, device=device)
    stage_midtrain(model, data, out, config, typer.echo)


@app.command()
def sft(
    model: Path, data: Annotated[Path, typer.Option()], out: Annotated[Path, typer.Option()], lr: Lr = 2e-3, steps: int = 1000,
    tokens_per_batch: int = 32768, seed: int = 0, device: Device = "cpu",
) -> None:  # fmt: skip
    """Fine-tune a model on conversations (JSONL with `messages`)."""
    from rollmill.trainer.supervised import SupervisedConfig, stage_sft

    config = SupervisedConfig(lr=lr, num_steps=steps, tokens_per_batch=tokens_per_batch, seed=seed, device=device)
    stage_sft(model, data, out, config, typer.echo)


def main() -> None:
    """Run a verb; what a person can fix is printed as one sentence, everything else keeps its traceback."""
    try:
        app()
    except (ValueError, FileNotFoundError) as error:
        print(f"rollmill: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
