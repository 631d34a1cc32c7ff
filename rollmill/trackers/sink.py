"""What a tracker must offer: rows that are written once, however often the process that writes them is killed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from rollmill.trackers.names import Names


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a run, named as the tracker shall show it."""

    number: int
    """Over all roles, from 0 without gaps; the same row has the same number when it is written again after a crash."""
    key: str
    """`trainer@1024`: role and byte offset of the line, its name for ever."""
    role: str
    step: int
    t: float
    """Unix seconds."""
    values: dict[str, float]


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Where rows go."""

    run_id: str
    """Letters and digits, chosen once per run and tracker."""
    project: str
    name: str
    """Of the run, for people."""
    out: Path
    """A folder for what the tracker keeps on disk."""
    config: dict[str, Any]
    """The run file."""
    names: Names


class Sink(Protocol):
    """One open tracker. `write` may be given rows that were written before a crash: they must not appear twice."""

    @property
    def num_there(self) -> int | None:
        """Rows that it held when it was opened, for a tracker that may lose acknowledged ones with our death; None: it loses none."""
        ...

    def write(self, rows: Sequence[Row]) -> dict[str, int]:
        """Write rows in the order of their numbers; returns a mark from which `open_sink` can go on."""
        ...

    def close(self) -> None: ...


OpenSink = Callable[[Target, dict[str, int]], Sink]
"""Opens a tracker at the mark of the last `write` that was acknowledged; empty for a new one."""

KINDS = ("wandb", "tensorboard", "trackio")


def open_sink(kind: str, target: Target, mark: dict[str, int]) -> Sink:
    """ValueError, with the command that installs it, when the tracker's package is missing."""
    if kind not in KINDS:
        raise ValueError(f"there is no tracker {kind!r}; choose one of {', '.join(KINDS)}")
    try:
        return _opener(kind)(target, mark)
    except ModuleNotFoundError as error:
        raise ValueError(f"{kind} is not installed ({error}); install it with:  pip install 'rollmill[{kind}]'") from error


def _opener(kind: str) -> OpenSink:
    if kind == "wandb":
        from rollmill.trackers.wandb_sink import WandbSink

        return WandbSink
    if kind == "tensorboard":
        from rollmill.trackers.tensorboard_sink import TensorboardSink

        return TensorboardSink
    from rollmill.trackers.trackio_sink import TrackioSink

    return TrackioSink
