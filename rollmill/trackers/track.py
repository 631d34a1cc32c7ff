"""Moves a run's metrics into a tracker, every line once: a plan is written down before it is carried out, and carried out again as it
was when the process died in between. Knows no tracker."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import secrets
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from rollmill.trackers.names import Names
from rollmill.trackers.sink import Row, Sink, Target, open_sink
from rollmill.trackers.stream import Span, ahead, points

log = logging.getLogger("rollmill.trackers")
SCHEMA = 1
CHUNK_BYTES = 1 << 20
"""Of each role's file at once."""


class Cursor(msgspec.Struct, frozen=True, kw_only=True):
    """`<run_dir>/trackers/<tracker>.json`: how far a tracker is."""

    schema: int = SCHEMA
    run_id: str
    project: str
    name: str
    aliases: str
    out: str
    offsets: dict[str, int] = {}
    """Bytes of each role's file that the tracker has."""
    num_rows: int = 0
    """Rows that the tracker has."""
    num_bad: int = 0
    """Lines that were no metrics."""
    mark: dict[str, int] = {}
    """What the sink said when it acknowledged them."""
    plan: dict[str, Span] = {}
    """What was begun after that, and may or may not have been written."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `<run_dir>/trackers/<tracker>.plans`: the rows from number `first` on came from these bytes."""

    first: int
    spans: dict[str, Span]


class Tracked(msgspec.Struct, frozen=True, kw_only=True):
    """What a call did."""

    num_rows: int
    num_bad: int
    run_id: str


def track(
    run_dir: Path,
    kind: str,
    *,
    project: str = "rollmill",
    name: str = "",
    aliases: str = "",
    out: Path | None = None,
    wait: Callable[[], bool] = lambda: False,
) -> Tracked:
    """Send everything that is there; then ask `wait`, which returns True when it is worth looking again, and False to end."""
    if not (run_dir / "metrics").is_dir():
        raise ValueError(f"{run_dir} has no metrics folder; is it a run directory?")
    names = Names(aliases)
    with _only_one(run_dir / "trackers", kind):
        file = run_dir / "trackers" / f"{kind}.json"
        folder = out or run_dir / ("tensorboard" if kind == "tensorboard" else "trackers")
        cursor = Cursor(run_id=secrets.token_hex(6), project=project, name=name or run_dir.resolve().name, aliases=aliases, out=str(folder))
        cursor = _resumed(file, cursor)
        target = Target(
            run_id=cursor.run_id, project=cursor.project, name=cursor.name, out=folder, config=read_config(run_dir), names=names
        )  # fmt: skip
        sink = open_sink(kind, target, cursor.mark)
        try:
            _send_lost(run_dir, sink, file, cursor)
            return _pump(run_dir, sink, file, cursor, wait)
        finally:
            sink.close()


def _pump(run_dir: Path, sink: Sink, file: Path, cursor: Cursor, wait: Callable[[], bool]) -> Tracked:
    before = cursor
    while True:
        if cursor.plan or (spans := ahead(run_dir, cursor.offsets, CHUNK_BYTES)):
            if not cursor.plan:
                cursor = msgspec.structs.replace(cursor, plan=spans)
                _note(file, cursor)
                _save(file, cursor)
            cursor = _carry_out(run_dir, sink, cursor)
            _save(file, cursor)
        elif not wait():
            return Tracked(num_rows=cursor.num_rows - before.num_rows, num_bad=cursor.num_bad - before.num_bad, run_id=cursor.run_id)


def _carry_out(run_dir: Path, sink: Sink, cursor: Cursor) -> Cursor:
    rows, num_bad = _rows(run_dir, cursor.plan, cursor.num_rows)
    if num_bad:
        log.warning("skipped %d damaged lines of %s", num_bad, run_dir / "metrics")
    mark = sink.write(rows) if rows else cursor.mark
    return msgspec.structs.replace(
        cursor,
        offsets=cursor.offsets | {role: span.end for role, span in cursor.plan.items()},
        num_rows=cursor.num_rows + len(rows),
        num_bad=cursor.num_bad + num_bad,
        mark=mark,
        plan={},
    )


def _rows(run_dir: Path, spans: dict[str, Span], first: int) -> tuple[list[Row], int]:
    found, num_bad = points(run_dir, spans)
    rows = [
        Row(number=first + i, key=f"{p.role}@{p.offset}", role=p.role, step=p.step, t=p.t, values=p.values) for i, p in enumerate(found)
    ]
    return rows, num_bad


def _note(file: Path, cursor: Cursor) -> None:
    """Keep the plan for good: which line has which number must be known when a tracker has lost rows it acknowledged."""
    with file.with_suffix(".plans").open("ab") as out:
        # On a line of its own even when we died in the middle of the one before.
        out.write(b"\n" + msgspec.json.encode(Plan(first=cursor.num_rows, spans=cursor.plan)) + b"\n")
        out.flush()
        os.fsync(out.fileno())


def _send_lost(run_dir: Path, sink: Sink, file: Path, cursor: Cursor) -> None:
    """Write again what the tracker acknowledged and no longer has, as it was planned then."""
    num_there = sink.num_there
    if num_there is None or num_there >= cursor.num_rows:
        return
    log.warning("%s lost the rows %d to %d when it was killed; sending them again", file.stem, num_there, cursor.num_rows - 1)
    # A plan noted twice was never carried out the first time: the later one is what happened.
    plans = {plan.first: plan for plan in map(_plan, file.with_suffix(".plans").read_bytes().splitlines()) if plan is not None}
    for first, plan in sorted(plans.items()):
        rows = [row for row in _rows(run_dir, plan.spans, first)[0] if num_there <= row.number < cursor.num_rows]
        if rows:
            sink.write(rows)


def _plan(line: bytes) -> Plan | None:
    try:
        return msgspec.json.decode(line, type=Plan)
    except msgspec.DecodeError:
        # Empty, or cut off when we died while noting it, and so never carried out.
        return None


def read_config(run_dir: Path) -> dict[str, Any]:
    """The run file as a tracker may show it: without the values of `agent.env` and without what follows `?` in a store's address,
    where people keep secrets. Empty when the folder has none."""
    path = run_dir / "run.toml"
    config = tomllib.loads(path.read_text()) if path.is_file() else {}
    if isinstance(env := config.get("agent", {}).get("env"), dict):
        config["agent"]["env"] = dict.fromkeys(env, "(not shown)")
    if isinstance(store := config.get("weights", {}).get("store"), str):
        config["weights"]["store"] = store.partition("?")[0]
    return config


def is_over(run_dir: Path) -> bool:
    """Whether the run has ended: its summary is the newest word, and no role that announced itself lives on this machine."""
    newest = max((p.stat().st_mtime_ns for p in (run_dir / "metrics").glob("*.jsonl")), default=0)
    summary = run_dir / "summary.json"
    if not summary.is_file() or summary.stat().st_mtime_ns < newest:
        return False
    return not any(_is_alive(path) for path in (run_dir / "roles").glob("*.json"))


def _is_alive(path: Path) -> bool:
    try:
        os.kill(int(json.loads(path.read_text())["pid"]), 0)
    except (ValueError, KeyError, FileNotFoundError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True


def _resumed(file: Path, fresh: Cursor) -> Cursor:
    if not file.is_file():
        return fresh
    try:
        held = msgspec.json.decode(file.read_bytes(), type=Cursor)
    except msgspec.DecodeError as error:
        raise ValueError(f"{file} is damaged ({error}); remove it to send everything again, under another name") from error
    if held.schema != SCHEMA:
        raise ValueError(f"{file} has schema {held.schema}, this program knows {SCHEMA}; use the rollmill that wrote it")
    for what in ("project", "name", "aliases", "out"):
        was, now = getattr(held, what), getattr(fresh, what)
        if was != now:
            raise ValueError(
                f"{what} was {was!r} when this tracker was begun and is {now!r} now; rows would end up in two places. "
                f"Use the same, or remove {file} to send everything again"
            )
    return held


def _save(file: Path, cursor: Cursor) -> None:
    work = file.with_suffix(".tmp")
    with work.open("wb") as out:
        out.write(msgspec.json.encode(cursor))
        out.flush()
        os.fsync(out.fileno())
    work.replace(file)


@contextlib.contextmanager
def _only_one(folder: Path, kind: str) -> Iterator[None]:
    """Two that follow the same run into the same tracker would each write every row."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{kind}.lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process already sends {folder.parent} to {kind}; stop it first") from None
        yield
