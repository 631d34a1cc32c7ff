"""A small run played against a real ledger: both roles' work, with a fake trainer whose weights are the list of groups it trained."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

from blake3 import blake3

from rollmill.ledger import BlobStore, CheckpointRow, GroupRow, IllegalTransition, Ledger, Pacing, cut, may_open
from rollmill.records import Boundary, CancelReason, DropReason, EpisodeState, Grade, GroupState, Role, StopReason, Task

PACING = Pacing.from_staleness(3, 2, "async")
MAX_STALENESS = 3
GROUP_SIZE = 3


def task(number: int = 0) -> Task:
    return Task(
        task_id=f"toy/add/1/{number}",
        family="toy",
        kind="add",
        level=1,
        seed=number,
        split="train",
        instruction="add",
        files={"a.py": "x = 1\n"},
    )


def finish(ledger: Ledger, episode_id: str, *, reward: float = 1.0, versions: tuple[int, int] = (0, 0), now: float = 0.0) -> None:
    blob = BlobStore(ledger.blobs.root, fsync=False).put(f"trace of {episode_id}".encode() * 3)
    ledger.finish_episode(
        episode_id,
        grade=Grade(reward=reward, success=reward > 0.5),
        stop=StopReason.SUBMITTED,
        blob=blob,
        versions=versions,
        num_tokens=10,
        num_sampled=4,
        now=now,
    )


def ready_group(ledger: Ledger, number: int = 0, *, reward: float = 1.0, versions: tuple[int, int] = (0, 0)) -> GroupRow:
    """A group of one whose episode is graded."""
    group = ledger.open_group(task(number), 1, now=0.0)
    ledger.start_episode(f"{group.group_id}.0.0", now=0.0)
    finish(ledger, f"{group.group_id}.0.0", reward=reward, versions=versions)
    assert ledger.settle_group(group.group_id, now=0.0) is GroupState.READY
    return ledger.group(group.group_id)


def checkpoint(step: int, version: int | None = None) -> CheckpointRow:
    return CheckpointRow(step=step, version=step + 1 if version is None else version, path=f"checkpoints/{step}", digest="00", wall_s=1.0)


class RolloutWalk:
    """Random but lawful work of the rollout role; `tell` is called after each commit that promised something."""

    def __init__(self, ledger: Ledger, rng: random.Random, tell: Callable[[str], None]) -> None:
        self.ledger, self.rng, self.tell, self.now = ledger, rng, tell, 0.0
        ledger.recover_rollout(self.now)

    def step(self) -> bool:
        """Do one thing; False when there is nothing to do until the trainer moves."""
        ledger, rng = self.ledger, self.rng
        progress = ledger.progress()
        acts: list[Callable[[], None]] = []
        if may_open(progress.num_opened_live, progress.num_steps_cut, PACING) and progress.num_open < 6:
            acts.append(lambda: self.tell(f"open {ledger.open_group(task(progress.num_opened), GROUP_SIZE, self.now).group_id}"))
        for group in ledger.open_groups():
            episodes = ledger.episodes_of(group.group_id)
            last_by_slot = {e.slot: e for e in episodes}
            if not any(e.is_live for e in episodes):
                ended_badly = [e for e in last_by_slot.values() if e.state is not EpisodeState.GRADED and e.attempt < 2]
                if ended_badly and rng.random() < 0.7:
                    acts.append(lambda e=rng.choice(ended_badly): ledger.retry_episode(e.episode_id, self.now))
                else:
                    acts.append(lambda g=group: self.tell(f"{ledger.settle_group(g.group_id, self.now)} {g.group_id}"))
            acts.extend(lambda e=e: self._advance(e.episode_id, e.state, max(0, progress.version)) for e in episodes if e.is_live)
        # The trainer is free to move a window row between the look and the drop, so only open groups are ours to sweep.
        for group in cut(ledger.window(PACING.window), version=progress.version, max_staleness=MAX_STALENESS, pacing=PACING).stale:
            if group.state is GroupState.OPEN:
                acts.append(lambda g=group: ledger.drop_group(g.group_id, DropReason.STALE, self.now))
        if not acts:
            return False
        rng.choice(acts)()
        return True

    def _advance(self, episode_id: str, state: EpisodeState, version: int) -> None:
        if state is EpisodeState.QUEUED:
            if self.rng.random() < 0.05:
                self.ledger.cancel_episode(episode_id, CancelReason.OVERLOAD, self.now)
            else:
                self.ledger.start_episode(episode_id, self.now)
        elif self.rng.random() < 0.1:
            self.ledger.fail_episode(episode_id, self.rng.choice(list(Boundary)), "the fake broke", self.now)
            self.tell(f"failed {episode_id}")
        else:
            finish(self.ledger, episode_id, reward=float(self.rng.randint(0, 1)), versions=(version, version), now=self.now)
            self.tell(f"graded {episode_id}")


class TrainerWalk:
    """The trainer role, with weights that are the ordered list of trained group ids: training twice or never would show."""

    def __init__(self, ledger: Ledger, rng: random.Random, tell: Callable[[str], None]) -> None:
        self.ledger, self.rng, self.tell, self.now = ledger, rng, tell, 0.0
        head = ledger.head_checkpoint()
        self.weights: list[str] = [] if head is None else self._load(head)
        self.next_step = 0 if head is None else head.step + 1
        self.version = ledger.progress().version
        if self.version < 0:
            self._publish()
        for step, groups in ledger.pending_batches().items():
            self._train(step, groups)

    def step(self) -> bool:
        ledger = self.ledger
        chosen = cut(ledger.window(PACING.window), version=self.version, max_staleness=MAX_STALENESS, pacing=PACING)
        for group in chosen.stale:
            if group.state is GroupState.READY:
                ledger.drop_group(group.group_id, DropReason.STALE, self.now)
        if not chosen.admit:
            return False
        step = self.next_step
        try:
            ledger.admit(step, [g.group_id for g in chosen.admit], version=self.version, now=self.now)
        except IllegalTransition:
            return False  # rollout swept one of them meanwhile; the next look sees that
        self._train(step, ledger.batch(step))
        return True

    def _train(self, step: int, groups: list[GroupRow]) -> None:
        assert step == self.next_step
        self.weights += [g.group_id for g in groups]
        self.next_step += 1
        self._publish()
        if self.rng.random() < 0.5:
            self.ledger.commit_step(self._save(step), self.now, {g.group_id: {"loss": 0.5} for g in groups})
            self.tell(f"committed {step}")

    def _publish(self) -> None:
        self.version += 1
        self.ledger.publish_version(self.version, self.next_step, "full", 100, self.now)

    def _save(self, step: int) -> CheckpointRow:
        data = json.dumps(self.weights).encode()
        digest = blake3(data).hexdigest()
        path = self.ledger.run_dir / f"weights-{step}-{digest[:8]}.json"
        path.with_suffix(".tmp").write_bytes(data)
        os.replace(path.with_suffix(".tmp"), path)
        return CheckpointRow(step=step, version=self.version, path=path.name, digest=digest, wall_s=1.0)

    def _load(self, head: CheckpointRow) -> list[str]:
        data = (self.ledger.run_dir / head.path).read_bytes()
        assert blake3(data).hexdigest() == head.digest
        return list(json.loads(data))


def walk(run_dir: Path, role: Role, seed: int, num_steps: int) -> None:
    """Do `num_steps` things as `role`, telling each promise on stdout; wait for the other role when there is nothing to do."""

    def tell(line: str) -> None:
        os.write(1, (line + "\n").encode())

    with Ledger.create_or_open(run_dir, role) as ledger:
        walker = (RolloutWalk if role is Role.ROLLOUT else TrainerWalk)(ledger, random.Random(seed), tell)
        deadline = time.monotonic() + 60.0
        while num_steps > 0:
            seen = ledger.data_version()
            if walker.step():
                num_steps -= 1
                continue
            while ledger.data_version() == seen:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{role} waited for the other role for 60 s")
                time.sleep(0.002)


if __name__ == "__main__":
    walk(Path(sys.argv[1]), Role(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
