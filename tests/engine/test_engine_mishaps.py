"""Claims about what must not happen to one request because of another, of a swap at a bad moment, or of who asks."""

from __future__ import annotations

import threading

import msgspec
import numpy as np
import pytest
import torch
from engine_worlds import CONFIG, DEADLINE_S, packed_logprobs, running, tiny_model, wait_until
from test_engine_routes import SPARSE, taken

from rollmill.engine.engine import EnginePhase
from rollmill.engine.inbox import QueueFull
from rollmill.engine.protocol import FinishReason, GenerateRequest, ScoreRequest, SwapMode
from rollmill.engine.scheduler import Sequence
from rollmill.model import MoEConfig
from rollmill.model.route_record import RouteRecord
from rollmill.ops.cpu import exact, strict
from rollmill.weights import fingerprint

BAD_TOKEN = 299


def test_a_request_whose_numbers_are_none_leaves_its_siblings_shared_pages_alone() -> None:
    """One token's embedding is no number; the requests share the two pages before it."""
    model = tiny_model(0, msgspec.structs.replace(CONFIG, tied=False))
    with torch.no_grad():
        model.slices()["model.embed_tokens.weight"][BAD_TOKEN] = float("nan")
    prompt = [i % 250 for i in range(130)]
    asked, started, done = threading.Event(), threading.Event(), threading.Event()

    def hear(seq, update) -> None:
        # The engine's thread stands still until the bad one is in the queue.
        if seq.num_sampled == 6:
            started.set()
            assert asked.wait(DEADLINE_S)
        if update.finished:
            done.set()

    with running(model) as engine:
        alone = [engine.generate(GenerateRequest(prompt_ids=prompt, max_tokens=40, seed=s)).result(DEADLINE_S) for s in range(9)]
        seed = next(i for i, reply in enumerate(alone) if BAD_TOKEN not in reply.token_ids)
        good = engine.submit(GenerateRequest(prompt_ids=prompt, max_tokens=40, seed=seed), hear, streams=True)
        assert started.wait(DEADLINE_S)
        bad = engine.generate(GenerateRequest(prompt_ids=[*prompt, BAD_TOKEN], max_tokens=5))
        asked.set()
        assert done.wait(DEADLINE_S)
        later = engine.generate(GenerateRequest(prompt_ids=prompt, max_tokens=3, seed=seed)).result(DEADLINE_S)
    assert bad.result(DEADLINE_S).finish_reason is FinishReason.ERROR and bad.result().num_reused == 128
    assert good.tokens[130:] == alone[seed].token_ids
    assert np.array_equal(np.array(good.logprobs, np.float32), alone[seed].logprobs_T)
    assert later.num_reused == 128 and later.token_ids == alone[seed].token_ids[:3]


def test_an_elder_prompt_may_take_the_pages_of_one_whose_turn_was_planned_already() -> None:
    model = tiny_model(0, msgspec.structs.replace(CONFIG, max_position=1792))
    with running(model, num_pages=28, num_slots=8, step_tokens=1024) as engine:
        eldest = engine.generate(GenerateRequest(prompt_ids=[1, 2, 3], max_tokens=40, seed=1))
        wait_until(lambda: len(engine.scheduler.running) == 1, "the eldest runs")
        long = GenerateRequest(prompt_ids=[(7 * i) % 250 for i in range(1785)], max_tokens=5, seed=2)
        waits = engine.generate(long)
        young = engine.generate(GenerateRequest(prompt_ids=[9, 8, 7], max_tokens=60, seed=3))
        lengths = [len(f.result(DEADLINE_S).token_ids) for f in (eldest, waits, young)]
        assert engine.phase is EnginePhase.SERVING
    assert lengths == [40, 5, 60]
    assert np.array_equal(waits.result().logprobs_T, packed_logprobs(model, long.prompt_ids, waits.result().token_ids).numpy())


@pytest.mark.parametrize("mode", list(SwapMode))
def test_tokens_keep_the_experts_that_their_sampling_followed_across_a_swap(mode: SwapMode) -> None:
    model, old, new = tiny_model(0, SPARSE), tiny_model(0, SPARSE), tiny_model(7, SPARSE)
    prompt = [i % 250 for i in range(30)]

    def swap():
        model.load_serving(new.serving_tensors())
        return fingerprint(model.serving_tensors())

    with running(model, swap_mode=mode) as engine:
        future = engine.generate(GenerateRequest(prompt_ids=prompt, max_tokens=200, seed=1, routes_from=5))
        wait_until(lambda: bool(engine.scheduler.running) and engine.scheduler.running[0].num_sampled > 40, "some tokens are sampled")
        assert engine.offer(2, swap).result(DEADLINE_S)
        reply = future.result(DEADLINE_S)
    tokens, border = prompt + reply.token_ids, len(prompt) + reply.spans[0].end - 1
    ids = RouteRecord.from_bytes(reply.routes).ids_TLK()
    assert len(reply.spans) == 2 and len(ids) == len(tokens) - 1 - 5
    assert np.array_equal(ids[: border - 5], taken(old, tokens)[5:border])
    if mode is SwapMode.RE_PREFILL:
        assert np.array_equal(ids[border - 5 :], taken(new, tokens)[border:-1])


def test_a_request_put_back_and_ended_by_its_deadline_keeps_its_routes() -> None:
    model = tiny_model(0, SPARSE)
    with running(model) as engine:
        request = GenerateRequest(prompt_ids=[1, 2, 3], max_tokens=100, seed=1, routes_from=0)
        seq = Sequence(key=0, request=request, seed=1, arrived_at=0.0, on_update=lambda s, u: None, streams=False)
        compute, held = engine._forward.compute, threading.Event()

        def put_back(step):
            out = compute(step)
            if step.chunks[0].seq.num_sampled == 20 and not held.is_set():
                held.set()
            return out

        engine._forward.compute = put_back
        ends: list[Sequence] = []
        seq = engine.submit(request, lambda s, u: ends.append(s))
        assert held.wait(DEADLINE_S)
        live = fingerprint(model.serving_tensors())
        engine.swap_mode = SwapMode.RE_PREFILL
        assert engine.offer(2, lambda: live).result(DEADLINE_S)
        engine.cancel(seq)
        wait_until(lambda: bool(ends), "the request ended")
    assert RouteRecord.from_bytes(seq.routes).num_tokens >= 3 + 20 - 1


@pytest.mark.parametrize("mode", list(SwapMode))
def test_versions_that_come_faster_than_a_context_is_computed_again_do_not_stop_everybody(mode: SwapMode) -> None:
    model = tiny_model(0, msgspec.structs.replace(CONFIG, max_position=2048))
    live = fingerprint(model.serving_tensors())
    stop = threading.Event()
    with running(model, swap_mode=mode, step_tokens=16) as engine:

        def publish() -> None:
            version = 2
            while not stop.is_set():
                engine.offer(version, lambda: live).result(DEADLINE_S)
                version += 1

        thread = threading.Thread(target=publish)
        thread.start()
        try:
            reply = engine.generate(GenerateRequest(prompt_ids=list(range(250)) * 4, max_tokens=4, seed=1))
            scored = engine.score(ScoreRequest(token_ids=list(range(249, -1, -1)) * 4))
            assert len(reply.result(DEADLINE_S).token_ids) == 4
            assert len(scored.result(DEADLINE_S).logprobs_T) == 999
        finally:
            stop.set()
            thread.join(DEADLINE_S)


def test_a_score_names_the_version_that_computed_it_however_late_it_is_read() -> None:
    late: list = []
    model = tiny_model()
    live = fingerprint(model.serving_tensors())
    with running(model, post=late.append) as engine:
        scored = engine.score(ScoreRequest(token_ids=[1, 2, 3, 4]))
        wait_until(lambda: bool(late), "the score is done")
        assert engine.offer(2, lambda: live).result(DEADLINE_S)
        for batch in late:
            for seq, update in batch:
                seq.on_update(seq, update)
    assert scored.result(DEADLINE_S).version == 1


def test_the_bound_on_requests_counts_those_on_their_way_from_the_queue_to_a_slot() -> None:
    """The moment between two lists, made long: whoever asks then must be refused, not let in and then be one too many."""
    refused: list[bool] = []
    with running(num_slots=1, max_waiting=1) as engine:
        running_list = engine.scheduler.running

        class Slow(list):
            def append(self, seq) -> None:
                try:
                    if refused:
                        return super().append(seq)
                    engine.generate(GenerateRequest(prompt_ids=[5], max_tokens=2))
                    engine.generate(GenerateRequest(prompt_ids=[6], max_tokens=2))
                except QueueFull:
                    refused.append(True)
                return super().append(seq)

        engine.scheduler.running = Slow(running_list)
        first = engine.generate(GenerateRequest(prompt_ids=[1], max_tokens=3))
        assert first.result(DEADLINE_S).finish_reason is FinishReason.LENGTH
        wait_until(lambda: engine._inbox.num_open == 0, "everyone ended")
        assert engine.phase is EnginePhase.SERVING and refused


def test_a_waiting_futures_owner_cannot_break_the_engine_by_cancelling_it() -> None:
    with running() as engine:
        future = engine.generate(GenerateRequest(prompt_ids=[1], max_tokens=50))
        assert not future.cancel()
        assert len(future.result(DEADLINE_S).token_ids) == 50 and engine.phase is EnginePhase.SERVING


def test_requests_that_ended_are_not_held_until_their_deadline() -> None:
    with running() as engine:
        for batch in range(5):
            futures = [engine.generate(GenerateRequest(prompt_ids=[i], max_tokens=1, deadline_s=9000)) for i in range(100)]
            assert all(f.result(DEADLINE_S) for f in futures), batch
        assert len(engine.scheduler._deadlines) < 400


def test_an_idle_engine_says_that_nobody_runs_or_waits() -> None:
    with running(num_slots=1) as engine:
        seqs = [engine.submit(GenerateRequest(prompt_ids=[1], max_tokens=200), lambda s, u: None) for _ in range(3)]
        wait_until(lambda: engine.metrics.waiting._value.get() == 2, "two wait")
        for seq in seqs:
            engine.cancel(seq)
        wait_until(lambda: engine._inbox.num_open == 0, "all ended")
        assert (engine.metrics.running._value.get(), engine.metrics.waiting._value.get()) == (0, 0)


@pytest.mark.parametrize("num_experts", [8, 16, 24])
def test_sigmoid_routers_give_the_trainers_bits_too(num_experts: int) -> None:
    moe = MoEConfig(num_experts=num_experts, top_k=3, expert_size=32, norm_topk=True, is_sigmoid=True, scale=2.5)
    model, before = tiny_model(0, msgspec.structs.replace(SPARSE, moe=moe)), torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with running(model, num_threads=2) as engine:
            requests = [GenerateRequest(prompt_ids=[i, 7, 9], max_tokens=60, seed=i) for i in range(7)]
            replies = [f.result(DEADLINE_S) for f in [engine.generate(r) for r in requests]]
        for request, reply in zip(requests, replies, strict=True):
            assert np.array_equal(reply.logprobs_T, packed_logprobs(model, request.prompt_ids, reply.token_ids).numpy())
    finally:
        torch.set_num_threads(before)


def test_weights_that_a_profile_cannot_hold_end_the_engine_and_the_offer_is_answered() -> None:
    model = tiny_model()
    model.numerics = "fp8"
    with running(model) as engine:
        engine.generate(GenerateRequest(prompt_ids=[1], max_tokens=2)).result(DEADLINE_S)

        def swap():
            with torch.no_grad():
                model.layers[0].mlp.down[0, 0] = float("nan")
            return fingerprint(tiny_model().serving_tensors())

        assert engine.offer(2, swap).result(DEADLINE_S) is False
        wait_until(lambda: engine.phase is EnginePhase.FAILED, "the engine has failed")
        assert "the profile 'fp8' cannot serve it" in engine.note


def test_blocks_give_the_same_bits_whatever_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "is_invariant", lambda n, d, t, *, is_blocked: is_blocked)
    gen = torch.Generator().manual_seed(0)
    x, weight, before = torch.randn(100, 1536, generator=gen), torch.randn(576, 1536, generator=gen), torch.get_num_threads()
    outs = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        outs.append(exact.CpuOps().linear(x, weight))
        assert torch.get_num_threads() == threads
    torch.set_num_threads(before)
    assert all(torch.equal(out, outs[0]) for out in outs)
    assert strict.blocked_linear(x[:0], weight).shape == (0, 576)


def test_the_exact_profile_of_the_cpu_refuses_bfloat16_by_name() -> None:
    with pytest.raises(ValueError, match=r"computes in float32, not torch.bfloat16"):
        exact.CpuOps().linear(torch.ones(2, 4, dtype=torch.bfloat16), torch.ones(3, 4, dtype=torch.bfloat16))
