"""The seam between an episode and whoever plays it: our own harness, a foreign program, a remote service."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from rollmill.gateway.sessions.skew import Skew
from rollmill.records import Grade, StopReason, Task, Window


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one attempt, before it is graded."""

    stop: StopReason
    windows: tuple[Window, ...]
    messages: tuple[dict[str, Any], ...] = ()
    """The conversation, for people and graders."""
    answer: str | None = None
    """What it said last, where that need not be in `messages`; None: it is."""
    files: Mapping[str, str] = {}
    """What the agent left."""
    facts: dict[str, Any] = {}
    """What a toolset or a remote environment reported to the grader."""
    grade: Grade | None = None
    """Given by a remote environment; None: the family grades."""
    timing_s: dict[str, float] = {}
    tally: Counter[str] = msgspec.field(default_factory=Counter)
    """What its model calls were: appended, forked, ..."""
    num_untrained: int = 0
    """Tokens that were sampled for it and are in no window: see docs/sessions.md."""
    skew: Skew = Skew()


class Seat(Protocol):
    """An attempt's place at the model, from before it starts until it is played."""

    @property
    def oldest_version(self) -> int | None:
        """The oldest weight version among the tokens sampled so far."""
        ...


class Player(Protocol):
    """Plays attempts, many at a time. Whatever our own machinery breaks is raised as RunFailure; TimeoutError: the deadline passed."""

    def open(self, key: str, *, seed: int, temperature: float, min_version: int | None) -> Any: ...

    async def play(self, task: Task, key: str, seat: Any, *, seed: int, deadline: float) -> Played: ...

    async def close(self) -> None: ...
