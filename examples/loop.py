"""The whole of asynchronous RL in one file and one process, top to bottom, made of the parts that `rollmill train` uses.

Three workers share one run directory and never wait for each other longer than they must:

    engine    samples tokens; takes new weights between two decode steps, while episodes are running
    rollouts  keep episodes running in sandboxes and write every finished one into the ledger
    trainer   cuts batches from the ledger, learns, publishes the new weights and commits what it consumed

    python examples/loop.py --steps 8

Kill it at any moment, also with -9, and start it again with the same --run-dir: it goes on where the ledger says it stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import torch

from rollmill.algorithms import DppoTv
from rollmill.chat.format import ChatFormat
from rollmill.engine.run import run_engine
from rollmill.gateway import Gateway, Replicas
from rollmill.harness import BoxTools, Limits, run_agent
from rollmill.ledger import CheckpointRow, EpisodeRow, GroupRow, Ledger, Pacing, cut, may_open
from rollmill.model import Tokenizer, load_model
from rollmill.records import CancelReason, DropReason, EpisodeState, Grade, GroupState, Role, RunFailure, Task, Trace, encode
from rollmill.sandbox import SandboxBackend, SandboxSpec, open_backend
from rollmill.tasks import Attempt, TaskSource, agent_of, open_family
from rollmill.telemetry import Waits
from rollmill.trainer.batch import GradedEpisode, make_batch
from rollmill.trainer.checkpoint import load_checkpoint, prune_checkpoints, save_checkpoint
from rollmill.trainer.learn import Learner
from rollmill.trainer.optimizer import MasterAdamW
from rollmill.weights import Published, Publisher, open_store

MODEL = Path(__file__).resolve().parents[1] / "models" / "demo"
SEED, TEMPERATURE = 0, 1.0
GROUP_SIZE, GROUPS_PER_BATCH = 8, 4
MAX_STALENESS = 4
MAX_RUNNING, MAX_RETRIES = 32, 3
EPISODE_S, BATCH_S, TICK_S = 120.0, 300.0, 0.05
LIMITS = Limits(max_turns=8, max_tokens_per_turn=128, max_context=512, tool_s=10.0)

# How far rollouts may run ahead of the trainer follows from how stale a token may be when it is trained.
PACING = Pacing.from_staleness(MAX_STALENESS, GROUPS_PER_BATCH, "async")


# --- rollouts: from tasks to graded episodes in the ledger -------------------------------------------------------------------


class Rollouts:
    """Keeps up to MAX_RUNNING episodes running. Each of them ends in the ledger exactly once."""

    def __init__(self, run_dir: Path, num_steps: int, urls: list[str]) -> None:
        self.num_steps = num_steps
        self.family = open_family("repo")
        self.source = TaskSource(self.family, split="train", seed=SEED)
        self.gateway = Gateway(ChatFormat(Tokenizer(MODEL)), Replicas(lambda: urls, Waits()))
        self.boxes: SandboxBackend = open_backend()
        # A handle per role: the role decides what the handle may change. The calls take about a millisecond, so the event loop makes them.
        self.ledger = Ledger.create_or_open(run_dir, Role.ROLLOUT)
        self.queue: deque[EpisodeRow] = deque()
        self.running: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        try:
            self.recover()
            while (progress := self.ledger.progress()).num_steps_committed < self.num_steps:
                # The pacing gate: the trainer's progress, not our own speed, decides how many groups may exist.
                room = may_open(progress.num_opened_live, progress.num_steps_cut, PACING)
                room = min(room, self.num_steps * GROUPS_PER_BATCH - progress.num_opened_live)
                for index in range(progress.num_opened, progress.num_opened + room):
                    if len(self.queue) + len(self.running) >= MAX_RUNNING:
                        break
                    group = self.ledger.open_group(self.source.task(index), GROUP_SIZE, time.time())
                    self.queue.extend(self.ledger.episodes_of(group.group_id))
                while self.queue and len(self.running) < MAX_RUNNING:
                    self.running.add(asyncio.create_task(self.attempt(self.queue.popleft())))
                if not self.running:
                    await asyncio.sleep(TICK_S)
                    continue
                # One finished episode frees one slot at once; nobody waits for the slowest of a group or a batch.
                done, self.running = await asyncio.wait(self.running, timeout=TICK_S, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            for task in self.running:
                task.cancel()
            await asyncio.gather(*self.running, return_exceptions=True)
            await self.gateway.close()
            await self.boxes.close()
            self.ledger.close()

    def recover(self) -> None:
        """Episodes that ran when an earlier process died are recorded as cancelled and queued again."""
        for group in self.ledger.recover_rollout(time.time()):
            self.queue.extend(e for e in self.ledger.episodes_of(group.group_id) if e.state is EpisodeState.QUEUED)
            self.settle(group.group_id)

    async def attempt(self, row: EpisodeRow) -> None:
        """One attempt of one slot of a group. What breaks outside the agent is tried again and never becomes a reward."""
        self.ledger.start_episode(row.episode_id, time.time())
        try:
            async with asyncio.timeout(EPISODE_S):
                grade, trace = await self.play(self.ledger.task_of(row.group_id), row.episode_id)
        except RunFailure as failure:
            self.ledger.fail_episode(row.episode_id, failure.boundary, failure.message, time.time())
            self.retry(row)
        except TimeoutError:
            self.ledger.cancel_episode(row.episode_id, CancelReason.DEADLINE, time.time())
            self.retry(row)
        else:
            self.ledger.finish_episode(
                row.episode_id,
                grade=grade,
                stop=trace.stop,
                # The trace is on the disk before the ledger refers to it.
                blob=self.ledger.blobs.put(encode(trace)),
                versions=trace.version_range(),
                num_tokens=sum(window.num_tokens for window in trace.windows),
                num_sampled=trace.num_sampled,
                now=time.time(),
            )
        self.settle(row.group_id)

    async def play(self, task: Task, episode_id: str) -> tuple[Grade, Trace]:
        """An episode: a box with the task's files, an agent with tools in it, and a grader that the agent cannot reach."""
        deadline = time.monotonic() + EPISODE_S
        session = self.gateway.open_session(episode_id, seed=SEED, temperature=TEMPERATURE)
        box = await self.boxes.create(SandboxSpec(files=task.files, lifetime_s=EPISODE_S + 60.0))
        try:
            spec, tools = agent_of(self.family, task), BoxTools(box, task.tools, tool_s=LIMITS.tool_s)
            played = await run_agent(task, session, LIMITS, spec=spec, tools=tools, deadline=deadline, rng=random.Random(episode_id))
            files = {path: (await box.read(path)).decode("utf-8", "replace") for path in await box.list()}
        except OSError:
            # A world that the agent made unreadable is its own doing: it is graded, as an empty one.
            files = {}
        finally:
            await box.close()
        grade = await self.family.grade(task, Attempt(files=files, stop=played.stop, probe=self.probe))
        # The session has kept every token as it was sampled, with its logprob and the version that the replica stamped on it.
        return grade, Trace(episode_id=episode_id, windows=session.windows(), messages=tuple(session.messages), stop=played.stop)

    async def probe(self, files: Mapping[str, str], argv: Sequence[str]) -> str:
        """How a grader runs the agent's code: in a fresh box that holds inputs only; the answer stays on this side."""
        box = await self.boxes.create(SandboxSpec(files=dict(files), lifetime_s=40.0))
        try:
            result = await box.exec(argv, timeout_s=10.0)
        finally:
            await box.close()
        return "" if result.timed_out or result.exit_code else result.stdout.decode("utf-8", "replace")

    def retry(self, row: EpisodeRow) -> None:
        if row.attempt < MAX_RETRIES:
            self.queue.append(self.ledger.retry_episode(row.episode_id, time.time()))

    def settle(self, group_id: str) -> None:
        """When the last slot has ended: READY if more than half of the group is graded, otherwise DROPPED with that reason."""
        if not any(episode.is_live for episode in self.ledger.episodes_of(group_id)):
            self.ledger.settle_group(group_id, time.time())


# --- trainer: from ready groups to new weights ---------------------------------------------------------------------------------


class Trainer:
    """Runs in a thread of its own and meets the other workers only in the ledger and in the weight store."""

    def __init__(self, run_dir: Path, num_steps: int, stop: threading.Event) -> None:
        self.run_dir, self.num_steps, self.stop, self.store = run_dir, num_steps, stop, open_store(run_dir / "weights")
        model, _ = load_model(MODEL)
        self.optimizer = MasterAdamW(model, lr=6e-4, warmup_steps=5)
        self.learner = Learner(model, self.optimizer, DppoTv(), temperature=TEMPERATURE, length_norm=64.0, tokens_per_microbatch=8192)
        self.ledger = Ledger.create_or_open(run_dir, Role.TRAINER)
        self.version = -1
        self.newest: Published | None = None

    def run(self) -> None:
        started = time.monotonic()
        with self.ledger, Publisher(self.store, run_id=self.run_dir.name, on_published=self.record) as publisher:
            head, first = self.ledger.head_checkpoint(), 0
            if head is not None:
                load_checkpoint(self.run_dir, head.path, head.digest, self.optimizer)
                first = head.step + 1
                print(f"{self.run_dir} holds {first} trained steps; going on from there", flush=True)
            self.version = publisher.resume(self.learner.model.serving_tensors(), step=first)
            if self.version not in {row.version for row in self.ledger.versions()}:
                # Published, but the process died before the ledger heard of it.
                self.ledger.publish_version(self.version, first, "full", 0, time.time())
            for step in range(first, self.num_steps):
                asked = time.monotonic()
                # A batch that was cut before a crash and is in no checkpoint is learnt from again, the same groups of it.
                rows = self.ledger.batch(step) or self.next_batch(step)
                if not rows:
                    return
                waited_s = time.monotonic() - asked
                batch = make_batch([self.attempts(row) for row in rows])
                _, is_changed = self.learner.step(batch, version=self.version)
                if is_changed:
                    # Returns at once: the delta is encoded and written while the next batch is learnt.
                    self.version = publisher.submit(self.learner.model.serving_tensors(), step=step)
                path, digest = save_checkpoint(self.run_dir, step=step, optimizer=self.optimizer)
                # One transaction: the checkpoint counts and its groups are TRAINED, or neither.
                row = CheckpointRow(step=step, version=self.version, path=path, digest=digest, wall_s=time.monotonic() - started)
                self.ledger.commit_step(row, time.time())
                prune_checkpoints(self.run_dir, step)
                self.report(step, rows, batch.rewards, waited_s, time.monotonic() - asked - waited_s)

    def record(self, done: Published) -> None:
        """Called by the publishing thread, once replicas may take the version."""
        self.newest = done
        self.ledger.publish_version(done.version, done.step, str(done.kind), done.num_bytes, time.time())

    def next_batch(self, step: int) -> list[GroupRow]:
        """Wait until a batch can be cut; empty when the run is being stopped."""
        deadline = time.monotonic() + BATCH_S
        while not self.stop.wait(0.01):
            found = cut(self.ledger.window(PACING.window), version=self.version, max_staleness=MAX_STALENESS, pacing=PACING)
            for row in found.stale:
                if row.state is GroupState.READY:
                    # Too old to be trained: dropped and counted, never trained with a warning.
                    self.ledger.drop_group(row.group_id, DropReason.STALE, time.time())
            if found.admit:
                self.ledger.admit(step, [row.group_id for row in found.admit], version=self.version, now=time.time())
                return self.ledger.batch(step)
            if time.monotonic() > deadline:
                raise TimeoutError(f"no batch within {BATCH_S:.0f} s: {found.waiting} groups are missing, the rollouts must provide them")
        return []

    def attempts(self, row: GroupRow) -> list[GradedEpisode]:
        """The graded episodes of a group. A trace is read only if the group's rewards differ: otherwise it teaches nothing."""
        found = []
        for episode in self.ledger.episodes_of(row.group_id):
            if episode.grade is not None and (blob := episode.blob) is not None:
                load = lambda blob=blob: msgspec.msgpack.decode(self.ledger.blobs.get(blob), type=Trace)  # noqa: E731
                found.append(GradedEpisode(episode_id=episode.episode_id, reward=episode.grade.reward, load=load))
        return found

    def report(self, step: int, rows: list[GroupRow], rewards: list[float], waited_s: float, worked_s: float) -> None:
        ages = [row.staleness for row in rows if row.staleness is not None] or [0]
        spans = [e.versions for row in rows for e in self.ledger.episodes_of(row.group_id) if e.versions is not None]
        last = self.newest
        print(
            f"step {step + 1}/{self.num_steps}  reward {sum(rewards) / max(1, len(rewards)):.2f}  "
            f"staleness {sum(ages) / len(ages):.1f} (max {max(ages)})  "
            f"{sum(old != new for old, new in spans)} of {len(spans)} episodes saw a weight swap  "
            f"trainer waited {waited_s:.1f} s, worked {worked_s:.1f} s  version {self.version}"
            + (f", last shipped {(last.delta_bytes or last.num_bytes) / 1e6:.2f} of {last.full_bytes / 1e6:.2f} MB" if last else ""),
            flush=True,
        )


# --- all three together ----------------------------------------------------------------------------------------------------------


async def loop(run_dir: Path, num_steps: int) -> None:
    stop, urls = threading.Event(), list[str]()
    trainer, rollouts = Trainer(run_dir, num_steps, stop), Rollouts(run_dir, num_steps, urls)
    try:
        async with asyncio.TaskGroup() as group:
            # Its compute thread swaps weights between two decode steps, and serves a version only after proving that it runs those bits.
            ready = lambda port: urls.append(f"http://127.0.0.1:{port}")  # noqa: E731
            engine = group.create_task(run_engine(MODEL, store=trainer.store, num_threads=1, num_slots=MAX_RUNNING, on_ready=ready))
            training = group.create_task(asyncio.to_thread(trainer.run))
            await rollouts.run()
            await training
            engine.cancel()
    finally:
        stop.set()


def main() -> None:
    parser = argparse.ArgumentParser(description="Asynchronous RL in one process.")
    parser.add_argument("--steps", type=int, default=8, help="optimiser steps to take in all")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/loop"), help="where everything of the run is kept")
    arguments = parser.parse_args()
    # Engine and trainer each get a core; more threads per operation would only make them fight.
    torch.set_num_threads(1)
    try:
        asyncio.run(loop(arguments.run_dir, arguments.steps))
    except KeyboardInterrupt:
        raise SystemExit("stopped; the same command goes on from here") from None
    with Ledger.open_reader(arguments.run_dir) as ledger:
        problems, progress = ledger.audit(), ledger.progress()
    assert not problems, "\n".join(problems)
    print(f"clean: {progress.num_trained} groups trained exactly once, {progress.num_dropped} dropped with a reason")


if __name__ == "__main__":
    main()
