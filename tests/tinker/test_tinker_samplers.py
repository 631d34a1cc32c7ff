"""Snapshots on engines, without HTTP: who gets an engine when, what a cancelled request leaves, and weights that are not what they say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from tinker_models import model_of

from rollmill.engine.engine import Engine, EnginePhase
from rollmill.engine.protocol import GenerateRequest, ScoreRequest
from rollmill.engine.replies import Posted, deliver
from rollmill.tinker import prompting
from rollmill.tinker import requests as ask
from rollmill.tinker.adam import AdamParams
from rollmill.tinker.checkpoints import Checkpoints
from rollmill.tinker.sampling import SampleFailed, Samplers
from rollmill.tinker.service import SESSION_TTL_S, Service, Unknown
from rollmill.tinker.training import Snapshot, Trainer
from rollmill.tinker.wire import Datum
from rollmill.trainer.lora import LoraConfig

DEADLINE_S = 60.0
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


class World:
    """A trainer, one engine, and what stands between them."""

    def __init__(self, trainer: Trainer, engine: Engine) -> None:
        async def merge(snapshot: Snapshot) -> Mapping[str, torch.Tensor]:
            return trainer.serving_tensors(snapshot)

        self.trainer, self.engine = trainer, engine
        self.samplers = Samplers([engine], base=trainer.base_snapshot, base_tensors=trainer.base, merge=merge)

    def snapshot(self, rank: int | None, seed: int) -> Snapshot:
        """Of a run that has learnt a little."""
        run = self.trainer.new_run(None if rank is None else LoraConfig(rank=rank, seed=seed))
        tokens = np.array([1, 2, 3, 4 + seed, 9, 9], np.int32)
        data = [Datum(tokens_N=tokens[:-1], inputs={"target_tokens": tokens[1:].astype(np.int64)})]
        for _ in range(3):
            self.trainer.run_pass(run, data, "cross_entropy", {}, is_forward_only=False)
            self.trainer.optim_step(run, AdamParams(learning_rate=0.02))
        snapshot = self.trainer.snapshot(run)
        self.expected[snapshot] = self.trainer.run_pass(run, data, "cross_entropy", {}, is_forward_only=True).logprobs[0]
        self.tokens[snapshot] = tokens.tolist()
        return snapshot

    async def score(self, snapshot: Snapshot) -> np.ndarray:
        return await self.samplers.score(snapshot, ScoreRequest(token_ids=self.tokens[snapshot]))

    expected: dict[Snapshot, np.ndarray]
    tokens: dict[Snapshot, list[int]]


@asynccontextmanager
async def world(device: str = "cpu") -> AsyncIterator[World]:
    loop = asyncio.get_running_loop()

    def post(batch: Posted) -> None:
        loop.call_soon_threadsafe(deliver, batch)

    model = model_of(device=device)
    engine = Engine(model, model.config, version=0, num_slots=4, num_threads=1, post=post)
    engine.start()
    made = World(Trainer(model_of(device=device)), engine)
    made.expected, made.tokens = {}, {}
    try:
        yield made
    finally:
        await asyncio.to_thread(engine.close)


def run(work: Callable[[World], Awaitable[None]], device: str = "cpu") -> None:
    async def life() -> None:
        async with world(device) as made:
            await asyncio.wait_for(work(made), DEADLINE_S)

    asyncio.run(life())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rank", [4, None])
def test_engine_scores_as_the_trainer_does_for_every_snapshot(device: str, rank: int | None) -> None:
    async def work(w: World) -> None:
        snapshots = [w.snapshot(rank, seed) for seed in range(3)]
        for snapshot in [*snapshots, *reversed(snapshots)]:
            assert (await w.score(snapshot)).tolist() == w.expected[snapshot].tolist()
        assert len({tuple(e.tolist()) for e in w.expected.values()}) == 3
        # Back to the base model: nothing of a run stays behind.
        w.tokens[w.trainer.base_snapshot] = [1, 2, 3]
        await w.score(w.trainer.base_snapshot)
        assert w.engine.fingerprint == w.trainer.base_snapshot.fingerprint

    run(work, device)


def test_waiting_snapshot_gets_the_engine_although_the_other_keeps_asking() -> None:
    async def work(w: World) -> None:
        busy, other = w.snapshot(2, 0), w.snapshot(2, 1)
        is_done = asyncio.Event()

        async def keep_asking() -> int:
            num = 0
            while not is_done.is_set():
                await w.samplers.generate(busy, GenerateRequest(prompt_ids=[1], max_tokens=4))
                num += 1
            return num

        askers = [asyncio.create_task(keep_asking()) for _ in range(4)]
        await asyncio.sleep(0)
        assert (await w.score(other)).tolist() == w.expected[other].tolist()
        is_done.set()
        assert len(await asyncio.gather(*askers)) == 4

    run(work)


def test_cancelled_requests_leave_the_engine_and_the_line() -> None:
    async def work(w: World) -> None:
        one, two = w.snapshot(2, 0), w.snapshot(2, 1)
        long = GenerateRequest(prompt_ids=[1], max_tokens=100)
        running = [asyncio.create_task(w.samplers.generate(one, long)) for _ in range(6)]
        waiting = asyncio.create_task(w.samplers.generate(two, long))
        await asyncio.sleep(0)
        for task in [*running, waiting]:
            task.cancel()
        found = await asyncio.gather(*running, waiting, return_exceptions=True)
        assert all(isinstance(f, asyncio.CancelledError) for f in found)
        assert (await w.score(one)).tolist() == w.expected[one].tolist()
        assert w.engine.pressure().running == 0

    run(work)


def test_weights_that_are_not_the_snapshots_are_never_served() -> None:
    async def work(w: World) -> None:
        forged = msgspec.structs.replace(w.snapshot(2, 0), fingerprint="0" * 32)
        with pytest.raises(SampleFailed, match="refused"):
            await w.samplers.generate(forged, GenerateRequest(prompt_ids=[1], max_tokens=1))
        assert w.engine.phase is EnginePhase.FAILED
        with pytest.raises((SampleFailed, RuntimeError)):
            await w.samplers.generate(w.trainer.base_snapshot, GenerateRequest(prompt_ids=[1], max_tokens=1))

    run(work)


def test_request_that_the_engine_cannot_serve_is_refused_alone() -> None:
    async def work(w: World) -> None:
        base = w.trainer.base_snapshot
        with pytest.raises(ValueError, match="from 0 to 31"):
            await w.samplers.generate(base, GenerateRequest(prompt_ids=[32], max_tokens=1))
        assert (await w.samplers.generate(base, GenerateRequest(prompt_ids=[1], max_tokens=1))).token_ids

    run(work)


def test_session_without_heartbeat_is_ended_and_one_with_it_stays(tmp_path: Path) -> None:
    async def work(w: World) -> None:
        now = datetime(2026, 1, 1, tzinfo=UTC)
        facts = prompting.Model(max_len=64, vocab_size=32, eos_ids=frozenset(), tokenizer=None)
        with ThreadPoolExecutor(1) as thread:
            service = Service(
                w.trainer, w.samplers, Checkpoints(tmp_path), facts, names=("m",), tokenizer_id="m", thread=thread, clock=lambda: now
            )
            silent, heard = (service.create_session(ask.CreateSession()) for _ in range(2))
            body = ask.CreateModel(session_id=silent, model_seq_id=0, base_model="m", lora_config=ask.LoraSpec(rank=1))
            promise = service.promises.get(service.create_model(body))
            assert promise is not None and await promise.settled(DEADLINE_S)
            now += timedelta(seconds=SESSION_TTL_S - 1)
            service.session(heard)
            now += timedelta(seconds=2)
            service.create_session(ask.CreateSession())
            assert silent not in service.sessions and heard in service.sessions
            with pytest.raises(Unknown, match="unloaded"):
                service.training_run(f"{silent}:train:0")

    run(work)
