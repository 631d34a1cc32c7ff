"""The decoder computes what the reference implementation computes, and a packed batch what its sequences compute alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_worlds import fresh, tiny

from rollmill.model import Model, ModelConfig, PackedAttention

SHAPES = {
    "tied": {},
    "untied": {"tied": False},
    "grouped": {"num_kv_heads": 2},
    "one_kv_head_untied": {"num_kv_heads": 1, "tied": False},
    "wide_heads": {"num_heads": 2, "num_kv_heads": 2, "head_dim": 24},
    "other_rope_and_eps": {"rope_theta": 500000.0, "norm_eps": 1e-6},
}


def run(model: Model, sequences: list[list[int]]) -> list[torch.Tensor]:
    attention = PackedAttention([len(s) for s in sequences])
    tokens = torch.tensor([t for s in sequences for t in s])
    with torch.no_grad():
        logits = model.logits(model(tokens, attention.positions_T, attention))
    return list(logits.split([len(s) for s in sequences]))


@pytest.mark.parametrize("name", SHAPES)
def test_logits_equal_the_reference_implementation(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    model = fresh(tiny(**SHAPES[name]), seed=3)
    peer = transformers.LlamaForCausalLM(transformers.LlamaConfig(**model.config.to_hf(), attn_implementation="eager")).eval().float()
    found = peer.load_state_dict(model.serving_tensors(), strict=False)
    assert found.unexpected_keys == [] and found.missing_keys in ([], ["lm_head.weight"])
    peer.tie_weights()
    ids = torch.randint(0, 64, (3, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = peer(ids).logits
    # Both sum in fp32 in another order: |logit| < 1 here, so 1e-5 is about a hundred units in the last place.
    for row, mine in zip(wanted, run(model, ids.tolist()), strict=True):
        assert float((row - mine).abs().max()) <= 1e-5


def test_config_round_trips_through_the_reference_config() -> None:
    transformers = pytest.importorskip("transformers")
    config = tiny(num_kv_heads=2, tied=False, rope_theta=12345.0)
    assert ModelConfig.from_hf(transformers.LlamaConfig(**config.to_hf()).to_dict()) == config


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.integers(0, 63), min_size=1, max_size=40), min_size=1, max_size=5))
def test_packed_batch_equals_one_by_one(sequences: list[list[int]]) -> None:
    model = fresh(tiny(num_kv_heads=2))
    for alone, packed in zip([run(model, [s])[0] for s in sequences], run(model, sequences), strict=True):
        assert torch.allclose(alone, packed, atol=1e-6, rtol=0)


def test_a_sequence_sees_neither_its_neighbours_nor_its_future() -> None:
    model = fresh(tiny())
    base = run(model, [[1, 2, 3, 4], [5, 6, 7]])
    other = run(model, [[1, 2, 3, 9], [8, 8, 8]])
    assert torch.equal(base[0][:3], other[0][:3]) and not torch.equal(base[0][3], other[0][3])


def test_gradients_of_packed_batch_equal_sum_of_single_ones() -> None:
    model = fresh(tiny(num_kv_heads=2))

    def loss(sequences: list[list[int]]) -> torch.Tensor:
        attention = PackedAttention([len(s) for s in sequences])
        hidden = model(torch.tensor([t for s in sequences for t in s]), attention.positions_T, attention)
        return model.logits(hidden).log_softmax(-1)[:, 5].sum()

    sequences = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]
    packed = torch.autograd.grad(loss(sequences), list(model.parameters()))
    single = [torch.autograd.grad(loss([s]), list(model.parameters())) for s in sequences]
    for together, apart in zip(packed, zip(*single, strict=True), strict=True):
        assert torch.allclose(together, sum(apart[1:], start=apart[0]), atol=1e-5)


def test_empty_sequence_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError):
        PackedAttention([3, 0])


def test_angles_stay_float32_whatever_the_model_computes_in() -> None:
    model = fresh(tiny())
    cos = model.cos.clone()
    assert torch.equal(model.to(torch.bfloat16).cos, cos) and model.embed.dtype is torch.bfloat16
    with torch.device("meta"):
        empty = Model(model.config)
    assert torch.equal(empty.to_empty(device="cpu").cos, cos)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_made_block_by_block_have_the_bits_and_gradients_of_one_block(monkeypatch: pytest.MonkeyPatch, temperature: float) -> None:
    model = fresh(tiny())
    hidden = torch.randn(50, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(50) % model.config.vocab_size
    found = []
    for rows in (1000, 7):
        monkeypatch.setattr("rollmill.model.transformer.LOGIT_ROWS", rows)
        x = hidden.clone().requires_grad_()
        model.zero_grad()
        logprobs, entropies = model.score(x, ids, temperature)
        logprobs.sum().backward()
        found.append((logprobs.detach(), entropies, x.grad, model.embed.grad))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    # Gradients of the head are summed over blocks in another order: rounding of 50 terms.
    assert torch.allclose(found[0][2], found[1][2], atol=1e-6) and torch.allclose(found[0][3], found[1][3], atol=1e-5)
