"""One module tree for trainer and engine, its checkpoint format and its tokenizer.

Names are looked up when first used: a rollout process needs the tokenizer only and must not pay for importing torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollmill.model.attention import Attention, PackedAttention, PagedAttention
    from rollmill.model.checkpoint import CheckpointError, check_model, compute_dtype, load_model, read_model_config, save_model
    from rollmill.model.config import ModelConfig, MoEConfig
    from rollmill.model.routes import ForcedRoutes, RecordedRoutes, Routes
    from rollmill.model.tokenizer import Tokenizer
    from rollmill.model.transformer import Model

__all__ = [
    "Attention",
    "CheckpointError",
    "ForcedRoutes",
    "MoEConfig",
    "Model",
    "ModelConfig",
    "PackedAttention",
    "PagedAttention",
    "RecordedRoutes",
    "Routes",
    "Tokenizer",
    "check_model",
    "compute_dtype",
    "load_model",
    "read_model_config",
    "save_model",
]

_HOME = {
    "Attention": "attention",
    "CheckpointError": "checkpoint",
    "ForcedRoutes": "routes",
    "MoEConfig": "config",
    "Model": "transformer",
    "ModelConfig": "config",
    "PackedAttention": "attention",
    "PagedAttention": "attention",
    "RecordedRoutes": "routes",
    "Routes": "routes",
    "Tokenizer": "tokenizer",
    "check_model": "checkpoint",
    "compute_dtype": "checkpoint",
    "load_model": "checkpoint",
    "read_model_config": "checkpoint",
    "save_model": "checkpoint",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
