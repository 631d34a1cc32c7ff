"""Claims about weights that change under load, with the real publisher, store and follower."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_worlds import DEADLINE_S, packed_logprobs, running, tiny_model, wait_until

from rollmill.engine import replies
from rollmill.engine.engine import Engine, EnginePhase, NotServing
from rollmill.engine.protocol import FinishReason, GenerateRequest, ScoreRequest, SwapMode
from rollmill.engine.swap import WeightWatch, follower_of
from rollmill.model import Model
from rollmill.weights import Publisher, fingerprint, open_store


def ask(**fields) -> GenerateRequest:
    return GenerateRequest(**{"prompt_ids": [1, 2, 3, 4, 5], "max_tokens": 40, "seed": 3, **fields})


def nudged(model: Model, seed: int) -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    return {n: (t.float() + 0.01 * torch.randn(t.shape, generator=gen)).to(t.dtype) for n, t in model.serving_tensors().items()}


class Trainer:
    """Publishes versions and remembers their weights."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.store = open_store(path)
        self.publisher = Publisher(self.store, run_id="test")
        self.weights: dict[int, dict[str, torch.Tensor]] = {}

    def publish(self, tensors: dict[str, torch.Tensor]) -> int:
        version = self.publisher.submit(tensors, step=len(self.weights))
        self.publisher.flush(DEADLINE_S)
        self.weights[version] = tensors
        return version


@pytest.fixture
def trainer(tmp_path: Path):
    trainer = Trainer(tmp_path / "store")
    yield trainer
    trainer.publisher.close()


class Following:
    """An engine that follows a store."""

    def __init__(self, trainer: Trainer, model: Model, **options) -> None:
        self.model = model
        self.engine = Engine(model, model.config, **{"num_slots": 8, "num_threads": 1, **options})
        self.watch = WeightWatch(self.engine, follower_of(trainer.store, model), poll_s=0.002)

    def __enter__(self) -> Engine:
        self.engine.start()
        self.watch.start()
        return self.engine

    def __exit__(self, *args) -> None:
        self.engine.close()
        self.watch.close()


def test_nothing_is_served_before_the_first_verified_weights(trainer: Trainer) -> None:
    source = tiny_model(1)
    with Following(trainer, tiny_model(0)) as engine:
        assert engine.health().phase == EnginePhase.STARTING
        with pytest.raises(NotServing, match="starting"):
            engine.generate(ask())
        version = trainer.publish(source.serving_tensors())
        wait_until(lambda: engine.phase is EnginePhase.SERVING, "the engine serves")
        reply = engine.generate(ask()).result(DEADLINE_S)
        assert engine.health().fingerprint == fingerprint(source.serving_tensors()).total
    assert set(reply.versions_T.tolist()) == {version}
    assert np.array_equal(reply.logprobs_T, packed_logprobs(source, ask().prompt_ids, reply.token_ids).numpy())


@pytest.mark.parametrize("mode", list(SwapMode))
def test_tokens_around_a_swap_carry_the_version_that_sampled_them(
    trainer: Trainer, mode: SwapMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replies, "PIECE_S", 0.0)
    model = tiny_model(0)
    first = trainer.publish(model.serving_tensors())
    news, finished, held = threading.Event(), threading.Event(), threading.Event()

    def hear(seq, update) -> None:
        # Hold the engine's thread after ten tokens until the new version is staged and offered.
        if seq.num_sampled >= 10 and not held.is_set():
            news.set()
            assert held.wait(DEADLINE_S)
        if update.finished:
            finished.set()

    with Following(trainer, model, swap_mode=mode) as engine:
        wait_until(lambda: engine.phase is EnginePhase.SERVING, "the engine serves")
        seq = engine.submit(ask(max_tokens=40), hear, streams=True)
        assert news.wait(DEADLINE_S)
        second = trainer.publish(nudged(model, 1))
        wait_until(lambda: engine._inbox.has_offer, "the swap is offered")
        held.set()
        assert finished.wait(DEADLINE_S)
    assert [(s.start, s.end, s.version) for s in seq.spans] == [(0, 10, first), (10, 40, second)]
    old, new = tiny_model(0), tiny_model(0)
    new.load_serving(trainer.weights[second])
    tokens = seq.tokens[seq.num_prompt :]
    by_old, by_new = (packed_logprobs(m, ask().prompt_ids, tokens).numpy() for m in (old, new))
    sampled = np.array(seq.logprobs, np.float32)
    assert np.array_equal(sampled[:10], by_old[:10])
    if mode is SwapMode.RE_PREFILL:
        assert np.array_equal(sampled[10:], by_new[10:]) and seq.stale_from is None
    else:
        # The kept cache makes it neither pure old nor pure new, and the reply says from where on.
        assert not np.array_equal(sampled[10:], by_new[10:]) and np.abs(sampled[10:] - by_old[10:]).max() > 1e-3
        assert seq.stale_from == 10


@pytest.mark.parametrize("mode", list(SwapMode))
def test_what_is_scored_across_a_swap_comes_from_one_version(trainer: Trainer, mode: SwapMode) -> None:
    model, tokens = tiny_model(0), [i % 200 for i in range(200)]
    trainer.publish(model.serving_tensors())
    with Following(trainer, model, swap_mode=mode, step_tokens=16) as engine:
        wait_until(lambda: engine.phase is EnginePhase.SERVING, "the engine serves")
        compute, gate, reached = engine._forward.compute, threading.Event(), threading.Event()

        def slow(step):
            if step.chunks[0].start >= 96:
                reached.set()
                assert gate.wait(DEADLINE_S)
            return compute(step)

        engine._forward.compute = slow
        scored = engine.score(ScoreRequest(token_ids=tokens, start=20))
        assert reached.wait(DEADLINE_S), "half of it is computed"
        second = trainer.publish(nudged(model, 1))
        wait_until(lambda: engine._inbox.has_offer, "the swap is offered")
        gate.set()
        reply = scored.result(DEADLINE_S)
    new = tiny_model(0)
    new.load_serving(trainer.weights[second])
    assert reply.version == second
    assert np.array_equal(reply.logprobs_T, packed_logprobs(new, tokens[:20], tokens[20:]).numpy())


def test_no_request_is_lost_and_every_token_is_stamped_over_fifty_swaps_under_load(trainer: Trainer) -> None:
    model = tiny_model(0)
    trainer.publish(model.serving_tensors())
    replies, stop = [], threading.Event()
    with Following(trainer, model) as engine:
        wait_until(lambda: engine.phase is EnginePhase.SERVING, "the engine serves")

        def load(worker: int) -> None:
            i = 0
            while not stop.is_set():
                batch = [engine.generate(ask(seed=1000 * worker + i + k, max_tokens=30, session=f"{worker}.{k}")) for k in range(3)]
                replies.extend(f.result(DEADLINE_S) for f in batch)
                i += 3

        workers = [threading.Thread(target=load, args=(w,)) for w in range(3)]
        for worker in workers:
            worker.start()
        for i in range(50):
            version = trainer.publish(nudged(tiny_model(0), i))
            wait_until(lambda v=version: engine.version == v, f"version {version} is served")
        stop.set()
        for worker in workers:
            worker.join(DEADLINE_S)
            assert not worker.is_alive()
        assert engine.fingerprint == fingerprint(trainer.weights[engine.version]).total
        assert engine.metrics.swaps.labels("confirmed")._value.get() == 51
    assert len(replies) > 50
    for reply in replies:
        assert reply.finish_reason is FinishReason.LENGTH and len(reply.token_ids) == 30
        assert reply.spans[0].start == 0 and reply.spans[-1].end == 30
        assert all(a.end == b.start and a.version < b.version for a, b in zip(reply.spans, reply.spans[1:], strict=False))
        assert set(reply.versions_T.tolist()) <= set(trainer.weights)
    assert any(len(reply.spans) > 1 for reply in replies), "some request lived through a swap"


class SlipperyModel(type(tiny_model())):  # type: ignore[misc]
    """Copies a wrong bit in while `slips` is set."""

    slips = False

    def patch_serving(self, name, positions, values) -> None:
        super().patch_serving(name, positions, values)
        if self.slips:
            SlipperyModel.slips = False
            with torch.no_grad():
                self.embed[3, 5] += 0.5


def test_a_wrong_fingerprint_keeps_the_old_version_serving_and_says_so(trainer: Trainer) -> None:
    model = tiny_model(0)
    model.__class__ = SlipperyModel
    first = trainer.publish(model.serving_tensors())
    with Following(trainer, model) as engine:
        wait_until(lambda: engine.phase is EnginePhase.SERVING, "the engine serves")
        before = engine.generate(ask()).result(DEADLINE_S)
        SlipperyModel.slips = True
        bad = trainer.publish(nudged(tiny_model(0), 1))
        wait_until(lambda: engine.metrics.swaps.labels("refused")._value.get() == 1, "the swap is refused")
        after = engine.generate(ask()).result(DEADLINE_S)
        health = engine.health()
        assert (health.phase, health.version, health.fingerprint) == ("serving", first, fingerprint(trainer.weights[first]).total)
        assert f"version {bad} was refused and version {first} serves on" in health.note
        assert after.token_ids == before.token_ids and after.versions_T.tolist() == before.versions_T.tolist()
        third = trainer.publish(nudged(tiny_model(0), 2))
        wait_until(lambda: engine.version == third, "the next version is taken")
        wait_until(lambda: engine.health().note == "", "the note is cleared")
        assert engine.fingerprint == fingerprint(trainer.weights[third]).total


def test_a_model_of_another_shape_is_refused_and_the_old_one_serves_on(trainer: Trainer) -> None:
    model = tiny_model(0)
    first = trainer.publish(model.serving_tensors())
    with Following(trainer, model) as engine:
        wait_until(lambda: engine.phase is EnginePhase.SERVING, "the engine serves")
        trainer.publish({"model.norm.weight": torch.ones(3, dtype=torch.bfloat16)})
        wait_until(lambda: "start the replica with the model that is trained" in engine.follow_problem, "the version is refused")
        assert engine.version == first
        assert engine.generate(ask()).result(DEADLINE_S).finish_reason is FinishReason.LENGTH


def test_a_cache_made_by_older_weights_is_not_reused(trainer: Trainer) -> None:
    model = tiny_model(0)
    trainer.publish(model.serving_tensors())
    with Following(trainer, model) as engine:
        wait_until(lambda: engine.phase is EnginePhase.SERVING, "the engine serves")
        first = engine.generate(ask(prompt_ids=[*range(90)])).result(DEADLINE_S)
        version = trainer.publish(nudged(model, 4))
        wait_until(lambda: engine.version == version, "the new version is served")
        prompt = [*range(90), *first.token_ids, 7]
        second = engine.generate(ask(prompt_ids=prompt)).result(DEADLINE_S)
        third = engine.generate(ask(prompt_ids=prompt)).result(DEADLINE_S)
        fresh = tiny_model(0)
        fresh.load_serving(trainer.weights[version])
    assert (second.num_reused, third.num_reused) == (0, 128)
    assert np.array_equal(second.logprobs_T, packed_logprobs(fresh, prompt, second.token_ids).numpy())


def test_a_swap_ends_requests_that_asked_for_an_exact_version(trainer: Trainer) -> None:
    model = tiny_model(0)
    first = trainer.publish(model.serving_tensors())
    started, held = threading.Event(), threading.Event()

    def hear(seq, update) -> None:
        started.set()
        assert held.wait(DEADLINE_S)

    with Following(trainer, model, num_slots=2) as engine:
        wait_until(lambda: engine.phase is EnginePhase.SERVING, "the engine serves")
        exact = engine.submit(ask(exact_version=first, max_tokens=200), hear, streams=True)
        assert started.wait(DEADLINE_S)
        waits = engine.generate(ask(exact_version=first))
        loose = engine.generate(ask())
        trainer.publish(nudged(model, 1))
        wait_until(lambda: engine._inbox.has_offer, "the swap is offered")
        held.set()
        assert waits.result(DEADLINE_S).finish_reason is FinishReason.VERSION
        assert loose.result(DEADLINE_S).finish_reason is FinishReason.LENGTH
        wait_until(lambda: exact.finish_reason is not None, "the running request ended")
    assert exact.finish_reason is FinishReason.VERSION and {s.version for s in exact.spans} == {first}


def test_a_store_that_vanishes_leaves_the_version_serving(trainer: Trainer) -> None:
    model = tiny_model(0)
    first = trainer.publish(model.serving_tensors())
    with Following(trainer, model) as engine:
        wait_until(lambda: engine.phase is EnginePhase.SERVING, "the engine serves")
        trainer.publish(nudged(model, 1))
        wait_until(lambda: engine.version > first, "the second version is served")
        served = engine.version
        shutil.rmtree(trainer.path)
        assert engine.generate(ask()).result(DEADLINE_S).versions_T.tolist() == [served] * 40


def test_an_engine_without_a_store_serves_its_own_weights() -> None:
    model = tiny_model(0)
    with running(model, version=0) as engine:
        assert engine.health().fingerprint == fingerprint(model.serving_tensors()).total
        assert engine.generate(ask()).result(DEADLINE_S).versions_T.tolist() == [0] * 40
