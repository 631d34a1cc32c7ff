"""Everything that made the state at the end of a command log: the nearest saved snapshot or fresh box, and the events since."""

from __future__ import annotations

from pathlib import Path

import msgspec

from rollmill.sandbox.records import SandboxSpec
from rollmill.sandbox.snapshots.events import AnyEvent, Head, Mark, Saved
from rollmill.sandbox.snapshots.log import read_events


class Step(msgspec.Struct, frozen=True, kw_only=True):
    log: Path
    at: int
    """Line of the log, from 0."""
    event: AnyEvent


class History(msgspec.Struct, frozen=True, kw_only=True):
    """Begin with `spec`, from `snapshot` in `store` unless it is empty, then do `steps`."""

    spec: SandboxSpec
    store: str
    snapshot: str
    steps: tuple[Step, ...]


def read_history(path: Path) -> History:
    """Follows a log to its parents, as far back as a state that can be had."""
    steps: list[Step] = []
    position: int | None = None
    while True:
        events = read_events(path)
        if not events:
            raise ValueError(f"{path} is empty: its owner died before it began; make a new log")
        head = events[0]
        assert isinstance(head, Head), "a log begins with its head"
        if position is not None and len(events) < position:
            raise ValueError(f"{path} has {len(events)} lines, a log that branched from it says {position}; restore the file")
        saved = {event.mark: event for event in events if isinstance(event, Saved)}
        own = [Step(log=path, at=at, event=event) for at, event in enumerate(events[:position])]
        for step in reversed(own):
            # A live snapshot goes on with processes that no log can talk to.
            if isinstance(step.event, Mark) and not step.event.live and step.event.mark in saved:
                found = saved[step.event.mark]
                return History(spec=head.spec, store=found.store, snapshot=found.snapshot, steps=(*own[step.at + 1 :], *steps))
        steps = own[1:] + steps
        if head.snapshot or not head.parent:
            return History(spec=head.spec, store=head.store, snapshot=head.snapshot, steps=tuple(steps))
        if "/" in head.parent:
            raise ValueError(f"{path} names parent {head.parent!r}; a parent lies in the same folder")
        path, position = path.with_name(head.parent), head.position
