"""The gates of numerics on a GPU, dense and with experts, through the real engine with replayed graphs."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from rollmill.engine.engine import Engine, EnginePhase
from rollmill.engine.forward import Forward
from rollmill.engine.protocol import GenerateReply, GenerateRequest, SwapMode
from rollmill.engine.swap import WeightWatch, follower_of
from rollmill.model import Model, ModelConfig, MoEConfig
from rollmill.numerics.gates import packed_logprobs, run_gates
from rollmill.weights import Publisher, fingerprint, open_store

SIZES = dict(
    vocab_size=2048, hidden_size=512, intermediate_size=1024, num_layers=3, num_heads=8, num_kv_heads=2, head_dim=64, max_position=2048
)
DENSE = ModelConfig(family="qwen3", **SIZES)
SPARSE = ModelConfig(family="qwen3_moe", moe=MoEConfig(num_experts=16, top_k=4, expert_size=256, norm_topk=True), **SIZES)
DEADLINE_S = 120.0


def lively(config: ModelConfig, numerics: str = "exact", seed: int = 0) -> Model:
    model = Model(config, numerics=numerics)
    model.init_weights(seed)
    model.load_serving({name: t * 2 for name, t in model.serving_tensors().items() if t.dim() > 1})
    return model.to(device="cuda", dtype=torch.bfloat16)


def requests(count: int, *, num_new: int = 60) -> list[GenerateRequest]:
    rng = np.random.default_rng(3)
    return [
        GenerateRequest(
            prompt_ids=rng.integers(0, 2048, 3 + 37 * i % 300).tolist(),
            max_tokens=num_new,
            seed=i,
            temperature=[1.0, 0.7, 0.0][i % 3],
            top_k=20 if i % 5 == 4 else 0,
        )
        for i in range(count)
    ]


def replies(model: Model, asked: list[GenerateRequest], **options) -> list[GenerateReply]:
    is_fixed = options.pop("is_fixed", True)
    engine = Engine(model, model.config, version=1, num_slots=32, **options)
    engine._forward = Forward(model, num_pages=engine.scheduler.book.num_pages, max_len=engine.max_len, is_fixed=is_fixed)
    engine.start()
    try:
        return [f.result(DEADLINE_S) for f in [engine.generate(r) for r in asked]]
    finally:
        engine.close()


@pytest.mark.parametrize("config", [DENSE, SPARSE], ids=["dense", "experts"])
def test_every_gate_holds(config: ModelConfig) -> None:
    gates = list(run_gates(lively(config), num_tokens=900, num_sequences=20))
    assert [g for g in gates if not g.passed] == []


@pytest.mark.parametrize("profile", ["fp8", "nvfp4"])
def test_every_gate_holds_in_quantised_profiles(profile: str) -> None:
    gates = list(run_gates(lively(DENSE, profile), num_tokens=200, num_sequences=8))
    assert [g for g in gates if not g.passed] == []


@pytest.mark.parametrize("config", [DENSE, SPARSE], ids=["dense", "experts"])
def test_replayed_graphs_give_the_bits_of_eager_steps(config: ModelConfig) -> None:
    model, asked = lively(config), requests(23)
    eager, graphs = (replies(model, asked, is_fixed=f, step_tokens=128) for f in (False, True))
    assert [(r.token_ids, r.logprobs) for r in graphs] == [(r.token_ids, r.logprobs) for r in eager]


def test_requests_put_back_for_lack_of_pages_end_with_the_same_bits() -> None:
    model, asked = lively(DENSE), requests(12, num_new=200)
    tight, roomy = replies(model, asked, num_pages=32), replies(model, asked)
    assert [(r.token_ids, r.logprobs) for r in tight] == [(r.token_ids, r.logprobs) for r in roomy]


@pytest.mark.parametrize("mode", list(SwapMode))
def test_swaps_in_place_under_replayed_graphs_serve_exactly_what_was_published(tmp_path: Path, mode: SwapMode) -> None:
    model, store = lively(DENSE), open_store(tmp_path / "store")
    publisher = Publisher(store, run_id="test")
    versions: dict[int, dict[str, torch.Tensor]] = {}

    def publish(seed: int) -> int:
        gen = torch.Generator().manual_seed(seed)
        tensors = {n: (t.float().cpu() + 0.004 * torch.randn(t.shape, generator=gen)).bfloat16() for n, t in start.items()}
        version = publisher.submit(tensors, step=len(versions))
        publisher.flush(DEADLINE_S)
        versions[version] = tensors
        return version

    start = {n: t.cpu() for n, t in model.serving_tensors().items()}
    engine = Engine(model, model.config, num_slots=8, swap_mode=mode)
    watch = WeightWatch(engine, follower_of(store, model), poll_s=0.002)
    publish(0)
    engine.start()
    watch.start()
    done: list[GenerateReply] = []
    try:
        served = threading.Event()
        while engine.phase is not EnginePhase.SERVING:
            assert not served.wait(0.01)
        for seed in range(1, 6):
            futures = [engine.generate(GenerateRequest(prompt_ids=[seed, i, 5], max_tokens=1800, seed=i)) for i in range(6)]
            version = publish(seed)
            while engine.version != version:
                assert not served.wait(0.005)
            done += [f.result(DEADLINE_S) for f in futures]
            assert engine.fingerprint == fingerprint(versions[version]).total
    finally:
        engine.close()
        watch.close()
        publisher.close()
    crossed = [r for r in done if len(r.spans) > 1]
    assert crossed, "some request lived through a swap"
    fresh = lively(DENSE)
    for i, reply in enumerate(done):
        prompt = [i // 6 + 1, i % 6, 5]
        for span in reply.spans if mode is SwapMode.RE_PREFILL else reply.spans[:1]:
            fresh.load_serving({n: t.cuda() for n, t in versions[span.version].items()})
            with torch.no_grad():
                again = packed_logprobs(fresh, [prompt + reply.token_ids], [3])[0].cpu().numpy()
            assert np.array_equal(again[span.start : span.end], reply.logprobs_T[span.start : span.end])
