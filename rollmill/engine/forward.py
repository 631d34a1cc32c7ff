"""Computes one planned step: packs the tokens, runs the model over the cache, samples; knows no queue, no clock and no versions.

Shapes: T packed tokens, N sampled rows, B decoding rows, D hidden.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from rollmill.engine.kv import KVCache, StepAttention
from rollmill.engine.sampling import sample
from rollmill.engine.scheduler import Sequence, Step
from rollmill.model import Model


class Sampled(NamedTuple):
    """One entry per sequence that got a token; a logprob of nan means that the logits were not numbers."""

    seqs: list[Sequence]
    ids: list[int]
    logprobs: list[float]


class Packed(NamedTuple):
    """A step as one flat batch: decoding rows first, then the chunks."""

    tokens: list[int]
    positions: list[int]
    rows: list[int]
    """Packed index of each token whose successor is sampled."""
    seqs: list[Sequence]
    """For whom, in the order of `rows`."""


def pack(step: Step, running: list[Sequence]) -> Packed:
    seqs = running[: step.num_decode]
    tokens = [seq.tokens[-1] for seq in seqs]
    positions = [seq.num_computed for seq in seqs]
    rows = list(range(step.num_decode))
    for chunk in step.chunks:
        seq = running[chunk.row]
        tokens += seq.tokens[chunk.start : chunk.end]
        positions += range(chunk.start, chunk.end)
        if chunk.end == seq.num_prompt:
            rows.append(len(tokens) - 1)
            seqs.append(seq)
    return Packed(tokens, positions, rows, seqs)


class Forward:
    """A model and its cache."""

    def __init__(self, model: Model, cache: KVCache) -> None:
        self.model, self.cache = model, cache
        self._lanes_for: list[Sequence] = []
        self._lanes: dict[str, np.ndarray] = {}

    @torch.inference_mode()
    def compute(self, step: Step, running: list[Sequence]) -> Sampled:
        """Run the step and move every sequence's `num_computed` on."""
        batch, device = pack(step, running), self.cache.kv.device
        lens_B = np.array(batch.positions[: step.num_decode], np.int64)
        attention = StepAttention(self.cache, decode_len_B=lens_B, chunks=step.chunks)
        hidden_TD = self.model(torch.tensor(batch.tokens, device=device), torch.tensor(batch.positions, device=device), attention)
        for seq in running[: step.num_decode]:
            seq.num_computed += 1
        for chunk in step.chunks:
            running[chunk.row].num_computed = chunk.end
        if not batch.seqs:
            return Sampled([], [], [])
        hidden_ND = hidden_TD if len(batch.rows) == len(batch.tokens) else hidden_TD[torch.tensor(batch.rows, device=device)]
        ids, logprobs = sample(self.model.logits(hidden_ND), **self._sampling_lanes(batch.seqs))
        return Sampled(batch.seqs, ids, logprobs)

    def _sampling_lanes(self, seqs: list[Sequence]) -> dict[str, np.ndarray]:
        """Sampling parameters as arrays; all but the position change only when the batch's membership does."""
        if seqs != self._lanes_for:
            self._lanes_for = seqs
            self._lanes = {
                "temperature_N": np.array([s.request.temperature for s in seqs], np.float64),
                "top_p_N": np.array([s.request.top_p for s in seqs], np.float64),
                "top_k_N": np.array([s.request.top_k for s in seqs], np.int64),
                "seed_N": np.array([s.seed for s in seqs], np.int64),
            }
        return {**self._lanes, "position_N": np.array([len(s.tokens) for s in seqs], np.int64)}
