"""Decode steps over fixed buffers, so that a GPU replays one captured graph instead of launching a kernel per operation.

A step is padded to the next bucket with rows that write into a page of their own; in the exact profile rows do not see each other,
so a replayed step, a padded one and an eager one give the same bits.
Shapes: B rows of a bucket, P pages of a context, V vocabulary, L layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import numpy as np
import torch

from rollmill.model import Model, PagedAttention, RecordedRoutes
from rollmill.ops import PAGE, Pages, Spans

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 512)


class Decoded(NamedTuple):
    """What a step gave, still on the device; rows beyond the batch are padding."""

    logits_BV: torch.Tensor
    """Over the temperature."""
    ids_B: torch.Tensor
    logprobs_B: torch.Tensor
    routes_BLK: torch.Tensor | None


class _Buffers(NamedTuple):
    tokens_B: torch.Tensor
    positions_B: torch.Tensor
    lens_B: torch.Tensor
    slots_B: torch.Tensor
    table_BP: torch.Tensor
    scale_B1: torch.Tensor
    greedy_B: torch.Tensor
    uniform_B: torch.Tensor


def _buffers(num_rows: int, width: int, device: torch.device, *, pin: bool = False) -> _Buffers:
    def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device, pin_memory=pin)

    return _Buffers(
        tokens_B=zeros(num_rows, dtype=torch.int64),
        positions_B=zeros(num_rows, dtype=torch.int64),
        lens_B=zeros(num_rows, dtype=torch.int32),
        slots_B=zeros(num_rows, dtype=torch.int64),
        table_BP=zeros(num_rows, width, dtype=torch.int32),
        scale_B1=zeros(num_rows, 1, dtype=torch.float32),
        greedy_B=zeros(num_rows, dtype=torch.bool),
        uniform_B=zeros(num_rows, dtype=torch.float64),
    )


class FixedStep:
    """The buffers of one bucket and the step over them; captured on its first use where the device can."""

    def __init__(self, model: Model, pages: Pages, *, num_rows: int, max_len: int, spare_page: int, memory: Any = None) -> None:
        """`memory`: a pool that all graphs may share, since no two run at once and each one's results are read before the next."""
        self._model, self._pages, self._num_rows, self._spare = model, pages, num_rows, spare_page
        device = model.embed.device
        width = -(-max_len // PAGE)
        self._host = _buffers(num_rows, width, torch.device("cpu"), pin=device.type == "cuda")
        self._there = _buffers(num_rows, width, device) if device.type != "cpu" else self._host
        self._spans = Spans(
            table_BP=self._there.table_BP,
            starts_B1=torch.arange(num_rows + 1, dtype=torch.int32, device=device),
            lens_B=self._there.lens_B,
            slots_T=self._there.slots_B,
            seq_T=np.arange(num_rows, dtype=np.int32),
            position_T=self._host.positions_B.numpy(),
            longest_new=1,
            longest=max_len,
        )
        self._memory = memory
        self._graph: torch.cuda.CUDAGraph | None = None
        self._out: Decoded | None = None

    def fill(
        self,
        tokens: Seq[int],
        positions: Seq[int],
        pages: Seq[Seq[int]],
        *,
        temperature_N: np.ndarray,
        uniform_N: np.ndarray,
    ) -> None:
        """Set the step's rows; what is beyond them becomes padding."""
        n, host = len(tokens), self._host
        host.tokens_B.numpy()[:n] = tokens
        host.tokens_B.numpy()[n:] = 0
        position = host.positions_B.numpy()
        position[:n], position[n:] = positions, 0
        host.lens_B.numpy()[:] = position + 1
        table = host.table_BP.numpy()
        for row, held in enumerate(pages):
            table[row, : len(held)] = held
        table[n:, 0] = self._spare
        host.slots_B.numpy()[:] = table[np.arange(self._num_rows), position // PAGE].astype(np.int64) * PAGE + position % PAGE
        host.scale_B1.numpy()[:n, 0] = np.where(temperature_N == 0, 1, temperature_N)
        host.scale_B1.numpy()[n:] = 1
        host.greedy_B.numpy()[:n] = temperature_N == 0
        host.greedy_B.numpy()[n:] = True
        host.uniform_B.numpy()[:n], host.uniform_B.numpy()[n:] = uniform_N, 0
        if self._there is not self._host:
            for mine, theirs in zip(self._there, self._host, strict=True):
                mine.copy_(theirs, non_blocking=True)

    def run(self) -> Decoded:
        if self._model.embed.device.type != "cuda":
            return self._compute()
        if self._graph is None:
            self._capture()
        assert self._graph is not None and self._out is not None
        self._graph.replay()
        return self._out

    def _capture(self) -> None:
        # Kernels are compiled, and their equality proved, in a plain run: neither may happen inside a capture.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._compute()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            self._out = self._compute()
        self._graph = graph

    def _compute(self) -> Decoded:
        model, b = self._model, self._there
        recorded = RecordedRoutes(model.config) if model.config.moe else None
        hidden_BD = model(b.tokens_B, b.positions_B, PagedAttention(self._pages, self._spans), recorded)
        # Divided by a tensor, also by 1: as `tempered` does.
        logits_BV = model.logits(hidden_BD) / b.scale_B1
        picked_B = torch.where(b.greedy_B, logits_BV.argmax(-1), model.ops.pick(logits_BV, b.uniform_B))
        logprobs_B, _ = model.ops.score(logits_BV, picked_B)
        return Decoded(logits_BV, picked_B, logprobs_B, recorded.ids_TLK() if recorded else None)
