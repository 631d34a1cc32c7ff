"""From the graph of an episode to the windows that are trained: every counted token in exactly one of them, whatever the paths share."""

from __future__ import annotations

import numpy as np

from rollmill.gateway.sessions.graph import Graph, Prompt, Sample, path_of, routes_of
from rollmill.records import SourceSpan, Window


class _Claims:
    """Which tokens earlier windows train, and which window was the first to hold a node."""

    def __init__(self) -> None:
        # A window holds a leading part of a sample, so what is claimed of it is a leading part too.
        self._num_claimed: dict[int, int] = {}
        self._owner: dict[int, int] = {}

    def take(self, sample: Sample, num_held: int) -> int:
        """First token of the sample that the window is to train."""
        if not sample.is_own:
            return num_held
        first = self._num_claimed.get(sample.number, 0)
        self._num_claimed[sample.number] = max(first, num_held)
        return min(first, num_held)

    def own(self, node: Prompt | Sample, index: int) -> int | None:
        """The window that held it first, when that is another one."""
        owner = self._owner.setdefault(id(node), index)
        return owner if owner != index else None


def windows_of(graph: Graph, *, realign_tokens: int) -> tuple[Window, ...]:
    """Root-to-leaf paths in order of their leaves' arrival. A path that would train nothing is none."""
    claims, found = _Claims(), list[Window]()
    for leaf in graph.leaves(realign_tokens):
        window = _window(leaf, claims, len(found))
        if window.sampled_T.any():
            found.append(window)
    return tuple(found)


def window_of(leaf: Sample) -> Window:
    """The one path to here, as if it were the only one."""
    return _window(leaf, _Claims(), 0)


def _window(leaf: Sample, claims: _Claims, index: int) -> Window:
    num_tokens = leaf.prompt.end + len(leaf.ids)
    tokens = np.empty(num_tokens, "<i4")
    sampled = np.zeros(num_tokens, "u1")
    logprobs = np.zeros(num_tokens, "<f4")
    versions = np.full(num_tokens, -1, "<i4")
    sources, stale = list[SourceSpan](), list[tuple[int, int]]()
    parent: int | None = None
    for prompt, sample, num_held in path_of(leaf):
        for node in (prompt, sample):
            owner = claims.own(node, index)
            parent = parent if owner is None else owner
        at, first = prompt.end, claims.take(sample, num_held)
        tokens[prompt.start : at] = prompt.context
        tokens[at : at + num_held] = sample.ids[:num_held]
        if first == num_held:
            continue
        is_trained = np.zeros(num_held, bool)
        is_trained[first:] = True
        for start, end in sample.forced:
            is_trained[start:end] = False
        sampled[at : at + num_held] = is_trained
        np.copyto(logprobs[at : at + num_held], sample.logprobs[:num_held], where=is_trained)
        for span in sample.spans:
            np.copyto(versions[at + span.start : at + min(span.end, num_held)], span.version, where=is_trained[span.start : span.end])
        for source in sample.sources:
            if source.start < num_held and source.end > first:
                _name(sources, at + max(source.start, first), at + min(source.end, num_held), source.replica)
        if sample.stale_from is not None and sample.stale_from < num_held:
            stale.append((at + max(sample.stale_from, first), at + num_held))
    routes = routes_of(leaf)
    return Window(
        parent=parent,
        tokens=tokens.tobytes(),
        sampled=sampled.tobytes(),
        logprobs=logprobs.tobytes(),
        versions=versions.tobytes(),
        routes=routes.to_bytes() if routes is not None else b"",
        sources=tuple(sources),
        stale=tuple(stale),
    )


def _name(sources: list[SourceSpan], start: int, end: int, replica: str) -> None:
    """Turns of one replica in a row are one span, the context between them included."""
    if sources and sources[-1].replica == replica:
        start = sources.pop().start
    sources.append(SourceSpan(start, end, replica))
