"""Whatever is called in whatever order, the ledger stays sound and a refused call leaves no trace."""

from __future__ import annotations

import random
import tempfile
import threading
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from ledger_walk import RolloutWalk, TrainerWalk, checkpoint, finish, task

from rollmill.ledger import IllegalTransition, Ledger
from rollmill.records import Boundary, CancelReason, DropReason, Role

GROUPS = [f"g00000{n}" for n in range(4)]
EPISODES = [f"{g}.{slot}.{attempt}" for g in GROUPS for slot in range(2) for attempt in range(2)]
roles = st.sampled_from([Role.ROLLOUT] * 4 + [Role.TRAINER] * 4 + [Role.SUPERVISOR])
groups = st.sampled_from(GROUPS)
episodes = st.sampled_from(EPISODES)
small = st.integers(-1, 4)


class AnyCallInAnyOrder(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.ledgers = {role: Ledger.create_or_open(self.folder.name, role) for role in (Role.ROLLOUT, Role.TRAINER, Role.SUPERVISOR)}

    def attempt(self, call: object, *args: object, **kwargs: object) -> None:
        reader = self.ledgers[Role.SUPERVISOR]
        before = reader.data_version()
        try:
            call(*args, now=0.0, **kwargs)  # type: ignore[operator]
        except (IllegalTransition, ValueError):
            assert reader.data_version() == before

    @rule(role=roles)
    def open_group(self, role: Role) -> None:
        if self.ledgers[role].progress().num_opened < len(GROUPS):
            self.attempt(self.ledgers[role].open_group, task(), 2)

    @rule(role=roles, episode=episodes)
    def start(self, role: Role, episode: str) -> None:
        self.attempt(self.ledgers[role].start_episode, episode)

    @rule(number=st.integers(0, 10), versions=st.tuples(small, small))
    def play_a_queued_episode(self, number: int, versions: tuple[int, int]) -> None:
        ledger = self.ledgers[Role.ROLLOUT]
        if queued := ledger.queued_episodes(20):
            episode = queued[number % len(queued)].episode_id
            self.attempt(ledger.start_episode, episode)
            self.attempt(lambda now: finish(ledger, episode, versions=versions))

    @rule(role=roles, episode=episodes, versions=st.tuples(small, small))
    def finish(self, role: Role, episode: str, versions: tuple[int, int]) -> None:
        self.attempt(lambda now: finish(self.ledgers[role], episode, versions=versions))

    @rule(role=roles, episode=episodes, boundary=st.sampled_from(Boundary))
    def fail(self, role: Role, episode: str, boundary: Boundary) -> None:
        self.attempt(self.ledgers[role].fail_episode, episode, boundary, "broke")

    @rule(role=roles, episode=episodes, reason=st.sampled_from(CancelReason))
    def cancel(self, role: Role, episode: str, reason: CancelReason) -> None:
        self.attempt(self.ledgers[role].cancel_episode, episode, reason)

    @rule(role=roles, episode=episodes)
    def retry(self, role: Role, episode: str) -> None:
        self.attempt(self.ledgers[role].retry_episode, episode)

    @rule(role=roles, group=groups)
    def settle(self, role: Role, group: str) -> None:
        self.attempt(self.ledgers[role].settle_group, group)

    @rule(role=roles, group=groups, reason=st.sampled_from(DropReason))
    def drop(self, role: Role, group: str, reason: DropReason) -> None:
        self.attempt(self.ledgers[role].drop_group, group, reason)

    @rule(role=roles)
    def recover(self, role: Role) -> None:
        self.attempt(self.ledgers[role].recover_rollout)

    @rule(role=roles, step=small, chosen=st.lists(groups, max_size=3), version=small)
    def admit(self, role: Role, step: int, chosen: list[str], version: int) -> None:
        self.attempt(self.ledgers[role].admit, step, chosen, version=version)

    @rule(role=roles, step=small)
    def commit(self, role: Role, step: int) -> None:
        self.attempt(self.ledgers[role].commit_step, checkpoint(step))

    @rule(role=roles, version=small)
    def publish(self, role: Role, version: int) -> None:
        self.attempt(self.ledgers[role].publish_version, version, 0, "full", 1)

    @invariant()
    def ledger_is_sound(self) -> None:
        assert self.ledgers[Role.SUPERVISOR].audit() == []

    def teardown(self) -> None:
        for ledger in self.ledgers.values():
            ledger.close()
        self.folder.cleanup()


AnyCallInAnyOrder.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestAnyCallInAnyOrder = AnyCallInAnyOrder.TestCase


def test_a_long_lawful_run_trains_batches_and_stays_sound(tmp_path: Path) -> None:
    told: list[str] = []
    with Ledger.create_or_open(tmp_path, Role.ROLLOUT) as rollout, Ledger.create_or_open(tmp_path, Role.TRAINER) as trainer:
        walks = RolloutWalk(rollout, random.Random(3), told.append), TrainerWalk(trainer, random.Random(4), told.append)
        for _ in range(1500):
            moved = [walk.step() for walk in walks]
            assert any(moved), "both roles wait for each other"
        assert trainer.audit() == []
        assert trainer.progress().num_steps_cut > 20
        for step in range(trainer.progress().num_steps_cut):
            assert all(g.age is not None and g.age <= 2 and (g.staleness or 0) <= 3 for g in trainer.batch(step))


def test_threads_may_share_a_handle(tmp_path: Path) -> None:
    with Ledger.create_or_open(tmp_path, Role.ROLLOUT) as ledger:

        def open_some() -> None:
            for number in range(20):
                ledger.open_group(task(number), 1, now=0.0)
                ledger.progress()

        threads = [threading.Thread(target=open_some) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert ledger.progress().num_opened == 80
        assert ledger.audit() == []
