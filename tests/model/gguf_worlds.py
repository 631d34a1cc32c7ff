"""Small GGUF files for tests: models of the reference implementation written with the library's own writer, and what can go wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from peer_worlds import SIZES

KIND = gguf.GGMLQuantizationType
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama_biased": ("Llama", {"attention_bias": True}),
    "llama_wide_heads": ("Llama", {"head_dim": 16}),
    "llama_linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 10000.0}}),
    "qwen2": ("Qwen2", {"rope_theta": 1e6}),
    "qwen2_yarn": (
        "Qwen2",
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e6}},
    ),
    "qwen3": ("Qwen3", {"head_dim": 12, "tie_word_embeddings": True}),
    "qwen3moe": (
        "Qwen3Moe",
        {"head_dim": 8, "moe_intermediate_size": 32, "num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True},
    ),
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abcdefghijklmnopqrstuvwxyz", "ab", "abc", "th", "the"]
MERGES = ["a b", "ab c", "t h", "th e"]
TYPES = [3, 3, 3] + [1] * (len(TOKENS) - 3)
CHAT = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


def reference(name: str, **changes: Any) -> Any:
    """A reference model whose every weight matters."""
    family, own = KINDS[name]
    config = getattr(transformers, f"{family}Config")(**(SIZES | own | changes), attn_implementation="eager")
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval().float()
    gen = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=gen)
            p.copy_(noise * p.shape[-1] ** -0.5 if p.dim() > 1 else p + 0.2 * noise)
    return model


def paired(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Halves of each head to neighbours, element by element: what llama.cpp does to query and key rows of llama models."""
    size = len(rows) // num_heads
    order = [head * size + half * (size // 2) + i for head in range(num_heads) for i in range(size // 2) for half in (0, 1)]
    return rows[order]


def tensors_of(model: Any, arch: str) -> dict[str, np.ndarray]:
    """The model's tensors as GGUF names and lays them out."""
    found: dict[str, np.ndarray] = {}
    heads = {"attn_q": model.config.num_attention_heads, "attn_k": model.config.num_key_value_heads}
    for name, live in model.state_dict().items():
        values = live.detach().numpy().copy()
        place, _, end = name.rpartition(".")
        if ".experts." in name:
            layer = name.split(".")[2]
            if end == "gate_up_proj":
                gate, up = np.split(values, 2, axis=1)
                found |= {f"blk.{layer}.ffn_gate_exps.weight": gate, f"blk.{layer}.ffn_up_exps.weight": up}
            else:
                found[f"blk.{layer}.ffn_down_exps.weight"] = values
        elif place in NAMES:
            if not (place == "lm_head" and model.config.tie_word_embeddings):
                found[f"{NAMES[place]}.{end}"] = values
        else:
            _, _, layer, what = place.split(".", 3)
            short = NAMES[what]
            if arch == "llama" and short in heads:
                values = paired(values, heads[short])
            found[f"blk.{layer}.{short}.{end}"] = values
    return found


def write_gguf(
    path: Path,
    model: Any,
    arch: str,
    *,
    kinds: dict[str, Any] | None = None,
    default: Any = KIND.F32,
    drop: tuple[str, ...] = (),
    extra: dict[str, np.ndarray] | None = None,
    raw: dict[str, tuple[np.ndarray, Any]] | None = None,
    vocabulary: dict[str, Any] | None = None,
    more: dict[str, Any] | None = None,
) -> Path:
    """`kinds` sets the quantisation of matrices by the middle of their name, `raw` gives tensors already quantised."""
    c = model.config
    w = gguf.GGUFWriter(path, arch)
    w.add_context_length(c.max_position_embeddings)
    w.add_embedding_length(c.hidden_size)
    w.add_block_count(c.num_hidden_layers)
    w.add_feed_forward_length(c.intermediate_size)
    w.add_head_count(c.num_attention_heads)
    w.add_head_count_kv(c.num_key_value_heads)
    w.add_layer_norm_rms_eps(c.rms_norm_eps)
    w.add_rope_freq_base(c.rope_parameters["rope_theta"])
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    w.add_key_length(head_dim)
    w.add_value_length(head_dim)
    if arch == "llama":
        w.add_rope_dimension_count(head_dim)
        w.add_vocab_size(c.vocab_size)
    rope = c.rope_parameters
    if rope["rope_type"] in ("linear", "yarn"):
        w.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        w.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        w.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if arch == "qwen3moe":
        w.add_expert_count(c.num_experts)
        w.add_expert_used_count(c.num_experts_per_tok)
        w.add_expert_feed_forward_length(c.moe_intermediate_size)
    add_vocabulary(w, **(vocabulary or {}))
    for key, value in (more or {}).items():
        put = {bool: w.add_bool, int: w.add_uint32, float: w.add_float32, str: w.add_string, list: w.add_array}[type(value)]
        put(key, value)
    tensors = {n: v for n, v in tensors_of(model, arch).items() if n not in drop} | (extra or {})
    for name, values in tensors.items():
        if raw and name in raw:
            data, kind = raw[name]
            w.add_tensor(name, data, raw_dtype=kind)
            continue
        kind = default if values.ndim > 1 else KIND.F32
        for part, asked in (kinds or {}).items():
            if part in name and values.ndim > 1:
                kind = asked
        w.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def add_vocabulary(
    w: Any, *, model: str = "gpt2", pre: str = "qwen2", tokens: list[str] = TOKENS, types: list[int] = TYPES, merges: list[str] = MERGES,
    eos: int | None = 2, bos: int | None = 1, chat: str | None = CHAT, add_bos: bool | None = None,
) -> None:  # fmt: skip
    w.add_tokenizer_model(model)
    w.add_tokenizer_pre(pre)
    w.add_token_list(tokens)
    w.add_token_types(types)
    w.add_token_merges(merges)
    if eos is not None:
        w.add_eos_token_id(eos)
    if bos is not None:
        w.add_bos_token_id(bos)
    if chat is not None:
        w.add_chat_template(chat)
    if add_bos is not None:
        w.add_add_bos_token(add_bos)


def arch_of(name: str) -> str:
    return name.partition("_")[0]
