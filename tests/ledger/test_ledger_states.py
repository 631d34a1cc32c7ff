"""Every transition is the right state's and the right role's, or it is refused and nothing changes."""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from ledger_walk import checkpoint, finish, ready_group, task

from rollmill.ledger import IllegalTransition, Ledger
from rollmill.ledger.transitions import EPISODE_MOVES, GROUP_MOVES, check_episode_move, check_group_move
from rollmill.records import BlobRef, Boundary, CancelReason, DropReason, EpisodeState, Grade, GroupState, Role, StopReason


@pytest.fixture
def rollout(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger.create_or_open(tmp_path, Role.ROLLOUT) as ledger:
        yield ledger
        assert ledger.audit() == []


@pytest.fixture
def trainer(rollout: Ledger, tmp_path: Path) -> Iterator[Ledger]:
    with Ledger.create_or_open(tmp_path, Role.TRAINER) as ledger:
        yield ledger


def test_only_the_listed_moves_exist_and_only_their_owner_makes_them() -> None:
    for a, b, role in itertools.product(EpisodeState, EpisodeState, Role):
        if role in EPISODE_MOVES.get((a, b), ()):
            check_episode_move("e", a, b, role)
        else:
            with pytest.raises(IllegalTransition):
                check_episode_move("e", a, b, role)
    allowed = {DropReason.STALE, DropReason.CORRUPT_BLOB}
    for c, d, role in itertools.product(GroupState, GroupState, Role):
        if role not in GROUP_MOVES.get((c, d), ()):
            for reason in DropReason:
                with pytest.raises(IllegalTransition):
                    check_group_move("g", c, d, role, reason)
    assert {r for r in allowed if _may(GroupState.READY, Role.ROLLOUT, r)} == {DropReason.STALE}
    assert {r for r in allowed if _may(GroupState.READY, Role.TRAINER, r)} == allowed
    assert {r for r in allowed if _may(GroupState.ADMITTED, Role.TRAINER, r)} == {DropReason.CORRUPT_BLOB}


def _may(state: GroupState, role: Role, reason: DropReason) -> bool:
    try:
        check_group_move("g", state, GroupState.DROPPED, role, reason)
    except IllegalTransition:
        return False
    return True


def test_group_goes_from_open_to_trained(rollout: Ledger, trainer: Ledger) -> None:
    group = rollout.open_group(task(5), 2, now=1.0)
    assert (group.group_id, group.seq, group.state, group.opened_at) == ("g000000", 0, GroupState.OPEN, 1.0)
    assert rollout.task_of("g000000") == task(5)
    assert [e.episode_id for e in rollout.queued_episodes(10)] == ["g000000.0.0", "g000000.1.0"]
    for slot, version in ((0, 4), (1, 3)):
        rollout.start_episode(f"g000000.{slot}.0", now=2.0)
        finish(rollout, f"g000000.{slot}.0", reward=float(slot), versions=(version, 5), now=3.0)
    episode = rollout.episode("g000000.1.0")
    assert episode.state is EpisodeState.GRADED and episode.versions == (3, 5) and not episode.is_live
    assert episode.grade == Grade(reward=1.0, success=True) and episode.stop is StopReason.SUBMITTED
    assert episode.blob is not None and rollout.blobs.get(episode.blob).startswith(b"trace of g000000.1.0")
    assert rollout.settle_group("g000000", now=4.0) is GroupState.READY
    assert [(g.group_id, g.min_version) for g in trainer.window(10)] == [("g000000", 3)]
    trainer.admit(0, ["g000000"], version=6, now=5.0)
    (admitted,) = trainer.batch(0)
    assert (admitted.state, admitted.step, admitted.version, admitted.staleness, admitted.age) == (GroupState.ADMITTED, 0, 6, 3, 0)
    assert list(trainer.pending_batches()) == [0]
    trainer.commit_step(checkpoint(0, 7), now=6.0, stats_by_group={"g000000": {"loss": 0.25}})
    trained = trainer.group("g000000")
    assert (trained.state, trained.ended_at, trained.stats) == (GroupState.TRAINED, 6.0, {"loss": 0.25})
    assert trainer.pending_batches() == {}
    assert [e.kind for e in trainer.history("g000000")] == ["group.open", "group.ready", "group.admitted", "group.trained"]


def test_refusal_names_id_state_wanted_state_and_role_and_changes_nothing(rollout: Ledger) -> None:
    rollout.open_group(task(), 1, now=0.0)
    before = rollout.events()
    with pytest.raises(IllegalTransition, match=r"g000000\.0\.0 is queued; role rollout may not make it graded") as error:
        finish(rollout, "g000000.0.0")
    refusal = error.value
    assert (refusal.subject, refusal.current, refusal.wanted, refusal.role) == ("g000000.0.0", "queued", "graded", Role.ROLLOUT)
    for call in (
        lambda: rollout.start_episode("g000009.0.0", now=0.0),
        lambda: rollout.retry_episode("nobody", now=0.0),
        lambda: rollout.settle_group("g000009", now=0.0),
        lambda: rollout.drop_group("g000009", DropReason.STALE, now=0.0),
        lambda: rollout.fail_episode("g000000.0.0", Boundary.MODEL, "", now=0.0),
    ):
        with pytest.raises(IllegalTransition):
            call()
    assert rollout.events() == before


def test_episode_ends_exactly_once(rollout: Ledger) -> None:
    rollout.open_group(task(), 1, now=0.0)
    rollout.start_episode("g000000.0.0", now=0.0)
    finish(rollout, "g000000.0.0")
    for call in (
        lambda: finish(rollout, "g000000.0.0"),
        lambda: rollout.fail_episode("g000000.0.0", Boundary.MODEL, "late", now=0.0),
        lambda: rollout.cancel_episode("g000000.0.0", CancelReason.DEADLINE, now=0.0),
        lambda: rollout.start_episode("g000000.0.0", now=0.0),
        lambda: rollout.retry_episode("g000000.0.0", now=0.0),
    ):
        with pytest.raises(IllegalTransition):
            call()


def test_other_roles_change_nothing(rollout: Ledger, trainer: Ledger, tmp_path: Path) -> None:
    rollout.open_group(task(), 1, now=0.0)
    with Ledger.create_or_open(tmp_path, Role.SUPERVISOR) as supervisor:
        for stranger in (trainer, supervisor):
            for call in (
                lambda s=stranger: s.open_group(task(), 1, now=0.0),
                lambda s=stranger: s.start_episode("g000000.0.0", now=0.0),
                lambda s=stranger: s.cancel_episode("g000000.0.0", CancelReason.SHUTDOWN, now=0.0),
                lambda s=stranger: s.retry_episode("g000000.0.0", now=0.0),
                lambda s=stranger: s.settle_group("g000000", now=0.0),
                lambda s=stranger: s.drop_group("g000000", DropReason.STALE, now=0.0),
                lambda s=stranger: s.recover_rollout(now=0.0),
            ):
                with pytest.raises(IllegalTransition):
                    call()
        ready_group(rollout)
        for stranger in (rollout, supervisor):
            for call in (
                lambda s=stranger: s.admit(0, ["g000001"], version=0, now=0.0),
                lambda s=stranger: s.commit_step(checkpoint(0), now=0.0),
                lambda s=stranger: s.publish_version(0, 0, "full", 1, now=0.0),
            ):
                with pytest.raises(IllegalTransition):
                    call()


def test_retry_adds_the_next_attempt_to_the_same_slot(rollout: Ledger) -> None:
    rollout.open_group(task(), 2, now=0.0)
    rollout.start_episode("g000000.1.0", now=0.0)
    rollout.fail_episode("g000000.1.0", Boundary.SANDBOX, "it broke", now=1.0)
    retry = rollout.retry_episode("g000000.1.0", now=2.0)
    assert (retry.episode_id, retry.slot, retry.attempt, retry.state) == ("g000000.1.1", 1, 1, EpisodeState.QUEUED)
    with pytest.raises(IllegalTransition, match=r"latest attempt is g000000\.1\.1 \(queued\)"):
        rollout.retry_episode("g000000.1.0", now=3.0)
    rollout.cancel_episode("g000000.1.1", CancelReason.DEADLINE, now=3.0)
    with pytest.raises(IllegalTransition, match="latest attempt"):
        rollout.retry_episode("g000000.1.0", now=3.0)
    assert rollout.retry_episode("g000000.1.1", now=4.0).episode_id == "g000000.1.2"
    failed = rollout.episode("g000000.1.0")
    assert (failed.boundary, failed.message) == (Boundary.SANDBOX, "it broke")


@pytest.mark.parametrize(
    ("graded", "size", "state"),
    [(2, 4, GroupState.DROPPED), (3, 4, GroupState.READY), (1, 1, GroupState.READY), (0, 1, GroupState.DROPPED)],
)
def test_group_is_kept_when_more_than_half_is_valid(rollout: Ledger, graded: int, size: int, state: GroupState) -> None:
    rollout.open_group(task(), size, now=0.0)
    for slot in range(size):
        rollout.start_episode(f"g000000.{slot}.0", now=0.0)
        if slot < graded:
            finish(rollout, f"g000000.{slot}.0")
        else:
            rollout.fail_episode(f"g000000.{slot}.0", Boundary.GRADER, "x", now=0.0)
    assert rollout.settle_group("g000000", now=0.0) is state
    assert rollout.group("g000000").drop_reason == (DropReason.TOO_FEW_VALID if state is GroupState.DROPPED else None)


def test_settling_waits_for_every_slot(rollout: Ledger) -> None:
    rollout.open_group(task(), 3, now=0.0)
    for slot in (0, 1):
        rollout.start_episode(f"g000000.{slot}.0", now=0.0)
        finish(rollout, f"g000000.{slot}.0")
    with pytest.raises(IllegalTransition, match=r"g000000\.2\.0 is still queued"):
        rollout.settle_group("g000000", now=0.0)


def test_dropping_a_group_cancels_what_still_runs_in_it(rollout: Ledger) -> None:
    for reason, cancelled in ((DropReason.STALE, CancelReason.STALE), (DropReason.CORRUPT_BLOB, CancelReason.GROUP_DROPPED)):
        group = rollout.open_group(task(), 3, now=0.0)
        rollout.start_episode(f"{group.group_id}.0.0", now=0.0)
        finish(rollout, f"{group.group_id}.0.0")
        rollout.start_episode(f"{group.group_id}.1.0", now=0.0)
        rollout.drop_group(group.group_id, reason, now=1.0)
        done, running, queued = rollout.episodes_of(group.group_id)
        assert done.state is EpisodeState.GRADED
        assert running.cancel_reason is queued.cancel_reason is cancelled
        with pytest.raises(IllegalTransition, match="is dropped"):
            rollout.retry_episode(running.episode_id, now=2.0)
        with pytest.raises(IllegalTransition):
            finish(rollout, running.episode_id)


def test_recovery_queues_again_what_was_running_and_returns_open_groups(rollout: Ledger) -> None:
    rollout.open_group(task(), 2, now=0.0)
    ready_group(rollout)
    rollout.start_episode("g000000.0.0", now=0.0)
    assert [g.group_id for g in rollout.recover_rollout(now=5.0)] == ["g000000"]
    assert rollout.episode("g000000.0.0").cancel_reason is CancelReason.PROCESS_DIED
    assert [e.episode_id for e in rollout.queued_episodes(10)] == ["g000000.0.1", "g000000.1.0"]
    assert [g.group_id for g in rollout.recover_rollout(now=6.0)] == ["g000000"]
    assert rollout.progress().num_cancelled_by_reason[CancelReason.PROCESS_DIED] == 1


def test_finish_refuses_what_could_not_be_trained_on(rollout: Ledger) -> None:
    rollout.open_group(task(), 1, now=0.0)
    rollout.start_episode("g000000.0.0", now=0.0)
    with pytest.raises(ValueError, match="must be finite"):
        finish(rollout, "g000000.0.0", reward=float("nan"))
    with pytest.raises(ValueError, match="oldest comes first"):
        finish(rollout, "g000000.0.0", versions=(3, 2))
    with pytest.raises(ValueError, match="put the trace before"):
        rollout.finish_episode(
            "g000000.0.0", grade=Grade(reward=0.0, success=False), stop=StopReason.SUBMITTED, blob=BlobRef(digest="ab" * 32, num_bytes=1),
            versions=(0, 0), num_tokens=1, num_sampled=1, now=0.0,
        )  # fmt: skip
    with pytest.raises(ValueError, match="group_size is 0"):
        rollout.open_group(task(), 0, now=0.0)


def test_episode_without_sampled_tokens_does_not_age_its_group(rollout: Ledger, trainer: Ledger) -> None:
    ready_group(rollout, versions=(-1, -1))
    assert rollout.group("g000000").min_version is None
    trainer.admit(0, ["g000000"], version=9, now=0.0)
    assert trainer.group("g000000").staleness is None


def test_admission_is_all_or_nothing(rollout: Ledger, trainer: Ledger) -> None:
    ready_group(rollout)
    rollout.open_group(task(), 1, now=0.0)
    with pytest.raises(IllegalTransition, match="g000001 is open"):
        trainer.admit(0, ["g000000", "g000001"], version=0, now=0.0)
    with pytest.raises(IllegalTransition, match="g000000 is admitted"):
        trainer.admit(0, ["g000000", "g000000"], version=0, now=0.0)
    with pytest.raises(ValueError, match="no groups"):
        trainer.admit(0, [], version=0, now=0.0)
    assert trainer.group("g000000").state is GroupState.READY
    assert trainer.batch(0) == [] and trainer.progress().num_steps_cut == 0


def test_admission_refuses_tokens_from_the_future(rollout: Ledger, trainer: Ledger) -> None:
    ready_group(rollout, versions=(4, 4))
    with pytest.raises(ValueError, match="newer than version 3"):
        trainer.admit(0, ["g000000"], version=3, now=0.0)


def test_batches_follow_each_other_without_gaps(rollout: Ledger, trainer: Ledger) -> None:
    for number in range(3):
        ready_group(rollout, number)
    trainer.commit_step(checkpoint(4), now=0.0)
    with pytest.raises(IllegalTransition, match="next batch is 5"):
        trainer.admit(4, ["g000000"], version=0, now=0.0)
    trainer.admit(5, ["g000001"], version=0, now=0.0)
    for step in (5, 7):
        with pytest.raises(IllegalTransition, match="next batch is 6"):
            trainer.admit(step, ["g000002"], version=0, now=0.0)
    assert trainer.group("g000000").num_overtaken == 1
    assert trainer.group("g000002").num_overtaken == 0


def test_commit_consumes_every_batch_inside_the_checkpoint_and_no_other(rollout: Ledger, trainer: Ledger) -> None:
    for number in range(4):
        ready_group(rollout, number)
        trainer.admit(number, [f"g00000{number}"], version=0, now=0.0)
    assert trainer.head_checkpoint() is None
    trainer.commit_step(checkpoint(2), now=8.0)
    assert [trainer.group(f"g00000{n}").state for n in range(4)] == [GroupState.TRAINED] * 3 + [GroupState.ADMITTED]
    assert list(trainer.pending_batches()) == [3]
    head = trainer.head_checkpoint()
    assert head is not None and (head.step, head.version, head.committed_at) == (2, 3, 8.0)
    assert (trainer.progress().num_steps_cut, trainer.progress().num_steps_committed) == (4, 3)
    for step in (1, 2):
        with pytest.raises(IllegalTransition, match="step 2 is committed already"):
            trainer.commit_step(checkpoint(step), now=9.0)
    with pytest.raises(IllegalTransition, match="last batch cut is 3"):
        trainer.commit_step(checkpoint(4), now=9.0)


def test_checkpoints_and_versions_are_written_through_and_the_rest_is_not(rollout: Ledger, trainer: Ledger) -> None:
    ready_group(rollout)
    seen: list[str] = []
    trainer._conn.set_trace_callback(lambda sql: seen.append(sql) if "synchronous" in sql or sql == "COMMIT" else None)
    trainer.admit(0, ["g000000"], version=0, now=0.0)
    assert seen == ["COMMIT"]
    trainer.commit_step(checkpoint(0), now=0.0)
    trainer.publish_version(0, 0, "full", 1, now=0.0)
    trainer._conn.set_trace_callback(None)
    assert seen[1:] == ["PRAGMA synchronous = FULL", "COMMIT", "PRAGMA synchronous = NORMAL"] * 2


def test_admitted_group_with_a_corrupt_blob_leaves_its_batch_and_keeps_its_place(rollout: Ledger, trainer: Ledger) -> None:
    ready_group(rollout, 0)
    ready_group(rollout, 1)
    trainer.admit(0, ["g000000", "g000001"], version=0, now=0.0)
    with pytest.raises(IllegalTransition, match="only for a corrupt blob"):
        trainer.drop_group("g000000", DropReason.STALE, now=0.0)
    trainer.drop_group("g000000", DropReason.CORRUPT_BLOB, now=0.0)
    trainer.commit_step(checkpoint(0), now=0.0)
    progress = trainer.progress()
    assert (progress.num_trained, progress.num_dropped, progress.num_dropped_admitted, progress.num_opened_live) == (1, 1, 1, 2)


def test_ready_group_is_dropped_by_rollout_only_as_stale(rollout: Ledger) -> None:
    ready_group(rollout)
    with pytest.raises(IllegalTransition, match="only as stale"):
        rollout.drop_group("g000000", DropReason.CORRUPT_BLOB, now=0.0)
    rollout.drop_group("g000000", DropReason.STALE, now=0.0)


def test_version_numbers_only_grow(trainer: Ledger) -> None:
    assert trainer.progress().version == -1
    trainer.publish_version(0, 0, "full", 10, now=1.0)
    trainer.publish_version(3, 1, "delta", 2, now=2.0)
    for version in (-1, 0, 2, 3):
        with pytest.raises(IllegalTransition, match="above 3"):
            trainer.publish_version(version, 9, "full", 1, now=3.0)
    assert [(v.version, v.step, v.kind, v.num_bytes) for v in trainer.versions()] == [(0, 0, "full", 10), (3, 1, "delta", 2)]
    assert trainer.progress().version == 3


def test_progress_tells_what_dropping_did_to_the_rewards(rollout: Ledger, trainer: Ledger) -> None:
    ready_group(rollout, 0, reward=1.0)
    ready_group(rollout, 1, reward=0.25)
    ready_group(rollout, 2, reward=0.0)
    rollout.open_group(task(), 1, now=0.0)
    trainer.admit(0, ["g000000"], version=0, now=0.0)
    trainer.commit_step(checkpoint(0), now=0.0)
    trainer.drop_group("g000001", DropReason.STALE, now=0.0)
    progress = trainer.progress()
    assert (progress.num_opened, progress.num_open, progress.num_ready, progress.num_trained) == (4, 1, 1, 1)
    assert progress.num_dropped_by_reason == {DropReason.STALE: 1, DropReason.TOO_FEW_VALID: 0, DropReason.CORRUPT_BLOB: 0}
    assert (progress.trained_outcome.mean_reward, progress.trained_outcome.mean_success) == (1.0, 1.0)
    dropped = progress.dropped_outcome
    assert (dropped.num_graded, dropped.mean_reward, dropped.mean_success) == (1, 0.25, 0.0)
    assert progress.dropped_outcome_by_reason[DropReason.TOO_FEW_VALID].mean_reward == 0.0
    assert progress.num_episodes_by_state[EpisodeState.GRADED] == 3
    assert progress.num_episodes_by_state[EpisodeState.QUEUED] == 1


def test_evaluations_never_touch_groups_and_group_by_version(rollout: Ledger) -> None:
    for version, success in ((0, False), (0, True), (4, True)):
        rollout.add_eval("heldout", version, "t/1", success, 0.5 + success, None, now=float(version))
    rollout.add_eval("other", 0, "t/1", True, 1.0, rollout.blobs.put(b"trace"), now=0.0)
    first, second = rollout.eval_summary("heldout")
    assert (first.version, first.num_episodes, first.mean_success, first.mean_reward) == (0, 2, 0.5, 1.0)
    assert (second.version, second.num_success, second.last_at) == (4, 1, 4.0)
    assert rollout.eval_summary("nothing") == []
    assert rollout.num_evals_by_task("heldout", 0) == {"t/1": 2}
    assert rollout.progress().num_opened == 0
    assert len(rollout.referenced_blobs()) == 1
    with pytest.raises(ValueError, match="finite"):
        rollout.add_eval("heldout", 0, "t/1", True, float("inf"), None, now=0.0)


def test_data_version_changes_exactly_when_something_was_written(rollout: Ledger, trainer: Ledger) -> None:
    ours, theirs = rollout.data_version(), trainer.data_version()
    rollout.progress()
    assert (rollout.data_version(), trainer.data_version()) == (ours, theirs)
    rollout.open_group(task(), 1, now=0.0)
    assert rollout.data_version() != ours and trainer.data_version() != theirs


def test_history_cannot_be_rewritten(rollout: Ledger) -> None:
    rollout.open_group(task(), 1, now=0.0)
    for sql in ("UPDATE events SET kind = 'x'", "DELETE FROM events"):
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            rollout._conn.execute(sql)
    assert [e.event_id for e in rollout.events(after=1)] == []


def test_readers_cannot_write(rollout: Ledger, tmp_path: Path) -> None:
    with Ledger.open_reader(tmp_path) as reader, pytest.raises(sqlite3.OperationalError, match="readonly"):
        reader.add_eval("x", 0, "t", True, 1.0, None, now=0.0)


def test_unknown_ids_are_named(rollout: Ledger) -> None:
    for call in (rollout.group, rollout.episode, rollout.task_of):
        with pytest.raises(ValueError, match="'g9'"):
            call("g9")
    assert rollout.episodes_of("g9") == []
