"""Reads the complete lines of a run's metrics files from a byte offset on; a line that is still being written is left for later."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import msgspec


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One line of one role.

    >>> Point(role="trainer", offset=0, step=3, t=1.0, values={"reward/mean": 0.5}).step
    3
    """

    role: str
    offset: int
    """Of the line in the role's file: with the role, its name for ever."""
    step: int
    """On the role's own clock."""
    t: float
    """Unix seconds."""
    values: dict[str, float]
    """Finite ones only."""


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Bytes [start, end) of a role's file, whole lines."""

    start: int
    end: int


def ahead(run_dir: Path, offsets: Mapping[str, int], max_bytes: int) -> dict[str, Span]:
    """What lies beyond `offsets`: the next whole lines of each role that has any, about `max_bytes` of each."""
    found = {}
    for path in sorted((run_dir / "metrics").glob("*.jsonl")):
        role, start = path.stem, offsets.get(path.stem, 0)
        size = path.stat().st_size
        if size < start:
            raise ValueError(f"{path} was read up to byte {start:,} and has {size:,} now; metrics files only grow: is it another run's?")
        if size > start:
            data = _read(path, Span(start, min(size, start + max_bytes)))
            # A single line longer than that is read whole: one look more, not a loop that never moves on.
            data = data if b"\n" in data else _read(path, Span(start, size))
            if end := data.rfind(b"\n") + 1:
                found[role] = Span(start, start + end)
    return found


def points(run_dir: Path, spans: Mapping[str, Span]) -> tuple[list[Point], int]:
    """The points of these spans, always in the same order, and how many lines were none: torn by a crash of their writer."""
    found, num_bad = [], 0
    for role, span in sorted(spans.items()):
        offset = span.start
        for line in _read(run_dir / "metrics" / f"{role}.jsonl", span).splitlines(keepends=True):
            point = _parse(role, offset, line)
            offset += len(line)
            if point is None:
                num_bad += 1
            else:
                found.append(point)
    return found, num_bad


def _parse(role: str, offset: int, line: bytes) -> Point | None:
    try:
        row = json.loads(line)
        step, t = int(row.pop("step")), float(row.pop("t"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    values = {name: float(value) for name, value in row.items() if isinstance(value, (int, float))}
    return Point(role=role, offset=offset, step=step, t=t, values=values)


def _read(path: Path, span: Span) -> bytes:
    with path.open("rb") as file:
        file.seek(span.start)
        return file.read(span.end - span.start)
