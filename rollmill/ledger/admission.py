"""The rules that bound staleness: when a group may be opened and which groups form a batch; pure, without I/O or clock.

Symbols, here, in docs/ledger.md and in the tests:

    P  groups per batch            L  lead: batches that rollouts may run ahead
    W  window, in groups           S  max_staleness, in weight versions
    s  a batch (from 0)            s0 batches cut when a group was opened
    k  num_overtaken of a live group: younger groups that went into a batch before it
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Generic, Literal, Protocol, TypeVar

import msgspec

from rollmill.records import GroupState


class Candidate(Protocol):
    """What the rules need to know of a group; `GroupRow` is one."""

    @property
    def seq(self) -> int: ...
    @property
    def state(self) -> GroupState: ...
    @property
    def min_version(self) -> int | None: ...
    @property
    def num_overtaken(self) -> int: ...


G = TypeVar("G", bound=Candidate)


class Pacing(msgspec.Struct, frozen=True, kw_only=True):
    """How far rollouts may run ahead and how far a batch may reach past a straggler.

    >>> Pacing.from_staleness(4, 8, "async")
    Pacing(groups_per_batch=8, lead=2, window=16)
    """

    groups_per_batch: int
    """P"""
    lead: int
    """L"""
    window: int
    """W; W - P younger groups may overtake a live one."""

    def __post_init__(self) -> None:
        if self.groups_per_batch < 1:
            raise ValueError(f"groups_per_batch is {self.groups_per_batch}; a batch needs at least 1 group")
        if self.lead < 0:
            raise ValueError(f"lead is {self.lead}; rollouts cannot run a negative number of batches ahead, use 0 or more")
        if self.window < self.groups_per_batch:
            raise ValueError(f"window {self.window} is smaller than groups_per_batch {self.groups_per_batch}: no batch could ever be cut")

    @classmethod
    def from_staleness(cls, max_staleness: int, groups_per_batch: int, mode: Literal["async", "sync"]) -> Pacing:
        """The loosest pacing whose worst case age plus one version of replica lag stays within `max_staleness`."""
        if mode == "sync":
            return cls(groups_per_batch=groups_per_batch, lead=0, window=groups_per_batch)
        if mode != "async":
            raise ValueError(f"mode is {mode!r}; use 'async' or 'sync'")
        if max_staleness < 1:
            raise ValueError(f"max_staleness is {max_staleness}; async rollouts lag by one version at least: use 1 or more, or mode 'sync'")
        # Overtaking hides stragglers but costs one version; below S = 3 the lead is worth more.
        overtake = 1 if max_staleness >= 3 else 0
        pacing = cls(
            groups_per_batch=groups_per_batch,
            lead=max_staleness - 1 - overtake,
            window=(1 + overtake) * groups_per_batch,
        )
        assert worst_case_age(pacing) + 1 <= max_staleness
        return pacing


def worst_case_age(pacing: Pacing) -> int:
    """The most batches cut between a group's opening and its own cut: s - s0 <= L + floor((W - 1) / P); attained when L >= 1."""
    return pacing.lead + (pacing.window - 1) // pacing.groups_per_batch


def may_open(num_opened_live: int, num_steps_cut: int, pacing: Pacing) -> int:
    """How many more groups may be opened now, so that opened minus dropped <= (steps cut + 1 + L) * P.

    `num_opened_live` is `Progress.num_opened_live`. Taking s batches of P groups off both counts changes nothing, so
    `may_open(num_open + num_ready, 0, pacing)` is the same gate, and the one to use when P changed since an earlier run.
    In sync mode pass for `num_steps_cut` the number of steps whose weights the replicas already serve; then no group starts
    on weights older than the ones its batch will train.
    """
    return max(0, (num_steps_cut + 1 + pacing.lead) * pacing.groups_per_batch - num_opened_live)


class Cut(msgspec.Struct, Generic[G], frozen=True, kw_only=True):
    """What to do with the window now."""

    admit: list[G]
    """P ready groups, oldest first, or none."""
    stale: list[G]
    """To be dropped: READY ones by either side, OPEN ones by the rollout role."""
    waiting: int
    """How many groups must still become ready before a batch can be cut; 0 when `admit` is not empty."""
    waits_for: G | None
    """The oldest group that the batch waits for."""


def is_stale(group: Candidate, *, version: int, max_staleness: int) -> bool:
    return group.min_version is not None and version - group.min_version > max_staleness


def cut(window_rows: Sequence[G], *, version: int, max_staleness: int, pacing: Pacing) -> Cut[G]:
    """Choose the next batch from the oldest W live groups.

    The batch is the oldest P ready groups that are not stale, provided that no group left behind ends up with k > W - P.
    A younger group outside the window may not overtake, and inside it only W - P of them may.
    """
    P, budget = pacing.groups_per_batch, pacing.window - pacing.groups_per_batch
    rows = list(window_rows)[: pacing.window]
    assert all(a.seq < b.seq for a, b in pairwise(rows)), "window rows must come oldest first"
    assert all(g.state in (GroupState.OPEN, GroupState.READY) for g in rows), "window rows must be live"
    stale = [g for g in rows if is_stale(g, version=version, max_staleness=max_staleness)]
    stale_seqs = {g.seq for g in stale}
    fresh = [g for g in rows if g.seq not in stale_seqs]
    ready = [g for g in fresh if g.state is GroupState.READY]
    unfinished = next((g for g in fresh if g.state is GroupState.OPEN), None)
    if len(ready) < P:
        return Cut(admit=[], stale=stale, waiting=P - len(ready), waits_for=unfinished)
    batch = ready[:P]
    chosen = {g.seq for g in batch}
    # k falls with youth, so the oldest group left behind decides for all of them.
    left_behind = next((g for g in fresh if g.seq not in chosen), None)
    if left_behind is not None:
        num_overtaking = sum(seq > left_behind.seq for seq in chosen)
        excess = left_behind.num_overtaken + num_overtaking - budget
        # A batch that overtakes nobody is always allowed, even when an earlier run with a larger window left k above today's budget.
        if num_overtaking > 0 and excess > 0:
            return Cut(admit=[], stale=stale, waiting=min(excess, num_overtaking), waits_for=left_behind)
    return Cut(admit=batch, stale=stale, waiting=0, waits_for=None)
