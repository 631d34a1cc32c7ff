"""Experts: routers choose and weigh as the reference does, routes can be recorded and imposed, and a token's sum is its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_worlds import fresh, tiny

pytest.importorskip("transformers")
import transformers
from peer_worlds import RAGGED, SPARSE, hidden, packed_logits, saved_peer
from safetensors.torch import load_file, save_file
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

from rollmill.model import CheckpointError, ForcedRoutes, Model, ModelConfig, MoEConfig, RecordedRoutes, check_model, load_model
from rollmill.model.checkpoint import _serving_parts
from rollmill.model.families import MoENames
from rollmill.model.moe import MoE
from rollmill.ops import CpuOps
from rollmill.ops.torch_ops import combine, top_ids

EXPERTS = MoEConfig(num_experts=8, top_k=3, expert_size=16, norm_topk=True)
OPS = CpuOps()
NUM_TOKENS = sum(len(s) for s in RAGGED)


def sparse(**changes: Any) -> ModelConfig:
    return tiny(family="qwen3_moe", moe=msgspec.structs.replace(EXPERTS, **changes))


def sharp(config: ModelConfig, seed: int = 0) -> Model:
    """Fresh weights, far enough apart that tokens really take different experts."""
    model = fresh(config, seed)
    model.load_serving({name: t * 8 for name, t in model.serving_tensors().items() if t.dim() > 1})
    return model


def peer_choice(peer: Any, sequences: list[list[int]], num_layers: int, top_k: int) -> torch.Tensor:
    """What the reference's routers chose, [T, L, K] ascending, -1 where a layer has none."""
    out = torch.full((sum(len(s) for s in sequences), num_layers, top_k), -1, dtype=torch.int16)
    at = 0
    for sequence in sequences:
        hooks = []
        for i, layer in enumerate(peer.model.layers):
            if hasattr(layer.mlp, "gate"):

                def keep(_module: Any, _args: Any, result: Any, i: int = i, rows: slice = slice(at, at + len(sequence))) -> None:
                    out[rows, i] = result[2].sort(-1).values.to(torch.int16)

                hooks.append(layer.mlp.gate.register_forward_hook(keep))
        with torch.no_grad():
            peer(torch.tensor([sequence]))
        for hook in hooks:
            hook.remove()
        at += len(sequence)
    return out


@pytest.mark.parametrize("name", SPARSE)
def test_recorded_routes_are_the_references_choice(name: str, tmp_path: Path) -> None:
    peer = saved_peer(name, tmp_path)
    model, config = load_model(tmp_path)
    assert config.moe
    routes = RecordedRoutes(config)
    packed_logits(model, RAGGED, routes)
    ids = routes.ids_TLK()
    assert ids.shape == (NUM_TOKENS, config.num_layers, config.moe.top_k)
    assert torch.equal(ids, peer_choice(peer, RAGGED, config.num_layers, config.moe.top_k))
    assert {i for i in range(config.num_layers) if (ids[:, i] >= 0).all()} == {i for i in range(config.num_layers) if config.is_sparse(i)}


@pytest.mark.parametrize("name", SPARSE)
def test_own_routes_imposed_change_no_bit(name: str, tmp_path: Path) -> None:
    saved_peer(name, tmp_path)
    model, config = load_model(tmp_path)
    routes = RecordedRoutes(config)
    free = packed_logits(model, RAGGED, routes)
    shuffled = routes.ids_TLK().flip(-1)
    for forced in (shuffled, torch.full_like(shuffled, -1)):
        assert all(torch.equal(a, b) for a, b in zip(free, packed_logits(model, RAGGED, ForcedRoutes(forced, config)), strict=True))


def test_imposed_routes_are_taken_with_live_weights_and_the_router_still_learns() -> None:
    config = sparse()
    model = sharp(config)
    other = torch.tensor([1, 4, 6], dtype=torch.int16).expand(NUM_TOKENS, config.num_layers, 3).clone()
    other[7:9] = -1
    seen = RecordedRoutes(config)
    forced = ForcedRoutes(other, config)

    def both(layer: int, ids_TK: torch.Tensor, choice_TX: torch.Tensor) -> torch.Tensor:
        return seen(layer, forced(layer, ids_TK, choice_TX), choice_TX)

    model.logits(hidden(model, RAGGED, both)).log_softmax(-1)[:, 5].sum().backward()
    live = RecordedRoutes(config)
    packed_logits(model, RAGGED, live)
    rows = torch.tensor([i for i in range(NUM_TOKENS) if i not in (7, 8)])
    assert torch.equal(seen.ids_TLK()[rows], other[rows]) and bool((seen.ids_TLK()[7:9] >= 0).all())
    assert torch.equal(seen.ids_TLK()[7:9, 0], live.ids_TLK()[7:9, 0])
    moe: Any = model.layers[0].mlp
    assert float(moe.router.weight.grad.abs().max()) > 0
    took = sorted({int(i) for i in seen.ids_TLK()[:, 0].flatten()})
    assert [x for x in range(8) if float(moe.down.grad[x].abs().max()) > 0] == took

    # The weights: a softmax over the imposed experts alone, since this family scales the chosen ones to sum to one.
    h = torch.randn(NUM_TOKENS, 32)
    with torch.no_grad():
        ids, gates = moe.router(h, 0, OPS, forced)
        logits = h @ moe.router.weight.T
    assert torch.allclose(gates[rows], logits.gather(1, ids)[rows].softmax(-1), atol=1e-6)


def test_routes_that_cannot_be_are_refused() -> None:
    config = sparse()
    good = torch.tensor([0, 1, 2]).expand(4, config.num_layers, 3).clone()
    ForcedRoutes(good, config)
    for bad, why in (
        (good[:, :1], r"needs \(tokens, 2 layers, 3 experts\)"),
        (good + 6, r"this model has 0\.\.7"),
        (good - 2, r"experts -2\.\."),
        (torch.where(good == 2, 1, good), "an expert twice"),
        (torch.where(good == 2, -1, good), "only some of"),
    ):
        with pytest.raises(ValueError, match=why):
            ForcedRoutes(bad, config)
    with pytest.raises(ValueError, match="routes are for 4 tokens, the batch has 32"):
        packed_logits(sharp(config), RAGGED, ForcedRoutes(good, config))
    with pytest.raises(ValueError, match="no routes were recorded"):
        RecordedRoutes(config).ids_TLK()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.integers(0, 3), min_size=9, max_size=9), min_size=1, max_size=5), st.integers(1, 9))
def test_ties_go_to_the_lower_expert(rows: list[list[int]], k: int) -> None:
    got = top_ids(torch.tensor(rows, dtype=torch.float32), k).tolist()
    assert got == [sorted(sorted(range(9), key=lambda x: (-row[x], x))[:k]) for row in rows]


def test_router_counts_in_float32_whatever_the_model_computes_in() -> None:
    model = sharp(sparse()).to(torch.bfloat16)
    moe: Any = model.layers[0].mlp
    h = torch.randn(64, 32).bfloat16()
    _, gates = moe.router(h, 0, OPS, None)
    wanted = (h.float() @ moe.router.weight.float().T).softmax(-1).topk(3).values
    assert gates.dtype is torch.float32
    assert torch.allclose(gates.sort(descending=True).values, wanted / wanted.sum(-1, keepdim=True), atol=1e-6)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(0, 2**31), st.integers(1, 40), st.integers(0, 39))
def test_a_tokens_sum_depends_on_its_own_experts_outputs_alone(seed: int, num_others: int, place: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    y_TKD, gates_TK = torch.randn(1 + num_others, 3, 32, generator=gen), torch.rand(1 + num_others, 3, generator=gen)
    alone = combine(y_TKD[:1], gates_TK[:1])[0]
    order = torch.roll(torch.arange(1 + num_others), place)
    assert torch.equal(combine(y_TKD[order], gates_TK[order])[(order == 0).nonzero()[0, 0]], alone)


def test_a_tokens_bits_do_not_change_with_the_routing_of_the_others() -> None:
    moe: Any = sharp(sparse()).layers[0].mlp
    gen = torch.Generator().manual_seed(1)
    token, outs, loads = torch.randn(1, 32, generator=gen), [], set()
    for num_others in (0, 1, 2, 5, 17, 100, 255, 255):
        others = torch.randn(num_others, 32, generator=gen)
        ids, _ = moe.router(others, 0, OPS, None)
        loads.add(tuple(torch.bincount(ids.flatten(), minlength=8).tolist()))
        place = int(torch.randint(0, num_others + 1, (1,), generator=gen))
        with torch.no_grad():
            outs.append(moe.mix(torch.cat([others[:place], token, others[place:]]), OPS, None)[place])
    assert len(loads) == 8
    assert all(torch.equal(out, outs[0]) for out in outs[1:])


def test_packed_batch_equals_one_by_one_with_experts() -> None:
    model = sharp(sparse())
    together = packed_logits(model, RAGGED)
    for sequence, packed in zip(RAGGED, together, strict=True):
        assert torch.allclose(packed_logits(model, [sequence])[0], packed, atol=2e-6, rtol=0)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_stacked_and_single_experts_load_alike(name: str, tmp_path: Path) -> None:
    peer = saved_peer(name, tmp_path)
    model, config = load_model(tmp_path)
    single = load_file(tmp_path / "model.safetensors")
    stacked = {key: value.contiguous() for key, value in peer.state_dict().items()}
    assert stacked.keys() != single.keys() and any(key.endswith("experts.gate_up_proj") for key in stacked)
    save_file(stacked, tmp_path / "model.safetensors")
    assert check_model(tmp_path) == config
    again, _ = load_model(tmp_path)
    assert again.serving_tensors().keys() == single.keys()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    key = next(key for key in stacked if key.endswith("experts.gate_up_proj"))
    for damaged, why in ((stacked[key][:-1], "lacks"), (stacked[key].flatten(0, 1), "three dimensions"), (stacked[key][:, :-2], "shape")):
        save_file(stacked | {key: damaged.contiguous()}, tmp_path / "model.safetensors")
        for read in (load_model, check_model):
            with pytest.raises(CheckpointError, match=why):
                read(tmp_path)


DEEPSEEK = {
    "normed": dict(norm_topk_prob=True, n_group=1, topk_group=1, routed_scaling_factor=2.5),
    "plain": dict(norm_topk_prob=False, n_group=1, topk_group=1, routed_scaling_factor=1.0),
    "grouped": dict(norm_topk_prob=True, n_group=4, topk_group=2, routed_scaling_factor=2.5),
    "grouped_two_shared": dict(norm_topk_prob=True, n_group=2, topk_group=1, routed_scaling_factor=1.5, n_shared_experts=2),
}


@pytest.mark.parametrize("name", DEEPSEEK)
def test_deepseek_router_and_shared_experts_equal_the_references(name: str) -> None:
    raw = dict(n_shared_experts=1) | DEEPSEEK[name]
    peer_config = transformers.DeepseekV3Config(
        hidden_size=32, moe_intermediate_size=16, n_routed_experts=16, num_experts_per_tok=4, num_hidden_layers=1, **raw
    )
    peer = DeepseekV3MoE(peer_config).eval()
    gen = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in (*peer.parameters(), peer.gate.e_score_correction_bias):
            p.copy_(torch.randn(p.shape, generator=gen) * (0.3 if p.dim() > 1 else 0.2))
    config = MoEConfig(
        num_experts=16,
        top_k=4,
        expert_size=16,
        norm_topk=bool(raw["norm_topk_prob"]),
        is_sigmoid=True,
        num_groups=int(raw["n_group"]),
        top_groups=int(raw["topk_group"]),
        scale=float(raw["routed_scaling_factor"]),
        num_shared=int(raw["n_shared_experts"]),
    )
    mine = MoE(config, hidden_size=32, names=MoENames(), layer=0)
    live = dict(mine.named_slices())
    shape = sparse()
    stored = dict(part for key, value in peer.state_dict().items() for part in _serving_parts(f"layer.mlp.{key}", value, shape))
    assert {f"layer.{key}" for key in live} - stored.keys() == {"layer.post_attention_layernorm.weight"}
    with torch.no_grad():
        for key, value in stored.items():
            live[key.removeprefix("layer.")].copy_(value)
    h = torch.randn(50, 32, generator=gen, requires_grad=True)
    _, weights, chosen = peer.gate(h)
    ids, gates = mine.router(h, 0, OPS, None)
    order = chosen.argsort(-1)
    assert torch.equal(ids, chosen.gather(1, order))
    assert torch.allclose(gates, weights.gather(1, order), atol=1e-6)
    out, wanted = mine.mix(h, OPS, None), peer(h[None])[0]
    assert torch.allclose(out, wanted, atol=1e-5)
    (grad,) = torch.autograd.grad(out.square().sum(), h)
    (peer_grad,) = torch.autograd.grad(wanted.square().sum(), h)
    assert torch.allclose(grad, peer_grad, atol=1e-4, rtol=1e-4)
    assert not mine.router.bias.requires_grad  # type: ignore[union-attr]
