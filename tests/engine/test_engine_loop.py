"""Claims about the running engine: numerics, batching, sessions, ends of life."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch
from engine_worlds import DEADLINE_S, VOCAB, packed_logprobs, running, tiny_model, wait_until

from rollmill.engine.engine import Engine, EnginePhase, NotServing, VersionMismatch
from rollmill.engine.inbox import QueueFull
from rollmill.engine.protocol import FinishReason, GenerateReply, GenerateRequest, ScoreRequest
from rollmill.engine.replies import deliver, reply_of


def ask(prompt: list[int], **fields) -> GenerateRequest:
    return GenerateRequest(prompt_ids=prompt, **{"max_tokens": 24, "seed": 5, **fields})


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(salt * 31 + i * 7) % VOCAB for i in range(length)]


def result(engine: Engine, request: GenerateRequest) -> GenerateReply:
    return engine.generate(request).result(DEADLINE_S)


@pytest.mark.parametrize("step_tokens", [1024, 20])
def test_decoded_logprobs_equal_those_of_a_packed_forward(step_tokens: int) -> None:
    model = tiny_model()
    with running(model, step_tokens=step_tokens) as engine:
        requests = [
            ask(prompt_of(3 + 11 * i, i), seed=i, temperature=t) for i, t in enumerate([1.0, 0.7, 1.3, 1.0, 2.0, 1.0, 0.5, 1.0, 1.0, 1.0])
        ]
        replies = [f.result(DEADLINE_S) for f in [engine.generate(r) for r in requests]]
    for request, reply in zip(requests, replies, strict=True):
        assert len(reply.token_ids) == 24 and reply.finish_reason is FinishReason.LENGTH
        expected = packed_logprobs(model, request.prompt_ids, reply.token_ids, request.temperature)
        assert np.array_equal(reply.logprobs_T, expected.numpy())
        assert reply.versions_T.tolist() == [1] * 24


def test_a_request_gives_the_same_tokens_alone_and_in_a_crowd() -> None:
    with running(num_slots=4) as engine:
        wanted = ask(prompt_of(17), seed=77, max_tokens=60)
        alone = result(engine, wanted)
        crowd = [engine.generate(ask(prompt_of(5 + i, i), seed=i, max_tokens=5 + 7 * i)) for i in range(8)]
        together = result(engine, wanted)
        assert [len(f.result(DEADLINE_S).token_ids) for f in crowd] == [5 + 7 * i for i in range(8)]
    assert together.token_ids == alone.token_ids
    assert np.array_equal(together.logprobs_T, alone.logprobs_T)
    assert together.seed == 77


def test_requests_without_a_seed_differ_and_report_the_seed_that_repeats_them() -> None:
    with running() as engine:
        a, b = (result(engine, ask(prompt_of(9), seed=None, max_tokens=40)) for _ in range(2))
        assert a.token_ids != b.token_ids
        assert result(engine, ask(prompt_of(9), seed=a.seed, max_tokens=40)).token_ids == a.token_ids


def test_temperature_zero_is_greedy() -> None:
    model = tiny_model()
    with running(model) as engine:
        reply = result(engine, ask(prompt_of(9), temperature=0.0))
    # Greedy: no token beats the chosen one under the packed forward.
    prompt = prompt_of(9)
    for i, token in enumerate(reply.token_ids):
        context = prompt + reply.token_ids[:i]
        best = max(float(packed_logprobs(model, context, [t])[0]) for t in (token, (token + 1) % VOCAB, (token + 100) % VOCAB))
        assert float(packed_logprobs(model, context, [token])[0]) == pytest.approx(best, abs=1e-5)


def test_the_next_turn_shares_the_pages_of_the_last_one_and_gives_the_same_bits_as_a_fresh_engine() -> None:
    model = tiny_model()
    with running(model) as engine:
        first = result(engine, ask(prompt_of(100)))
        second_prompt = prompt_of(100) + first.token_ids + [9, 8, 7]
        second = result(engine, ask(second_prompt))
    with running(model) as engine:
        fresh = result(engine, ask(second_prompt))
    # Of the first turn's 124 tokens all but the last were computed: one whole page.
    assert (first.num_reused, second.num_reused, fresh.num_reused) == (0, 64, 0)
    assert second.token_ids == fresh.token_ids and second.logprobs == fresh.logprobs
    assert np.array_equal(second.logprobs_T, packed_logprobs(model, second_prompt, second.token_ids).numpy())


def test_a_context_that_forks_shares_only_the_pages_before_the_fork() -> None:
    model = tiny_model()
    with running(model) as engine:
        result(engine, ask(prompt_of(200)))
        forked = [*prompt_of(150), 250, 251, 252]
        reply, again = result(engine, ask(forked)), result(engine, ask(forked))
        page = result(engine, ask(prompt_of(128)))
    assert (reply.num_reused, again.num_reused) == (128, 128)
    assert page.num_reused == 64, "the last prompt token is always computed"
    assert np.array_equal(reply.logprobs_T, packed_logprobs(model, forked, reply.token_ids).numpy())
    assert again.token_ids == reply.token_ids and again.logprobs == reply.logprobs


def test_attempts_at_one_prompt_that_arrive_together_compute_it_once() -> None:
    with running(num_slots=16) as engine:
        futures = [engine.generate(ask(prompt_of(200), seed=i, max_tokens=3)) for i in range(16)]
        replies = [f.result(DEADLINE_S) for f in futures]
        computed = engine.metrics.prefill_tokens._value.get()
    assert sorted(r.num_reused for r in replies) == [0] + [192] * 15
    assert computed == 200 + 15 * 8


def test_many_conversations_over_few_pages_stay_exact() -> None:
    """Pages for two full contexts, five slots, twelve conversations: requests are put back and computed again, and no bit shows it."""
    model = tiny_model()
    with running(model, num_slots=5, num_pages=8) as engine:
        histories = {s: prompt_of(6 + 12 * s, s) for s in range(12)}
        for turn in range(3):
            futures = {s: engine.generate(ask(h, seed=s, max_tokens=4 + (s + turn) % 5)) for s, h in histories.items()}
            for s, future in futures.items():
                reply = future.result(DEADLINE_S)
                assert np.array_equal(reply.logprobs_T, packed_logprobs(model, histories[s], reply.token_ids).numpy())
                histories[s] = histories[s] + reply.token_ids + [s, turn]


def test_requests_that_outgrow_the_pages_are_put_back_and_end_with_the_same_bits() -> None:
    model = tiny_model()
    requests = [ask(prompt_of(60, s), seed=s, max_tokens=150) for s in range(4)]
    with running(model, num_slots=4, num_pages=6) as engine:
        replies = [f.result(DEADLINE_S) for f in [engine.generate(r) for r in requests]]
        assert engine.metrics.preemptions._value.get() > 0
    with running(model, num_slots=4) as engine:
        roomy = [f.result(DEADLINE_S) for f in [engine.generate(r) for r in requests]]
        assert engine.metrics.preemptions._value.get() == 0
    assert [(r.token_ids, r.logprobs) for r in replies] == [(r.token_ids, r.logprobs) for r in roomy]


def test_pages_that_cannot_hold_one_context_are_refused() -> None:
    with pytest.raises(ValueError, match=r"3 pages of 64 tokens cannot hold one context of 256"), running(num_pages=3):
        pass


def test_one_clients_flood_does_not_keep_another_waiting() -> None:
    order: list[str] = []
    with running(num_slots=1) as engine:
        flood = [ask(prompt_of(3, i), queue="flood", max_tokens=2, seed=i) for i in range(12)]
        calls = [*flood, ask(prompt_of(5), queue="other", max_tokens=2)]
        done = threading.Semaphore(0)

        def ended(queue: str) -> None:
            order.append(queue)
            done.release()

        for request in calls:
            engine.submit(request, lambda seq, update: ended(seq.request.queue))
        assert all(done.acquire(timeout=DEADLINE_S) for _ in calls)
    assert order.index("other") <= 4


def test_scores_of_a_prefill_are_the_bits_that_were_sampled() -> None:
    model = tiny_model()
    with running(model, step_tokens=50) as engine:
        reply = result(engine, ask(prompt_of(90), max_tokens=100, temperature=0.7))
        tokens = prompt_of(90) + reply.token_ids
        cold = engine.score(ScoreRequest(token_ids=tokens, start=90, temperature=0.7)).result(DEADLINE_S)
        again = engine.score(ScoreRequest(token_ids=tokens, start=180, temperature=0.7)).result(DEADLINE_S)
        whole = engine.score(ScoreRequest(token_ids=prompt_of(256))).result(DEADLINE_S)
    assert cold.logprobs == reply.logprobs and cold.version == 1
    assert again.logprobs == reply.logprobs[4 * 90 :]
    assert len(whole.logprobs_T) == 255, "a full context can be scored"


def test_a_stop_token_ends_the_request_and_is_its_last_token() -> None:
    with running() as engine:
        free = result(engine, ask(prompt_of(9), max_tokens=40))
        stop = free.token_ids[10]
        reply = result(engine, ask(prompt_of(9), max_tokens=40, stop_ids=[stop]))
    cut = free.token_ids.index(stop) + 1
    assert reply.token_ids == free.token_ids[:cut] and reply.finish_reason is FinishReason.STOP


def test_a_full_context_ends_the_request() -> None:
    with running(max_len=32) as engine:
        reply = result(engine, ask(prompt_of(30), max_tokens=50))
    assert len(reply.token_ids) == 2 and reply.finish_reason is FinishReason.CONTEXT


def test_cancelling_frees_the_row_for_the_next_request() -> None:
    done, first_token = threading.Event(), threading.Event()
    reasons = []

    def hear(seq, update) -> None:
        first_token.set()
        if update.finished:
            reasons.append(update.finished)
            done.set()

    with running(num_slots=1, max_len=256) as engine:
        seq = engine.submit(ask(prompt_of(4), max_tokens=200), hear, streams=True)
        assert first_token.wait(DEADLINE_S)
        waiting = engine.generate(ask(prompt_of(4), max_tokens=3))
        engine.cancel(seq)
        engine.cancel(seq)
        assert done.wait(DEADLINE_S)
        assert len(waiting.result(DEADLINE_S).token_ids) == 3
        assert reasons in ([FinishReason.CANCELLED], [FinishReason.LENGTH])
        wait_until(lambda: engine.pressure().running == 0, "the rows are free")


def test_a_deadline_ends_a_waiting_request_with_what_it_has() -> None:
    gate = threading.Event()
    with running(num_slots=1, post=lambda batch: (gate.wait(DEADLINE_S), deliver(batch))) as engine:
        runs = engine.generate(ask(prompt_of(4), max_tokens=1))
        late = engine.generate(ask(prompt_of(4), deadline_s=1e-4))
        gate.set()
        assert runs.result(DEADLINE_S).finish_reason is FinishReason.LENGTH
        reply = late.result(DEADLINE_S)
    assert reply.finish_reason is FinishReason.DEADLINE and len(reply.token_ids) < 24


def test_a_deadline_ends_a_running_request_with_the_tokens_it_has() -> None:
    first_token, ended = threading.Event(), threading.Event()

    def hear(seq, update) -> None:
        # Hold the loop after the first token until the deadline has passed.
        if not first_token.is_set():
            first_token.set()
            wait_until(lambda: time.monotonic() > seq.deadline_at, "the deadline has passed")
        if update.finished:
            ended.set()

    with running() as engine:
        seq = engine.submit(ask(prompt_of(4), max_tokens=200, deadline_s=0.2), hear, streams=True)
        assert ended.wait(DEADLINE_S)
    assert seq.finish_reason is FinishReason.DEADLINE and len(reply_of(seq).token_ids) == len(seq.logprobs) <= 1


def test_the_queue_is_bounded_and_drains() -> None:
    at_gate, gate = threading.Event(), threading.Event()

    def hold(batch) -> None:
        at_gate.set()
        assert gate.wait(DEADLINE_S)
        deliver(batch)

    with running(num_slots=2, max_waiting=3, post=hold) as engine:
        futures = [engine.generate(ask(prompt_of(4), max_tokens=1))]
        assert at_gate.wait(DEADLINE_S)
        # Two free rows and three places in the queue.
        futures += [engine.generate(ask(prompt_of(4), max_tokens=1)) for _ in range(5)]
        with pytest.raises(QueueFull, match="5 requests run or wait already"):
            engine.generate(ask(prompt_of(4)))
        gate.set()
        assert [f.result(DEADLINE_S).finish_reason for f in futures] == [FinishReason.LENGTH] * 6


def test_version_constraints_are_refused_before_any_work() -> None:
    with running(version=7) as engine:
        for bad in ({"min_version": 8}, {"exact_version": 6}):
            with pytest.raises(VersionMismatch, match="version 7 is served"):
                engine.generate(ask(prompt_of(4), **bad))
        for good in ({"min_version": 7}, {"exact_version": 7}, {"min_version": 2}):
            assert result(engine, ask(prompt_of(4), **good)).versions_T.tolist() == [7] * 24


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"prompt_ids": []}, "prompt_ids is empty"),
        ({"prompt_ids": [VOCAB]}, f"holds {VOCAB}"),
        ({"prompt_ids": [-1]}, "holds -1"),
        ({"prompt_ids": [1] * 300}, "300 tokens"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"temperature": -1.0}, "temperature is -1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0.0}, "top_p is 0"),
        ({"top_k": -2}, "top_k is -2"),
        ({"seed": -3}, "seed is -3"),
        ({"stop_ids": [9999]}, "stop_ids holds 9999"),
        ({"session": ""}, "session has 0"),
        ({"deadline_s": 0.0}, "deadline_s is 0"),
        ({"schema": 99}, "schema is 99"),
    ],
)
def test_values_out_of_range_are_refused_by_name(fields: dict, text: str) -> None:
    with running() as engine, pytest.raises(ValueError, match=text):
        engine.generate(GenerateRequest(**{"prompt_ids": [1], "max_tokens": 1, **fields}))


def test_logits_that_are_not_numbers_end_only_with_an_error_and_leave_no_trace_in_the_row() -> None:
    model = tiny_model()
    good = {name: t.clone() for name, t in model.serving_tensors().items()}
    with running(model, num_slots=2) as engine:
        model.load_serving({"model.norm.weight": torch.full_like(good["model.norm.weight"], float("nan"))})
        model.load_serving(
            {"model.layers.0.self_attn.v_proj.weight": torch.full_like(good["model.layers.0.self_attn.v_proj.weight"], float("nan"))}
        )
        assert result(engine, ask(prompt_of(40))).finish_reason is FinishReason.ERROR
        model.load_serving(good)
        pair = [engine.generate(ask(prompt_of(n), max_tokens=8)) for n in (4, 50)]
        for n, future in zip((4, 50), pair, strict=True):
            reply = future.result(DEADLINE_S)
            assert np.array_equal(reply.logprobs_T, packed_logprobs(model, prompt_of(n), reply.token_ids).numpy())


class BrokenModel(type(tiny_model())):  # type: ignore[misc]
    """Fails in the middle of a step."""

    def forward(self, *args, **kwargs):
        raise RuntimeError("out of memory, say")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_crash_of_the_loop_ends_every_request_and_shows_in_health() -> None:
    model = tiny_model()
    with running(model) as engine:
        result(engine, ask(prompt_of(4)))
        model.__class__ = BrokenModel  # while it serves: broken from the start it could fail before the first request
        reply = result(engine, ask(prompt_of(5)))
        assert reply.finish_reason is FinishReason.ERROR
        wait_until(lambda: engine.health().phase == EnginePhase.FAILED, "the engine says that it failed")
        with pytest.raises(NotServing, match="crashed"):
            engine.generate(ask(prompt_of(4)))


def test_closing_cancels_what_still_runs() -> None:
    with running(num_slots=1) as engine:
        futures = [engine.generate(ask(prompt_of(4), max_tokens=200)) for _ in range(4)]
        engine.close()
        reasons = {f.result(DEADLINE_S).finish_reason for f in futures}
        assert reasons <= {FinishReason.CANCELLED, FinishReason.LENGTH} and FinishReason.CANCELLED in reasons
        with pytest.raises(NotServing, match="stopped"):
            engine.generate(ask(prompt_of(4)))


@pytest.mark.parametrize("bad", [{"num_slots": 0}, {"max_len": 1}, {"max_waiting": 0}, {"step_tokens": 0}])
def test_settings_out_of_range_are_refused_by_name(bad: dict) -> None:
    model = tiny_model()
    with pytest.raises(ValueError, match=next(iter(bad))):
        Engine(model, model.config, **bad)
