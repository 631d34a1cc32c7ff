"""Importing a GGUF file as a Hugging Face safetensors directory: complete and checked, or not there at all.

The architecture's own metadata keys are read, pinned or known to change nothing; any other is refused, and so is a tensor without
a place, since a feature that is silently left out gives a model that answers fluently and wrongly.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors.torch import save_file

from rollmill.model.checkpoint import INDEX, SHARD_BYTES, WHOLE, check_model
from rollmill.model.config import DTYPES, ModelConfig
from rollmill.model.gguf_config import ROPE_FACTORS, architecture_of, model_config
from rollmill.model.gguf_file import GGUFError, GGUFFile
from rollmill.model.gguf_tokenizer import Vocabulary
from rollmill.model.tokenizer import Tokenizer
from rollmill.model.transformer import Model

_OUTSIDE = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}
_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj")


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Where in the file one tensor of the model comes from."""

    name: str
    part: int | None = None
    """Which entry of a stack of experts."""
    num_heads: int = 0
    """Of query and key rows that lie in pairs: how many heads to put in halves; 0: as stored."""


def import_gguf(
    path: Path, out: Path, *, dtype: str = "bfloat16", tokenizer: Path | None = None, shard_bytes: int = SHARD_BYTES
) -> ModelConfig:
    """Write the model in a GGUF file as the directory `out`, which must not exist or be empty.

    `tokenizer` is a directory whose tokenizer files are taken instead of making them from the file's vocabulary.
    """
    if dtype not in DTYPES:
        raise ValueError(f"cannot store a model in {dtype!r}; choose one of {', '.join(DTYPES)}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists already; name a directory that does not, or remove it")
    file = GGUFFile(path)
    architecture = architecture_of(file)
    vocabulary = Vocabulary.read(file.metadata, path) if tokenizer is None else None
    out.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the last step is one rename; whatever goes wrong before it takes everything away again.
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
        made = Path(scratch) / "model"
        made.mkdir()
        token_ids = _write_tokenizer(tokenizer or vocabulary, made)
        num_tokens = len(vocabulary.tokens) if vocabulary else Tokenizer(made).vocab_size
        config = model_config(file, dtype=dtype, eos_token_ids=token_ids.pop("eos_token_id"))
        if num_tokens > config.vocab_size:
            raise GGUFError(
                f"the tokenizer has {num_tokens:,} tokens, {path} embeddings for {config.vocab_size:,}; they do not belong together"
            )
        _write_weights(file, config, _sources(file, config, is_interleaved=architecture.is_interleaved), made, shard_bytes)
        (made / "config.json").write_text(json.dumps(config.to_hf() | token_ids, indent=2) + "\n")
        check_model(made)
        made.replace(out)
    return config


def _write_tokenizer(source: Vocabulary | Path | None, made: Path) -> dict[str, Any]:
    """Write the tokenizer's files; what config.json says about its tokens."""
    if isinstance(source, Vocabulary):
        source.write(made)
    elif source:
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            if (source / file).is_file():
                shutil.copyfile(source / file, made / file)
    tokenizer = Tokenizer(made)
    stop_ids = tuple(sorted(tokenizer.stop_ids))
    try:
        # Compiled when first asked for; a broken one must not be found out in a run.
        _ = tokenizer.chat_template
    except ValueError as error:
        raise GGUFError(f"the chat template is not valid: {error}; give the original model's tokenizer with --tokenizer DIR") from error
    if isinstance(source, Vocabulary):
        return {"eos_token_id": source.stop_ids, "bos_token_id": source.bos_id, "pad_token_id": source.pad_id}
    return {"eos_token_id": stop_ids}


def _sources(file: GGUFFile, config: ModelConfig, *, is_interleaved: bool) -> dict[str, Source]:
    """For each tensor of the model its place in the file, shapes compared; nothing in the file may be left over."""
    with torch.device("meta"):
        wanted = {name: tuple(live.shape) for name, live in Model(config).named_slices()}
    num_rows = {"self_attn.q_proj": config.num_heads, "self_attn.k_proj": config.num_kv_heads} if is_interleaved else {}
    found = {name: _source(name, num_rows) for name in wanted}
    for name, source in found.items():
        if source.name not in file.tensors:
            raise GGUFError(f"{file.path} lacks the tensor {source.name!r}; it is not a whole {config.family} model")
        shape = file.tensors[source.name].shape
        num_experts = config.moe.num_experts if config.moe else 0
        asked = wanted[name] if source.part is None else (num_experts, *wanted[name])
        if shape != asked:
            raise GGUFError(f"{file.path}: tensor {source.name!r} has shape {shape}, its metadata ask for {asked}")
    if foreign := file.tensors.keys() - {s.name for s in found.values()} - {ROPE_FACTORS}:
        raise GGUFError(f"{file.path} has the tensor {min(foreign)!r}, which this version has no place for in a {config.family} model")
    return found


def _source(name: str, heads: dict[str, int]) -> Source:
    if name in _OUTSIDE:
        return Source(name=_OUTSIDE[name])
    layer = _LAYER.fullmatch(name)
    assert layer, f"{name} is neither in a layer nor known outside"
    at, what, end = layer.groups()
    if expert := _EXPERT.fullmatch(what):
        return Source(name=f"blk.{at}.ffn_{expert[2]}_exps.{end}", part=int(expert[1]))
    return Source(name=f"blk.{at}.{_IN_LAYER[what]}.{end}", num_heads=heads.get(what, 0))


def _write_weights(file: GGUFFile, config: ModelConfig, sources: dict[str, Source], made: Path, shard_bytes: int) -> None:
    """One shard in memory at a time, so that a model larger than memory can be imported."""
    shards = list(_shards(file, sources, getattr(torch, config.dtype), shard_bytes))
    many = len(shards) > 1
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for i, names in enumerate(shards):
        shard = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" if many else WHOLE
        tensors = {name: _tensor(file, sources[name], getattr(torch, config.dtype)) for name in names}
        save_file(tensors, made / shard, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, shard)
        total_bytes += sum(t.nbytes for t in tensors.values())
    if many:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        (made / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _shards(file: GGUFFile, sources: dict[str, Source], dtype: torch.dtype, shard_bytes: int) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, source in sources.items():
        shape = file.tensors[source.name].shape
        num_bytes = int(np.prod(shape if source.part is None else shape[1:])) * dtype.itemsize
        if names and size + num_bytes > shard_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += num_bytes
    yield names


def _tensor(file: GGUFFile, source: Source, dtype: torch.dtype) -> torch.Tensor:
    values = torch.from_numpy(file.read(source.name, source.part))
    if source.num_heads:
        # (head, pair, which of the two, ...) to (head, which, pair, ...): llama.cpp turns neighbours, we turn halves.
        values = values.view(source.num_heads, -1, 2, *values.shape[1:]).transpose(1, 2).reshape(values.shape)
    stored = values.to(dtype).contiguous()
    if not stored.isfinite().all():
        raise GGUFError(f"{file.path}: tensor {source.name!r} has values that are not finite in {dtype}; try --dtype float32")
    return stored
