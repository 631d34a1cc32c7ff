"""A config.json that asks for something we do not compute is refused with its value; what changes nothing is accepted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
from peer_worlds import FAMILIES, YARN, edit_config, peer, saved_peer

from rollmill.model import CheckpointError, ModelConfig, load_model, save_model


def raw_of(name: str) -> dict[str, Any]:
    return peer(name).config.to_dict()


REFUSED = [
    ("llama", {"model_type": "gpt2"}, "model_type 'gpt2'; this version loads llama, mistral, qwen2"),
    ("llama", {"model_type": "deepseek_v3"}, "'deepseek_v3', whose latent attention this version does not compute"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act = 'gelu'; for llama this version computes 'silu'"),
    ("llama", {"mlp_bias": True}, "mlp_bias = True; for llama this version computes False"),
    ("llama", {"attention_dropout": 0.1}, r"attention_dropout = 0\.1"),
    ("llama", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor = 0\.5"),
    ("llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, r"partial_rotary_factor = 0\.5"),
    ("llama", {"logit_scale": 0.0625}, "logit_scale"),
    ("llama", {"final_logit_softcapping": 30.0}, r"final_logit_softcapping = 30\.0; for llama this version computes none"),
    ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config = .*fp8"),
    ("qwen2", {"use_mrope": True}, "use_mrope = True; for qwen2 this version computes False"),
    ("llama", {"use_strange_feature": True}, "use_strange_feature = True, which this version does not know for llama"),
    ("llama", {"num_experts": 8}, "num_experts = 8, which this version does not know for llama"),
    ("llama", {"dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn'; weights are served in one of bfloat16"),
    ("llama", {"num_key_value_heads": 3}, "4 query heads for 3 key/value heads"),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'; .*its frequencies change with the length"),
    ("llama", {"rope_scaling": {"type": "longrope", "factor": 2.0}}, "'longrope'; this version computes default, linear, llama3, yarn"),
    ("llama", {"rope_parameters": YARN | {"short_factor": [1.0]}}, r"'yarn' has short_factor = \[1\.0\]; this version knows"),
    ("llama", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "has full_attention ="),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 0.5}}, r"factor is 0\.5"),
    ("llama", {"layer_types": ["linear_attention", "full_attention"]}, "layer_types with 'linear_attention'"),
    ("mistral", {"sliding_window": 32}, "sliding_window = 32 for contexts up to 64; .*lower max_position_embeddings to 32"),
    ("mistral", {"attention_bias": True}, "attention_bias = True; for mistral this version computes False"),
    ("mixtral", {"sliding_window": 16}, "sliding_window = 16"),
    ("mixtral", {"router_jitter_noise": 0.1}, r"router_jitter_noise = 0\.1"),
    ("mixtral", {"norm_topk_prob": False}, "norm_topk_prob = False; for mixtral this version computes True"),
    ("mixtral", {"mlp_only_layers": [0]}, r"mlp_only_layers = \[0\]"),
    ("mixtral", {"num_experts_per_tok": 9}, "9 of 4 experts"),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "layer_types": None, "max_window_layers": 1}, "sliding_window = 8"),
    (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]},
        "sliding_window = 8",
    ),
    ("qwen2", {"attention_bias": False}, "attention_bias = False; for qwen2 this version computes True"),
    ("olmoe", {"clip_qkv": 8.0}, r"clip_qkv = 8\.0; for olmoe this version computes none"),
]


@pytest.mark.parametrize(("name", "change", "why"), REFUSED)
def test_unsupported_feature_is_refused_with_its_value(name: str, change: dict[str, Any], why: str) -> None:
    raw = raw_of(name)
    ModelConfig.from_hf(raw)
    with pytest.raises(ValueError, match=why):
        ModelConfig.from_hf(raw | change)


ACCEPTED = [
    ("llama", {"transformers_version": "4.42.3", "transformers.js_config": {"kv_cache_dtype": {}}, "is_llama_config": True}),
    ("llama", {"rope_interleaved": False, "pretraining_tp": 2, "initializer_range": 0.04, "_name_or_path": "x", "some_feature": None}),
    ("mistral", {"sliding_window": 64}),
    ("qwen2", {"use_sliding_window": False, "sliding_window": 8, "layer_types": None, "max_window_layers": 1}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "layer_types": None, "max_window_layers": 2}),
    ("qwen3_moe", {"sliding_window": 8, "use_sliding_window": False, "max_window_layers": 48}),
    ("mixtral", {"output_router_logits": True, "router_aux_loss_coef": 0.1}),
]


@pytest.mark.parametrize(("name", "change"), ACCEPTED)
def test_what_changes_nothing_is_accepted(name: str, change: dict[str, Any]) -> None:
    raw = raw_of(name)
    assert ModelConfig.from_hf(raw | change) == ModelConfig.from_hf(raw)


@pytest.mark.parametrize("name", FAMILIES)
def test_config_survives_a_round_trip(name: str) -> None:
    config = ModelConfig.from_hf(raw_of(name))
    assert config.family == name and ModelConfig.from_hf(config.to_hf()) == config
    assert ModelConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


def test_defaults_are_the_familys_where_the_file_is_silent() -> None:
    raw = {k: v for k, v in raw_of("mistral").items() if k not in ("sliding_window", "rms_norm_eps", "rope_parameters")}
    assert ModelConfig.from_hf(raw).norm_eps == 1e-6
    with pytest.raises(ValueError, match="sliding_window = 4096 for contexts up to 8192"):
        ModelConfig.from_hf(raw | {"max_position_embeddings": 8192})
    raw = {k: v for k, v in raw_of("mixtral").items() if k not in ("rms_norm_eps", "rope_parameters")}
    assert (ModelConfig.from_hf(raw).norm_eps, ModelConfig.from_hf(raw).rope_theta) == (1e-5, 1e6)
    raw = {k: v for k, v in raw_of("qwen3").items() if k != "head_dim"}
    assert ModelConfig.from_hf(raw).head_dim == 128
    assert ModelConfig.from_hf(raw | {"head_dim": None}).head_dim == 8


def test_yarn_added_to_a_pretrained_file_stretches_the_context() -> None:
    raw = {k: v for k, v in raw_of("qwen2").items() if k != "rope_parameters"} | {"rope_theta": 1e6}
    config = ModelConfig.from_hf(raw | {"rope_scaling": {"type": "yarn", "factor": 4.0}})
    assert config.max_position == 256 and config.rope_theta == 1e6
    assert config.rope_scaling is not None and config.rope_scaling.original_max_position == 64
    assert ModelConfig.from_hf(config.to_hf()) == config


def test_missing_and_unreadable_parts_are_named(tmp_path: Path) -> None:
    saved_peer("qwen3_moe", tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    for key in ("num_experts_per_tok", "moe_intermediate_size", "num_key_value_heads"):
        (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if k != key}))
        with pytest.raises(CheckpointError, match=f"it lacks '{key}'"):
            load_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    edit_config(tmp_path, num_local_experts=5)
    with pytest.raises(CheckpointError, match=r"experts\.5\..*is not part of this model|shape"):
        load_model(tmp_path)


def test_index_names_the_shards_and_a_missing_one_is_named(tmp_path: Path) -> None:
    saved_peer("qwen2", tmp_path)
    model, _ = load_model(tmp_path)
    save_model(model, tmp_path, shard_bytes=9_000)
    assert not (tmp_path / "model.safetensors").exists() and not list(tmp_path.glob("*.tmp"))
    (tmp_path / "consolidated.safetensors").write_bytes(b"not ours to read")
    load_model(tmp_path)
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    held = shards[1].read_bytes()
    shards[1].unlink()
    with pytest.raises(CheckpointError, match=f"lacks the shard '{shards[1].name}'"):
        load_model(tmp_path)
    shards[1].write_bytes(held)
    index = tmp_path / "model.safetensors.index.json"
    for damaged in ("{", "[]", '{"weight_map": {"a": "../x.safetensors"}}'):
        good = index.read_text()
        index.write_text(damaged)
        with pytest.raises(CheckpointError, match=r"is damaged|lacks the shard"):
            load_model(tmp_path)
        index.write_text(good)
    save_model(model, tmp_path)
    assert [p.name for p in tmp_path.glob("model*")] == ["model.safetensors"]
    load_model(tmp_path)
