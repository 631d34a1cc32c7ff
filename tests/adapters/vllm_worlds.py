"""A tiny model as a checkpoint, a weight store that trains it a little, and its logprobs recomputed: what the adapter tests stand on."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import tokenizers
import torch

from rollmill.model import Model, ModelConfig, PackedAttention, save_model
from rollmill.model.config import MoEConfig
from rollmill.weights import Publisher, open_store

VOCAB = 300
# Biases, grouped heads, tied embeddings and a vocabulary that vLLM pads; sides of 32 for the packed multiplies of CPUs.
CONFIG = ModelConfig(
    family="qwen2",
    vocab_size=VOCAB,
    hidden_size=128,
    intermediate_size=192,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    max_position=2048,
    qkv_bias=True,
    eos_token_ids=(256,),
)
MOE_CONFIG = msgspec.structs.replace(
    CONFIG, family="qwen3_moe", qkv_bias=False, tied=False, moe=MoEConfig(num_experts=8, top_k=2, expert_size=64, norm_topk=True)
)


def tiny_model(seed: int = 0, config: ModelConfig = CONFIG) -> Model:
    """Random weights, large enough that the distribution is far from uniform."""
    model = Model(config)
    model.init_weights(seed)
    gen = torch.Generator().manual_seed(seed)
    tensors = model.serving_tensors()
    model.load_serving({n: t * 4 if t.dim() > 1 else t + torch.randn(t.shape, generator=gen).to(t.dtype) / 8 for n, t in tensors.items()})
    return model


def write_checkpoint(path: Path, model: Model) -> Path:
    save_model(model, path)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tok = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tok.add_special_tokens(["<|end|>"])
    tok.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "tokenizer_class": "PreTrainedTokenizerFast"}))
    return path


class TrainedStore:
    """A real store, and the model as it was at each of its versions."""

    def __init__(self, where: Path, model: Model) -> None:
        self.where, self.store = str(where), open_store(where)
        self._publisher = Publisher(self.store, run_id="adapters")
        self._model, self._config = model, model.config
        self._tensors = {0: model.serving_tensors()}
        assert self._publisher.resume(self._tensors[0], step=0) == 0

    def step(self) -> int:
        """A step that moves a twentieth of every matrix by enough to be seen in logprobs."""
        last = max(self._tensors)
        gen = torch.Generator().manual_seed(last)
        tensors = {name: t.clone() for name, t in self._tensors[last].items()}
        for t in tensors.values():
            moved = torch.rand(t.shape, generator=gen) < 0.05
            t[moved] = (t[moved].float() * 1.5 + 0.01).to(t.dtype)
        version = self._publisher.submit(tensors, step=last + 1)
        self._publisher.flush()
        self._tensors[version] = tensors
        return version

    def model_at(self, version: int) -> Model:
        model = Model(self._config)
        model.load_serving(self._tensors[version])
        return model

    def close(self) -> None:
        self._publisher.close()


def logprobs_of(model: Model, tokens: list[int], start: int, temperature: float = 1.0) -> torch.Tensor:
    """float32 logprobs of tokens start .. end from one forward."""
    attention = PackedAttention([len(tokens)])
    with torch.inference_mode():
        hidden = model(torch.tensor(tokens), attention.positions_T, attention)
        logprobs = (model.logits(hidden) / temperature).log_softmax(-1)
    return logprobs[torch.arange(start - 1, len(tokens) - 1), torch.tensor(tokens[start:])]
