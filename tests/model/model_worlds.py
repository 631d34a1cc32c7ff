"""Tiny models for tests: shapes that exercise grouped heads, odd head counts, tied and untied output."""

from __future__ import annotations

from rollmill.model import Model, ModelConfig


def tiny(**changes: object) -> ModelConfig:
    facts = dict(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=4,
        head_dim=8,
        max_position=64,
        dtype="float32",
        eos_token_ids=(2, 0),
    )
    return ModelConfig(**(facts | changes))  # type: ignore[arg-type]


def fresh(config: ModelConfig, seed: int = 0) -> Model:
    model = Model(config)
    model.init_weights(seed)
    return model
