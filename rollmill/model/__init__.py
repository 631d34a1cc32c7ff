"""One module tree for trainer and engine, its checkpoint format and its tokenizer."""

from rollmill.model.attention import Attention, PackedAttention
from rollmill.model.checkpoint import CheckpointError, load_model, read_model_config, save_model
from rollmill.model.config import ModelConfig
from rollmill.model.tokenizer import Tokenizer
from rollmill.model.transformer import Model

__all__ = [
    "Attention",
    "CheckpointError",
    "Model",
    "ModelConfig",
    "PackedAttention",
    "Tokenizer",
    "load_model",
    "read_model_config",
    "save_model",
]
