"""What the endpoints share: the engine, what compiles constraints for its model, and the model's name."""

from __future__ import annotations

import msgspec

from rollmill.engine.constrain import Constraints
from rollmill.engine.engine import Engine


class Service(msgspec.Struct, frozen=True, kw_only=True):
    engine: Engine
    constraints: Constraints
    model_name: str
