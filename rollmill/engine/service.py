"""What the endpoints share: the engine, the tokenizer and the model's name."""

from __future__ import annotations

import msgspec

from rollmill.engine.engine import Engine
from rollmill.model import Tokenizer


class Service(msgspec.Struct, frozen=True, kw_only=True):
    engine: Engine
    tokenizer: Tokenizer | None
    """None when the model directory has none; then only token ids are taken."""
    model_name: str
    stop_ids: frozenset[int]
    """Tokens that end a turn of the OpenAI endpoints."""
