"""Whole models in the quantised profiles: what the engine decodes, the trainer's packed forward scores with the same bits."""

from __future__ import annotations

import sys
from itertools import chain
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "engine"))
from engine_worlds import CONFIG, DEADLINE_S, VOCAB, packed_logprobs, running

from rollmill.engine.protocol import GenerateReply, GenerateRequest
from rollmill.model import Model, ModelConfig, MoEConfig, PackedAttention
from rollmill.ops.quantised import QUANTISED
from rollmill.trainer.optimizer import MasterAdamW
from rollmill.weights import Fingerprint, fingerprint
from rollmill.weights.quant import quantise

DENSE = CONFIG
SPARSE = msgspec.structs.replace(
    CONFIG, family="qwen3_moe", moe=MoEConfig(num_experts=8, top_k=2, expert_size=24, norm_topk=True, num_shared=1)
)
both = pytest.mark.parametrize("profile", list(QUANTISED))
every_model = pytest.mark.parametrize("config", [DENSE, SPARSE], ids=["dense", "experts"])


def tiny(profile: str, config: ModelConfig, seed: int = 0) -> Model:
    model = Model(config, numerics=profile)
    model.init_weights(seed)
    model.load_serving({name: t * 4 for name, t in model.serving_tensors().items() if t.dim() > 1})
    return model


def requests(num: int = 6) -> list[GenerateRequest]:
    prompts = [[(i * 31 + j * 7) % VOCAB for j in range(3 + 13 * i)] for i in range(num)]
    return [GenerateRequest(prompt_ids=p, max_tokens=12, seed=i, temperature=(1.0, 0.7)[i % 2]) for i, p in enumerate(prompts)]


def decoded(model: Model) -> list[GenerateReply]:
    """In small chunks and together, so that prefill and decode share steps."""
    with running(model, step_tokens=20) as engine:
        return [future.result(DEADLINE_S) for future in [engine.generate(r) for r in requests()]]


def mismatches(model: Model, replies: list[GenerateReply]) -> int:
    scored = [packed_logprobs(model, r.prompt_ids, y.token_ids, r.temperature) for r, y in zip(requests(), replies, strict=True)]
    return sum(int((y.logprobs_T != s.numpy()).sum()) for y, s in zip(replies, scored, strict=True))


def packed(model: Model, tokens: list[list[int]]) -> torch.Tensor:
    attention = PackedAttention([len(t) for t in tokens])
    return model.logits(model(torch.tensor(list(chain.from_iterable(tokens))), attention.positions_T, attention))


@both
@every_model
def test_engine_and_trainer_give_the_same_bits_and_one_changed_code_is_seen(profile: str, config: ModelConfig) -> None:
    model = tiny(profile, config)
    replies = decoded(model)
    assert mismatches(model, replies) == 0
    name = next(n for n in model.slices() if n.endswith("down_proj.weight"))
    weight = model.slices()[name]
    scheme = QUANTISED[profile][0]
    code = quantise("w", weight, scheme)["w"].view(torch.uint8)[0, 0].item()
    # Another code for the first weight of the first row, and nothing else.
    model.patch_serving(name, torch.tensor([0]), torch.tensor([float(weight.abs().max()) * (0.5 if weight[0, 0] < 0 else -0.5)]))
    assert quantise("w", model.slices()[name], scheme)["w"].view(torch.uint8)[0, 0].item() != code
    assert mismatches(model, replies) > 0


@both
def test_quantised_logits_differ_from_those_in_full_precision_but_not_by_much(profile: str) -> None:
    """A coarse check that it is the right model; docs/precision.md has the figures."""
    model, exact = tiny(profile, DENSE), tiny("exact", DENSE)
    tokens = [r.prompt_ids for r in requests()]
    with torch.inference_mode():
        found, wanted = packed(model, tokens), packed(exact, tokens)
    error = float((found - wanted).norm() / wanted.norm())
    assert 0 < error < {"fp8": 0.1, "nvfp4": 0.35}[profile]


@both
@every_model
def test_bits_do_not_depend_on_packing_or_on_gradients(profile: str, config: ModelConfig) -> None:
    model = tiny(profile, config)
    tokens = [r.prompt_ids for r in requests()]
    with torch.inference_mode():
        alone = torch.cat([packed(model, [t]) for t in tokens])
    assert torch.equal(packed(model, tokens), alone)
    assert torch.equal(packed(model, tokens[::-1]), torch.cat(list(reversed(alone.split([len(t) for t in tokens])))))


@both
@every_model
def test_a_step_of_the_trainer_a_loaded_snapshot_and_a_patch_all_reach_the_quantised_weights(profile: str, config: ModelConfig) -> None:
    trained, tokens = tiny(profile, config), [r.prompt_ids for r in requests(2)]

    def logits(model: Model) -> torch.Tensor:
        with torch.inference_mode():
            return packed(model, tokens)

    def check(model: Model) -> None:
        fresh = Model(config, numerics=profile)
        fresh.load_serving(model.serving_tensors())
        assert torch.equal(logits(model), logits(fresh))

    served = tiny(profile, config)
    before = logits(trained)
    assert torch.equal(before, logits(served))
    optimizer = MasterAdamW(trained, lr=1e-2)
    packed(trained, tokens).square().mean().backward()
    assert all(
        p.grad is not None and p.grad.abs().sum() > 0 for n, p in trained.named_parameters() if n.endswith(("qkv", "down", "gate_up"))
    )
    assert optimizer.step().is_applied
    assert not torch.equal(logits(trained), before)
    check(trained)
    served.load_serving(trained.serving_tensors())
    assert torch.equal(logits(served), logits(trained))
    name = next(n for n in served.slices() if n.endswith("q_proj.weight"))
    served.patch_serving(name, torch.tensor([0, 5]), torch.tensor([0.9, -0.9]))
    assert not torch.equal(logits(served), logits(trained))
    check(served)


@both
def test_an_engine_that_swaps_weights_serves_the_new_codes(profile: str) -> None:
    old, new = tiny(profile, DENSE), tiny(profile, DENSE, seed=1)
    wanted = decoded(new)
    with running(old, step_tokens=20) as engine:
        [future.result(DEADLINE_S) for future in [engine.generate(r) for r in requests()]]

        def swap() -> Fingerprint:
            """As a device kernel writes: torch counts nothing."""
            for name, view in old.slices().items():
                view.numpy()[:] = new.slices()[name].numpy()
            return fingerprint(old.serving_tensors())

        assert engine.offer(2, swap).result(DEADLINE_S)
        found = [future.result(DEADLINE_S) for future in [engine.generate(r) for r in requests()]]
    for a, b in zip(found, wanted, strict=True):
        assert a.token_ids == b.token_ids and np.array_equal(a.logprobs_T, b.logprobs_T)
