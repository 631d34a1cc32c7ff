"""`rollmill weights`: the verbs on a weight store. Each opens a store, calls one function and says in plain words what it did.

What the verbs need is imported inside them, so that `--help` is instant and nothing but publishing a live model needs torch.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rollmill.weights.interop.tensor_file import Tensors
    from rollmill.weights.store import WeightStore

weights_app = typer.Typer(no_args_is_help=True, help="Publish, fetch, inspect and look after weights in a store.")

Where = Annotated[str, typer.Argument(metavar="STORE", help="a directory, s3://bucket/prefix?endpoint=..., or a run directory")]
Which = Annotated[str, typer.Option("--version", help="a number, a tag or `latest`")]
AsJson = Annotated[bool, typer.Option("--json", help="one JSON value on standard output")]


def _verb(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command whose store may be out of reach: that is said in one line, like every other thing a person can mend."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> None:
            from rollmill.weights.errors import WrongWeights
            from rollmill.weights.objects import ReadOnly, StoreUnavailable

            try:
                function(*args, **kwargs)
            except (StoreUnavailable, ReadOnly) as error:
                raise ValueError(error.strerror or str(error)) from error
            except WrongWeights as error:
                raise ValueError(str(error)) from error

        return weights_app.command(name)(call)

    return register


@_verb("publish")
def publish(
    where: Where,
    weights: Annotated[Path, typer.Argument(help="a safetensors file or a Hugging Face directory")],
    step: Annotated[int | None, typer.Option(help="the optimiser step; by default one more than latest's")] = None,
    run_id: Annotated[str, typer.Option(help="by default latest's")] = "",
    note: Annotated[str, typer.Option(help="a remark kept with the version")] = "",
) -> None:
    """Publish safetensors weights as the next version: a delta when the tensors are those of latest."""
    from rollmill.weights.interop.hf import read_directory
    from rollmill.weights.interop.intake import take_in

    store = _store(where, may_be_new=True)
    taken = take_in(store, read_directory(_existing(weights)), step=step, run_id=run_id, note=note)
    record = taken.record
    if not taken.is_new:
        typer.echo(f"nothing to do: version {record.version}, which is latest, has these bits already")
        return
    ratio = record.raw_bytes / max(1, taken.num_bytes)
    typer.echo(
        f"published version {record.version} (step {record.step}) as {taken.kind}: {_size(taken.num_bytes)} for {_size(record.raw_bytes)} "
        f"of weights, {ratio:.1f}x smaller; {record.num_changed:,} elements changed"
    )
    _next(f"pull {where} DIRECTORY", "fetch it")


@_verb("pull")
def pull_command(
    where: Where, folder: Annotated[Path, typer.Argument(help="where the weights should lie")], which: Which = "latest"
) -> None:
    """Make a directory hold one version as plain safetensors, fetching only what differs from what lies there, and prove it."""
    from rollmill.weights.interop.pull import pull

    store = _store(where)
    done = pull(store, _version(store, which), folder)
    record = done.record
    if done.started_from == record.version and not done.num_files_written:
        typer.echo(f"{folder} holds version {record.version} already, proved again: fingerprint {record.fingerprint}")
        return
    way = f"from version {done.started_from}" if done.started_from is not None else f"in full ({done.why_full})"
    typer.echo(
        f"pulled version {record.version} {way}: {_size(done.bytes_to_read)} to read, {done.num_files_written} of {done.num_files} "
        f"files written, proved by fingerprint {record.fingerprint}"
    )
    _next(f"pull {where} {folder}", "move on later")


@_verb("log")
def log_command(where: Where, limit: Annotated[int, typer.Option(min=1, help="how many versions")] = 50, as_json: AsJson = False) -> None:
    """The chain of published versions, newest first."""
    from itertools import islice

    from rollmill.weights.history import log

    store = _store(where)
    if as_json:
        return _json([_plain(record, without=("tensors",)) for record in islice(store.lineage(), limit)])
    typer.echo("\n".join(log(store, limit=limit)))


@_verb("show")
def show_command(
    where: Where, which: Annotated[str, typer.Argument(help="a number, a tag or `latest`")] = "latest", as_json: AsJson = False
) -> None:
    """Everything about one version: what it is, how to reach it, what changed most."""
    from rollmill.weights.history import show

    store = _store(where)
    version = _version(store, which)
    if not as_json:
        typer.echo("\n".join(show(store, version)))
        return None
    record = store.version(version)
    names = [spec.name for spec in store.schema(record.schema).tensors]
    found = _plain(record) | {
        "tensors": dict(zip(names, record.tensors, strict=True)),
        "routes": [_plain(store.route(name)) for name in store.routes() if name.version == version],
        "tags": sorted(tag.name for tag in store.tags() if tag.version == version),
        "leases": [_plain(lease) for lease in store.leases() if lease.version == version],
    }
    return _json(found)


@_verb("verify")
def verify_command(
    where: Where,
    which: Annotated[str, typer.Option("--version", help="only this one: a number, a tag or `latest`")] = "",
    as_json: AsJson = False,
) -> None:
    """Rebuild every version by every route and compare its fingerprint, bit for bit."""
    from rollmill.weights.check import verify

    store = _store(where)
    problems = verify(store, version=_version(store, which) if which else None)
    if not problems and not store.versions():
        raise ValueError(f"nothing was published in {store} yet, so there is nothing to verify")
    if as_json:
        _json({"is_whole": not problems, "problems": problems})
    else:
        for problem in problems:
            typer.echo(f"DAMAGED: {problem}")
        if not problems:
            typer.echo("clean: every version decodes, by every route, to the weights the trainer fingerprinted")
    if problems:
        if not as_json:
            _next(f"fsck {where} --repair", "mend what can be mended")
        raise typer.Exit(1)


@_verb("fsck")
def fsck_command(
    where: Where,
    deep: Annotated[bool, typer.Option("--deep", help="also read and decode every byte")] = False,
    mend: Annotated[bool, typer.Option("--repair", help="do what can be done without the trainer")] = False,
    as_json: AsJson = False,
) -> None:
    """Name every damage of a store and its remedy; with --repair apply them."""
    from rollmill.weights.check import fsck, repair

    store = _store(where)
    findings = fsck(store, deep=deep, now=time.time())
    done = repair(store, findings, now=time.time()) if mend and findings else []
    left = fsck(store, deep=deep, now=time.time()) if done else findings
    is_fatal = any(one.is_fatal for one in left)
    if as_json:
        _json(
            {
                "is_usable": not is_fatal,
                "findings": [_plain(one) for one in findings],
                "repairs": done,
                "left": [_plain(one) for one in left],
            }
        )
    else:
        for one in findings:
            typer.echo(f"{'DAMAGED' if one.is_fatal else 'note'}: {one.kind}: {one.key}: {one.what}; remedy: {one.repair}")
        for line in done:
            typer.echo(f"repair: {line}")
        depth = "every byte was read" if deep else "records and sizes were read; --deep reads every byte"
        typer.echo(f"{'damaged' if is_fatal else 'clean' if not left else 'usable'}: {len(left)} findings left; {depth}")
        if is_fatal and not mend:
            _next(f"fsck {where} --repair", "mend what can be mended")
    if is_fatal:
        raise typer.Exit(1)


@_verb("compact")
def compact_command(where: Where) -> None:
    """Add the folds and full routes that are due, so that late replicas read less."""
    from rollmill.weights.compactor import Compactor

    done = Compactor(_store(where), writer=_writer()).step(time.time())
    for one in done:
        typer.echo(str(one))
    if not done:
        typer.echo("nothing is due: every late replica already has a short way to latest")
    _next(f"gc {where} --dry-run", "see what is not needed any more")


@_verb("gc")
def gc_command(
    where: Where,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only say what would go")] = False,
    grace_s: Annotated[float | None, typer.Option(min=0, help="seconds that anything unfinished is left alone")] = None,
    as_json: AsJson = False,
) -> None:
    """Delete what no live replica, tag or late joiner needs: first the ways, and after a grace period the bytes."""
    from rollmill.weights.gc import GRACE_S, collect

    report = collect(_store(where), time.time(), grace_s=GRACE_S if grace_s is None else grace_s, dry_run=dry_run)
    if as_json:
        return _json(_plain(report))
    typer.echo("\n".join(report.lines()))
    if dry_run:
        _next(f"gc {where}", "do it")
    return None


@_verb("rollback")
def rollback_command(
    where: Where, which: Annotated[str, typer.Argument(help="whose bits to serve again: a number or a tag")], note: str = ""
) -> None:
    """Publish the bits of an earlier version under a new number."""
    from rollmill.weights.rollback import rollback

    store = _store(where)
    version = _version(store, which)
    record = rollback(store, version, run_id=store.version(version).run_id, writer=_writer(), note=note)
    typer.echo(f"published version {record.version} with the bits of version {version}; replicas move to it at their next poll")
    typer.echo("a trainer that still publishes here stops with its next version: restart it from the weights it should go on with")
    _next(f"log {where}", "see the line")


@_verb("tag")
def tag_command(
    where: Where,
    name: Annotated[str, typer.Argument(help="the tag; without it all tags are listed")] = "",
    which: Annotated[str, typer.Argument(metavar="[VERSION]", help="a number, a tag or `latest`")] = "latest",
    delete: Annotated[bool, typer.Option("--delete", help="take the tag away")] = False,
    note: str = "",
) -> None:
    """List tags, set one or delete one. A tagged version is never collected."""
    from rollmill.weights.manifest import Tag, check_name
    from rollmill.weights.plan import reachable

    store = _store(where)
    tags = {tag.name: tag for tag in store.tags()}
    if not name:
        for tag in sorted(tags.values(), key=lambda tag: (tag.version, tag.name)):
            typer.echo(f"{tag.name}  version {tag.version}  {tag.note}".rstrip())
        if not tags:
            typer.echo("no tags")
            _next(f"tag {where} NAME VERSION", "set one")
        return
    if delete:
        if name not in tags:
            raise ValueError(f"there is no tag {name!r} in {store}; `rollmill weights tag {where}` lists them")
        store.untag(name)
        typer.echo(f"deleted tag {name}; version {tags[name].version} is kept no longer on its account")
        return
    check_name(name, "tag")
    if name.isdigit() or name == "latest":
        raise ValueError(f"a tag named {name!r} could be taken for a version; choose another name")
    version = _version(store, which)
    if version not in reachable(store.routes()):
        raise ValueError(f"no route leads to version {version} any more, so a tag cannot keep it: it is being collected, or damaged")
    store.tag(Tag(name=name, version=version, created=time.time(), note=note))
    typer.echo(f"tagged version {version} as {name}; collection will keep it")
    _next(f"export {where} DIRECTORY --version {name}", "write it as plain files")


@_verb("export")
def export_command(
    where: Where,
    out: Annotated[Path, typer.Argument(help="a directory that does not exist yet; for --xor one that gets weight_vNNNNNN inside")],
    which: Which = "latest",
    like: Annotated[Path | None, typer.Option(help="a model directory to copy configuration and tokenizer from")] = None,
    xor: Annotated[str, typer.Option(help="FIRST..LAST: write byte-wise deltas between these versions instead")] = "",
    encoding: Annotated[str, typer.Option(help="of deltas: xor or overwrite")] = "xor",
    checksum: Annotated[str, typer.Option(help="of deltas: blake3, adler32 or xxh3-128")] = "blake3",
    max_file_gb: Annotated[float, typer.Option(help="start a new file past this many GB")] = 5.0,
) -> None:
    """Write a version as a Hugging Face directory, or versions as the XOR directories that other systems read."""
    store = _store(where)
    limit = int(max_file_gb * 1e9)
    if xor:
        from rollmill.weights.interop.xor_dir import export_xor, formats_of

        first, found, last = xor.partition("..")
        if not found:
            raise ValueError(f"--xor {xor!r} must be FIRST..LAST, e.g. --xor 3..latest")
        formats = formats_of({"delta_encoding": encoding, "checksum_format": checksum}, "the export")
        written = export_xor(store, out, first=_version(store, first), last=_version(store, last), formats=formats, max_file_bytes=limit)
        for path, num_bytes in written:
            typer.echo(f"wrote {path}: {_size(num_bytes)}")
        return
    from rollmill.weights.interop.hf import export_directory

    done = export_directory(store, _version(store, which), out, like=like, max_file_bytes=limit)
    typer.echo(
        f"wrote version {done.record.version} to {out}: {len(done.files)} files, {_size(done.num_bytes)}, "
        f"proved by fingerprint {done.record.fingerprint}"
    )


@_verb("import")
def import_command(
    where: Where,
    source: Annotated[Path, typer.Argument(help="a Hugging Face directory, or one with weight_vNNNNNN directories of XOR deltas")],
    base: Annotated[str, typer.Option(help="what the deltas start from: a model directory, or a version or tag of the store")] = "",
    run_id: str = "",
) -> None:
    """Take in weights that another system wrote, every checksum verified."""
    from rollmill.weights.interop.xor_dir import chain_below, import_xor

    if not (source.is_dir() and chain_below(source)):
        return publish(where, source, run_id=run_id)
    store = _store(where, may_be_new=True)
    num_taken = 0
    for path, taken in import_xor(store, source, base=_base(store, base) if base else None, run_id=run_id):
        num_taken += taken.is_new
        what = f"{taken.kind}, {_size(taken.num_bytes)}" if taken.is_new else "nothing new: latest has these bits"
        typer.echo(f"{path.name}: version {taken.record.version} ({what})")
    typer.echo(f"took in {num_taken} versions" if num_taken else "nothing to do: the store has taken in this chain to its end")
    _next(f"log {where}", "see the line")
    return None


def _store(where: str, *, may_be_new: bool = False) -> WeightStore:
    """Imported at the first call, so that `--help` is instant."""
    from rollmill.weights.store import find_store

    return find_store(where, may_be_new=may_be_new)


def _version(store: WeightStore, which: str) -> int:
    pointer = store.latest()
    if pointer is None:
        raise ValueError(f"nothing was published in {store} yet; `rollmill weights publish STORE DIRECTORY` does it")
    if which == "latest":
        return pointer.version
    if not which.isdecimal():
        tags = {tag.name: tag.version for tag in store.tags()}
        if which not in tags:
            known = f"; tags are {', '.join(sorted(tags))}" if tags else ""
            raise ValueError(f"{which!r} is no version of {store}: give a number, `latest` or a tag{known}")
        return tags[which]
    if int(which) not in store.versions():
        raise ValueError(f"version {which} is not in {store}, latest is {pointer.version}; `rollmill weights log` lists what is")
    return int(which)


def _base(store: WeightStore, base: str) -> Tensors:
    from rollmill.weights.interop.hf import read_directory
    from rollmill.weights.interop.intake import tensors_of
    from rollmill.weights.reader import materialise

    if Path(base).exists():
        return read_directory(Path(base))
    _, schema, data = materialise(store, _version(store, base))
    return tensors_of(schema, data)


def _existing(path: Path) -> Path:
    if not path.exists():
        raise ValueError(f"there is no {path}; give a safetensors file or a directory of them")
    return path


def _writer() -> str:
    return f"{socket.gethostname()}-{os.getpid()}"


def _plain(record: Any, *, without: tuple[str, ...] = ()) -> dict[str, Any]:
    import msgspec

    return {name: value for name, value in msgspec.to_builtins(record).items() if name not in without}


def _json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))


def _next(command: str, what: str) -> None:
    typer.echo(f"next:  rollmill weights {command}   # {what}")


def _size(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.2f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.2f} TB"
