"""Logprobs of a data set under a fixed model, computed once and kept on disk: a part that is missing or damaged is computed again.

Shapes: S sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from blake3 import blake3

from rollmill.model import Model
from rollmill.trainer.datasets.shards import TokenShards, replace_file
from rollmill.trainer.stages.order import shared_out
from rollmill.trainer.stages.packed import Packed, pack, token_losses

PART = 2048
"""Sequences per file: minutes of work at most, and an even number, so that pairs stay together."""


def answer_logprobs(model: Model, packed: Packed) -> torch.Tensor:
    """Weighted sum of the logprobs of each sequence's answer: [S], float32."""
    device = model.embed.device
    logprobs_N = -token_losses(model, packed) * torch.from_numpy(packed.weights_N).to(device)
    sequence_N = torch.from_numpy(packed.sequence_N).to(device)
    return torch.zeros(len(packed.seq_lens), device=device).index_add(0, sequence_N, logprobs_N)


@torch.no_grad()
def reference_logprobs(
    model: Model,
    shards: TokenShards,
    folder: Path,
    *,
    max_tokens: int,
    attention_share: float,
    report: Callable[[str], None],
) -> np.ndarray:
    """Of all sequences of the shards: [S], float32. `folder` belongs to this model and these shards."""
    folder.mkdir(parents=True, exist_ok=True)
    out: list[np.ndarray] = []
    num_parts = -(-shards.num_sequences // PART)
    for number in range(num_parts):
        numbers = range(number * PART, min((number + 1) * PART, shards.num_sequences))
        path = folder / f"{number:05d}.logprobs"
        found = _read(path, len(numbers))
        if found is None:
            found = _compute(model, shards, numbers, max_tokens, attention_share)
            replace_file(path, blake3(found.tobytes()).digest() + found.tobytes())
            if number % 10 == 9 or number + 1 == num_parts:
                report(f"reference logprobs: {number + 1} of {num_parts} parts")
        out.append(found)
    return np.concatenate(out) if out else np.zeros(0, np.float32)


def _compute(model: Model, shards: TokenShards, numbers: Sequence[int], max_tokens: int, attention_share: float) -> np.ndarray:
    sequences = [shards.sequence(n) for n in numbers]
    out = np.zeros(len(numbers), "<f4")
    lengths = np.array([len(s.tokens_T) for s in sequences])
    for part in shared_out(lengths, max_tokens=max_tokens, attention_share=attention_share):
        out[part] = answer_logprobs(model, pack([sequences[i] for i in part])).cpu().numpy()
    return out


def _read(path: Path, length: int) -> np.ndarray | None:
    body = path.read_bytes() if path.is_file() else b""
    if len(body) != 32 + 4 * length or blake3(body[32:]).digest() != body[:32]:
        return None
    return np.frombuffer(body, "<f4", offset=32)
