"""The staleness bound: derived in docs/ledger.md, attained by one schedule and broken by none."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.ledger import Pacing, cut, may_open, worst_case_age
from rollmill.records import GroupState


@dataclass
class PlannedGroup:
    seq: int
    opened_steps_cut: int
    state: GroupState = GroupState.OPEN
    min_version: int | None = None
    num_overtaken: int = 0


class PlannedRun:
    """The gate and the cut without a ledger: what a planner would run."""

    def __init__(self, pacing: Pacing, max_staleness: int = 10**9) -> None:
        self.pacing, self.max_staleness = pacing, max_staleness
        self.groups: list[PlannedGroup] = []
        self.num_steps_cut = 0
        self.num_dropped = 0
        self.ages: list[int] = []

    @property
    def live(self) -> list[PlannedGroup]:
        return [g for g in self.groups if g.state in (GroupState.OPEN, GroupState.READY)]

    def open_all(self) -> None:
        for _ in range(may_open(len(self.groups) - self.num_dropped, self.num_steps_cut, self.pacing)):
            self.groups.append(PlannedGroup(seq=len(self.groups), opened_steps_cut=self.num_steps_cut))

    def drop(self, group: PlannedGroup) -> None:
        group.state = GroupState.DROPPED
        self.num_dropped += 1

    def try_cut(self) -> bool:
        window = self.live[: self.pacing.window]
        chosen = cut(window, version=self.num_steps_cut, max_staleness=self.max_staleness, pacing=self.pacing)
        for group in chosen.stale:
            self.drop(group)
        if not chosen.admit:
            assert chosen.waiting > 0
            return False
        assert len(chosen.admit) == self.pacing.groups_per_batch and chosen.waiting == 0
        for group in chosen.admit:
            group.state = GroupState.ADMITTED
            self.ages.append(self.num_steps_cut - group.opened_steps_cut)
            if group.min_version is not None:
                assert self.num_steps_cut - group.min_version <= self.max_staleness
        for group in self.live:
            group.num_overtaken += sum(g.seq > group.seq for g in chosen.admit)
            assert group.num_overtaken <= self.pacing.window - self.pacing.groups_per_batch
        self.num_steps_cut += 1
        return True


pacings = st.builds(
    lambda p, lead, extra: Pacing(groups_per_batch=p, lead=lead, window=p + extra), st.integers(1, 5), st.integers(0, 4), st.integers(0, 12)
)


@given(pacing=pacings, seed=st.integers(0, 2**32), drop_rate=st.sampled_from([0.0, 0.05, 0.3]), straggle=st.sampled_from([0.0, 0.1, 0.4]))
@settings(max_examples=100, deadline=None)
def test_no_schedule_makes_a_group_older_than_the_worst_case(pacing: Pacing, seed: int, drop_rate: float, straggle: float) -> None:
    rng = random.Random(seed)
    run = PlannedRun(pacing)
    stragglers: set[int] = set()
    for _ in range(300):
        run.open_all() if rng.random() < 0.7 else None
        stragglers |= {g.seq for g in run.live if rng.random() < straggle * 0.1}
        candidates = [g for g in run.live if g.state is GroupState.OPEN and g.seq not in stragglers]
        if candidates:
            group = rng.choice(candidates)
            if rng.random() < drop_rate:
                run.drop(group)
            else:
                group.state = GroupState.READY
        elif stragglers and rng.random() < 0.2:
            stragglers.pop()
        if rng.random() < drop_rate * 0.2 and run.live:
            run.drop(rng.choice(run.live))
        if rng.random() < 0.5:
            run.try_cut()
    assert max(run.ages, default=0) <= worst_case_age(pacing)


@given(pacing=pacings)
@settings(max_examples=60, deadline=None)
def test_the_worst_case_age_is_attained_by_one_straggler(pacing: Pacing) -> None:
    # Without a lead only P groups are live, all of them in the next batch: nobody can overtake, whatever the window.
    attained = worst_case_age(pacing) if pacing.lead >= 1 else 0
    run = PlannedRun(pacing)
    run.open_all()
    straggler = run.groups[-1]
    while straggler.state is not GroupState.ADMITTED:
        run.open_all()
        for group in run.live:
            if group is not straggler:
                group.state = GroupState.READY
        if not run.try_cut():
            straggler.state = GroupState.READY
    assert run.num_steps_cut - 1 - straggler.opened_steps_cut == attained == max(run.ages)


@given(pacing=pacings, seed=st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_a_batch_can_always_be_cut_once_every_live_group_is_ready(pacing: Pacing, seed: int) -> None:
    rng = random.Random(seed)
    run = PlannedRun(pacing)
    for _ in range(40):
        run.open_all()
        for group in run.live:
            if rng.random() < 0.4:
                group.state = GroupState.READY
        run.try_cut()
        if rng.random() < 0.1:
            run.drop(rng.choice(run.live)) if run.live else None
        if rng.random() < 0.2:
            run.open_all()
            for group in run.live:
                group.state = GroupState.READY
            assert run.try_cut()


@given(max_staleness=st.integers(1, 9), p=st.integers(1, 4), seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_with_one_version_of_replica_lag_nothing_is_ever_swept(max_staleness: int, p: int, seed: int) -> None:
    rng = random.Random(seed)
    run = PlannedRun(Pacing.from_staleness(max_staleness, p, "async"), max_staleness)
    for _ in range(200):
        run.open_all()
        for group in run.live:
            # Every token is sampled after opening, on weights at most one step behind the batches cut by then.
            if group.min_version is None:
                group.min_version = max(0, group.opened_steps_cut - 1)
            if rng.random() < 0.15:
                group.state = GroupState.READY
        run.try_cut()
    assert run.num_dropped == 0


def test_sync_pacing_never_runs_ahead() -> None:
    pacing = Pacing.from_staleness(5, 4, "sync")
    assert (pacing.lead, pacing.window, worst_case_age(pacing)) == (0, 4, 0)
    assert may_open(0, 0, pacing) == 4
    assert may_open(4, 0, pacing) == 0
    assert may_open(4, 1, pacing) == 4


@pytest.mark.parametrize(("max_staleness", "lead", "window"), [(1, 0, 8), (2, 1, 8), (3, 1, 16), (4, 2, 16), (8, 6, 16)])
def test_async_pacing_shares_the_allowance_between_lead_and_overtaking(max_staleness: int, lead: int, window: int) -> None:
    pacing = Pacing.from_staleness(max_staleness, 8, "async")
    assert (pacing.lead, pacing.window) == (lead, window)
    assert worst_case_age(pacing) + 1 == max_staleness


def test_impossible_pacing_says_what_to_change() -> None:
    with pytest.raises(ValueError, match="max_staleness is 0"):
        Pacing.from_staleness(0, 4, "async")
    with pytest.raises(ValueError, match="use 'async' or 'sync'"):
        Pacing.from_staleness(1, 4, "fast")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="window 3 is smaller"):
        Pacing(groups_per_batch=4, lead=0, window=3)
    with pytest.raises(ValueError, match="lead is -1"):
        Pacing(groups_per_batch=4, lead=-1, window=4)
    with pytest.raises(ValueError, match="groups_per_batch is 0"):
        Pacing(groups_per_batch=0, lead=0, window=4)


def test_gate_gives_back_the_place_of_a_dropped_group() -> None:
    pacing = Pacing(groups_per_batch=4, lead=1, window=4)
    assert may_open(8, 0, pacing) == 0
    assert may_open(7, 0, pacing) == 1
    assert may_open(20, 0, pacing) == 0


def planned(*states: str, min_versions: tuple[int | None, ...] = (), overtaken: int = 0) -> list[PlannedGroup]:
    versions = min_versions or (None,) * len(states)
    return [
        PlannedGroup(seq=i, opened_steps_cut=0, state=GroupState(s), min_version=v, num_overtaken=overtaken)
        for i, (s, v) in enumerate(zip(states, versions, strict=True))
    ]


def test_cut_takes_the_oldest_ready_groups_and_leaves_the_straggler() -> None:
    rows = planned("open", "ready", "ready", "ready")
    chosen = cut(rows, version=0, max_staleness=2, pacing=Pacing(groups_per_batch=2, lead=0, window=4))
    assert [g.seq for g in chosen.admit] == [1, 2]


def test_younger_group_outside_the_window_may_not_overtake() -> None:
    rows = planned("open", "ready", "open", "ready")
    chosen = cut(rows, version=0, max_staleness=2, pacing=Pacing(groups_per_batch=2, lead=0, window=3))
    assert chosen.admit == [] and chosen.waiting == 1 and chosen.waits_for is rows[0]


def test_straggler_that_was_overtaken_enough_holds_the_batch() -> None:
    rows = planned("open", "ready", "ready", "ready", overtaken=2)
    chosen = cut(rows, version=0, max_staleness=2, pacing=Pacing(groups_per_batch=2, lead=0, window=4))
    assert chosen.admit == [] and chosen.waits_for is rows[0] and chosen.waiting == 2


def test_groups_overtaken_under_a_larger_window_do_not_block_the_run() -> None:
    rows = planned("ready", "ready", overtaken=9)
    chosen = cut(rows, version=0, max_staleness=2, pacing=Pacing(groups_per_batch=1, lead=0, window=1))
    assert [g.seq for g in chosen.admit] == [0]


def test_sweep_names_every_group_older_than_max_staleness_and_admits_none_of_them() -> None:
    rows = planned("ready", "open", "ready", "ready", "open", min_versions=(2, 2, 3, 5, None))
    chosen = cut(rows, version=5, max_staleness=2, pacing=Pacing(groups_per_batch=2, lead=0, window=5))
    assert [g.seq for g in chosen.stale] == [0, 1]
    assert [g.seq for g in chosen.admit] == [2, 3]
