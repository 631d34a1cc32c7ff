"""Adapters as a PEFT directory, `adapter_config.json` and `adapter_model.safetensors`, readable by whatever reads PEFT's."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rollmill.trainer.lora import Lora, LoraConfig

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_KEY = re.compile(rf"^{re.escape(_PREFIX)}(?P<layer>.+)\.lora_(?P<side>[AB])\.weight$")


def save_adapter(lora: Lora, path: Path, *, base_model: str) -> None:
    """Write both files into a directory; what makes it appear whole is the caller's affair."""
    path.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for key, parameter in lora.parameters().items():
        name, _, side = key.rpartition(".")
        tensors[f"{_PREFIX}{name.removesuffix('.weight')}.lora_{side}.weight"] = parameter.detach().cpu().contiguous()
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})
    c = lora.config
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": c.rank,
        "lora_alpha": c.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "target_modules": sorted({name.removesuffix(".weight").rpartition(".")[2] for name in lora.names}),
    }
    (path / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def load_adapter(path: Path, *, device: torch.device | str = "cpu") -> Lora:
    """The adapters of a directory that this, or PEFT, has written."""
    try:
        raw = json.loads((path / CONFIG).read_text())
        tensors = load_file(path / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"no adapter can be read from {path}: {error}") from error
    odd = {key: raw.get(key) for key in ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save") if raw.get(key)}
    if raw.get("peft_type") != "LORA" or odd:
        raise ValueError(f"{path / CONFIG} is no plain LoRA adapter: peft_type {raw.get('peft_type')!r}, {odd}")
    params, shapes = {}, {}
    for key, tensor in tensors.items():
        if not (match := _KEY.match(key)):
            raise ValueError(f"{path / WEIGHTS} holds {key!r}, which is no adapter of a linear layer")
        name = f"{match['layer']}.weight"
        params[f"{name}.{match['side']}"] = tensor.float()
        shapes[name] = torch.Size((0, 0))
    for name in shapes:
        if not {f"{name}.A", f"{name}.B"} <= params.keys():
            raise ValueError(f"{path / WEIGHTS} holds half an adapter of {name!r}")
        shapes[name] = torch.Size((params[f"{name}.B"].shape[0], params[f"{name}.A"].shape[1]))
    names = [name for name in shapes if not name.startswith("lm_head")]
    config = LoraConfig(
        rank=int(raw["r"]),
        alpha=float(raw["lora_alpha"]),
        train_attn=any(".self_attn." in name for name in names),
        train_mlp=any(".self_attn." not in name for name in names),
        train_unembed=len(names) < len(shapes),
    )
    lora = Lora(config, shapes, device)
    lora.load(params)
    return lora
