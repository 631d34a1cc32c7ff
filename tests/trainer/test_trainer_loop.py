"""The trainer role on a real ledger: every admitted group is trained exactly once or dropped with its reason, whatever happens."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from trainer_worlds import bits, config_of, fill

from rollmill.config import RunConfig
from rollmill.ledger import Ledger
from rollmill.records import DropReason, GroupState, Role
from rollmill.telemetry import Metrics, Waits, WaitTimeout, read_metrics
from rollmill.trainer import loop as loop_module
from rollmill.trainer.batch import StepBatch
from rollmill.trainer.loop import TrainerLoop, lr_scale

MIXED = [1.0, 0.0, 0.0, 1.0]
FLAT = [1.0, 1.0, 1.0, 1.0]


class Crash(Exception):
    """Stands for the death of the process."""


def train(config: RunConfig, should_stop: Callable[[], bool] = lambda: False) -> dict[str, bytes]:
    """One life of a trainer process; returns the weights it ended with."""
    with Ledger.create_or_open(config.run.dir, Role.TRAINER) as ledger:
        loop = TrainerLoop(config, ledger, Metrics(config.run.dir, "trainer"), Waits(), should_stop)
        loop.run()
        return bits(loop._model)


def crash_at(monkeypatch: pytest.MonkeyPatch, name: str, step: int) -> None:
    """The first call of `name` in the loop's module at this step, or later, ends the process."""
    real, armed = getattr(loop_module, name), [True]

    def dying(*args: object, **kwargs: object) -> object:
        if armed[0] and kwargs.get("step", step) >= step:
            armed[0] = False
            raise Crash
        return real(*args, **kwargs)

    monkeypatch.setattr(loop_module, name, dying)


def test_trainer_learns_publishes_and_commits(tmp_path: Path) -> None:
    fill(tmp_path, [MIXED, FLAT, MIXED, MIXED, FLAT, FLAT])
    weights = train(config_of(tmp_path))
    with Ledger.open_reader(tmp_path) as ledger:
        progress = ledger.progress()
        assert (progress.num_trained, progress.num_steps_committed, progress.num_dropped) == (6, 3, 0)
        assert ledger.audit() == []
        # The initial weights, and one version for each of the two batches that had something to teach; `step` counts steps taken.
        assert [(row.version, row.step) for row in ledger.versions()] == [(0, 0), (1, 1), (2, 2)]
        head = ledger.head_checkpoint()
        assert head is not None and (head.step, head.version) == (2, ledger.versions()[-1].version)
    rows = [r for r in read_metrics(tmp_path, "trainer") if "reward/mean" in r]
    assert [r["frac_reward_zero_std"] for r in rows] == [0.5, 0.0, 1.0]
    assert [r["reward/mean"] for r in rows] == [0.75, 0.5, 1.0]
    # The traces carry the shipped model's own logprobs, so before the first update nothing may differ.
    assert rows[0]["mm/abs_diff_max"] < 1e-4 and rows[0]["grad/norm"] > 0 and rows[2]["grad/norm"] == 0
    assert set(rows[0]) == set(rows[2]), "a step without signal writes zeros, not gaps"
    assert weights != {} and all(math.isfinite(v) for r in rows for v in r.values())


@pytest.mark.parametrize(("checkpoint_every", "died_at"), [(1, 0), (1, 1), (2, 3), (1, 3)])
def test_crash_between_admission_and_commit_is_replayed_exactly_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint_every: int, died_at: int
) -> None:
    for run in ("straight", "crashed"):
        fill(tmp_path / run, [MIXED, FLAT, MIXED, MIXED, MIXED, FLAT, MIXED, MIXED])
    options = {"steps": 4, "checkpoint_every": checkpoint_every}
    wanted = train(config_of(tmp_path / "straight", **options))
    with monkeypatch.context() as patch:
        crash_at(patch, "save_checkpoint", died_at)
        with pytest.raises(Crash):
            train(config_of(tmp_path / "crashed", **options))
    with Ledger.open_reader(tmp_path / "crashed") as ledger:
        assert ledger.progress().num_admitted > 0
    assert train(config_of(tmp_path / "crashed", **options)) == wanted
    for run in ("straight", "crashed"):
        with Ledger.open_reader(tmp_path / run) as ledger:
            assert ledger.audit() == [] and ledger.progress().num_trained == 8
            assert [[row.group_id for row in ledger.batch(step)] for step in range(4)] == [
                [f"g{2 * s:06d}", f"g{2 * s + 1:06d}"] for s in range(4)
            ]


def test_corrupt_trace_drops_its_group_and_training_goes_on(tmp_path: Path) -> None:
    blobs = fill(tmp_path, [MIXED, MIXED, MIXED, MIXED])
    with Ledger.open_reader(tmp_path) as ledger:
        path = ledger.blobs.path(blobs[1][2])
    path.write_bytes(path.read_bytes()[:-3])
    train(config_of(tmp_path, steps=2))
    with Ledger.open_reader(tmp_path) as ledger:
        row = ledger.batch(0)[1]
        assert (row.group_id, row.state, row.drop_reason) == ("g000001", GroupState.DROPPED, DropReason.CORRUPT_BLOB)
        assert ledger.progress().num_trained == 3 and ledger.progress().num_steps_committed == 2


def test_crash_after_a_whole_batch_was_dropped_does_not_block_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the batch is left to replay, yet its step is cut and must be committed before the next."""
    blobs = fill(tmp_path, [MIXED, MIXED, MIXED, MIXED])
    with Ledger.open_reader(tmp_path) as ledger:
        for refs in blobs[:2]:
            ledger.blobs.path(refs[0]).unlink()
    with monkeypatch.context() as patch:
        crash_at(patch, "save_checkpoint", 0)
        with pytest.raises(Crash):
            train(config_of(tmp_path, steps=2))
    train(config_of(tmp_path, steps=2, batch_s=10.0))
    with Ledger.open_reader(tmp_path) as ledger:
        progress = ledger.progress()
        assert (progress.num_steps_committed, progress.num_trained, progress.num_dropped) == (2, 2, 2)


def test_last_commit_is_visible_only_with_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever evaluates after the last step must not find the weights of the step before."""
    fill(tmp_path, [MIXED, MIXED])
    seen = []
    real = Ledger.commit_step

    def watched(ledger: Ledger, *args: object, **kwargs: object) -> None:
        seen.append((args[0].version, ledger.progress().version))  # type: ignore[attr-defined]
        real(ledger, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Ledger, "commit_step", watched)
    train(config_of(tmp_path, steps=1))
    [(committed, published)] = seen
    assert committed == published == 1


def test_stale_groups_are_dropped_not_trained(tmp_path: Path) -> None:
    fill(tmp_path, [MIXED] * 4)

    def should_stop() -> bool:
        with Ledger.open_reader(tmp_path) as ledger:
            return ledger.progress().num_dropped > 0

    train(config_of(tmp_path, steps=4, groups_per_batch=1, max_staleness=1), should_stop)
    with Ledger.open_reader(tmp_path) as ledger:
        states = [ledger.group(f"g{i:06d}").state for i in range(4)]
    # Version 0 made them all; after two updates the trainer is at version 2.
    assert states[:2] == [GroupState.TRAINED] * 2 and GroupState.DROPPED in states[2:] and GroupState.ADMITTED not in states


def test_wait_for_a_batch_ends_loudly_and_names_who_it_waits_for(tmp_path: Path) -> None:
    with pytest.raises(WaitTimeout, match="for batch, which rollout must provide"):
        train(config_of(tmp_path, batch_s=0.05))


def test_stop_request_leaves_a_sound_ledger(tmp_path: Path) -> None:
    fill(tmp_path, [MIXED] * 4)

    def should_stop() -> bool:
        with Ledger.open_reader(tmp_path) as ledger:
            return ledger.progress().num_steps_committed >= 1

    train(config_of(tmp_path, steps=9), should_stop)
    with Ledger.open_reader(tmp_path) as ledger:
        assert ledger.progress().num_steps_committed == 1 and ledger.audit() == []


def test_step_size_follows_the_schedule_and_the_share_of_groups_that_teach() -> None:
    def batch(num_flat: int) -> StepBatch:
        return StepBatch(lessons=[], num_episodes=32, rewards=[], num_groups=8, num_groups_without_signal=num_flat, num_tokens=0)

    assert lr_scale(batch(0), step=0, num_steps=11, final_frac=0.2) == pytest.approx(1.0)
    assert lr_scale(batch(0), step=10, num_steps=11, final_frac=0.2) == pytest.approx(0.2)
    assert lr_scale(batch(6), step=0, num_steps=11, final_frac=0.2) == pytest.approx(0.25)
    assert lr_scale(batch(8), step=5, num_steps=11, final_frac=1.0) == 0.0
