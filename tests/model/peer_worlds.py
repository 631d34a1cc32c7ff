"""Tiny models of every family built by the reference implementation, and what it computes with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from rollmill.model import Model, PackedAttention, Routes

SIZES = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    eos_token_id=2,
    pad_token_id=None,
    bos_token_id=None,
)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 500000.0,
}
ROPES = {
    "linear": {"rope_type": "linear", "factor": 2.5, "rope_theta": 10000.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn_mscale": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn_given_factor": YARN | {"attention_factor": 1.3, "truncate": False},
}
MOE = dict(num_experts=6, num_experts_per_tok=2)
DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True}),
    "llama_biased": ("Llama", {"attention_bias": True}),
    "qwen2": ("Qwen2", {}),
    "qwen2_tied": ("Qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "qwen3": ("Qwen3", {"head_dim": 12}),
    "qwen3_biased_tied": ("Qwen3", {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    **{f"llama_{name}": ("Llama", {"rope_parameters": rope}) for name, rope in ROPES.items()},
    "qwen3_yarn": ("Qwen3", {"head_dim": 12, "rope_parameters": YARN}),
}
SPARSE: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3Moe", {"head_dim": 8, "moe_intermediate_size": 20, **MOE}),
    "qwen3_moe_normed": ("Qwen3Moe", {"head_dim": 8, "moe_intermediate_size": 20, "norm_topk_prob": True, **MOE, "num_experts_per_tok": 3}),
    "qwen3_moe_every_second": (
        "Qwen3Moe",
        {"head_dim": 8, "moe_intermediate_size": 20, "decoder_sparse_step": 2, "num_hidden_layers": 4, "mlp_only_layers": [3], **MOE},
    ),
    "olmoe": ("Olmoe", {**MOE}),
    "olmoe_normed": ("Olmoe", {"norm_topk_prob": True, "num_key_value_heads": 4, **MOE}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "qwen3_moe", "olmoe", "mixtral")
RAGGED = [[5, 9, 2, 40, 33, 1, 0, 63, 17], [7], [60, 3, 3, 3, 21, 8, 30, 31, 32, 50, 51, 52, 11, 12, 13, 14, 15, 16, 17], [44, 45, 46]]


def peer(name: str, seed: int = 0) -> Any:
    """A reference model whose every weight matters: norms, biases and routers are far from their starting values."""
    kind, changes = (DENSE | SPARSE)[name]
    config = getattr(transformers, f"{kind}Config")(**(SIZES | changes), attn_implementation="eager")
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval().float()
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=gen)
            p.copy_(noise * p.shape[-1] ** -0.5 if p.dim() > 1 else p + 0.2 * noise)
    return model


def saved_peer(name: str, path: Path, seed: int = 0) -> Any:
    model = peer(name, seed)
    model.save_pretrained(path)
    return model


def peer_logits(model: Any, sequences: list[list[int]]) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model(torch.tensor([s])).logits[0].float() for s in sequences]


def hidden(model: Model, sequences: list[list[int]], routes: Routes | None = None) -> torch.Tensor:
    attention = PackedAttention([len(s) for s in sequences])
    return model(torch.tensor([t for s in sequences for t in s]), attention.positions_T, attention, routes)


def packed_logits(model: Model, sequences: list[list[int]], routes: Routes | None = None) -> list[torch.Tensor]:
    with torch.no_grad():
        return list(model.logits(hidden(model, sequences, routes)).split([len(s) for s in sequences]))


def edit_config(path: Path, **changes: Any) -> None:
    file = path / "config.json"
    raw = json.loads(file.read_text()) | changes
    file.write_text(json.dumps(raw))
