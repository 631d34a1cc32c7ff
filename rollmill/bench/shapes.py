"""Models to measure: known shapes by name with random weights made where they are used, and a second profile over the same weights.

Random weights are as good as trained ones for time and for equal bits. Shapes: D inputs of a matrix.
"""

from __future__ import annotations

import copy

import msgspec
import torch

from rollmill.model import Model, ModelConfig, MoEConfig, compute_dtype

_QWEN3 = ModelConfig(
    family="qwen3", vocab_size=151_936, hidden_size=2048, intermediate_size=6144, num_layers=28, num_heads=16, num_kv_heads=8,
    head_dim=128, max_position=40_960, rope_theta=1e6, norm_eps=1e-6, tied=True,
)  # fmt: skip
SHAPES = {
    "tiny": ModelConfig(
        vocab_size=512, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, max_position=4096
    ),
    "demo": ModelConfig(
        vocab_size=512, hidden_size=160, intermediate_size=432, num_layers=4, num_heads=4, num_kv_heads=4, head_dim=40, max_position=4096
    ),
    "tiny-moe": ModelConfig(
        family="qwen3_moe", vocab_size=512, hidden_size=64, intermediate_size=96, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16,
        max_position=4096, moe=MoEConfig(num_experts=16, top_k=4, expert_size=32, norm_topk=True),
    ),
    "smollm2": ModelConfig(
        vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64,
        max_position=8192, rope_theta=1e5,
    ),
    "qwen3-1.7b": _QWEN3,
    "qwen3-8b": msgspec.structs.replace(
        _QWEN3, hidden_size=4096, intermediate_size=12_288, num_layers=36, num_heads=32, tied=False
    ),
    "moe-30b-a3b": msgspec.structs.replace(
        _QWEN3, family="qwen3_moe", num_layers=48, num_heads=32, num_kv_heads=4, tied=False,
        moe=MoEConfig(num_experts=128, top_k=8, expert_size=768, norm_topk=True),
    ),
}  # fmt: skip


def shape_of(name: str, num_layers: int | None = None) -> ModelConfig:
    if name not in SHAPES:
        raise ValueError(f"there is no shape {name!r}; choose one of {', '.join(SHAPES)}")
    config = SHAPES[name]
    if num_layers is None:
        return config
    if not 1 <= num_layers <= config.num_layers:
        raise ValueError(f"{num_layers} layers were asked for, {name} has {config.num_layers}; choose from 1 to that")
    return msgspec.structs.replace(config, num_layers=num_layers)


@torch.no_grad()
def random_model(config: ModelConfig, *, device: torch.device | str = "cpu", numerics: str = "exact", seed: int = 0) -> Model:
    """Never twice in memory: made on the device, in the dtype it computes in. Logits spread by about 3, routers are sure of themselves."""
    dtype = compute_dtype(str(device))
    with torch.device("meta"):
        model = Model(config, numerics=numerics)
    model = model.to(dtype).to_empty(device=device)
    gen = torch.Generator(device).manual_seed(seed)
    for name, live in model.named_parameters():
        if live.dim() == 1:
            live.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        spread = 3.0 if name in ("embed", "head") or "router" in name else 1.0
        live.normal_(std=spread * live.shape[-1] ** -0.5, generator=gen)
        # What is published has the serving dtype; the live weights must be able to hold it exactly.
        live.copy_(live.to(model.serving_dtype))
    return model


def twin(model: Model, numerics: str) -> Model:
    """The same weights, in the same memory, computed by another profile."""
    other = copy.copy(model)
    other.numerics = numerics
    return other
