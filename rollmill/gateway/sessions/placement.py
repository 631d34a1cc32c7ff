"""Where a request goes in an episode's graph, as the one who samples for it needs to know it."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from rollmill.gateway.sessions.chain import Key
from rollmill.gateway.sessions.graph import Prompt


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How a run samples."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


class PlaceKind(StrEnum):
    FIRST = "first"
    """The episode's first request."""
    APPEND = "append"
    """Goes on from an answer that nothing came after."""
    REALIGN = "realign"
    """Goes on from a part of an answer: the client repeats the rest differently."""
    FORK = "fork"
    """A branch: goes on from an answer that something came after already, or from none."""
    RETRY = "retry"
    """The same request as before."""


COUNTED_AS = {
    PlaceKind.FIRST: "first",
    PlaceKind.APPEND: "appended",
    PlaceKind.REALIGN: "realigned",
    PlaceKind.FORK: "forked",
    PlaceKind.RETRY: "retried",
}
"""The name of each kind in an episode's tally."""


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Hand it back with what was sampled; all but the first three fields are the graph's business."""

    kind: PlaceKind
    prompt_ids: list[int]
    routes_from: int | None
    """What to ask the replica for: positions from here on have no experts on record. None: none are wanted."""
    call: int = 0
    """Its number in the episode."""
    prompt: Prompt | None = None
    """New, and in the graph only once it has an answer; or the same request's from before. None: outside any episode."""
    key: Key | None = None
    """Of the conversation; None for raw text or ids."""
    begun: tuple[Key, str] | None = None
    """When the conversation ends with the beginning of the answer: its key before that, and that text."""


class EpisodeClosed(ValueError):
    """The episode has ended: nothing is sampled for it any more."""


class EpisodeFull(ValueError):
    """The episode holds all that it may."""
