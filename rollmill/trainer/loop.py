"""The trainer role: takes groups as they become ready, learns, publishes every new version and commits what it consumed.

Exactly once: a group is ADMITTED with its batch before it is learnt from, and TRAINED in the same transaction that makes
the checkpoint holding its gradient the head. After a crash the admitted batches since the head are replayed as they were.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import torch

from rollmill.algorithms import advantage_options, corrections_of, effort_options, loss_options
from rollmill.config import RunConfig
from rollmill.ledger import CheckpointRow, CorruptBlob, GroupRow, IllegalTransition, Ledger, cut
from rollmill.model import Model, compute_dtype, load_model
from rollmill.model.route_record import RouteRecord
from rollmill.model.routes import route_shape
from rollmill.records import BlobRef, DropReason, EpisodeState, GroupState, Trace, Window
from rollmill.telemetry import Metrics, Waits
from rollmill.trainer.advantages import Estimator
from rollmill.trainer.alarms import AlarmBoard
from rollmill.trainer.batch import GradedEpisode, StepBatch, held, make_batch, table_of
from rollmill.trainer.checkpoint import load_checkpoint, prune_checkpoints, save_checkpoint
from rollmill.trainer.learn import Learner
from rollmill.trainer.optimizer import MasterAdamW
from rollmill.trainer.staleness import Bound
from rollmill.weights import Published, Publisher, open_store

log = logging.getLogger("rollmill.trainer")
POLL_S = 0.01


class TrainerLoop:
    """One trainer process. `should_stop` is asked between steps."""

    def __init__(self, config: RunConfig, ledger: Ledger, metrics: Metrics, waits: Waits, should_stop: Callable[[], bool]) -> None:
        self._config, self._ledger, self._metrics, self._waits, self._should_stop = config, ledger, metrics, waits, should_stop
        t = config.trainer
        torch.set_num_threads(t.num_threads)
        model, _ = load_model(config.model.path, device=t.device, compute_dtype=compute_dtype(t.device), numerics=config.model.numerics)
        self._optimizer = MasterAdamW(model, lr=t.lr, warmup_steps=t.warmup_steps, clip_norm=t.clip_norm, eps=t.adam_eps)
        model.recompute_layers = t.recompute_layers
        self._model = model
        loss = loss_options(t.loss, t.loss_options)
        self._learner = Learner(
            model,
            self._optimizer,
            loss,
            temperature=config.rollout.temperature,
            length_norm=t.length_norm,
            tokens_per_microbatch=t.tokens_per_microbatch,
            router_replay=t.router_replay,
            corrections=corrections_of(t.corrections, t.correction_options, loss),
            aggregation=None if t.aggregation == "loss" else t.aggregation,
            minibatches=t.minibatches,
            kl_ref=t.kl_ref,
            reference=_frozen(config) if t.kl_ref else None,
        )
        self._estimator = Estimator(advantage_options(t.advantage, t.advantage_options))
        self._effort = effort_options(t.effort)
        is_exact = (
            model.ops.is_exact
            and config.engine.numerics in ("", config.model.numerics)
            and torch.device(t.device).type == torch.device(config.engine.device).type
        )
        self._alarms = AlarmBoard(is_exact=is_exact)
        self._route_shape = route_shape(model.config) if model.config.moe else None
        self._bound = Bound(config, ledger)
        # In sync mode a committed step is what tells rollouts that the barrier is open.
        self._checkpoint_every = 1 if config.run.mode == "sync" else t.checkpoint_every
        self._publisher = Publisher(
            open_store(config.weight_store),
            run_id=ledger.run_dir.name,
            on_published=self._record_version,
        )
        self.step = 0
        self.version = -1
        self._wall_s = 0.0

    def run(self) -> None:
        """Train until the last step, then leave a finished store and a committed ledger."""
        self._recover()
        started = time.monotonic()
        base_wall_s = self._wall_s
        try:
            while self.step < self._config.run.steps and not self._should_stop():
                waited = time.monotonic()
                if rows := self._ledger.batch(self.step):
                    # Cut before a crash. A group dropped since keeps its place in the batch but teaches nothing, and a batch
                    # of which nothing is left must still be committed, because its step cannot be cut again.
                    rows = [row for row in rows if row.state == GroupState.ADMITTED]
                    log.info("replaying batch %d of %d groups admitted before a crash", self.step, len(rows))
                elif not (rows := self._next_batch()):
                    break
                waited_s = time.monotonic() - waited
                self._wall_s = base_wall_s + time.monotonic() - started
                self._train(rows, waited_s)
            self._publisher.flush()
        finally:
            self._publisher.close()

    def _recover(self) -> None:
        head = self._ledger.head_checkpoint()
        if head is not None:
            load_checkpoint(self._ledger.run_dir, head.path, head.digest, self._optimizer)
            self.step, self._wall_s = head.step + 1, head.wall_s
            prune_checkpoints(self._ledger.run_dir, head.step)
            if self._estimator.remembers:
                for step in range(self.step):
                    # What it remembers follows from the grades of the batches so far, and those are in the ledger.
                    rows = [row for row in self._ledger.batch(step) if row.state == GroupState.TRAINED]
                    self._estimator.watch(table_of([self._graded(row) for row in rows]))
        self.version = self._publisher.resume(self._model.serving_tensors(), step=self.step)
        if self.version not in {row.version for row in self._ledger.versions()}:
            # Published, but the process died before the ledger heard of it.
            self._ledger.publish_version(self.version, self.step, "full", 0, time.time())
        log.info("starting at step %d with weight version %d", self.step, self.version)

    def _record_version(self, done: Published) -> None:
        num_bytes = done.num_bytes if done.delta_bytes is None else done.delta_bytes
        self._ledger.publish_version(done.version, done.step, str(done.kind), num_bytes, time.time())
        self._metrics.write(
            {
                "weights/version": done.version,
                "weights/bytes": num_bytes,
                "weights/is_full": float(done.delta_bytes is None),
                "weights/full_bytes": done.full_bytes,
                "timing_s/encode": done.encode_s,
                "timing_s/write": done.write_s,
            },
            step=done.step,
        )

    def _next_batch(self) -> list[GroupRow]:
        """Wait until a batch can be cut; empty when asked to stop."""
        seen = -1
        with self._waits.of("batch", owner="rollout", deadline_s=self._config.trainer.batch_s) as check:
            while not self._should_stop():
                now_seen = self._ledger.data_version()
                if now_seen != seen:
                    seen = now_seen
                    if rows := self._try_cut():
                        return rows
                check()
                time.sleep(POLL_S)
        return []

    def _try_cut(self) -> list[GroupRow]:
        pacing = self._bound.pacing
        window = self._ledger.window(pacing.window)
        found = cut(window, version=self.version, max_staleness=self._config.max_staleness, pacing=pacing)
        try:
            for row in found.stale:
                if row.state == GroupState.READY:
                    self._ledger.drop_group(row.group_id, DropReason.STALE, time.time())
            if found.admit:
                self._ledger.admit(self.step, [row.group_id for row in found.admit], version=self.version, now=time.time())
                return self._ledger.batch(self.step)
        except IllegalTransition as race:
            # Rollout dropped one of these groups between our look and our move: look again.
            log.info("batch %d: %s", self.step, race)
        return []

    def _train(self, rows: Sequence[GroupRow], waited_s: float) -> None:
        started = time.monotonic()
        groups = [self._attempts(row) for row in rows]
        batch = make_batch([g for g in groups if g], self._estimator, self._effort)
        loaded_s = time.monotonic() - started
        scale = lr_scale(batch, step=self.step, num_steps=self._config.run.steps, final_frac=self._config.trainer.lr_final_frac)
        metrics, is_changed = self._learner.step(batch, version=self.version, lr_scale=scale)
        learnt_s = time.monotonic() - started - loaded_s
        for crossing in self._alarms.look(metrics):
            log.log(logging.ERROR if crossing.alarm.is_severe else logging.WARNING, "step %d: %s", self.step, crossing)
        used_version, blocked_s = self.version, self._publisher.stats().blocked_s
        is_last = self.step + 1 == self._config.run.steps
        if is_changed:
            self.version = self._publisher.submit(self._model.serving_tensors(), step=self.step + 1)
        if self._config.run.mode == "sync" or is_last:
            # Whoever sees these commits acts on the version they made: the barrier, and the evaluation after the last step.
            with self._waits.of("publish", owner="weight store", deadline_s=600.0):
                self._publisher.flush()
        published_s = time.monotonic() - started - loaded_s - learnt_s
        if (self.step + 1) % self._checkpoint_every == 0 or is_last:
            self._commit()
        total_s = time.monotonic() - started
        staleness = [row.staleness for row in rows if row.staleness is not None]
        ages = [row.age for row in rows if row.age is not None]
        told = (
            metrics
            | batch.stats
            | {
                "reward/mean": float(np.mean(batch.rewards)) if batch.rewards else 0.0,
                "reward/std": float(np.std(batch.rewards)) if batch.rewards else 0.0,
                "frac_reward_zero_std": batch.num_groups_without_signal / max(1, batch.num_groups),
                "staleness/mean": float(np.mean(staleness)) if staleness else 0.0,
                "staleness/max": float(max(staleness, default=0)),
                "staleness/age_max": float(max(ages, default=0)),
                "staleness/bound": float(self._bound.versions),
                "timing_s/wait_batch": waited_s,
                "timing_s/load": loaded_s,
                "timing_s/learn": learnt_s,
                "timing_s/publish": published_s,
                "timing_s/publish_blocked": self._publisher.stats().blocked_s - blocked_s,
                "timing_s/checkpoint": total_s - loaded_s - learnt_s - published_s,
                "timing_s/step": total_s,
                "perf/num_tokens": batch.num_tokens,
                "perf/tokens_per_s": batch.num_tokens / max(learnt_s, 1e-9),
                "perf/num_episodes": batch.num_episodes,
                "weights/trained_version": used_version,
                "mm/num_alarms": self._alarms.num_on,
            }
        )
        self._metrics.write(told, step=self.step)
        self._bound.look(told, step=self.step)
        self.step += 1

    def _commit(self) -> None:
        path, digest = save_checkpoint(self._ledger.run_dir, step=self.step, optimizer=self._optimizer)
        row = CheckpointRow(step=self.step, version=self.version, path=path, digest=digest, wall_s=self._wall_s)
        self._ledger.commit_step(row, time.time())
        prune_checkpoints(self._ledger.run_dir, self.step)

    def _attempts(self, row: GroupRow) -> list[GradedEpisode]:
        """The graded episodes of a group; none, and the group dropped with its reason, when a trace is damaged."""
        attempts = self._graded(row)
        is_read = self._effort.scale > 0 or len({_compared(a, self._estimator) for a in attempts}) > 1
        try:
            if is_read:
                attempts = [msgspec.structs.replace(a, load=held(a.load())) for a in attempts]
        except (CorruptBlob, msgspec.DecodeError, ValueError) as error:
            log.error("group %s is dropped: %s", row.group_id, error)
            self._ledger.drop_group(row.group_id, DropReason.CORRUPT_BLOB, time.time())
            return []
        return attempts

    def _graded(self, row: GroupRow) -> list[GradedEpisode]:
        out = []
        for episode in self._ledger.episodes_of(row.group_id):
            if episode.state == EpisodeState.GRADED:
                assert episode.grade is not None and episode.blob is not None
                grade = episode.grade
                out.append(
                    GradedEpisode(
                        episode_id=episode.episode_id,
                        reward=grade.reward,
                        load=self._loader(episode.blob),
                        success=grade.success,
                        parts=grade.parts,
                        role=grade.role,
                        environment=grade.environment,
                        chain_root=grade.chain_root,
                    )
                )
        return out

    def _loader(self, blob: BlobRef) -> Callable[[], Trace]:
        def load() -> Trace:
            trace = msgspec.msgpack.decode(self._ledger.blobs.get(blob), type=Trace)
            for window in trace.windows:
                window.check()
                if int(window.tokens_T.max(initial=0)) >= self._model.config.vocab_size:
                    raise ValueError(f"{trace.episode_id} holds a token id beyond the model's {self._model.config.vocab_size}")
                if window.routes:
                    self._check_routes(window)
            return trace

        return load

    def _check_routes(self, window: Window) -> None:
        """Here and not when they are imposed: a damaged record costs its group, not the trainer."""
        record = RouteRecord.from_bytes(window.routes)
        if record.shape != self._route_shape:
            raise ValueError(f"a window's routes are those of another model: {record.shape}, the trainer's has {self._route_shape}")
        if record.num_tokens != window.num_tokens:
            raise ValueError(f"a window of {window.num_tokens} tokens has routes of {record.num_tokens}")
        record.check()


def lr_scale(batch: StepBatch, *, step: int, num_steps: int, final_frac: float) -> float:
    """The schedule, times the share of groups that teach something: AdamW divides the gradient's size out, so without
    this a batch with one telling group would move the weights as far as one with eight."""
    done = step / max(1, num_steps - 1)
    telling = 1.0 - batch.num_groups_without_signal / max(1, batch.num_groups)
    return (1.0 - (1.0 - final_frac) * done) * telling


def _compared(attempt: GradedEpisode, estimator: Estimator) -> tuple[float, ...]:
    """The numbers that an advantage can see of an episode; where they are equal over a group no trace is needed."""
    return (attempt.reward, *(value for _, value in sorted(attempt.parts.items()))) if estimator.reads_parts else (attempt.reward,)


def _frozen(config: RunConfig) -> Model:
    """Where training started: the run's first version, which stays in memory as a second copy of the weights."""
    device = config.trainer.device
    model, _ = load_model(config.model.path, device=device, compute_dtype=compute_dtype(device), numerics=config.model.numerics)
    return model.requires_grad_(False)
