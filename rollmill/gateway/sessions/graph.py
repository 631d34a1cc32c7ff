"""The graph of one episode: every request's context and every answer sampled for it, each token held once; pure, and knows no text.

    root prompt -> sample -> prompt -> sample            a conversation that grew
                          -> prompt -> sample            a branch from the same answer
                -> sample                                another answer to the same request: a retry, or one of n
    root prompt -> sample                                another conversation: a helper, or a compacted history

A prompt holds only what it added to the sample it goes on from, so an episode's memory is its tokens, however often clients repeat them.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from rollmill.chat.messages import ChatMessage
from rollmill.engine.protocol import GenerateReply, VersionSpan
from rollmill.gateway.sessions.chain import Key
from rollmill.model.route_record import RouteRecord
from rollmill.records import Boundary, RunFailure, SourceSpan


class Prompt(msgspec.Struct, kw_only=True, eq=False):
    """Context that a request added, after the first `num_kept` sampled tokens of the answer it goes on from."""

    parent: Sample | None
    num_kept: int = 0
    start: int = 0
    """Position of the first token of `context`."""
    context: np.ndarray
    """int32: never trained."""
    messages: tuple[ChatMessage, ...] | None = None
    """What it says, for people; None: read it from the tokens."""
    text: str | None = None
    """The whole request, when it was raw text."""
    said: ChatMessage | None = None
    """What the client says the answer before was, when it is not what was sampled."""
    samples: list[Sample] = []
    num_followed: int = 0
    """Samples that a client went on from."""
    last_call: int = -1
    num_last: int = 0
    """Samples of the last call."""

    @property
    def end(self) -> int:
        """Position of the first sampled token."""
        return self.start + len(self.context)

    @property
    def num_orphans(self) -> int:
        """Answers that nobody went on from although somebody asked again or went on from another."""
        return len(self.samples) - (self.num_followed or self.num_last)


class Sample(msgspec.Struct, kw_only=True, eq=False):
    """One answer, token by token as the replica sampled it."""

    number: int
    """In order of arrival."""
    call: int
    """The request it answers; choices of one request share it."""
    prompt: Prompt
    ids: np.ndarray
    """int32[N]"""
    logprobs: np.ndarray
    """float32[N]"""
    spans: tuple[VersionSpan, ...] = ()
    forced: tuple[tuple[int, int], ...] = ()
    """[start, end) where a constraint left one choice."""
    stale_from: int | None = None
    sources: tuple[SourceSpan, ...] = ()
    """Who sampled what of `ids`."""
    routes: RouteRecord | None = None
    """Rows of positions `routes_from` .. `num_routed`."""
    routes_from: int = 0
    num_routed: int = 0
    """Leading positions of the path to here whose experts are known."""
    message: ChatMessage
    """The answer as the client got it."""
    key: Key | None = None
    """Of the request, as this client put it; None for raw ones."""
    known_as: bytes = b""
    """Exact key of the conversation that ends with it."""
    is_own: bool = True
    """False: it was sampled in another episode, of which this one is a branch."""
    is_followed: bool = False
    max_kept: int = -1
    """Most of its tokens that a prompt after it kept; -1: none came after it."""
    skew_from: int | None = None
    """First token from which its text encodes to other ids, its length when none; None: not looked at yet."""

    @property
    def last_id(self) -> int | None:
        return int(self.ids[-1]) if len(self.ids) else None

    @property
    def counts(self) -> bool:
        """Whether it is no orphan: clients went on from it, or from none and it belongs to the last call."""
        return self.is_followed if self.prompt.num_followed else self.call == self.prompt.last_call


Step = tuple[Prompt, Sample, int]
"""A prompt, the sample taken there, and how many of its tokens the path holds."""


class Graph:
    """Grows by `add`; nothing is ever taken away."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.prompts: list[Prompt] = []
        self.num_tokens = 0
        self.num_orphans = 0

    def follow(self, sample: Sample) -> None:
        """A client went on from this answer, so it is the one that it took."""
        if not sample.is_followed:
            before = sample.prompt.num_orphans
            sample.is_followed = True
            sample.prompt.num_followed += 1
            self.num_orphans += sample.prompt.num_orphans - before

    def add_prompt(self, prompt: Prompt) -> None:
        """A request got its first answer."""
        self.prompts.append(prompt)
        self.num_tokens += len(prompt.context)
        if prompt.parent is not None:
            prompt.parent.max_kept = max(prompt.parent.max_kept, prompt.num_kept)

    def add_sample(self, sample: Sample) -> None:
        prompt = sample.prompt
        before = prompt.num_orphans
        prompt.samples.append(sample)
        self.samples.append(sample)
        self.num_tokens += len(sample.ids)
        if sample.call > prompt.last_call:
            prompt.last_call, prompt.num_last = sample.call, 0
        prompt.num_last += sample.call == prompt.last_call
        self.num_orphans += prompt.num_orphans - before

    def leaves(self, realign_tokens: int) -> Iterator[Sample]:
        """Samples at which a window ends, in order of arrival.

        An answer that clients repeat differently goes on in their version alone, unless that would lose more than `realign_tokens`.
        """
        for sample in self.samples:
            if sample.counts and (sample.max_kept < 0 or self.num_held(sample, realign_tokens) > sample.max_kept):
                yield sample

    def num_held(self, sample: Sample, realign_tokens: int) -> int:
        """How many of its tokens the windows hold between them; the rest was told differently by every client that went on."""
        if not sample.counts:
            return 0
        num = len(sample.ids)
        return num if sample.max_kept < 0 or num - sample.max_kept > realign_tokens else sample.max_kept

    def branch(self, leaf: Sample | None) -> tuple[Graph, Sample | None]:
        """Another graph with the same past, none of it its own."""
        other, at = Graph(), None
        for prompt, sample, _ in path_of(leaf) if leaf is not None else []:
            prompt = msgspec.structs.replace(prompt, parent=at, samples=[], num_followed=0, last_call=-1, num_last=0)
            other.add_prompt(prompt)
            at = msgspec.structs.replace(sample, number=len(other.samples), prompt=prompt, is_own=False, is_followed=True, max_kept=-1)
            prompt.num_followed = 1
            other.add_sample(at)
        return other, at


def path_of(leaf: Sample) -> list[Step]:
    """From the root to this sample."""
    steps: list[Step] = []
    at: Sample | None = leaf
    num_held = len(leaf.ids)
    while at is not None:
        prompt = at.prompt
        steps.append((prompt, at, num_held))
        at, num_held = prompt.parent, prompt.num_kept
    steps.reverse()
    return steps


def ids_before(parent: Sample | None, num_kept: int) -> list[np.ndarray]:
    """The tokens of the path to here, in pieces."""
    if parent is None:
        return []
    pieces = [piece for prompt, sample, num in path_of(parent)[:-1] for piece in (prompt.context, sample.ids[:num])]
    return [*pieces, parent.prompt.context, parent.ids[:num_kept]]


def routed_before(parent: Sample | None, num_kept: int) -> int:
    """Leading positions of the path to here whose experts are known."""
    return min(parent.num_routed, parent.prompt.end + num_kept) if parent is not None else 0


def routes_of(leaf: Sample) -> RouteRecord | None:
    """One row per token of the path. The last sampled token was never computed, so its row is missing."""
    num_tokens = leaf.prompt.end + len(leaf.ids)
    pieces: list[RouteRecord] = []
    at: Sample | None = leaf
    end = leaf.num_routed
    while at is not None and end > 0:
        if at.routes is not None and at.routes_from < end:
            pieces.append(at.routes.cut(0, end - at.routes_from))
            end = at.routes_from
        at = at.prompt.parent
    assert end == 0, f"positions below {end} have no routes although they were counted as known"
    if not pieces:
        return None
    return RouteRecord.join([*reversed(pieces), RouteRecord.missing(pieces[0].shape, num_tokens - leaf.num_routed)])


def routes_in(reply: GenerateReply, *, num_prompt: int, routes_from: int) -> RouteRecord | None:
    """The rows that a replica sent, checked against what it was asked for."""
    if not reply.routes or not reply.token_ids:
        return None
    who = f"replica {reply.replica}"
    try:
        record = RouteRecord.from_bytes(reply.routes)
    except ValueError as error:
        raise RunFailure(Boundary.MODEL, f"{who} sent routes that cannot be used: {error}") from error
    num_asked = num_prompt + len(reply.token_ids) - 1 - routes_from
    if record.num_tokens != num_asked:
        asked = f"the {num_asked} tokens from {routes_from} on"
        raise RunFailure(Boundary.MODEL, f"{who} sent routes of {record.num_tokens} tokens, asked for {asked}")
    return record
