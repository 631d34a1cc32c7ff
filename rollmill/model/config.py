"""The shape of a model, as read from and written to a Hugging Face `config.json`; what it does not compute it refuses."""

from __future__ import annotations

from typing import Any

import msgspec

from rollmill.model.families import FAMILIES, INERT, LATENT_ATTENTION, PINNED, Bias, Family
from rollmill.model.rope import RopeScaling

_READ = frozenset(
    "model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "max_position_embeddings rope_theta rope_scaling rope_parameters original_max_position_embeddings rms_norm_eps tie_word_embeddings "
    "eos_token_id dtype torch_dtype attention_bias sliding_window use_sliding_window max_window_layers layer_types".split()
)
_READ_MOE = frozenset("num_experts_per_tok norm_topk_prob decoder_sparse_step mlp_only_layers".split())
DTYPES = ("bfloat16", "float16", "float32")


class MoEConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Experts of the sparse layers. Softmax routing, unless `is_sigmoid`: then each expert is scored on its own (DeepSeek-V3)."""

    num_experts: int
    top_k: int
    expert_size: int
    """Inner size of one expert."""
    norm_topk: bool
    """Whether the chosen experts' weights are scaled to sum to one."""
    sparse_step: int = 1
    """Every so manieth layer is sparse, counted so that with 2 the layers 1, 3, ... are."""
    dense_layers: tuple[int, ...] = ()
    """Layers that are dense all the same."""
    is_sigmoid: bool = False
    num_groups: int = 1
    """Sigmoid only: experts come in groups of equal size, and `top_groups` of them may be chosen from."""
    top_groups: int = 1
    scale: float = 1.0
    """Sigmoid only: multiplies every weight at the end."""
    num_shared: int = 0
    """Experts that every token passes, as one of so many times the size."""

    def is_sparse(self, layer: int) -> bool:
        return layer not in self.dense_layers and (layer + 1) % self.sparse_step == 0


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU or experts of it, optional tied embeddings."""

    family: str = "llama"
    """Key of `families.FAMILIES`."""
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
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    qkv_bias: bool = False
    out_bias: bool = False
    tied: bool = True
    """Whether the output head is the embedding matrix."""
    moe: MoEConfig | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "bfloat16"
    """The serving dtype: what is stored, shipped and fingerprinted."""

    @property
    def traits(self) -> Family:
        return FAMILIES[self.family]

    def is_sparse(self, layer: int) -> bool:
        return self.moe is not None and self.moe.is_sparse(layer)

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> ModelConfig:
        kind = raw.get("model_type")
        if kind in LATENT_ATTENTION:
            raise ValueError(f"config.json has model_type {kind!r}, whose latent attention this version does not compute")
        if kind not in FAMILIES:
            raise ValueError(f"config.json has model_type {kind!r}; this version loads {', '.join(FAMILIES)}")
        family = FAMILIES[kind]
        _refuse_foreign_features(raw, kind, family)
        heads, num_layers = raw["num_attention_heads"], raw["num_hidden_layers"]
        kv_heads = raw.get("num_key_value_heads") if family.all_heads_have_keys else raw["num_key_value_heads"]
        rope = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
        if raw.get("original_max_position_embeddings"):
            rope["original_max_position_embeddings"] = raw["original_max_position_embeddings"]
        max_position = raw["max_position_embeddings"]
        scaling = RopeScaling.from_hf(rope, max_position=max_position)
        if scaling and scaling.rule == "yarn":
            # Yarn is often switched on by adding its few lines to a file that still states the pretrained context.
            max_position = max(max_position, round(scaling.factor * scaling.original_max_position))
        _refuse_window(raw, family, max_position=max_position)
        is_biased = family.bias is Bias.ASKED and bool(raw.get("attention_bias", False))
        eos = raw.get("eos_token_id")
        dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "bfloat16").removeprefix("torch.")
        if dtype not in DTYPES:
            raise ValueError(f"config.json has dtype {dtype!r}; weights are served in one of {', '.join(DTYPES)}")
        config = cls(
            family=kind,
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_layers=num_layers,
            num_heads=heads,
            num_kv_heads=kv_heads or heads,
            head_dim=raw.get("head_dim", family.head_dim) or raw["hidden_size"] // heads,
            max_position=max_position,
            rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or family.rope_theta),
            rope_scaling=scaling,
            norm_eps=raw.get("rms_norm_eps", family.norm_eps),
            qkv_bias=is_biased or family.bias is Bias.QKV,
            out_bias=is_biased,
            tied=bool(raw.get("tie_word_embeddings", False)),
            moe=_read_moe(raw, family),
            eos_token_ids=tuple(eos) if isinstance(eos, list) else (() if eos is None else (eos,)),
            dtype=dtype,
        )
        if config.num_heads % config.num_kv_heads or config.head_dim % 2:
            raise ValueError(
                f"config.json has {config.num_heads} query heads for {config.num_kv_heads} key/value heads of size {config.head_dim}; "
                "query heads must be a multiple of key/value heads and the size even"
            )
        return config

    def to_hf(self) -> dict[str, Any]:
        family = self.traits
        out: dict[str, Any] = {
            "architectures": [family.architecture],
            "model_type": self.family,
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
            "eos_token_id": list(self.eos_token_ids),
            "torch_dtype": self.dtype,
        }
        if self.rope_scaling:
            out["rope_scaling"] = self.rope_scaling.to_hf()
        if family.bias is Bias.ASKED:
            out["attention_bias"] = self.out_bias
        if self.family == "llama":
            out["mlp_bias"] = False
        if family.window:
            # Left out, it would mean the family's default window.
            out["sliding_window"] = None
        if self.moe and family.moe:
            out |= {family.moe.num_experts[0]: self.moe.num_experts, family.moe.expert_size: self.moe.expert_size}
            out["num_experts_per_tok"] = self.moe.top_k
            if family.moe.norm_topk is None:
                out["norm_topk_prob"] = self.moe.norm_topk
            if self.moe.sparse_step != 1 or self.moe.dense_layers:
                out |= {"decoder_sparse_step": self.moe.sparse_step, "mlp_only_layers": list(self.moe.dense_layers)}
        return out


def _read_moe(raw: dict[str, Any], family: Family) -> MoEConfig | None:
    names = family.moe
    if names is None:
        return None
    counts = [raw[key] for key in names.num_experts if raw.get(key) is not None]
    if not counts:
        raise KeyError(names.num_experts[0])
    moe = MoEConfig(
        num_experts=counts[0],
        top_k=raw["num_experts_per_tok"],
        expert_size=raw[names.expert_size],
        norm_topk=bool(raw.get("norm_topk_prob", False)) if names.norm_topk is None else names.norm_topk,
        sparse_step=raw.get("decoder_sparse_step") or 1,
        dense_layers=tuple(raw.get("mlp_only_layers") or ()),
    )
    if not 1 <= moe.top_k <= moe.num_experts:
        raise ValueError(f"config.json routes each token to {moe.top_k} of {moe.num_experts} experts")
    return moe


def _refuse_foreign_features(raw: dict[str, Any], kind: str, family: Family) -> None:
    pinned = PINNED | family.pinned
    if family.bias is not Bias.ASKED:
        pinned = pinned | {"attention_bias": (family.bias is Bias.QKV, None)}
    read = _READ
    if family.moe:
        read = read | _READ_MOE | {*family.moe.num_experts, family.moe.expert_size}
        if family.moe.norm_topk is not None:
            pinned = pinned | {"norm_topk_prob": (family.moe.norm_topk, None)}
        if kind != "qwen3_moe":
            pinned = pinned | {"decoder_sparse_step": (1, None), "mlp_only_layers": ([], None)}
    for key, value in raw.items():
        if key in pinned:
            if value not in pinned[key]:
                known = " or ".join(repr(v) for v in pinned[key] if v is not None) or "none"
                raise ValueError(f"config.json has {key} = {value!r}; for {kind} this version computes {known}")
        elif key not in read and key not in INERT and not key.startswith(("_", "transformers.")) and value is not None:
            raise ValueError(
                f"config.json has {key} = {value!r}, which this version does not know for {kind}; "
                "remove it if it does not change what the model computes"
            )


def _refuse_window(raw: dict[str, Any], family: Family, *, max_position: int) -> None:
    """Only full attention is computed; a window that no context can outgrow is full attention."""
    kinds = raw.get("layer_types")
    if foreign := sorted(set(kinds or ()) - {"full_attention", "sliding_attention"}):
        raise ValueError(f"config.json has layer_types with {foreign[0]!r}; this version computes 'full_attention'")
    window = raw.get("sliding_window", family.window)
    is_on = bool(raw.get("use_sliding_window", not family.is_window_switched))
    if window is None or window >= max_position or not is_on:
        return
    if kinds is not None:
        is_used = "sliding_attention" in kinds
    else:
        is_used = raw.get("max_window_layers") is None or raw["max_window_layers"] < raw["num_hidden_layers"]
    if is_used:
        raise ValueError(
            f"config.json has sliding_window = {window} for contexts up to {max_position}; this version computes full attention only: "
            f"lower max_position_embeddings to {window}, within which both are the same"
        )
