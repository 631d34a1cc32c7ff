"""Reading and writing a model as a Hugging Face safetensors directory."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rollmill.model.config import ModelConfig
from rollmill.model.transformer import Model


class CheckpointError(ValueError):
    """A model directory that is missing, foreign or damaged."""


def read_model_config(path: Path) -> ModelConfig:
    """The shape of the model stored in a directory."""
    file = path / "config.json"
    if not file.is_file():
        raise CheckpointError(f"no model at {path}: {file.name} is missing; point `model.path` at a Hugging Face safetensors directory")
    try:
        return ModelConfig.from_hf(json.loads(file.read_text()))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file} does not describe a model this version can load: {error}") from error


def load_model(path: Path, *, device: str = "cpu", compute_dtype: torch.dtype = torch.float32) -> tuple[Model, ModelConfig]:
    """Load every tensor the model needs; refuse a directory that lacks one, has a foreign one or another shape."""
    config = read_model_config(path)
    model = Model(config).to(device=device, dtype=compute_dtype)
    wanted = {name for name, _ in model.named_slices()}
    found: set[str] = set()
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"no weights at {path}: expected model.safetensors or its shards beside config.json")
    for file in files:
        try:
            with safe_open(file, framework="pt") as shard:
                names = [n for n in shard.keys() if not (config.tied and n == "lm_head.weight")]  # noqa: SIM118 (not a dict)
                model.load_serving({name: shard.get_tensor(name) for name in names})
                found.update(names)
        except SafetensorError as error:
            raise CheckpointError(f"{file} is damaged: {error}; fetch or make it again") from error
        except ValueError as error:
            raise CheckpointError(f"{file} does not fit {path / 'config.json'}: {error}") from error
    if missing := wanted - found:
        raise CheckpointError(f"{path} lacks {len(missing)} of {len(wanted)} tensors, first {min(missing)!r}; the directory is incomplete")
    return model, config


def check_model(path: Path) -> ModelConfig:
    """Refuse what `load_model` would refuse, from the files' headers alone: a big model is not loaded to be looked at."""
    config = read_model_config(path)
    with torch.device("meta"):
        wanted = {name: list(live.shape) for name, live in Model(config).named_slices()}
    found: dict[str, list[int]] = {}
    for file in sorted(path.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as shard:
                found |= {name: shard.get_slice(name).get_shape() for name in shard.keys()}  # noqa: SIM118 (not a dict)
        except SafetensorError as error:
            raise CheckpointError(f"{file} is damaged: {error}; fetch or make it again") from error
    for name, shape in wanted.items():
        if found.get(name) != shape:
            has = f"has it with shape {found[name]}" if name in found else "lacks it"
            raise CheckpointError(f"{path / 'config.json'} asks for {name!r} of shape {shape}, the weights beside it {has}")
    return config


def save_model(model: Model, path: Path) -> None:
    """Write weights and config; tokenizer files are the caller's to copy."""
    path.mkdir(parents=True, exist_ok=True)
    save_file({k: v.cpu() for k, v in model.serving_tensors().items()}, path / "model.safetensors.tmp", metadata={"format": "pt"})
    (path / "model.safetensors.tmp").replace(path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(model.config.to_hf(), indent=2) + "\n")
