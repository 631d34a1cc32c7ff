"""The shape of a model from a GGUF file's metadata; a key that could change what is computed and is not known here is refused.

GGUF keeps what llama.cpp needs, which is less than `config.json` says: the rest is read off the tensors or fixed by the architecture.
"""

from __future__ import annotations

import reprlib
from typing import Any

import msgspec
import numpy as np
import torch

from rollmill.model.config import ModelConfig
from rollmill.model.gguf_file import GGUFError, GGUFFile
from rollmill.model.rope import RopeScaling, frequencies

ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies: how the files of Llama 3.1 and later state their scaling."""


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """One value of `general.architecture`."""

    family: str
    """Key of `families.FAMILIES`."""
    is_interleaved: bool = False
    """Whether query and key rows lie in pairs (0, n/2, 1, n/2 + 1, ...) instead of in halves."""
    rope_theta: float = 10000.0
    """When the file does not say."""


ARCHITECTURES = {
    "llama": Architecture(family="llama", is_interleaved=True),
    "qwen2": Architecture(family="qwen2"),
    "qwen3": Architecture(family="qwen3"),
    "qwen3moe": Architecture(family="qwen3_moe"),
}
_SIZES = {
    "embedding_length": ("hidden_size", 1 << 20),
    "feed_forward_length": ("intermediate_size", 1 << 20),
    "block_count": ("num_hidden_layers", 1 << 10),
    "attention.head_count": ("num_attention_heads", 1 << 12),
    "context_length": ("max_position_embeddings", 1 << 24),
}
"""Key, what config.json calls it, and a bound beyond every real model, so that a damaged file cannot ask for absurd shapes."""
_READ = frozenset(_SIZES) | frozenset(
    "vocab_size attention.head_count_kv attention.key_length attention.value_length attention.layer_norm_rms_epsilon "
    "attention.sliding_window rope.dimension_count rope.freq_base rope.scale_linear rope.scaling.type rope.scaling.factor "
    "rope.scaling.original_context_length rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow "
    "expert_count expert_used_count expert_feed_forward_length".split()
)
_PINNED: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.scale": (0.0,),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "expert_shared_count": (0,),
    "expert_weights_scale": (0.0, 1.0),
    "expert_weights_norm": (True,),
    "leading_dense_block_count": (0,),
    "nextn_predict_layers": (0,),
}
_INERT = frozenset({"tensor_data_layout", "rope.scaling.finetuned"})


def architecture_of(file: GGUFFile) -> Architecture:
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise GGUFError(f"{file.path} has the architecture {reprlib.repr(name)}; this version imports {', '.join(ARCHITECTURES)}")
    if file.metadata.get("split.count", 1) not in (0, 1):
        raise GGUFError(
            f"{file.path} is one of {file.metadata['split.count']} parts of a model: join them first with `llama-gguf-split --merge`"
        )
    return ARCHITECTURES[name]


def model_config(file: GGUFFile, *, dtype: str, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """The model in `file` as it will be stored in `dtype`."""
    architecture = architecture_of(file)
    said = _Said(file)
    said.refuse_foreign()
    raw: dict[str, Any] = {hf: said.size(key, most=most) for key, (hf, most) in _SIZES.items()}
    heads, num_layers = raw["num_attention_heads"], raw["num_hidden_layers"]
    if num_layers > len(file.tensors):
        raise GGUFError(f"{file.path} is damaged: it claims {num_layers:,} layers and has {len(file.tensors):,} tensors")
    head_dim = said.size("attention.key_length", raw["hidden_size"] // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (other := said.size(key, head_dim)) != head_dim:
            raise GGUFError(f"{file.path}: {said.arch}.{key} is {other}, heads have size {head_dim}; this version computes equal ones only")
    theta = said.real("rope.freq_base", architecture.rope_theta)
    raw |= {
        "model_type": architecture.family,
        "num_key_value_heads": said.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": _vocab_size(file, said),
        "rms_norm_eps": said.real("attention.layer_norm_rms_epsilon", None),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(file, said, head_dim=head_dim, theta=theta),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "eos_token_id": list(eos_token_ids),
        "torch_dtype": dtype,
    }
    if architecture.family != "qwen2":
        raw["attention_bias"] = "blk.0.attn_output.bias" in file.tensors
    if said.pairs.get("attention.sliding_window"):
        raw |= {"sliding_window": said.size("attention.sliding_window", most=1 << 24), "use_sliding_window": True}
    raw |= _experts(file, said, raw)
    try:
        return ModelConfig.from_hf(raw)
    except ValueError as error:
        raise GGUFError(f"the model in {file.path} is not one this version computes; as a Hugging Face model its {error}") from error


class _Said:
    """The metadata under the architecture's own prefix."""

    def __init__(self, file: GGUFFile) -> None:
        self.path, self.arch = file.path, file.metadata["general.architecture"]
        start = f"{self.arch}."
        self.pairs = {key.removeprefix(start): value for key, value in file.metadata.items() if key.startswith(start)}

    def refuse_foreign(self) -> None:
        for key, value in self.pairs.items():
            if key in _PINNED:
                if value not in _PINNED[key]:
                    known = " or ".join(map(repr, _PINNED[key]))
                    raise GGUFError(f"{self.path} has {self.arch}.{key} = {reprlib.repr(value)}; this version computes {known}")
            elif key not in _READ and key not in _INERT:
                raise GGUFError(f"{self.path} has {self.arch}.{key} = {reprlib.repr(value)}, which this version does not know")

    def size(self, key: str, default: int | None = None, *, most: int = 1 << 12) -> int:
        found = self.pairs.get(key, default)
        if isinstance(found, list) and len(set(found)) == 1:
            # One entry per layer, all the same.
            found = found[0]
        if found is None:
            raise GGUFError(f"{self.path} lacks {self.arch}.{key}")
        if type(found) is not int or not 1 <= found <= most:
            raise GGUFError(f"{self.path} has {self.arch}.{key} = {reprlib.repr(found)}; expected one whole number from 1 to {most:,}")
        return found

    def real(self, key: str, default: float | None) -> float:
        found = self.pairs.get(key, default)
        if found is None:
            raise GGUFError(f"{self.path} lacks {self.arch}.{key}")
        if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < float("inf"):
            raise GGUFError(f"{self.path} has {self.arch}.{key} = {reprlib.repr(found)}; expected a number above 0")
        # The file holds float32: its shortest decimal is what the model's author wrote (1e-05, not 9.999999747378752e-06).
        return float(str(np.float32(found)))


def _vocab_size(file: GGUFFile, said: _Said) -> int:
    if "token_embd.weight" not in file.tensors:
        raise GGUFError(f"{file.path} lacks the tensor 'token_embd.weight'; it is not a whole model")
    rows = file.tensors["token_embd.weight"].shape[0]
    if (claimed := said.size("vocab_size", rows, most=1 << 24)) != rows:
        raise GGUFError(f"{file.path} is damaged: it claims {claimed:,} tokens and has embeddings for {rows:,}")
    return rows


def _experts(file: GGUFFile, said: _Said, raw: dict[str, Any]) -> dict[str, Any]:
    if raw["model_type"] != "qwen3_moe":
        if count := said.pairs.get("expert_count"):
            raise GGUFError(
                f"{file.path} has {said.arch}.expert_count = {reprlib.repr(count)}; this version imports experts of qwen3moe only"
            )
        return {}
    num_experts = said.size("expert_count")
    stack = file.tensors.get("blk.0.ffn_gate_exps.weight")
    if stack is None or stack.shape[0] != num_experts:
        raise GGUFError(f"{file.path} claims {num_experts:,} experts, its tensor 'blk.0.ffn_gate_exps.weight' does not hold as many")
    return {
        "num_experts": num_experts,
        "num_experts_per_tok": said.size("expert_used_count"),
        "moe_intermediate_size": said.size("expert_feed_forward_length", most=1 << 20),
        "norm_topk_prob": True,
    }


def _rope_scaling(file: GGUFFile, said: _Said, *, head_dim: int, theta: float) -> dict[str, Any] | None:
    rule = said.pairs.get("rope.scaling.type") or "none"
    if ROPE_FACTORS in file.tensors:
        if rule != "none":
            raise GGUFError(f"{file.path} scales its positions twice: by {ROPE_FACTORS} and by the rule {reprlib.repr(rule)}")
        return _llama3(file, head_dim=head_dim, theta=theta)
    if rule == "none" and "rope.scale_linear" not in said.pairs:
        return None
    if rule in ("none", "linear"):
        key = "rope.scaling.factor" if "rope.scaling.factor" in said.pairs else "rope.scale_linear"
        return {"rope_type": "linear", "factor": said.real(key, None)}
    if rule != "yarn":
        raise GGUFError(
            f"{file.path} has {said.arch}.rope.scaling.type = {reprlib.repr(rule)}; this version computes none, linear and yarn"
        )
    return {
        "rope_type": "yarn",
        "factor": said.real("rope.scaling.factor", None),
        "original_max_position_embeddings": said.size("rope.scaling.original_context_length", most=1 << 24),
        "beta_fast": said.real("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": said.real("rope.scaling.yarn_beta_slow", 1.0),
    }


def _llama3(file: GGUFFile, *, head_dim: int, theta: float) -> dict[str, Any] | None:
    """The rule behind the divisors. Llama 3.1 to 3.3 stretch 8,192 tokens between 1 and 4 turns, by the largest divisor."""
    divisors = torch.from_numpy(file.read(ROPE_FACTORS).astype(np.float64)).flatten()
    factor = float(divisors.max())
    scaling = RopeScaling(rule="llama3", factor=factor, original_max_position=8192, low_freq_factor=1.0, high_freq_factor=4.0)
    plain = frequencies(head_dim=head_dim, theta=theta, scaling=None)
    # The divisors were computed and stored in float32; a few rounding steps of 6e-8 each stay below 1e-5.
    asked = plain / frequencies(head_dim=head_dim, theta=theta, scaling=scaling)
    if divisors.shape != plain.shape or not torch.allclose(asked, divisors, rtol=1e-5, atol=0.0):
        raise GGUFError(
            f"{file.path} scales its positions by {ROPE_FACTORS} in a way that is not Llama 3's; this version computes that one only"
        )
    return scaling.to_hf() if factor != 1 else None
