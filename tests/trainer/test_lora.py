"""Adapters: what they compute, how their gradients come about, and the directory they are kept in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rollmill.model import Model, ModelConfig, MoEConfig, PackedAttention
from rollmill.trainer.attach import Attached
from rollmill.trainer.lora import Lora, LoraConfig, targets
from rollmill.trainer.lora_files import load_adapter, save_adapter

SHAPE = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "max_position": 64,
}


def model_of(**changes: object) -> Model:
    model = Model(ModelConfig(**{**SHAPE, **changes}), numerics="fast")  # type: ignore[arg-type]
    model.init_weights(0)
    return model


def loss_of(model: Model) -> torch.Tensor:
    tokens_T = torch.arange(12) * 3 % 40
    attention = PackedAttention([12], tokens_T.device)
    hidden_TD = model(tokens_T, attention.positions_T, attention)
    return -model.score(hidden_TD[:-1], tokens_T[1:])[0].sum()


def randomised(lora: Lora) -> Lora:
    gen = torch.Generator().manual_seed(1)
    lora.load({key: torch.randn(p.shape, generator=gen) * 0.1 for key, p in lora.parameters().items()})
    return lora


def test_new_adapter_changes_no_bit_of_the_model() -> None:
    model = model_of()
    before = model.serving_tensors()
    Attached(model, Lora.of(model, LoraConfig(rank=4)))
    assert all(torch.equal(before[name], now) for name, now in model.serving_tensors().items())


def test_merged_weight_is_the_exact_sum_rounded_once() -> None:
    model = model_of()
    base = model.serving_tensors()
    lora = randomised(Lora.of(model, LoraConfig(rank=4, alpha=8.0)))
    Attached(model, lora)
    for name in lora.names:
        a, b = (lora.parameters()[f"{name}.{side}"].double() for side in "AB")
        exact = base[name].double() + 2.0 * (b @ a)
        # The fp32 sum of R + 1 terms is off by at most (R + 1) * 2**-24 of the terms' magnitudes; then one rounding to bfloat16, 2**-9.
        magnitude = base[name].double().abs() + 2.0 * (b.abs() @ a.abs())
        bound = 5 * 2.0**-23 * magnitude + 2.0**-8 * exact.abs()
        assert bool(((model.serving_tensors()[name].double() - exact).abs() <= bound).all()), name


def test_gradients_are_those_of_the_unmerged_form() -> None:
    model = model_of()
    lora = randomised(Lora.of(model, LoraConfig(rank=4, alpha=8.0)))
    Attached(model, lora)
    loss_of(model).backward()
    # The same gradient by hand: the merged weights as leaves, then the chain rule in float64.
    plain = model_of()
    plain.load_serving(model_merged(lora))
    loss_of(plain).backward()
    whole = gradients_by_name(plain)
    for name in lora.names:
        a, b = (lora.parameters()[f"{name}.{side}"] for side in "AB")
        g = whole[name].double()
        assert a.grad is not None and b.grad is not None
        assert torch.allclose(a.grad.double(), 2.0 * (b.double().T @ g), rtol=1e-4, atol=1e-6)
        assert torch.allclose(b.grad.double(), 2.0 * (g @ a.double().T), rtol=1e-4, atol=1e-6)


def model_merged(lora: Lora) -> dict[str, torch.Tensor]:
    base = model_of().serving_tensors()
    return {name: lora.value(name, base[name]).to(torch.bfloat16) for name in lora.names}


def gradients_by_name(model: Model) -> dict[str, torch.Tensor]:
    twin = model_of()
    with torch.no_grad():
        for mine, theirs in zip(twin.parameters(), model.parameters(), strict=True):
            mine.copy_(torch.zeros_like(mine) if theirs.grad is None else theirs.grad)
    return {name: live.clone() for name, live in twin.slices().items()}


def test_gradients_add_up_over_passes_and_leave_nothing_on_the_model() -> None:
    model = model_of()
    lora = randomised(Lora.of(model, LoraConfig(rank=4)))
    Attached(model, lora)
    loss_of(model).backward()
    once = {key: p.grad.clone() for key, p in lora.parameters().items() if p.grad is not None}
    loss_of(model).backward()
    assert len(once) == len(lora.parameters())
    assert all(torch.equal(2 * once[key], p.grad) for key, p in lora.parameters().items() if p.grad is not None)
    assert all(p.grad is None for p in model.parameters())


def test_detaching_restores_the_model() -> None:
    model = model_of()
    before = model.serving_tensors()
    attached = Attached(model, randomised(Lora.of(model, LoraConfig(rank=4))))
    assert not model.norm.requires_grad
    attached.detach()
    assert all(torch.equal(before[name], now) for name, now in model.serving_tensors().items())
    assert all(p.requires_grad for p in model.parameters())
    loss_of(model).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_targets_follow_the_settings_and_never_hold_a_router() -> None:
    dense = model_of(tied=False)
    assert list(targets(dense, LoraConfig(rank=1, train_mlp=False, train_attn=False))) == ["lm_head.weight"]
    assert len(targets(dense, LoraConfig(rank=1, train_mlp=False, train_unembed=False))) == 2 * 4
    moe = model_of(family="mixtral", moe=MoEConfig(num_experts=4, top_k=2, expert_size=16, norm_topk=True))
    names = targets(moe, LoraConfig(rank=1, train_attn=False, train_unembed=False))
    assert len(names) == 2 * 4 * 3
    assert not any("gate.weight" in name for name in names)
    with pytest.raises(ValueError, match="set at least one"):
        targets(dense, LoraConfig(rank=1, train_attn=False, train_mlp=False, train_unembed=False))


def test_rank_and_alpha_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Lora.of(model_of(), LoraConfig(rank=0))
    with pytest.raises(ValueError, match="above 0"):
        Lora.of(model_of(), LoraConfig(rank=1, alpha=0.0))


def test_adapters_come_back_from_their_directory_bit_for_bit(tmp_path: Path) -> None:
    model = model_of(tied=False)
    lora = randomised(Lora.of(model, LoraConfig(rank=4, alpha=8.0, train_mlp=False)))
    save_adapter(lora, tmp_path, base_model="tiny")
    again = load_adapter(tmp_path)
    assert again.config.scale == lora.config.scale
    assert (again.config.train_attn, again.config.train_mlp, again.config.train_unembed) == (True, False, True)
    assert all(torch.equal(p, again.parameters()[key]) for key, p in lora.parameters().items())


def test_directory_has_the_names_that_peft_writes(tmp_path: Path) -> None:
    save_adapter(Lora.of(model_of(), LoraConfig(rank=4)), tmp_path, base_model="tiny")
    names = load_file(tmp_path / "adapter_model.safetensors").keys()
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in names
    assert "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight" in names
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 32.0)
    assert config["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


def test_foreign_adapters_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no adapter can be read"):
        load_adapter(tmp_path)
    save_adapter(Lora.of(model_of(), LoraConfig(rank=4)), tmp_path, base_model="tiny")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    with pytest.raises(ValueError, match="no plain LoRA"):
        load_adapter(tmp_path)
