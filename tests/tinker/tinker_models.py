"""The tiny model of the Tinker tests; needs no SDK."""

from __future__ import annotations

from pathlib import Path

import torch

from rollmill.model import Model, ModelConfig, save_model

CONFIG = ModelConfig(
    vocab_size=32,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    max_position=128,
    eos_token_ids=(0,),
    tied=False,
)


def model_of(config: ModelConfig = CONFIG, device: str = "cpu") -> Model:
    """Fresh weights give an almost uniform distribution; larger ones give every prompt a habit of its own."""
    model = Model(config).to(device=device, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    model.init_weights(0)
    model.load_serving({name: t * 3 for name, t in model.serving_tensors().items() if t.dim() > 1})
    return model


def write_model(path: Path, config: ModelConfig = CONFIG) -> Path:
    save_model(model_of(config), path)
    return path
