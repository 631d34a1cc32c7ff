"""The JSON bodies that clients send, as far as they are used; fields that a newer client adds are passed over."""

from __future__ import annotations

from typing import Any

import msgspec

from rollmill.tinker.adam import AdamParams


class CreateSession(msgspec.Struct, kw_only=True, frozen=True):
    user_metadata: dict[str, Any] | None = None
    display_name: str | None = None


class SessionRef(msgspec.Struct, kw_only=True, frozen=True):
    session_id: str


class LoraSpec(msgspec.Struct, kw_only=True, frozen=True):
    rank: int
    """0: train all weights."""
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerSpec(msgspec.Struct, kw_only=True, frozen=True):
    type: str = "adamw"


class CreateModel(msgspec.Struct, kw_only=True, frozen=True):
    session_id: str
    model_seq_id: int
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraSpec | None = None
    """None: train all weights."""
    optimizer_config: OptimizerSpec = OptimizerSpec()


class ModelRef(msgspec.Struct, kw_only=True, frozen=True):
    model_id: str


class OptimStep(msgspec.Struct, kw_only=True, frozen=True):
    model_id: str
    seq_id: int | None = None
    adam_params: AdamParams | None = None
    optimizer_params: dict[str, Any] | None = None
    """Of an optimiser other than AdamW."""


class SaveWeights(msgspec.Struct, kw_only=True, frozen=True):
    """Of `save_weights` and `save_weights_for_sampler`."""

    model_id: str
    path: str | None = None
    seq_id: int | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    sampling_session_seq_id: int | None = None
    """Set when the weights are only for a sampling session, and kept in memory."""


class LoadWeights(msgspec.Struct, kw_only=True, frozen=True):
    """Onto an existing model (`model_id`), or onto a new one (`session_id` and `model_seq_id`)."""

    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: OptimizerSpec | None = None


class CreateSamplingSession(msgspec.Struct, kw_only=True, frozen=True):
    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class SamplingSessionRef(msgspec.Struct, kw_only=True, frozen=True):
    sampling_session_id: str


class Chunk(msgspec.Struct, kw_only=True, frozen=True):
    type: str = "encoded_text"
    tokens: list[int] = []


class ModelInput(msgspec.Struct, kw_only=True, frozen=True):
    chunks: list[Chunk]

    def token_ids(self) -> list[int]:
        if odd := [c.type for c in self.chunks if c.type != "encoded_text"]:
            raise ValueError(f"the prompt holds a chunk of type {odd[0]!r}; this server reads text tokens only")
        return [token for chunk in self.chunks for token in chunk.tokens]


class SamplingParams(msgspec.Struct, kw_only=True, frozen=True):
    max_tokens: int | None = None
    """None: as many as the context has room for."""
    seed: int | None = None
    stop: str | list[str | int] | None = None
    """None: the model's own end tokens; an empty list: none at all."""
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class Sample(msgspec.Struct, kw_only=True, frozen=True):
    prompt: ModelInput
    sampling_params: SamplingParams
    num_samples: int = 1
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: int | None = None
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: int | None = None
    topk_sample_logprobs: int = 0
    topk_prompt_logprobs: int = 0
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: int = 0


class RequestRef(msgspec.Struct, kw_only=True, frozen=True):
    request_id: str


class TinkerPath(msgspec.Struct, kw_only=True, frozen=True):
    tinker_path: str


class Ttl(msgspec.Struct, kw_only=True, frozen=True):
    ttl_seconds: int | None = None
