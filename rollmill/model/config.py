"""The shape of a model, as read from and written to a Hugging Face `config.json`."""

from __future__ import annotations

from typing import Any

import msgspec

SUPPORTED = ("llama",)


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A dense Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU, optional tied embeddings."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    """Longest context in tokens."""
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tied: bool = True
    """Whether the output head is the embedding matrix."""
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "bfloat16"
    """The serving dtype: what is stored, shipped and fingerprinted."""

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> ModelConfig:
        kind = raw.get("model_type")
        if kind not in SUPPORTED:
            raise ValueError(f"config.json has model_type {kind!r}; this version loads {', '.join(SUPPORTED)}")
        if raw.get("rope_scaling"):
            raise ValueError(f"config.json asks for rope_scaling {raw['rope_scaling']!r}, which this version does not compute")
        heads = raw["num_attention_heads"]
        eos = raw.get("eos_token_id")
        rope = raw.get("rope_parameters") or {}
        return cls(
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
            max_position=raw["max_position_embeddings"],
            rope_theta=float(raw.get("rope_theta") or rope.get("rope_theta") or 10000.0),
            norm_eps=raw.get("rms_norm_eps", 1e-5),
            tied=bool(raw.get("tie_word_embeddings", False)),
            eos_token_ids=tuple(eos) if isinstance(eos, list) else (() if eos is None else (eos,)),
            dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "bfloat16").removeprefix("torch."),
        )

    def to_hf(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_position,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.norm_eps,
            "tie_word_embeddings": self.tied,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "eos_token_id": list(self.eos_token_ids),
            "torch_dtype": self.dtype,
        }
