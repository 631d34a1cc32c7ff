"""Sequences laid end to end for one forward, and the loss of their tokens; no sequence sees another.

Shapes: T tokens, N tokens that count in the loss, D hidden, S sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from rollmill.model import Model, ModelConfig, PackedAttention
from rollmill.trainer.datasets.shards import TokenSequence
from rollmill.trainer.stages.order import shared_out

LOGITS_AT_ONCE = 2**27
"""Elements of logits that exist at once (512 MB); beyond it they are made in blocks, and again for the backward pass."""


Addends = dict[str, torch.Tensor | float]
"""What a micro-batch adds to the metrics of its step; tensors stay on their device until the step is over."""


class Packed(msgspec.Struct, frozen=True, kw_only=True):
    """One micro-batch."""

    tokens_T: np.ndarray
    rows_N: np.ndarray
    """Positions whose next token counts in the loss."""
    weights_N: np.ndarray
    """How much."""
    sequence_N: np.ndarray
    """Which sequence each belongs to."""
    seq_lens: tuple[int, ...]

    @property
    def weight(self) -> float:
        return float(self.weights_N.sum(dtype=np.float64))


def pack(sequences: Sequence[TokenSequence]) -> Packed:
    lens = [len(s.tokens_T) for s in sequences]
    # A token's loss sits on the position before it; the last position of each sequence predicts nothing.
    shifted_T = np.concatenate([np.append(_weights(s)[1:], np.float32(0.0)) for s in sequences])
    rows_N = np.flatnonzero(shifted_T)
    return Packed(
        tokens_T=np.concatenate([s.tokens_T for s in sequences]),
        rows_N=rows_N,
        weights_N=shifted_T[rows_N],
        sequence_N=np.repeat(np.arange(len(lens)), lens)[rows_N],
        seq_lens=tuple(lens),
    )


def _weights(sequence: TokenSequence) -> np.ndarray:
    return np.ones(len(sequence.tokens_T), np.float32) if sequence.weights_T is None else sequence.weights_T


def micro_batches(sequences: Sequence[TokenSequence], *, max_tokens: int, attention_share: float) -> list[Packed]:
    """All of them, in micro-batches of even cost; those in which nothing counts are left out."""
    lengths_S = np.array([len(s.tokens_T) for s in sequences])
    packed = [pack([sequences[i] for i in part]) for part in shared_out(lengths_S, max_tokens=max_tokens, attention_share=attention_share)]
    return [p for p in packed if len(p.rows_N)]


def attention_share(model: Model) -> float:
    """Multiplications of attention per (token, token) pair over those of the weights per token: 2 L H E / 2 P, causal."""
    c: ModelConfig = model.config
    return c.num_layers * c.num_heads * c.head_dim / model.num_parameters


def token_losses(model: Model, packed: Packed) -> torch.Tensor:
    """Negative logprob of each token that counts: [N], float32."""
    device = model.embed.device
    tokens_T = torch.from_numpy(packed.tokens_T).to(device)
    rows_N = torch.from_numpy(packed.rows_N).to(device)
    attention = PackedAttention(packed.seq_lens, device)
    hidden_ND = model(tokens_T, attention.positions_T, attention)[rows_N]
    next_N = tokens_T[rows_N + 1]
    block = max(1, LOGITS_AT_ONCE // model.config.vocab_size)
    if len(rows_N) <= block:
        return _nll(model, hidden_ND, next_N)
    parts = zip(hidden_ND.split(block), next_N.split(block), strict=True)
    if not torch.is_grad_enabled():
        return torch.cat([_nll(model, h, n) for h, n in parts])
    return torch.cat([checkpoint(_nll, model, h, n, use_reentrant=False) for h, n in parts])


def _nll(model: Model, hidden_ND: torch.Tensor, next_N: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model.logits(hidden_ND), next_N, reduction="none")


def weighted_losses(model: Model, batch: Iterable[Packed], *, divisor: float) -> Iterator[tuple[torch.Tensor, Addends]]:
    """Each micro-batch's share of the weighted mean loss, and what it adds to the step's metrics."""
    for packed in batch:
        weights_N = torch.from_numpy(packed.weights_N).to(model.embed.device)
        loss = (token_losses(model, packed) * weights_N).sum() / divisor
        yield loss, {"loss/nll": loss.detach(), "perf/num_tokens": len(packed.tokens_T)}


@torch.no_grad()
def mean_loss(model: Model, batch: Sequence[Packed]) -> float:
    """Over all tokens that count; nan without any."""
    divisor = sum(p.weight for p in batch)
    return sum(float(loss) for loss, _ in weighted_losses(model, batch, divisor=divisor)) if divisor else float("nan")
