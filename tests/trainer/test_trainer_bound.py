"""The trainer with a bound chosen by measurement, on a real ledger: it follows the samples, is kept, and counts no step twice."""

from __future__ import annotations

from pathlib import Path

import pytest
from trainer_worlds import config_of, fill

from rollmill.config import RunConfig
from rollmill.ledger import Ledger, Pacing
from rollmill.ledger.staleness import ControllerState, Limits, start
from rollmill.ledger.staleness_row import BoundRow, IdleRow
from rollmill.records import Role
from rollmill.telemetry import Metrics, Waits, read_metrics
from rollmill.trainer import loop as loop_module
from rollmill.trainer.loop import TrainerLoop
from rollmill.trainer.staleness import Bound

MIXED = [1.0, 0.0, 0.0, 1.0]
FLAT = [1.0, 1.0, 1.0, 1.0]
LAGS = ("0", "1", "2_3", "4_7", "8_up")


class Crash(Exception):
    """Stands for the death of the process."""


def auto(run_dir: Path, **trainer: object) -> RunConfig:
    return config_of(run_dir, **({"max_staleness": "auto", "staleness_limit": 30, "groups_per_batch": 1} | trainer))


def train(config: RunConfig) -> None:
    with Ledger.create_or_open(config.run.dir, Role.TRAINER) as ledger:
        TrainerLoop(config, ledger, Metrics(config.run.dir, "trainer"), Waits(), lambda: False).run()


def kept(run_dir: Path) -> BoundRow:
    with Ledger.open_reader(run_dir) as ledger:
        row = ledger.bound_in_force()
    assert row is not None
    return row


def bounds_told(run_dir: Path) -> list[tuple[int, float]]:
    return [(r["step"], r["staleness/bound"]) for r in read_metrics(run_dir, "trainer") if "staleness/bound" in r]


def shown(ess: float, *, wait_s: float = 0.0) -> dict[str, float]:
    """The metrics of one step with this effective sample size."""
    metrics = {f"mm/lag_{lag}/{what}": 0.0 for lag in LAGS for what in ("token_frac", "k3")}
    return metrics | {"mm/num_tokens": 9.0, "mm/ess": ess, "timing_s/wait_batch": wait_s, "timing_s/step": 1.0, "perf/num_tokens": 9.0}


def test_every_step_that_compared_tokens_is_a_reading_and_others_are_none(tmp_path: Path) -> None:
    fill(tmp_path, [MIXED, FLAT, MIXED])
    train(auto(tmp_path, steps=3, lr=1e-5))
    assert [step for step, _ in bounds_told(tmp_path)] == [0, 1, 2]
    assert kept(tmp_path).step == 2
    assert kept(tmp_path).state.num_steps == 2


def test_bound_falls_when_the_samples_are_far_off_the_policy(tmp_path: Path) -> None:
    """Traces of version 0 throughout, and steps so large that they say little about the weights in training."""
    fill(tmp_path, [MIXED] * 6)
    train(auto(tmp_path, steps=6, lr=0.05))
    assert bounds_told(tmp_path)[0] == (0, 2.0)
    assert kept(tmp_path).bound == 1
    with Ledger.open_reader(tmp_path) as ledger:
        told = [(e.detail["before"], e.detail["bound"], e.detail["why"]) for e in ledger.history("staleness")]
        # A bound of 1 dropped none of the groups that are up to six versions old: that is the hard limit's to do.
        assert ledger.progress().num_dropped == 0 and ledger.audit() == []
    assert told[-1] == (2, 1, "harmful")


@pytest.mark.parametrize("crash_at", [1, 2, 3])
def test_crash_and_resume_keep_the_bound_and_count_no_step_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash_at: int) -> None:
    """Steps 0 .. crash_at are decided, the checkpoint that would hold them is lost, and all are trained again."""
    config = auto(tmp_path, steps=6, lr=1e-5, checkpoint_every=6)
    fill(tmp_path, [MIXED] * 6)
    real, num_looks = Bound.look, [0]

    def dying(self: Bound, metrics: dict[str, float], *, step: int) -> None:
        real(self, metrics, step=step)
        num_looks[0] += 1
        if num_looks[0] == crash_at + 1:
            raise Crash

    monkeypatch.setattr(loop_module.Bound, "look", dying)
    with pytest.raises(Crash):
        train(config)
    before = kept(tmp_path)
    assert (before.step, before.state.num_steps) == (crash_at, crash_at + 1)
    with Ledger.create_or_open(tmp_path, Role.TRAINER) as ledger:
        again = Bound(config, ledger)
        assert (again.versions, again._state) == (before.bound, before.state)
        again.look(shown(0.1), step=crash_at)
        assert (again._state, ledger.bound_in_force()) == (before.state, before)
    train(config)
    assert (kept(tmp_path).step, kept(tmp_path).state.num_steps) == (5, 6)
    with Ledger.open_reader(tmp_path) as ledger:
        assert ledger.audit() == [] and ledger.progress().num_trained == 6


def test_bound_rises_while_both_sides_wait_and_the_pacing_with_it(tmp_path: Path) -> None:
    config = auto(tmp_path, staleness_limit=4, groups_per_batch=8)
    with Ledger.create_or_open(tmp_path, Role.TRAINER) as trainer, Ledger.create_or_open(tmp_path, Role.ROLLOUT) as rollout:
        bound = Bound(config, trainer)
        assert (bound.versions, bound.pacing) == (2, Pacing.from_staleness(2, 8, "async"))
        for step in range(8):
            if step % 2 == 0:
                # Every second step brings no report: what was reported last holds on.
                rollout.report_idle(IdleRow(started_at=1.0, idle_s=0.5 * step, clock_s=1.0 * step))
            bound.look(shown(1.0, wait_s=1.0), step=step)
        assert (bound.versions, bound.pacing) == (3, Pacing.from_staleness(3, 8, "async"))
        row = rollout.bound_in_force()
        assert row is not None and row.bound == 3


def test_rollouts_that_do_not_idle_leave_the_bound_alone(tmp_path: Path) -> None:
    with Ledger.create_or_open(tmp_path, Role.TRAINER) as trainer:
        bound = Bound(auto(tmp_path), trainer)
        for step in range(20):
            bound.look(shown(1.0, wait_s=1.0), step=step)
        assert bound.versions == 2


@pytest.mark.parametrize(("trainer", "versions"), [({"max_staleness": 5}, 5), ({"max_staleness": "auto", "mode": "sync"}, 0)])
def test_fixed_bound_is_told_and_never_decided(tmp_path: Path, trainer: dict[str, object], versions: int) -> None:
    config = config_of(tmp_path, **trainer)
    with Ledger.create_or_open(tmp_path, Role.TRAINER) as ledger:
        bound = Bound(config, ledger)
        bound.look(shown(0.1), step=0)
        assert (bound.versions, ledger.bound_in_force()) == (versions, None)


def test_run_goes_on_fixed_after_a_life_with_auto_and_back(tmp_path: Path) -> None:
    with Ledger.create_or_open(tmp_path, Role.TRAINER) as ledger:
        ledger.decide_bound(BoundRow(step=3, state=ControllerState(bound=6)), 1.0)
        assert Bound(config_of(tmp_path, max_staleness=3), ledger).versions == 3
        assert Bound(auto(tmp_path, staleness_limit=4), ledger).versions == 4
        assert Bound(auto(tmp_path), ledger).versions == 6
        assert start(Limits.up_to(30)).bound == 2
