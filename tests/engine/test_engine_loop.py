"""Claims about the running engine: numerics, batching, sessions, ends of life."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch
from engine_worlds import DEADLINE_S, VOCAB, packed_logprobs, running, tiny_model, wait_until

from rollmill.engine.engine import Engine, EnginePhase, NotServing, VersionMismatch, deliver, reply_of
from rollmill.engine.protocol import FinishReason, GenerateReply, GenerateRequest
from rollmill.engine.scheduler import QueueFull


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
        np.testing.assert_allclose(reply.logprobs_T, expected.numpy(), atol=1e-4)
        assert reply.versions_T.tolist() == [1] * 24


def test_a_request_gives_the_same_tokens_alone_and_in_a_crowd() -> None:
    with running(num_slots=4) as engine:
        wanted = ask(prompt_of(17), seed=77, max_tokens=60)
        alone = result(engine, wanted)
        crowd = [engine.generate(ask(prompt_of(5 + i, i), seed=i, max_tokens=5 + 7 * i)) for i in range(8)]
        together = result(engine, wanted)
        assert [len(f.result(DEADLINE_S).token_ids) for f in crowd] == [5 + 7 * i for i in range(8)]
    assert together.token_ids == alone.token_ids
    np.testing.assert_allclose(together.logprobs_T, alone.logprobs_T, atol=1e-4)
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


def test_the_next_turn_of_a_session_reuses_its_cache_and_gives_the_same_result_as_a_fresh_one() -> None:
    model = tiny_model()
    with running(model) as engine:
        first = result(engine, ask(prompt_of(20), session="s"))
        second_prompt = prompt_of(20) + first.token_ids + [9, 8, 7]
        second = result(engine, ask(second_prompt, session="s"))
        fresh = result(engine, ask(second_prompt))
    # Of the first turn everything but its last sampled token was computed.
    assert (first.num_reused, second.num_reused, fresh.num_reused) == (0, 20 + 24 - 1, 0)
    assert second.token_ids == fresh.token_ids
    np.testing.assert_allclose(second.logprobs_T, fresh.logprobs_T, atol=1e-4)
    np.testing.assert_allclose(second.logprobs_T, packed_logprobs(model, second_prompt, second.token_ids).numpy(), atol=1e-4)


def test_a_session_that_forks_reuses_only_the_common_beginning() -> None:
    model = tiny_model()
    with running(model) as engine:
        result(engine, ask(prompt_of(20), session="s"))
        forked = [*prompt_of(12), 250, 251, 252]
        reply = result(engine, ask(forked, session="s"))
        again = result(engine, ask(forked, session="s"))
    assert reply.num_reused == 12
    assert again.num_reused == len(forked) - 1, "the last prompt token is always computed"
    np.testing.assert_allclose(reply.logprobs_T, packed_logprobs(model, forked, reply.token_ids).numpy(), atol=1e-4)
    assert again.token_ids == reply.token_ids


def test_many_sessions_over_few_rows_stay_correct() -> None:
    model = tiny_model()
    with running(model, num_slots=5) as engine:
        histories = {s: prompt_of(6 + s, s) for s in range(12)}
        num_reused = 0
        for turn in range(3):
            futures = {s: engine.generate(ask(h, session=f"s{s}", seed=s, max_tokens=4 + (s + turn) % 5)) for s, h in histories.items()}
            for s, future in futures.items():
                reply = future.result(DEADLINE_S)
                num_reused += reply.num_reused
                np.testing.assert_allclose(reply.logprobs_T, packed_logprobs(model, histories[s], reply.token_ids).numpy(), atol=1e-4)
                histories[s] = histories[s] + reply.token_ids + [s, turn]
        last = result(engine, ask(histories[11], session="s11"))
        num_reused += last.num_reused
    assert num_reused > 0


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
        with pytest.raises(QueueFull, match="5 requests wait already"):
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
            np.testing.assert_allclose(reply.logprobs_T, packed_logprobs(model, prompt_of(n), reply.token_ids).numpy(), atol=1e-4)


class BrokenModel(type(tiny_model())):  # type: ignore[misc]
    """Fails in the middle of a step."""

    def forward(self, *args, **kwargs):
        raise RuntimeError("out of memory, say")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_crash_of_the_loop_ends_every_request_and_shows_in_health() -> None:
    model = tiny_model()
    model.__class__ = BrokenModel
    with running(model) as engine:
        reply = result(engine, ask(prompt_of(4)))
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
