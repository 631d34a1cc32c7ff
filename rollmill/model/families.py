"""What sets the supported model families apart, as one table; knows their names and switches, computes nothing.

A `config.json` key is read (`config`), harmless (`INERT`) or pinned to the values we compute (`PINNED`); any other key is refused,
since a feature that is silently left out gives a model that answers fluently and wrongly.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec


class QKNorm(StrEnum):
    """What an RMSNorm on queries and keys runs over."""

    NONE = "none"
    HEAD = "head"
    """Each head on its own, one weight of the head's size for all."""
    WHOLE = "whole"
    """All heads of a token together."""


class Bias(StrEnum):
    """Which attention projections carry a bias."""

    NEVER = "never"
    QKV = "qkv"
    ASKED = "asked"
    """All four when `attention_bias` says so."""


class MoENames(msgspec.Struct, frozen=True, kw_only=True):
    """Where a sparse layer's tensors live under `model.layers.N.`, and what config.json calls its sizes."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    num_experts: tuple[str, ...] = ("num_experts", "num_local_experts")
    """The key we write, then others that are read."""
    expert_size: str = "intermediate_size"
    norm_topk: bool | None = None
    """Whether the chosen weights are scaled to sum to one; None: `norm_topk_prob` says."""


class Family(msgspec.Struct, frozen=True, kw_only=True):
    architecture: str
    bias: Bias = Bias.NEVER
    qk_norm: QKNorm = QKNorm.NONE
    moe: MoENames | None = None
    norm_eps: float = 1e-6
    """When config.json does not say; so are the next ones."""
    rope_theta: float = 10000.0
    window: int | None = None
    head_dim: int | None = None
    """None: the hidden size is shared out among the query heads."""
    is_window_switched: bool = False
    """Whether `sliding_window` counts only where `use_sliding_window` is true."""
    all_heads_have_keys: bool = False
    """Whether a missing `num_key_value_heads` means one per query head; otherwise it must be given."""
    pinned: dict[str, tuple[Any, ...]] = {}
    """Further keys with the values we compute."""


FAMILIES = {
    "llama": Family(architecture="LlamaForCausalLM", bias=Bias.ASKED, all_heads_have_keys=True),
    "mistral": Family(architecture="MistralForCausalLM", window=4096),
    "qwen2": Family(architecture="Qwen2ForCausalLM", bias=Bias.QKV, is_window_switched=True),
    "qwen3": Family(architecture="Qwen3ForCausalLM", bias=Bias.ASKED, qk_norm=QKNorm.HEAD, head_dim=128, is_window_switched=True),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        bias=Bias.ASKED,
        qk_norm=QKNorm.HEAD,
        moe=MoENames(expert_size="moe_intermediate_size"),
        is_window_switched=True,
    ),
    "olmoe": Family(
        architecture="OlmoeForCausalLM",
        bias=Bias.ASKED,
        qk_norm=QKNorm.WHOLE,
        moe=MoENames(),
        norm_eps=1e-5,
        all_heads_have_keys=True,
        pinned={"clip_qkv": (None,)},
    ),
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        moe=MoENames(
            block="block_sparse_moe", gate="w1", up="w3", down="w2", num_experts=("num_local_experts", "num_experts"), norm_topk=True
        ),
        norm_eps=1e-5,
        rope_theta=1e6,
        pinned={"router_jitter_noise": (0, None)},
    ),
}

LATENT_ATTENTION = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25")
"""Families whose routers and experts `router` and `moe` compute, but whose attention nothing here does."""

PINNED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "mlp_bias": (False, None),
    "attention_dropout": (0, None),
    "partial_rotary_factor": (1, None),
    "rope_interleaved": (False, None),
    "use_mrope": (False, None),
    "quantization_config": (None,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "tie_encoder_decoder": (False,),
    "logit_scale": (1, None),
    "logits_scaling": (1, None),
    "embedding_multiplier": (1, None),
    "residual_multiplier": (1, None),
    "final_logit_softcapping": (None,),
    "attn_logit_softcapping": (None,),
}

INERT = frozenset(
    "architectures attn_implementation auto_map bad_words_ids bos_token_id chunk_size_feed_forward cross_attention_hidden_size "
    "decoder_start_token_id finetuning_task gradient_checkpointing id2label initializer_range is_decoder is_llama_config label2id "
    "max_sequence_length name_or_path output_attentions output_hidden_states output_router_logits pad_token_id prefix pretraining_tp "
    "problem_type pruned_heads return_dict router_aux_loss_coef sep_token_id task_specific_params tf_legacy_loss tokenizer_class "
    "torchscript transformers_version unsloth_fixed unsloth_version use_bfloat16 use_cache".split()
)
"""Keys that change nothing a forward computes: bookkeeping, generation defaults, and settings of a training we do not run.

`pretraining_tp` only says in how many slices an old trainer summed the same products."""
