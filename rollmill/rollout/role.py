"""The rollout role: held-out evaluation, then rollouts for the whole run, then held-out evaluation again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rollmill.chat.format import ChatFormat
from rollmill.config import RunConfig
from rollmill.gateway import Gateway
from rollmill.gateway.routing.replicas import Replicas
from rollmill.harness import Limits
from rollmill.ledger import Ledger, Pacing
from rollmill.model import Tokenizer
from rollmill.rollout.cast import MakePlayer, players
from rollmill.rollout.curriculum import Aim
from rollmill.rollout.curriculum_source import CurriculumSource
from rollmill.rollout.dispatcher import Dispatcher
from rollmill.rollout.episode import EpisodeRunner
from rollmill.rollout.evaluation import evaluate
from rollmill.rollout.own import without_latency
from rollmill.sandbox import open_backend
from rollmill.tasks import TaskFamily, TaskSource, open_family
from rollmill.telemetry import Metrics, Waits

START_S = 120.0


async def run_rollout(
    config: RunConfig, ledger: Ledger, metrics: Metrics, waits: Waits, replicas: Callable[[], list[str]], should_stop: Callable[[], bool]
) -> None:
    """One rollout process, from start or from wherever the ledger says an earlier one stopped."""
    family, r = open_family(config.tasks.family), config.rollout
    sandboxes = open_backend(r.sandbox)
    chat = ChatFormat(Tokenizer(config.model.path))
    wants_routes = config.trainer.router_replay != "off"
    gateway = Gateway(chat, Replicas(replicas, waits), name=config.agent.model, wants_routes=wants_routes)
    limits = limits_of(config)
    kinds, levels, seed = config.tasks.kinds, config.tasks.levels, config.run.seed
    train = train_source(config, family)
    heldout = TaskSource(family, split="heldout", seed=seed, kinds=kinds, levels=levels)

    async def judge(make: MakePlayer, label: str, version: int) -> None:
        quiet = without_latency(limits)
        runner = EpisodeRunner(family, gateway, sandboxes, quiet, waits, player=make(quiet))
        try:
            await evaluate(
                label,
                ledger=ledger,
                source=heldout,
                runner=runner,
                num_tasks=config.tasks.num_heldout,
                num_at_once=r.max_running,
                seed=seed,
                temperature=r.temperature,
                min_version=version,
                episode_s=r.episode_s,
            )
        finally:
            await runner.close()

    try:
        first = await _first_version(ledger, waits, should_stop)
        if first is None:
            return
        async with players(config, family, gateway, sandboxes, waits) as make:
            if ledger.progress().num_opened == 0:
                await judge(make, "before", first)
            runner = EpisodeRunner(family, gateway, sandboxes, limits, waits, player=make(limits))
            try:
                await Dispatcher(config, ledger, train, runner, gateway, metrics, waits, should_stop).run()
            finally:
                await runner.close()
            progress = ledger.progress()
            if progress.num_steps_committed >= config.run.steps:
                await judge(make, "after", progress.version)
    finally:
        await gateway.close()
        await sandboxes.close()


def train_source(config: RunConfig, family: TaskFamily) -> TaskSource | CurriculumSource:
    """The tasks that this run trains on, in the order in which its groups are opened."""
    kinds, levels, seed, num_groups = config.tasks.kinds, config.tasks.levels, config.run.seed, config.trainer.groups_per_batch
    if config.tasks.curriculum == "even":
        return TaskSource(family, split="train", seed=seed, kinds=kinds, levels=levels)
    low, high = config.tasks.curriculum_band
    return CurriculumSource(
        family,
        split="train",
        seed=seed,
        kinds=kinds,
        levels=levels,
        aim=Aim(low=low, high=high, max_passes=config.tasks.curriculum_passes),
        # The widest that the run can have: the order of tasks must not depend on when the bound moved.
        pacing=Pacing.from_staleness(config.max_staleness, num_groups, config.run.mode),
        group_size=config.rollout.group_size,
        num_groups=config.run.steps * num_groups,
    )


def limits_of(config: RunConfig) -> Limits:
    """The budget of one episode in this run."""
    r = config.rollout
    return Limits(
        max_turns=r.max_turns,
        max_tokens_per_turn=r.max_tokens_per_turn,
        max_context=config.engine.max_len,
        tool_s=r.tool_s,
        max_bad_calls=r.max_bad_calls,
        # Half of the episode's time at most: what is left must be enough for the model to answer.
        tools_s=r.episode_s / 2,
        tool_latency_s=r.tool_latency_s,
    )


async def _first_version(ledger: Ledger, waits: Waits, should_stop: Callable[[], bool]) -> int | None:
    with waits.of("first weights", owner="trainer", deadline_s=START_S) as check:
        while not should_stop():
            if (version := ledger.progress().version) >= 0:
                return version
            check()
            await asyncio.sleep(0.05)
    return None
