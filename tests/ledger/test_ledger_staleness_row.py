"""The bound in force lives in the ledger: one decider, one decision per step, seen by every process, and safe to change under way."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.ledger import GroupRow, IllegalTransition, Ledger, Pacing, cut, may_open, worst_case_age
from rollmill.ledger.staleness import ControllerState, Limits, Verdict, start
from rollmill.ledger.staleness_row import BoundRow, IdleRow
from rollmill.records import GroupState, Role


def row(step: int, bound: int, verdict: Verdict = Verdict.HOLD) -> BoundRow:
    return BoundRow(step=step, state=ControllerState(bound=bound, verdict=verdict, num_steps=step + 1, before_raise=(10.5, 0.25)))


def test_both_sides_see_the_same_bound_and_a_restart_keeps_it(tmp_path: Path) -> None:
    with Ledger.create_or_open(tmp_path, Role.TRAINER) as trainer, Ledger.create_or_open(tmp_path, Role.ROLLOUT) as rollout:
        assert rollout.bound_in_force() is None
        seen = rollout.data_version()
        assert trainer.decide_bound(row(0, 3), 1.0)
        assert rollout.data_version() != seen
        assert rollout.bound_in_force() == trainer.bound_in_force() == row(0, 3)
    with Ledger.create_or_open(tmp_path, Role.TRAINER) as again:
        assert again.bound_in_force() == row(0, 3)
        assert again.audit() == []


def test_only_the_trainer_decides(tmp_path: Path) -> None:
    with Ledger.create_or_open(tmp_path, Role.ROLLOUT) as rollout, pytest.raises(IllegalTransition):
        rollout.decide_bound(row(0, 3), 1.0)
    with Ledger.create_or_open(tmp_path, Role.TRAINER) as trainer, pytest.raises(IllegalTransition):
        trainer.decide_bound(row(0, 0), 1.0)


def test_step_trained_again_after_a_crash_decides_nothing(tmp_path: Path) -> None:
    with Ledger.create_or_open(tmp_path, Role.TRAINER) as trainer:
        assert trainer.decide_bound(row(4, 3), 1.0)
        assert not trainer.decide_bound(row(4, 5), 2.0)
        assert not trainer.decide_bound(row(2, 5), 2.0)
        assert trainer.bound_in_force() == row(4, 3)
        assert trainer.decide_bound(row(5, 4, Verdict.RAISED), 3.0)


def test_lowered_hard_maximum_cuts_the_bound_of_an_earlier_life(tmp_path: Path) -> None:
    with Ledger.create_or_open(tmp_path, Role.TRAINER) as trainer:
        assert trainer.controller_state(Limits.up_to(1)) == start(Limits(hard_max=1, first=1))
        trainer.decide_bound(row(0, 6), 1.0)
        assert trainer.controller_state(Limits.up_to(8)) == row(0, 6).state
        assert trainer.controller_state(Limits.up_to(4)).bound == 4


def test_every_change_is_history_and_an_unchanged_bound_is_not(tmp_path: Path) -> None:
    with Ledger.create_or_open(tmp_path, Role.TRAINER) as trainer:
        for step, bound in enumerate((2, 2, 3, 3, 2)):
            trainer.decide_bound(row(step, bound, Verdict.HARMFUL if step == 4 else Verdict.HOLD), float(step))
        told = [(e.detail["step"], e.detail["before"], e.detail["bound"]) for e in trainer.history("staleness")]
        assert told == [(0, None, 2), (2, 2, 3), (4, 3, 2)]
        assert trainer.history("staleness")[-1].detail["why"] == "harmful"


def test_trainer_learns_how_long_slots_stood_empty_since_its_last_look(tmp_path: Path) -> None:
    with Ledger.create_or_open(tmp_path, Role.TRAINER) as trainer, Ledger.create_or_open(tmp_path, Role.ROLLOUT) as rollout:
        assert trainer.idle_reported() is None
        rollout.report_idle(first := IdleRow(started_at=1.0, idle_s=2.0, clock_s=10.0))
        assert trainer.idle_reported() == first
        assert first.since(None) == 0.2
        assert first.since(first) is None
        assert IdleRow(started_at=1.0, idle_s=6.0, clock_s=15.0).since(first) == 0.8
        restarted = IdleRow(started_at=20.0, idle_s=0.5, clock_s=1.0)
        assert restarted.since(first) == 0.5
        with pytest.raises(IllegalTransition):
            trainer.report_idle(first)
        assert trainer.audit() == []


def live(seq: int, state: GroupState, num_overtaken: int, opened: int) -> GroupRow:
    return GroupRow(
        group_id=f"g{seq:06d}", seq=seq, task_id="t", group_size=2, state=state, num_graded=2, reward_sum=0.0, num_success=0,
        min_version=max(0, opened - 1), opened_at=0.0, opened_steps_cut=opened, num_overtaken=num_overtaken, ready_at=None, step=None,
        version=None, staleness=None, age=None, drop_reason=None, ended_at=None, stats=None,
    )  # fmt: skip


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.data(), st.integers(1, 3), st.integers(1, 8))
def test_no_group_outlives_the_hard_maximum_however_the_bound_moves(data: st.DataObject, num_groups: int, hard_max: int) -> None:
    """The wiring of docs/staleness.md: pacing follows the bound in force, only the hard maximum drops. So nothing is ever dropped."""
    groups: dict[int, GroupRow] = {}
    num_cut = num_opened = 0
    for _ in range(40):
        bound = data.draw(st.integers(1, hard_max))
        pacing = Pacing.from_staleness(bound, num_groups, "async")
        for _ in range(min(data.draw(st.integers(0, 6)), may_open(num_opened, num_cut, pacing))):
            groups[num_opened] = live(num_opened, GroupState.OPEN, 0, num_cut)
            num_opened += 1
        for seq in [s for s, g in groups.items() if g.state is GroupState.OPEN and data.draw(st.booleans())]:
            groups[seq] = live(seq, GroupState.READY, groups[seq].num_overtaken, groups[seq].opened_steps_cut)
        found = cut([groups[s] for s in sorted(groups)][: pacing.window], version=num_cut, max_staleness=hard_max, pacing=pacing)
        assert found.stale == []
        if not found.admit:
            continue
        chosen = {g.seq for g in found.admit}
        for group in found.admit:
            assert num_cut - group.opened_steps_cut <= worst_case_age(Pacing.from_staleness(hard_max, num_groups, "async")) <= hard_max - 1
            del groups[group.seq]
        for seq, g in groups.items():
            groups[seq] = live(seq, g.state, g.num_overtaken + sum(c > seq for c in chosen), g.opened_steps_cut)
        num_cut += 1


def test_gate_closes_until_the_surplus_is_drained_when_the_bound_shrinks() -> None:
    wide, narrow = Pacing.from_staleness(6, 4, "async"), Pacing.from_staleness(2, 4, "async")
    num_opened = may_open(0, 0, wide)
    assert num_opened == 20
    assert [may_open(num_opened, cuts, narrow) for cuts in range(6)] == [0, 0, 0, 0, 4, 8]
