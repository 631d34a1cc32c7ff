"""The command line: verbs only, each calls one function. Imports happen inside the verbs, so `--help` is instant."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from rollmill.bench.staleness_command import bench_staleness_command
from rollmill.chat.commands import template_app
from rollmill.fleet.commands import gateway_command, serve_command
from rollmill.fleet.pipeline_commands import pipeline_command
from rollmill.harness.commands import agent_app
from rollmill.model.commands import import_model
from rollmill.numerics.commands import numerics_app
from rollmill.sandbox.commands import sandbox_app
from rollmill.tinker.commands import tinker_command
from rollmill.trackers.commands import track_command
from rollmill.trainer.commands import dpo_command, midtrain_command, sft_command
from rollmill.weights.commands import weights_app

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="Train LLM agents by asynchronous RL.")
tasks_app = typer.Typer(no_args_is_help=True, help="Look at tasks and write data sets from them.")
model_app = typer.Typer(no_args_is_help=True, help="Make and inspect models.")
bench_app = typer.Typer(no_args_is_help=True, help="Measure, beside a peer, in one run.")
app.add_typer(bench_app, name="bench")
app.add_typer(weights_app, name="weights")
app.add_typer(sandbox_app, name="sandbox")
app.add_typer(tasks_app, name="tasks")
app.add_typer(model_app, name="model")
app.add_typer(numerics_app, name="numerics")
app.add_typer(template_app, name="template")
app.add_typer(agent_app, name="agent")
model_app.command("import")(import_model)
for name, verb in (("midtrain", midtrain_command), ("sft", sft_command), ("dpo", dpo_command), ("pipeline", pipeline_command)):
    app.command(name)(verb)
app.command("gateway")(gateway_command)
app.command("serve")(serve_command)
app.command("track")(track_command)
app.command("tinker")(tinker_command)
bench_app.command("staleness")(bench_staleness_command)


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


Device = Annotated[str, typer.Option(help="cpu or cuda")]


RunFile = Annotated[Path, typer.Argument(help="the run file (TOML)")]
Sets = Annotated[list[str] | None, typer.Option("--set", help="override, e.g. --set trainer.lr=1e-5")]
RunDir = Annotated[Path, typer.Argument(help="the run directory")]


@app.command()
def train(
    run_file: RunFile,
    set_: Sets = None,
    resume: Annotated[bool, typer.Option(help="go on with the run in run.dir")] = False,
    dry_run: Annotated[bool, typer.Option(help="print the resolved run file and what would start, then stop")] = False,
) -> None:
    """Train: supervise trainer, engines and rollouts on this machine until the last step."""
    from rollmill.config import dump_config, load_config
    from rollmill.fleet.summary import describe, summarise
    from rollmill.fleet.train import train_run
    from rollmill.fleet.validate import check_inputs

    config = load_config(run_file, tuple(set_ or ()))
    if dry_run:
        check_inputs(config)
        typer.echo(dump_config(config))
        typer.echo(f"# would start: trainer, {config.engine.num_replicas} x engine, rollout; everything is kept in {config.run.dir}")
        return
    if not train_run(config, resume=resume):
        typer.echo(f"stopped; nothing is lost. Go on with:  {_me()} train {config.run.dir / 'run.toml'} --resume")
        raise typer.Exit(130)
    typer.echo("\n" + describe(summarise(config.run.dir), config.run.dir, _me()) + "\n")
    typer.echo(str(config.run.dir / "summary.json"))


@app.command()
def role(name: str, run_file: RunFile, index: int = 0, set_: Sets = None) -> None:
    """Run one role of a run: trainer, engine or rollout. This is what a launcher calls."""
    from rollmill.config import load_config
    from rollmill.fleet.role import run_role

    raise typer.Exit(run_role(name, load_config(run_file, tuple(set_ or ())), index=index))


@app.command()
def summary(run_dir: RunDir) -> None:
    """Say in plain English what a run achieved so far."""
    from rollmill.fleet.summary import describe, summarise

    typer.echo(describe(summarise(run_dir), run_dir, _me()))


@app.command()
def audit(run_dir: RunDir) -> None:
    """Prove from the ledger that every episode ended once and every group was trained at most once."""
    from rollmill.ledger import Ledger

    with Ledger.open_reader(run_dir) as ledger:
        problems, progress = ledger.audit(), ledger.progress()
    for problem in problems:
        typer.echo(f"VIOLATED: {problem}")
    if problems:
        raise typer.Exit(1)
    typer.echo(f"clean: {progress.num_trained} groups trained exactly once, {progress.num_dropped} dropped with a reason")


@app.command()
def show(run_dir: RunDir, episode: Annotated[str | None, typer.Argument(help="id; the newest graded one by default")] = None) -> None:
    """Print one episode, turn by turn, with its grade and weight versions."""
    from rollmill.fleet.viewer import show_episode

    typer.echo(show_episode(run_dir, episode))


@bench_app.command("loop")
def bench_loop_command(
    run_file: Annotated[Path, typer.Option(help="the run file both modes share")] = Path("examples/demo.toml"),
    work: Annotated[Path, typer.Option(help="where the two runs are kept")] = Path("runs/bench-loop"),
    steps: int = 60,
    latency: Annotated[str, typer.Option(help="seconds each tool call really takes: from,to")] = "0.1,2.0",
    target: Annotated[float, typer.Option(help="held-out success to reach")] = 0.8,
    every: Annotated[int, typer.Option(help="weight versions between two held-out looks")] = 5,
    num_heldout: int = 200,
    max_staleness: Annotated[int, typer.Option(min=0, help="bound of the async mode in versions; 0: the run file's")] = 0,
    seed: int = 0,
    json_: Annotated[bool, typer.Option("--json", help="one JSON object on standard output")] = False,
) -> None:
    """Sync against async on the same tasks with slow tools: time to the same held-out success, and who waited."""
    from rollmill.bench.loop import bench_loop
    from rollmill.bench.report import show as show_result

    low, high = (float(x) for x in latency.split(","))
    found = bench_loop(
        run_file, work, steps=steps, latency_s=(low, high), target=target, every=every, num_heldout=num_heldout, seed=seed,
        max_staleness=max_staleness,
    )  # fmt: skip
    show_result(found, as_json=json_)


Threads = Annotated[int, typer.Option(min=0, help="threads that compute; 0: as many as there are cores")]
AsJson = Annotated[bool, typer.Option("--json", help="one JSON object on standard output")]


@bench_app.command("engine")
def bench_engine_command(
    model: Annotated[Path | None, typer.Option(help="a Hugging Face safetensors directory; default: random weights")] = None,
    shape: Annotated[str, typer.Option(help="shape of random weights; default: smollm2, for swaps on a CPU demo")] = "",
    device: Device = "cpu",
    threads: Threads = 0,
    sequences: Annotated[str, typer.Option(help="numbers of sequences at once, comma separated; with --swaps the first one")] = "",
    prompt: Annotated[int, typer.Option(help="prompt tokens of each")] = 128,
    new: Annotated[int, typer.Option(help="sampled tokens of each")] = 128,
    rounds: Annotated[int, typer.Option(help="turns that everybody takes; medians are told")] = 3,
    peers: Annotated[str, typer.Option(help="comma separated; empty: none")] = "transformers,transformers-cb,vllm",
    swaps: Annotated[int, typer.Option(min=0, help="instead, swap weights this many times under load, in both modes")] = 0,
    swap_every: Annotated[float, typer.Option(min=0, help="least seconds between two swaps")] = 0.0,
    json_: AsJson = False,
) -> None:
    """Sampled tokens per second beside transformers and vLLM on the same weights; or weight swaps under load, every request counted."""
    from rollmill.bench.report import show as show_result
    from rollmill.bench.report import typed_command

    counts = [int(x) for x in (sequences or ("32" if swaps else "1,8,32,128")).split(",")]
    common: dict[str, Any] = {"command": typed_command(), "model_dir": model, "device": device, "threads": _threads(threads)}
    if swaps:
        from rollmill.bench.swaps import bench_swaps

        found = bench_swaps(
            num_swaps=swaps,
            shape=shape or ("demo" if device == "cpu" else "smollm2"),
            num_running=counts[0],
            num_prompt=prompt,
            num_new=new,
            every_s=swap_every,
            **common,
        )
    else:
        from rollmill.bench.engine import bench_engine

        names = [p for p in peers.split(",") if p]
        found = bench_engine(
            shape=shape or "smollm2", sequences=counts, num_prompt=prompt, num_new=new, rounds=rounds, peers=names, **common
        )
    show_result(found, as_json=json_)


@bench_app.command("numerics")
def bench_numerics_command(
    shape: Annotated[str, typer.Option(help="smollm2, qwen3-1.7b, qwen3-8b, moe-30b-a3b, demo, tiny or tiny-moe")] = "smollm2",
    layers: Annotated[int, typer.Option(min=0, help="layers that are built; 0: all of the shape's")] = 0,
    device: Device = "cpu",
    threads: Threads = 0,
    batches: Annotated[str, typer.Option(help="sequences of a decode step, comma separated")] = "1,8,32,128,256",
    context: Annotated[int, typer.Option(min=0, help="keys of each sequence in a decode step; 0: 2048 on cuda, 256 on cpu")] = 0,
    forward: Annotated[str, typer.Option(help="packed forwards as SEQUENCESxTOKENS, comma separated; empty: chosen by the device")] = "",
    tokens: Annotated[int, typer.Option(min=-1, help="sampled and scored again; -1: 1,048,576 on cuda, 4,096 on cpu; 0: none")] = -1,
    rounds: Annotated[int, typer.Option(help="turns that everybody takes; medians are told")] = 5,
    json_: AsJson = False,
) -> None:
    """What equal bits cost beside the best path without them, how many logprobs differ, and what router replay buys."""
    from rollmill.bench.numerics import bench_numerics
    from rollmill.bench.report import show as show_result
    from rollmill.bench.report import typed_command

    packed = [(int(a), int(b)) for a, _, b in (part.partition("x") for part in forward.split(",") if part)]
    found = bench_numerics(
        command=typed_command(), shape=shape, num_layers=layers or None, device=device, threads=_threads(threads),
        batches=[int(x) for x in batches.split(",")], context=context or None, forward=packed, rounds=rounds,
        num_tokens=None if tokens < 0 else tokens,
    )  # fmt: skip
    show_result(found, as_json=json_)


@bench_app.command("gateway")
def bench_gateway_command(
    model: Annotated[Path, typer.Option(help="model directory whose tokenizer and template are used")] = Path("models/demo"),
    peers: Annotated[Path | None, typer.Option(help="folder that scripts/setup_gateway_peers.sh filled; else what is on the path")] = None,
    streams: Annotated[int, typer.Option(min=1, help="streams held at once")] = 1000,
    rounds: Annotated[int, typer.Option(min=1, help="turns that everybody takes")] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="one short round: does everything run?")] = False,
    json_: AsJson = False,
) -> None:
    """What the gateway adds to a model call, calls per second and streams held, beside LiteLLM's proxy before the same replica."""
    import msgspec

    from rollmill.bench.gateway import QUICK, Sizes, bench_gateway
    from rollmill.bench.report import show as show_result
    from rollmill.bench.report import typed_command

    sizes = QUICK if quick else msgspec.structs.replace(Sizes(), num_streams=streams, rounds=rounds)
    show_result(bench_gateway(model, command=typed_command(), peers=peers, sizes=sizes), as_json=json_)


def _threads(asked: int) -> int:
    return asked or len(os.sched_getaffinity(0))


@weights_app.command("bench")
def weights_bench(
    old: Annotated[str, typer.Argument(help="a safetensors file or directory, or STORE@VERSION")],
    new: Annotated[str, typer.Argument(help="the same a few steps later")],
    between: Annotated[list[str] | None, typer.Option(help="a snapshot between the two, in order: adds a table of folds")] = None,
    repeats: Annotated[int, typer.Option(help="the best of this many is told")] = 3,
    threads: Annotated[int, typer.Option(help="for the second figure of each codec")] = 2,
    json_: Annotated[bool, typer.Option("--json", help="one JSON object on standard output")] = False,
) -> None:
    """Our codecs beside the usual ones on the same pair of weights: bytes, ratio, speed, every one decoded and compared."""
    from rollmill.bench.weights import bench_command

    typer.echo(bench_command(old, new, as_json=json_, repeats=repeats, threads=threads, between=between or ()))


@sandbox_app.command("bench")
def sandbox_bench(
    peers: Annotated[Path | None, typer.Option(help="folder that scripts/setup_peers.sh filled; else what is on the path")] = None,
    backend: Annotated[str, typer.Option(help="which of our own is measured")] = "namespace",
    quick: Annotated[bool, typer.Option("--quick", help="one short round: does everything run?")] = False,
    big: Annotated[bool, typer.Option("--big", help="also hold 5,000 boxes at once")] = False,
    json_: AsJson = False,
) -> None:
    """Starts, commands, forks, bursts and memory of boxes beside other sandboxes, in turns in one run."""
    import msgspec

    from rollmill.bench.report import show as show_result
    from rollmill.bench.report import typed_command
    from rollmill.bench.sandbox import QUICK, Sizes, bench_sandbox

    sizes = msgspec.structs.replace(QUICK if quick else Sizes(), num_big=5000 if big else 0)
    show_result(bench_sandbox(command=typed_command(), backend=backend, peers=peers, sizes=sizes), as_json=json_)


@app.command()
def doctor(
    backend: Annotated[str, typer.Option(help="whose boxes must work for status 0")] = "namespace",
    json_: AsJson = False,
) -> None:
    """Say what works on this machine and what to install, one line each; exit status 1 when no boxes can be made."""
    from rollmill.sandbox.checks import all_checks
    from rollmill.sandbox.doctor import report, run_checks

    raise typer.Exit(report(run_checks(all_checks(backend)), decisive=f"{backend} boxes", as_json=json_))


@tasks_app.command("show")
def tasks_show(seed: int = 0, num: int = 5, levels: str = "1", split: str = "train") -> None:
    """Print a few generated tasks."""
    from rollmill.tasks import TaskSource, open_family

    source = TaskSource(open_family("repo"), split=split, seed=seed, levels=tuple(int(x) for x in levels.split(",")))
    for index in range(num):
        task = source.task(index)
        typer.echo(f"{task.task_id}\n  {task.instruction}")
        for path, text in task.files.items():
            typer.echo(f"  {path}: {text!r}")


def _me() -> str:
    """How this program was called, for commands that a person may paste."""
    return sys.argv[0] if sys.argv[0].endswith("rollmill") else "rollmill"


def main() -> None:
    """Run a verb; what a person can fix is printed as one sentence, everything else keeps its traceback."""
    try:
        app()
    except (ValueError, FileNotFoundError) as error:
        print(f"rollmill: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
