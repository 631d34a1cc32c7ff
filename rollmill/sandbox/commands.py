"""`rollmill sandbox`: try, fork, build and check boxes from a shell. What a verb needs is imported inside it, so `--help` is instant."""

from __future__ import annotations

import itertools
import re
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rollmill.sandbox.records import Allow, SandboxSpec

sandbox_app = typer.Typer(no_args_is_help=True, help="Run commands in boxes; build images; see what this machine can do.")

_WORDS_LAST = {"allow_interspersed_args": False}
Words = Annotated[list[str] | None, typer.Argument(metavar="[--] ARGV...", help="the command; none: a shell on this terminal")]
ImageName = Annotated[str, typer.Option("--image", help="`host`, or the name of an image that `rollmill sandbox build` made")]
BackendName = Annotated[str, typer.Option("--backend", help="what makes the box")]
Root = Annotated[bool, typer.Option("--root", help="run as root of the box")]
Memory = Annotated[str, typer.Option(help="e.g. 512MiB")]
Disk = Annotated[str, typer.Option(help="what it may write, e.g. 1GiB")]
Processes = Annotated[int, typer.Option(min=1, help="how many processes it may have")]
Cpus = Annotated[float, typer.Option(min=0, help="bound on CPU time per second; 0: none")]
Allowed = Annotated[list[str] | None, typer.Option("--allow", metavar="HOST[:PORT][/METHOD,...]", help="may be reached; else nothing")]
Variables = Annotated[list[str] | None, typer.Option("--env", metavar="NAME=VALUE", help="a variable of the box")]
Files = Annotated[Path | None, typer.Option("--files", help="a folder whose files are copied into the working directory", file_okay=False)]
Timeout = Annotated[float, typer.Option(min=0.001, help="seconds until the command is killed")]
Lasting = Annotated[float, typer.Option("--timeout", min=0.001, help="seconds until each command is killed")]

World = list[tuple[str, bytes, int]]
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
_ALLOW = re.compile(r"(?P<host>[^:/\s]+)(?::(?P<port>\d+))?(?:/(?P<methods>[A-Za-z,]+))?")


@sandbox_app.command(context_settings=_WORDS_LAST)
def run(
    argv: Words = None,
    image: ImageName = "host",
    backend: BackendName = "namespace",
    root: Root = False,
    memory: Memory = "512MiB",
    disk: Disk = "64MiB",
    processes: Processes = 64,
    cpus: Cpus = 0.0,
    allow: Allowed = None,
    env: Variables = None,
    files: Files = None,
    timeout: Timeout = 600.0,
) -> None:
    """Run a command in a fresh box: its output, input and exit status are those of this command."""
    is_terminal = not argv and sys.stdin.isatty() and sys.stdout.isatty()
    if not argv and not is_terminal:
        raise ValueError("there is no command to run and no terminal for a shell; say `rollmill sandbox run -- ARGV...`")
    spec = make_spec(
        image=image, root=root, memory=memory, disk=disk, processes=processes, cpus=cpus, allow=allow, env=env, timeout_s=timeout
    )  # fmt: skip
    raise typer.Exit(_attributed(_run(backend, spec, argv or [], read_files(files), timeout, is_terminal)))


async def _run(backend_name: str, spec: SandboxSpec, argv: list[str], world: World, timeout_s: float, is_terminal: bool) -> int:
    import asyncio
    import os

    from rollmill.sandbox import open_backend
    from rollmill.sandbox.terminal import TIMED_OUT, attach

    backend = open_backend(backend_name)
    try:
        box = await backend.create(spec)
        for path, data, mode in world:
            await box.write(path, data, mode=mode)
        if is_terminal:
            term = {"TERM": os.environ.get("TERM", "xterm")}
            process = await box.start("command -v bash > /dev/null && exec bash -i || exec sh -i", env=term, pty=True)
        else:
            try:
                process = await box.start(argv)
            except OSError as error:
                print(f"rollmill: {error.strerror or error}", file=sys.stderr)
                return 127 if isinstance(error, FileNotFoundError) else 126
        status = await attach(process, timeout_s=timeout_s, is_terminal=is_terminal)
        if status == TIMED_OUT:
            print(f"rollmill: killed after {timeout_s:g} s; give it longer with --timeout", file=sys.stderr)
        return status
    finally:
        await asyncio.shield(backend.close())


@sandbox_app.command(context_settings=_WORDS_LAST)
def fork(
    argv: Annotated[list[str], typer.Argument(metavar="[--] ARGV...", help="what every fork runs")],
    num: Annotated[int, typer.Option(min=1, help="how many forks")] = 2,
    setup: Annotated[str, typer.Option(help="shell command that is run once, before the snapshot")] = "",
    image: ImageName = "host",
    backend: BackendName = "namespace",
    root: Root = False,
    memory: Memory = "512MiB",
    disk: Disk = "64MiB",
    processes: Processes = 64,
    allow: Allowed = None,
    env: Variables = None,
    files: Files = None,
    timeout: Lasting = 600.0,
) -> None:
    """Set up once, snapshot, fork N times and run a command in each; exit status 1 when one of them failed."""
    spec = make_spec(image=image, root=root, memory=memory, disk=disk, processes=processes, allow=allow, env=env, timeout_s=timeout)
    raise typer.Exit(_attributed(_fork(backend, spec, argv, read_files(files), num, setup, timeout)))


async def _fork(backend_name: str, spec: SandboxSpec, argv: list[str], world: World, num: int, setup: str, timeout_s: float) -> int:
    import asyncio

    from rollmill.sandbox import open_backend
    from rollmill.sandbox.terminal import status_of

    backend = open_backend(backend_name)
    try:
        marks = [time.perf_counter()]
        box = await backend.create(spec)
        for path, data, mode in world:
            await box.write(path, data, mode=mode)
        if setup:
            done = await box.exec(setup, timeout_s=timeout_s)
            if done.exit_code:
                sys.stdout.write(done.stdout.decode(errors="replace"))
                raise ValueError(f"the set-up ended with status {status_of(done)}; no fork was made")
        marks.append(time.perf_counter())
        snapshot = await box.snapshot()
        marks.append(time.perf_counter())
        kids = await snapshot.fork(num)
        marks.append(time.perf_counter())
        results = await asyncio.gather(*(kid.exec(argv, timeout_s=timeout_s) for kid in kids))
        marks.append(time.perf_counter())
        for index, result in enumerate(results):
            words = " (timed out)" if result.timed_out else ""
            typer.echo(f"fork {index}: status {status_of(result)}{words} after {result.wall_s * 1e3:.1f} ms")
            for line in result.stdout.decode(errors="replace").splitlines():
                typer.echo(f"  {line}")
        set_up, snap, ready, ran = ((after - before) * 1e3 for before, after in itertools.pairwise(marks))
        typer.echo(f"set-up {set_up:.1f} ms, snapshot {snap:.1f} ms, {num} forks ready in {ready:.1f} ms, all ran within {ran:.1f} ms")
        return int(any(result.exit_code for result in results))
    finally:
        await asyncio.shield(backend.close())


@sandbox_app.command()
def build(
    project: Annotated[Path, typer.Argument(metavar="DIR", help="a folder with a sandbox.toml", exists=True, file_okay=False)],
    name: Annotated[str, typer.Option(help="what to call the image; by default the name in sandbox.toml")] = "",
    backend: BackendName = "namespace",
    fresh: Annotated[bool, typer.Option("--fresh", help="run every step again")] = False,
) -> None:
    """Make an image from a project folder; what did not change since the last build is not done again."""

    async def whole() -> None:
        from rollmill.sandbox import open_backend
        from rollmill.sandbox.images.build import build as build_image
        from rollmill.sandbox.images.store import ImageStore

        opened = open_backend(backend)
        try:
            image = await build_image(
                project, store=ImageStore(), backend=opened, name=name, fresh=fresh, on_progress=lambda text: print(text, file=sys.stderr)
            )
        finally:
            await opened.close()
        typer.echo(f"built {image.name}\nnext:  rollmill sandbox run --image {image.name}")

    _attributed(whole())


@sandbox_app.command()
def images() -> None:
    """List the images of this machine."""
    from rollmill.sandbox.images.store import ImageStore

    found = ImageStore().images()
    for image in found:
        typer.echo(f"{image.name:30} {image.digest[:12]}")
    if not found:
        typer.echo("there is no image yet; make one with `rollmill sandbox build DIR`")


@sandbox_app.command()
def doctor(
    backend: BackendName = "namespace",
    json_: Annotated[bool, typer.Option("--json", help="one JSON object on standard output")] = False,
) -> None:
    """Say which boxes work on this machine, and what to install or change; exit status 1 when the backend does not work."""
    from rollmill.sandbox.checks import sandbox_checks
    from rollmill.sandbox.doctor import report, run_checks

    raise typer.Exit(report(run_checks(sandbox_checks(backend)), decisive=f"{backend} boxes", as_json=json_))


def make_spec(
    *, image: str, root: bool, memory: str, disk: str, processes: int, timeout_s: float, cpus: float = 0.0,
    allow: list[str] | None = None, env: list[str] | None = None,
) -> SandboxSpec:  # fmt: skip
    from rollmill.sandbox.records import Egress, SandboxSpec

    variables = {}
    for pair in env or ():
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise ValueError(f"--env {pair!r} is not NAME=VALUE")
        variables[name] = value
    return SandboxSpec(
        image=image,
        env=variables,
        egress=Egress(allow=tuple(map(parse_allow, allow))) if allow else None,
        root=root,
        memory_bytes=parse_size(memory),
        disk_bytes=parse_size(disk),
        num_processes=processes,
        cpus=cpus,
        # Its making and its end are not part of the command's time.
        lifetime_s=timeout_s + 60.0,
    )


def parse_size(text: str) -> int:
    """`512MiB`, `512m` and `536870912` are the same."""
    found = _SIZE.fullmatch(text.strip())
    if not found:
        raise ValueError(f"{text!r} is not a size; write e.g. 512MiB or 2GiB")
    return int(float(found[1]) * 1024 ** " kmgt".index(found[2].lower() or " "))


def parse_allow(text: str) -> Allow:
    """`example.org`, `example.org:80` and `example.org:80/GET,HEAD`."""
    from rollmill.sandbox.records import Allow

    found = _ALLOW.fullmatch(text)
    if not found or not 0 < int(found["port"] or 443) < 65536:
        raise ValueError(f"--allow {text!r} is not HOST[:PORT][/METHOD,...], e.g. example.org:443/GET,HEAD")
    methods = tuple(m.upper() for m in (found["methods"] or "").split(",") if m)
    return Allow(host=found["host"], port=int(found["port"] or 443), methods=methods)


def read_files(folder: Path | None) -> World:
    """Path, bytes and permissions of every regular file below the folder; links are left out and counted."""
    if folder is None:
        return []
    if not folder.is_dir():
        raise ValueError(f"--files {folder} is not a folder")
    paths = sorted(folder.rglob("*"))
    if num_links := sum(path.is_symlink() for path in paths):
        print(f"rollmill: {num_links} links in {folder} were left out", file=sys.stderr)
    kept = [path for path in paths if path.is_file() and not path.is_symlink()]
    return [(str(path.relative_to(folder)), path.read_bytes(), path.stat().st_mode & 0o777) for path in kept]


def _attributed(work: Coroutine[Any, Any, Any]) -> Any:
    """What the sandbox itself failed at is one line, like everything else that a person can mend."""
    import asyncio

    from rollmill.records import RunFailure

    try:
        return asyncio.run(work)
    except RunFailure as failure:
        raise ValueError(f"{failure.message}; `rollmill sandbox doctor` says what works here") from failure
