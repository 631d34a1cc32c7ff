"""Every family computes what the reference implementation computes: logits, gradients, and after a round trip through files."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
import transformers
from peer_worlds import DENSE, FAMILIES, RAGGED, ROPES, SPARSE, hidden, packed_logits, peer, peer_logits, saved_peer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rollmill.model import Model, check_model, load_model, save_model
from rollmill.model.checkpoint import _serving_parts
from rollmill.model.rope import RopeScaling, frequencies

# Both sum in fp32 in another order: |logit| < 8 here, so this is some twenty units in the last place.
CLOSE = 1e-5


def furthest(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("name", [*DENSE, *SPARSE])
def test_family_computes_what_the_reference_computes_and_survives_files_both_ways(name: str, tmp_path: Path) -> None:
    theirs = saved_peer(name, tmp_path / "theirs")
    wanted = peer_logits(theirs, RAGGED)
    model, config = load_model(tmp_path / "theirs")
    assert check_model(tmp_path / "theirs") == config
    assert max(float(w.abs().max()) for w in wanted) > 0.5
    assert furthest(packed_logits(model, RAGGED), wanted) <= CLOSE

    save_model(model, tmp_path / "mine", shard_bytes=20_000)
    assert len(list((tmp_path / "mine").glob("model-*.safetensors"))) > 1
    again, same = load_model(tmp_path / "mine")
    assert same == config and all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))
    back, found = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "mine", dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert type(back) is type(theirs)
    assert not any(found[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), found
    # The weights are the same bits; only a yarn factor that the reference derived anew can differ in the last place.
    assert furthest(peer_logits(back, RAGGED), wanted) <= 1e-6


def named_gradients(model: Model) -> dict[str, torch.Tensor]:
    shadow = copy.deepcopy(model)
    with torch.no_grad():
        for to, live in zip(shadow.parameters(), model.parameters(), strict=True):
            assert live.grad is not None
            to.copy_(live.grad)
    return dict(shadow.named_slices())


@pytest.mark.parametrize("name", ["llama_biased", "qwen2", "qwen3", "mistral", *SPARSE])
def test_gradients_equal_the_references(name: str, tmp_path: Path) -> None:
    theirs = saved_peer(name, tmp_path)
    model, config = load_model(tmp_path)
    gen = torch.Generator().manual_seed(4)
    weights = [torch.randn(len(s), config.vocab_size, generator=gen) for s in RAGGED]
    logits = model.logits(hidden(model, RAGGED)).log_softmax(-1)
    (logits * torch.cat(weights)).sum().backward()
    for sequence, weight in zip(RAGGED, weights, strict=True):
        (theirs(torch.tensor([sequence])).logits[0].log_softmax(-1) * weight).sum().backward()
    mine = named_gradients(model)
    wanted = dict(part for n, p in theirs.named_parameters() for part in _serving_parts(n, p.grad, config))
    assert mine.keys() == wanted.keys()
    for key, grad in mine.items():
        scale = max(1.0, float(wanted[key].abs().max()))
        assert float((grad.detach() - wanted[key]).abs().max()) <= 1e-4 * scale, key


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("head_dim", [8, 64, 128])
def test_frequencies_and_attention_factor_follow_the_reference(name: str, head_dim: int) -> None:
    raw = ROPES[name] | {"original_max_position_embeddings": 4096} if name != "linear" else ROPES[name]
    peer_config = transformers.LlamaConfig(
        hidden_size=4 * head_dim, num_attention_heads=4, max_position_embeddings=32768, rope_parameters=raw
    )
    wanted, factor = ROPE_INIT_FUNCTIONS[raw["rope_type"]](peer_config)
    scaling = RopeScaling.from_hf(raw, max_position=32768)
    assert scaling is not None and scaling.attention_factor == pytest.approx(factor)
    got = frequencies(head_dim=head_dim, theta=raw["rope_theta"], scaling=scaling)
    assert torch.allclose(got.float(), wanted, rtol=1e-5, atol=0)
    assert RopeScaling.from_hf(scaling.to_hf(), max_position=32768) == scaling


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_stored_bits_survive_for_every_family(name: str, dtype: str, tmp_path: Path) -> None:
    theirs = peer(name).to(getattr(torch, dtype))
    theirs.save_pretrained(tmp_path / "theirs")
    model, config = load_model(tmp_path / "theirs")
    assert config.dtype == dtype
    save_model(model, tmp_path / "mine")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "mine")
    assert back.dtype == getattr(torch, dtype)
    state: dict[str, Any] = back.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in theirs.state_dict().items())


@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe", "olmoe", "mixtral"])
def test_every_stored_tensor_is_a_contiguous_view_that_can_be_patched(name: str, tmp_path: Path) -> None:
    saved_peer(name, tmp_path)
    model, _ = load_model(tmp_path)
    slices = dict(model.named_slices())
    assert sum(t.numel() for t in slices.values()) == model.num_parameters
    for key, live in slices.items():
        assert live.is_contiguous()
        model.patch_serving(key, torch.tensor([live.numel() - 1]), torch.tensor([7.5]))
        assert float(live.detach().view(-1)[-1]) == 7.5
    moved = copy.deepcopy(model)
    moved.patch_serving("model.norm.weight", torch.tensor([0]), torch.tensor([3.0]))
    assert moved.norm.tolist()[0] == 3.0 and model.norm.tolist()[0] != 3.0
    half = model.to(torch.bfloat16)
    half.patch_serving("model.norm.weight", torch.tensor([0]), torch.tensor([2.0]))
    assert half.norm.tolist()[0] == 2.0
