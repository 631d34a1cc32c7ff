"""Claims about recorded experts: what the engine says a token took is what the trainer's forward takes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_worlds import CONFIG, DEADLINE_S, Gate, running, tiny_model, wait_until

from rollmill.engine.protocol import GenerateRequest, SwapMode
from rollmill.model import Model, MoEConfig, PackedAttention, RecordedRoutes
from rollmill.model.config import ModelConfig
from rollmill.model.route_record import RouteRecord
from rollmill.weights import Fingerprint, fingerprint

SPARSE = ModelConfig(
    family="qwen3_moe",
    **{
        k: getattr(CONFIG, k)
        for k in "vocab_size hidden_size intermediate_size num_layers num_heads num_kv_heads head_dim max_position".split()
    },
    moe=MoEConfig(num_experts=8, top_k=3, expert_size=32, norm_topk=True, dense_layers=(0,)),
)


def taken(model: Model, tokens: list[int]) -> np.ndarray:
    routes, attention = RecordedRoutes(model.config), PackedAttention([len(tokens)])
    with torch.inference_mode():
        model(torch.tensor(tokens), attention.positions_T, attention, routes)
    return routes.ids_TLK().numpy()


def test_recorded_experts_are_those_of_the_packed_forward_also_on_shared_pages_and_after_being_put_back() -> None:
    model = tiny_model(0, SPARSE)
    prompt = [i % 250 for i in range(100)]
    requests = [GenerateRequest(prompt_ids=prompt, max_tokens=120, seed=s, routes_from=s * 30) for s in range(4)]
    with running(model, num_slots=4, num_pages=8) as engine:
        replies = [f.result(DEADLINE_S) for f in [engine.generate(r) for r in requests]]
        assert engine.metrics.preemptions._value.get() > 0
        plain = engine.generate(GenerateRequest(prompt_ids=prompt, max_tokens=3)).result(DEADLINE_S)
    assert plain.routes == b""
    assert any(r.num_reused for r in replies), "pages were shared"
    for request, reply in zip(requests, replies, strict=True):
        tokens = prompt + reply.token_ids
        record = RouteRecord.from_bytes(reply.routes)
        # The last sampled token was never computed.
        assert record.num_tokens == len(tokens) - 1 - request.routes_from
        assert np.array_equal(record.ids_TLK(), taken(model, tokens)[request.routes_from : -1])


def test_recorded_experts_of_a_prompt_are_those_of_the_weights_that_sampled_its_first_token() -> None:
    """New weights came when half of the prompt was computed, and the whole of it was computed again."""
    model, prompt = tiny_model(0, SPARSE), [i % 250 for i in range(100)]
    newer = tiny_model(1, SPARSE).serving_tensors()

    def swap() -> Fingerprint:
        model.load_serving(newer)
        return fingerprint(model.serving_tensors())

    with running(model, swap_mode=SwapMode.RE_PREFILL, step_tokens=16) as engine:
        gate = Gate(engine)
        gate.allow(3)
        replied = engine.generate(GenerateRequest(prompt_ids=prompt, max_tokens=5, seed=1, routes_from=0))
        wait_until(lambda: engine.scheduler.running[0].num_computed >= 48 if engine.scheduler.running else False, "half is computed")
        swapped = engine.offer(2, swap)
        gate.open()
        reply = replied.result(DEADLINE_S)
        assert swapped.result(DEADLINE_S)
    assert reply.versions_T.tolist() == [2] * 5
    assert np.array_equal(RouteRecord.from_bytes(reply.routes).ids_TLK(), taken(model, prompt + reply.token_ids)[:-1])


def test_routes_of_a_dense_model_or_beyond_the_prompt_are_refused() -> None:
    with running(tiny_model()) as engine, pytest.raises(ValueError, match="has no experts"):
        engine.generate(GenerateRequest(prompt_ids=[1, 2], max_tokens=3, routes_from=0))
    with running(tiny_model(0, SPARSE)) as engine, pytest.raises(ValueError, match="routes_from is 3, the prompt has 2 tokens"):
        engine.generate(GenerateRequest(prompt_ids=[1, 2], max_tokens=3, routes_from=3))
