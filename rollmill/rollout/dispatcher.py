"""Keeps the engines busy: opens groups as the pacing gate allows, runs their episodes one by one, accounts groups whole.

Every dispatched episode ends in the ledger exactly once. A finished episode frees a slot at once; a group is settled when
all its slots have ended. Failures outside the agent's control are retried and never become a reward.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from rollmill.config import RunConfig
from rollmill.engine.protocol import Pressure
from rollmill.gateway import Gateway
from rollmill.ledger import EpisodeRow, IllegalTransition, Ledger, Pacing, Progress, may_open
from rollmill.ledger.staleness import Limits
from rollmill.ledger.staleness_row import IdleRow
from rollmill.records import CancelReason, DropReason, EpisodeState, GroupState, RunFailure, Task, encode
from rollmill.rollout.concurrency import Concurrency
from rollmill.rollout.curriculum_source import CurriculumSource
from rollmill.rollout.episode import EpisodeRunner, Finished
from rollmill.rollout.played import Seat
from rollmill.tasks import TaskSource
from rollmill.telemetry import Metrics, Waits

log = logging.getLogger("rollmill.rollout")
TICK_S = 0.05
OBSERVE_S = 0.5
REPORT_S = 2.0
MAX_DROPPED_IN_A_ROW = 8
GRACE_S = 5.0
"""Beyond an episode's own deadline, so that whoever runs out of time inside it can say so first."""
T = TypeVar("T")


class EverythingFails(ValueError):
    """Episodes fail faster than they finish: going on would only burn tasks."""


class _Running(msgspec.Struct, kw_only=True):
    row: EpisodeRow
    session: Seat
    play: asyncio.Task[Finished]
    """The only part of an episode that may be cancelled: the record of how it ended is never interrupted."""
    started: float
    cancel_reason: CancelReason = CancelReason.DEADLINE

    def cancel(self, reason: CancelReason) -> None:
        if not self.play.done() and not self.play.cancelling():
            self.cancel_reason = reason
            self.play.cancel()


class Dispatcher:
    """One rollout process. The ledger is only touched from its own thread, so the event loop never waits for a disk."""

    def __init__(
        self,
        config: RunConfig,
        ledger: Ledger,
        source: TaskSource | CurriculumSource,
        runner: EpisodeRunner,
        gateway: Gateway,
        metrics: Metrics,
        waits: Waits,
        should_stop: Callable[[], bool],
    ) -> None:
        self._config, self._ledger, self._source, self._runner = config, ledger, source, runner
        self._gateway, self._metrics, self._waits, self._should_stop = gateway, metrics, waits, should_stop
        self._limits = Limits.up_to(config.max_staleness) if config.is_staleness_auto else None
        self._pacing = self._pacing_of(config.max_staleness)
        self._started_at = time.time()
        self._concurrency = Concurrency(most=config.rollout.max_running)
        self._disk = ThreadPoolExecutor(1, "ledger")
        self._queue: deque[EpisodeRow] = deque()
        self._running: dict[str, _Running] = {}
        self._tasks: dict[str, Task] = {}
        self._num_failures: dict[tuple[str, int], int] = {}
        self._served_version = -1
        self._idle_s = self._gated_s = self._clock_s = 0.0
        self._num_done = 0
        self._num_dropped_in_a_row = 0
        self._last_failure = "none recorded"
        self._ended = asyncio.Event()
        self._endings: set[asyncio.Task[None]] = set()
        self._errors: list[BaseException] = []

    async def run(self) -> None:
        """Work until every step of the run has its groups and the trainer has committed them."""
        await self._recover()
        observer = asyncio.create_task(self._observe())
        last = time.monotonic()
        try:
            while not self._should_stop():
                progress = await self._look()
                if progress.num_steps_committed >= self._config.run.steps and not self._running:
                    return
                await self._sweep(progress)
                is_gated = await self._fill(progress)
                if observer.done():
                    observer.result()
                if self._errors:
                    raise self._errors[0]
                await self._tick()
                now = time.monotonic()
                self._account(now - last, is_gated)
                last = now
        finally:
            observer.cancel()
            await self._cancel_all(CancelReason.SHUTDOWN)
            self._report()
            self._disk.shutdown()

    async def _look(self) -> Progress:
        """The ledger's counts, and the bound in force where the trainer chooses it."""
        if self._limits is None:
            return await self._call(self._ledger.progress)
        limits = self._limits
        progress, bound = await self._call(lambda: (self._ledger.progress(), self._ledger.controller_state(limits).bound))
        self._pacing = self._pacing_of(bound)
        return progress

    def _pacing_of(self, bound: int) -> Pacing:
        return Pacing.from_staleness(bound, self._config.trainer.groups_per_batch, self._config.run.mode)

    async def _recover(self) -> None:
        if isinstance(self._source, CurriculumSource):
            self._source.restore(await self._call(self._ledger.tasks_opened), await self._call(self._ledger.group_results, 0))
        groups = await self._call(self._ledger.recover_rollout, time.time())
        for group in groups:
            episodes = await self._call(self._ledger.episodes_of, group.group_id)
            self._queue.extend(e for e in episodes if e.state == EpisodeState.QUEUED)
            if not any(e.is_live for e in episodes):
                await self._settle(group.group_id)
        if groups:
            log.info("picked up %d open groups, %d episodes to run again", len(groups), len(self._queue))

    async def _fill(self, progress: Progress) -> bool:
        """Open groups while there is room for their episodes, start queued episodes; True when only the gate holds us back."""
        is_gated = False
        while len(self._queue) + len(self._running) < self._concurrency.limit:
            if self._room_for_groups(progress) <= 0:
                is_gated = True
                break
            task = await self._next_task(progress.num_opened)
            group = await self._call(self._ledger.open_group, task, self._config.rollout.group_size, time.time())
            self._tasks[group.group_id] = task
            self._queue.extend(await self._call(self._ledger.episodes_of, group.group_id))
            progress = await self._call(self._ledger.progress)
        while self._queue and len(self._running) < self._concurrency.limit:
            await self._start(self._queue.popleft(), progress)
        return is_gated

    async def _next_task(self, index: int) -> Task:
        if not isinstance(self._source, CurriculumSource):
            return self._source.task(index)
        return self._source.task(index, await self._call(self._ledger.group_results, self._source.curriculum.num_folded))

    def _room_for_groups(self, progress: Progress) -> int:
        steps = progress.num_steps_cut
        is_sync = self._config.run.mode == "sync"
        if is_sync and (progress.num_steps_committed < steps or self._served_version < progress.version):
            # The barrier: the step that was cut must be learnt, published and served before its successor is sampled.
            steps -= 1
        planned = self._config.run.steps * self._pacing.groups_per_batch
        return min(may_open(progress.num_opened_live, steps, self._pacing), planned - progress.num_opened_live)

    async def _start(self, row: EpisodeRow, progress: Progress) -> None:
        try:
            await self._call(self._ledger.start_episode, row.episode_id, time.time())
        except IllegalTransition:
            # Its group was dropped while it waited; the ledger has ended it already.
            return
        if row.group_id not in self._tasks:
            self._tasks[row.group_id] = await self._call(self._ledger.task_of, row.group_id)
        min_version = progress.version if self._config.run.mode == "sync" else None
        session = self._runner.open_session(
            row.episode_id, seed=self._config.run.seed, temperature=self._config.rollout.temperature, min_version=min_version
        )
        play = asyncio.create_task(self._play(row, session), name=row.episode_id)
        running = _Running(row=row, session=session, play=play, started=time.monotonic())
        self._running[row.episode_id] = running
        self._endings.add(ending := asyncio.create_task(self._episode(running), name=f"{row.episode_id} end"))
        ending.add_done_callback(self._endings.discard)

    async def _play(self, row: EpisodeRow, session: Seat) -> Finished:
        limit_s = self._config.rollout.episode_s
        deadline = time.monotonic() + limit_s
        async with asyncio.timeout(limit_s + GRACE_S):
            task = self._tasks[row.group_id]
            return await self._runner.run(task, row.episode_id, session, seed=self._config.run.seed, deadline=deadline)

    async def _episode(self, running: _Running) -> None:
        try:
            await asyncio.wait([running.play])
            await self._record(running)
        except Exception as error:  # noqa: BLE001
            # Our own mistake or a broken disk: the run loop raises it, so that the process ends loudly and nothing is guessed.
            self._errors.append(error)
        finally:
            self._running.pop(running.row.episode_id, None)
            self._ended.set()

    async def _record(self, running: _Running) -> None:
        row, play = running.row, running.play
        error = None if play.cancelled() else play.exception()
        if play.cancelled() or isinstance(error, TimeoutError):
            reason = running.cancel_reason if play.cancelled() else CancelReason.DEADLINE
            # A stale group's episodes are ended with their group, in one transaction.
            if reason != CancelReason.STALE:
                is_failure = reason == CancelReason.DEADLINE
                if is_failure:
                    limit_s = self._config.rollout.episode_s
                    self._last_failure = (
                        f"still running after rollout.episode_s = {limit_s:g} s; agent.time_s ends and grades a program before"
                    )
                    log.warning("episode %s was cancelled: %s", row.episode_id, self._last_failure)
                await self._end(row, lambda now: self._ledger.cancel_episode(row.episode_id, reason, now), is_failure=is_failure)
        elif isinstance(error, RunFailure):
            boundary, message = error.boundary, error.message
            log.warning("episode %s failed at %s: %s", row.episode_id, boundary, message)
            self._last_failure = f"{boundary}: {message}"
            await self._end(row, lambda now: self._ledger.fail_episode(row.episode_id, boundary, message, now), is_failure=True)
        else:
            await self._finish(row, play.result())

    async def _finish(self, row: EpisodeRow, done: Finished) -> None:
        blob = await self._call(self._ledger.blobs.put, encode(done.trace))
        try:
            await self._call(
                self._ledger.finish_episode,
                row.episode_id,
                grade=done.grade,
                stop=done.trace.stop,
                blob=blob,
                versions=done.trace.version_range(),
                num_tokens=sum(w.num_tokens for w in done.trace.windows),
                num_sampled=done.trace.num_sampled,
                now=time.time(),
            )
        except IllegalTransition as race:
            # The sweep dropped its group, and ended this episode with it, while the trace was being written.
            log.info("%s", race)
            return
        self._num_done += 1
        await self._settle(row.group_id)

    async def _end(self, row: EpisodeRow, record: Callable[[float], Any], *, is_failure: bool) -> None:
        """Record how an attempt ended without a grade; queue another one unless the slot has used up its retries.

        At a shutdown too: the next process then finds the slot queued, as it would after a crash.
        """
        key = (row.group_id, row.slot)
        self._num_failures[key] = self._num_failures.get(key, 0) + int(is_failure)
        may_retry = self._num_failures[key] <= self._config.rollout.max_retries

        def record_and_retry() -> EpisodeRow | None:
            # One job on the ledger's thread: between the two the slot has no live attempt, and a sibling could settle the group.
            record(time.time())
            return self._ledger.retry_episode(row.episode_id, time.time()) if may_retry else None

        try:
            retry = await self._call(record_and_retry)
        except IllegalTransition as race:
            # The sweep dropped the group meanwhile and has ended its episodes.
            log.info("%s", race)
            return
        if retry is not None:
            self._queue.appendleft(retry)
        else:
            await self._settle(row.group_id)

    async def _settle(self, group_id: str) -> None:
        """Settle the group once nothing in it is live; siblings that end in the same moment all ask, the first one does it."""

        def settle() -> GroupState | None:
            is_open = self._ledger.group(group_id).state == GroupState.OPEN
            if not is_open or any(e.is_live for e in self._ledger.episodes_of(group_id)):
                return None
            return self._ledger.settle_group(group_id, time.time())

        state = await self._call(settle)
        if state is not None:
            self._forget(group_id)
        if state == GroupState.DROPPED:
            log.warning("group %s is dropped: fewer than half of its episodes are valid", group_id)
            self._num_dropped_in_a_row += 1
        elif state == GroupState.READY:
            self._num_dropped_in_a_row = 0
        if self._num_dropped_in_a_row >= MAX_DROPPED_IN_A_ROW:
            raise EverythingFails(
                f"the last {self._num_dropped_in_a_row} groups gave too few graded episodes to learn from; the last failure was: "
                f"{self._last_failure}. Nothing was trained on them. Mend the cause and go on with --resume"
            )

    def _forget(self, group_id: str) -> None:
        self._tasks.pop(group_id, None)
        for key in [k for k in self._num_failures if k[0] == group_id]:
            del self._num_failures[key]

    async def _sweep(self, progress: Progress) -> None:
        """Drop open groups whose oldest token can no longer be trained: their work would only be thrown away later."""
        if self._config.run.mode == "sync" or not self._running:
            return
        oldest: dict[str, int] = {}
        for running in self._running.values():
            if (version := running.session.oldest_version) is not None:
                group_id = running.row.group_id
                oldest[group_id] = min(version, oldest.get(group_id, version))
        for group_id, version in oldest.items():
            if progress.version - version <= self._config.max_staleness:
                continue
            for running in [r for r in self._running.values() if r.row.group_id == group_id]:
                running.cancel(CancelReason.STALE)
            self._queue = deque(e for e in self._queue if e.group_id != group_id)
            try:
                await self._call(self._ledger.drop_group, group_id, DropReason.STALE, time.time())
                self._forget(group_id)
            except IllegalTransition as race:
                log.info("%s", race)

    async def _observe(self) -> None:
        """Follow the replicas' pressure and report, for as long as the run lasts."""
        reported = time.monotonic()
        while True:
            pressures = await self._gateway.replicas.pressures()
            self._served_version = min((p.version for p in pressures), default=-1)
            verdict = self._concurrency.observe(pressures, len(self._running))
            youngest = sorted(self._running.values(), key=lambda r: -r.started)[: verdict.num_to_cancel]
            for running in youngest:
                running.cancel(CancelReason.OVERLOAD)
            if time.monotonic() - reported >= REPORT_S:
                reported = time.monotonic()
                self._report(pressures)
                if self._limits is not None:
                    idle = IdleRow(started_at=self._started_at, idle_s=self._idle_s, clock_s=self._clock_s)
                    await self._call(self._ledger.report_idle, idle)
            await asyncio.sleep(OBSERVE_S if self._config.run.mode == "async" else TICK_S)

    def _report(self, pressures: Sequence[Pressure] = ()) -> None:
        totals, tally = self._waits.totals_s(), self._runner.tally
        self._metrics.write(
            {
                "rollout/num_running": len(self._running),
                "rollout/limit": self._concurrency.limit,
                "rollout/num_queued": len(self._queue),
                "rollout/num_done": self._num_done,
                "rollout/idle_frac": self._idle_s / max(self._clock_s, 1e-9),
                "rollout/gated_frac": self._gated_s / max(self._clock_s, 1e-9),
                "engine/tokens_per_s": sum(p.tokens_per_s for p in pressures),
                "engine/num_waiting": sum(p.waiting for p in pressures),
                "engine/version": self._served_version,
                "timing_s/wait_policy": totals.get("policy", 0.0),
                "timing_s/wait_sandbox": totals.get("sandbox", 0.0),
                "rollout/num_model_retries": self._gateway.replicas.num_retries,
                "rollout/num_calls_appended": tally["appended"],
                "rollout/num_calls_realigned": tally["realigned"],
                "rollout/num_calls_forked": tally["forked"],
                "rollout/num_calls_retried": tally["retried"],
                "rollout/num_calls_abandoned": tally["abandoned"],
                "rollout/num_calls_overridden": tally["overridden"],
                "rollout/num_answers_orphaned": tally["orphaned"],
                "rollout/num_tokens_untrained": self._runner.num_untrained,
                "rollout/skew_answer_frac": self._runner.skew.answer_frac,
                "rollout/skew_token_frac": self._runner.skew.token_frac,
            }
            | (self._source.curriculum.metrics() if isinstance(self._source, CurriculumSource) else {}),
            step=self._num_done,
        )

    async def _tick(self) -> None:
        """Until an episode ends, or a short while has passed."""
        self._ended.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), TICK_S)

    def _account(self, elapsed_s: float, is_gated: bool) -> None:
        """Idle = the share of slots that stand empty because the gate is closed, weighted by time."""
        self._clock_s += elapsed_s
        if is_gated:
            self._gated_s += elapsed_s
            self._idle_s += elapsed_s * max(0, self._concurrency.limit - len(self._running)) / self._concurrency.limit

    async def _cancel_all(self, reason: CancelReason) -> None:
        for running in list(self._running.values()):
            running.cancel(reason)
        if self._endings:
            await asyncio.wait(list(self._endings), timeout=10.0)

    async def _call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._disk, lambda: function(*args, **kwargs))
