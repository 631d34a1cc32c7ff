"""A tiny model and tiny data sets for the stages: seconds on one thread."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from rollmill.model import load_model
from rollmill.model.build import new_model
from rollmill.trainer.stages.stage import StageJob

DEMO = Path(__file__).parents[2] / "models" / "demo"
CONVERSATION = [
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": "first"},
    {"role": "tool", "content": "r"},
    {"role": "assistant", "content": "second"},
]
DOCUMENTS = [{"text": f"zebra {n} zebra {n} owl {n} " * 4} for n in range(40)]
CHATS = [
    {"messages": [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": f"{n} {n} " * (n % 5 + 1)}]} for n in range(40)
]
PAIRS = [
    {
        "prompt": [{"role": "user", "content": f"q{n}"}],
        "chosen": [{"role": "assistant", "content": f"yes {n}"}],
        "rejected": [{"role": "assistant", "content": "no way " * (n % 3 + 1)}],
    }
    for n in range(40)
]


def tiny_model(path: Path, *, max_position: int = 64) -> Path:
    """One layer over the demo vocabulary."""
    path.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, path / name)
    new_model(path, hidden_size=32, num_layers=1, head_dim=16, max_position=max_position, seed=0)
    return path


def write_rows(path: Path, rows: Iterable[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def job_of(model: Path, data: Path | str, out: Path, **more: Any) -> StageJob:
    return StageJob(model=model, data=(str(data),), out=out, **{"cache": out.parent / "cache", **more})


def weight_bits(path: Path) -> dict[str, bytes]:
    model, _ = load_model(path)
    return {name: t.view(torch.int16).numpy().tobytes() for name, t in model.serving_tensors().items()}


def quiet(line: str) -> None:
    return None
