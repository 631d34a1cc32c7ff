"""Reading and writing a model as a Hugging Face safetensors directory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rollmill.model.config import ModelConfig
from rollmill.model.transformer import Model

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000


class CheckpointError(ValueError):
    """A model directory that is missing, foreign or damaged."""


def read_model_config(path: Path) -> ModelConfig:
    """The shape of the model stored in a directory."""
    file = path / "config.json"
    if not file.is_file():
        raise CheckpointError(f"no model at {path}: {file.name} is missing; point `model.path` at a Hugging Face safetensors directory")
    try:
        return ModelConfig.from_hf(json.loads(file.read_text()))
    except KeyError as error:
        raise CheckpointError(f"{file} does not describe a model this version can load: it lacks {error}") from error
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{file} does not describe a model this version can load: {error}") from error


def compute_dtype(device: str) -> torch.dtype:
    """A CPU computes in float32 with weights that the serving dtype holds exactly; a GPU in the serving dtype itself."""
    return torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32


def load_model(
    path: Path, *, device: str = "cpu", compute_dtype: torch.dtype = torch.float32, numerics: str = "exact"
) -> tuple[Model, ModelConfig]:
    """Load every tensor the model needs; refuse a directory that lacks one, has a foreign one or another shape."""
    config = read_model_config(path)
    model = Model(config, numerics=numerics).to(device=device, dtype=compute_dtype)
    wanted = {name for name, _ in model.named_slices()}
    found: set[str] = set()
    files = _weight_files(path)
    if not files:
        raise CheckpointError(f"no weights at {path}: expected {WHOLE} or its shards beside config.json")
    for file in files:
        try:
            with safe_open(file, framework="pt") as shard:
                stored = ((name, shard.get_tensor(name)) for name in shard.keys())  # noqa: SIM118 (not a dict)
                parts = dict(part for name, tensor in stored for part in _serving_parts(name, tensor, config))
            model.load_serving(parts)
            found.update(parts)
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
    for file in _weight_files(path):
        try:
            with safe_open(file, framework="pt") as shard:
                for name in shard.keys():  # noqa: SIM118 (not a dict)
                    stored = torch.empty(shard.get_slice(name).get_shape(), device="meta")
                    found |= {part: list(tensor.shape) for part, tensor in _serving_parts(name, stored, config)}
        except SafetensorError as error:
            raise CheckpointError(f"{file} is damaged: {error}; fetch or make it again") from error
        except ValueError as error:
            raise CheckpointError(f"{file} does not fit {path / 'config.json'}: {error}") from error
    for name, shape in wanted.items():
        if found.get(name) != shape:
            has = f"has it with shape {found[name]}" if name in found else "lacks it"
            raise CheckpointError(f"{path / 'config.json'} asks for {name!r} of shape {shape}, the weights beside it {has}")
    if foreign := found.keys() - wanted.keys():
        raise CheckpointError(f"the weights at {path} have {min(foreign)!r}, which {path / 'config.json'} does not ask for")
    return config


def _weight_files(path: Path) -> list[Path]:
    """One whole file, or the shards of the index, or without an index every safetensors file there is."""
    if (path / WHOLE).is_file():
        return [path / WHOLE]
    if not (path / INDEX).is_file():
        return sorted(path.glob("*.safetensors"))
    try:
        names = set(json.loads((path / INDEX).read_text())["weight_map"].values())
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path / INDEX} is damaged: {error!r}; fetch or make it again") from error
    for name in sorted(names):
        if Path(name).name != name or not (path / name).is_file():
            raise CheckpointError(f"{path} lacks the shard {name!r} that {INDEX} names; the directory is incomplete")
    return [path / name for name in sorted(names)]


def _serving_parts(name: str, stored: torch.Tensor, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """A stored tensor as the model's own: experts may lie stacked in one tensor per layer; what a model never reads is left out."""
    if (config.tied and name == "lm_head.weight") or name.endswith("rotary_emb.inv_freq"):
        return
    names = config.traits.moe
    layer, found, rest = name.partition(".mlp.")
    if names and found and rest in ("experts.gate_up_proj", "experts.down_proj"):
        if stored.dim() != 3:
            raise ValueError(f"tensor {name!r} has shape {tuple(stored.shape)}, stacked experts need three dimensions")
        for x, expert in enumerate(stored.unbind()):
            at = f"{layer}.{names.block}.experts.{x}"
            if rest == "experts.down_proj":
                yield f"{at}.{names.down}.weight", expert
            else:
                gate, up = expert.chunk(2)
                yield f"{at}.{names.gate}.weight", gate
                yield f"{at}.{names.up}.weight", up
    elif names and found and rest == "gate.weight":
        yield f"{layer}.{names.block}.gate.weight", stored
    else:
        yield name, stored


def save_model(model: Model, path: Path, *, shard_bytes: int = SHARD_BYTES) -> None:
    """Write weights and config; tokenizer files are the caller's to copy.

    A crash leaves the old model, the new one, or a directory that `load_model` refuses.
    """
    path.mkdir(parents=True, exist_ok=True)
    shards = _shards(model, shard_bytes)
    many = len(shards) > 1
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" if many else WHOLE for i in range(len(shards))]
    live = dict(model.named_slices())
    for name, shard in zip(names, shards, strict=True):
        tensors = {n: live[n].detach().to(device="cpu", dtype=model.serving_dtype, copy=True).contiguous() for n in shard}
        save_file(tensors, path / f"{name}.tmp", metadata={"format": "pt"})
    config, text = path / "config.json", json.dumps(model.config.to_hf(), indent=2) + "\n"
    stale = [p for p in (*sorted(path.glob("model-*-of-*.safetensors")), path / INDEX, path / WHOLE) if p.exists() and p.name not in names]
    if many or stale or not config.is_file() or config.read_text() != text:
        # More than one file changes: without a config.json nobody takes the directory for a model meanwhile.
        config.unlink(missing_ok=True)
    for file in stale:
        file.unlink()
    for name in names:
        (path / f"{name}.tmp").replace(path / name)
    if many:
        size = sum(t.numel() for t in live.values()) * model.serving_dtype.itemsize
        weight_map = {n: name for name, shard in zip(names, shards, strict=True) for n in shard}
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (path / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    if not config.is_file():
        (path / "config.json.tmp").write_text(text)
        (path / "config.json.tmp").replace(config)


def _shards(model: Model, shard_bytes: int) -> list[list[str]]:
    """Names in order, a new shard where the next tensor would not fit."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, live in model.named_slices():
        num_bytes = live.numel() * model.serving_dtype.itemsize
        if shards[-1] and size + num_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += num_bytes
    return shards
