"""Computes one planned step: packs the tokens, runs the model over the pages, samples or scores; knows no queue, no clock, no versions.

Shapes: T packed tokens, N sampled rows, R scored rows, L layers, K experts per token, D hidden, V vocabulary.
"""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from rollmill.engine.constrain import Masks
from rollmill.engine.fixed import BUCKETS, FixedStep
from rollmill.engine.sampling import Lanes, keyed_uniform, most_likely, sample, to_host
from rollmill.engine.scheduler import Chunk, Sequence, Step
from rollmill.model import Model, PagedAttention, RecordedRoutes
from rollmill.model.route_record import RouteRecord
from rollmill.model.routes import route_shape
from rollmill.ops import PAGE, Pages, Spans, tempered


class Sampled(NamedTuple):
    """One entry per sequence that got a token; a logprob of nan means that the logits were not numbers."""

    seqs: list[Sequence]
    ids: list[int]
    logprobs: list[float]
    tops: dict[int, list[tuple[int, float]]]
    """By entry, for the sequences that want the most likely tokens told."""


def _positions(seqs: list[Sequence]) -> np.ndarray:
    return np.array([len(s.tokens) for s in seqs], np.int64)


class Forward:
    """A model and its pages; for a model with experts also, slot by slot, which of them each token took."""

    def __init__(self, model: Model, *, num_pages: int, max_len: int, is_fixed: bool | None = None) -> None:
        """`is_fixed`: decode over fixed buffers; by default on a GPU, where they are replayed as graphs."""
        c = model.config
        self.model, self.num_pages, self.max_len = model, num_pages, max_len
        if is_fixed is None:
            # Other profiles than the exact one ask the host how many rows each expert has, which a graph cannot.
            is_fixed = model.embed.is_cuda and (c.moe is None or model.numerics == "exact")
        self._is_fixed = is_fixed
        # The last page is nobody's: the padding of fixed steps writes there.
        self.pages: Pages = model.ops.new_pages(
            num_pages + self._is_fixed, num_layers=c.num_layers, num_kv_heads=c.num_kv_heads, head_dim=c.head_dim, dtype=model.embed.dtype
        )
        self._routes_SLK: np.ndarray | None = None
        if c.moe:
            # By slot, as the keys are: what a shared page's tokens took is known to whoever shares it.
            self._routes_SLK = np.full((num_pages * PAGE, c.num_layers, c.moe.top_k), -1, np.int16)
        self._lanes_for: list[Sequence] = []
        self._lanes: Lanes | None = None
        self._masks: Masks | None = None
        self._steps: dict[int, FixedStep] = {}
        self._graph_memory = torch.cuda.graph_pool_handle() if model.embed.is_cuda else None

    def weights_changed(self) -> None:
        """New weights are in place. Graphs go on reading them, and what a profile derives from them, where they lie."""
        self.model.ops.refresh()

    @torch.inference_mode()
    def compute(self, step: Step) -> Sampled:
        """Run the step. Scored logprobs go straight to their sequences."""
        if self._is_fixed and step.num_decode == len(step.chunks) <= BUCKETS[-1] and all(c.seq.score_from is None for c in step.chunks):
            return self._decode(step.chunks)
        hidden_TD = self._hidden(step.chunks)
        seqs: list[Sequence] = []
        rows: list[int] = []
        at = 0
        for chunk in step.chunks:
            at += chunk.end - chunk.start
            if chunk.seq.score_from is not None:
                self._score(chunk, hidden_TD[at - (chunk.end - chunk.start) : at])
            elif chunk.end == len(chunk.seq.tokens):
                seqs.append(chunk.seq)
                rows.append(at - 1)
        if not seqs:
            return Sampled([], [], [], {})
        hidden_ND = hidden_TD if len(rows) == len(hidden_TD) else hidden_TD[torch.tensor(rows, device=hidden_TD.device)]
        lanes = self._lanes_of(seqs)
        return self._sample(seqs, tempered(self.model.logits(hidden_ND), lanes.temperature_N), lanes)

    def _sample(self, seqs: list[Sequence], logits_NV: torch.Tensor, lanes: Lanes) -> Sampled:
        # On a GPU the forward is still under way while the masks are made.
        mask_RW = self._mask(seqs, lanes) if lanes.guided else None
        ids, logprobs = sample(self.model.ops, logits_NV, lanes, _positions(seqs), mask_RW)
        return Sampled(seqs, ids, logprobs, self._tops(seqs, logits_NV, lanes))

    def _mask(self, seqs: list[Sequence], lanes: Lanes) -> np.ndarray:
        if self._masks is None:
            # The engine's share of the cores: this is its thread.
            self._masks = Masks(self.model.config.vocab_size, num_threads=torch.get_num_threads())
        return self._masks.fill([guide for row in lanes.guided if (guide := seqs[row].guide) is not None])

    def _tops(self, seqs: list[Sequence], logits_NV: torch.Tensor, lanes: Lanes) -> dict[int, list[tuple[int, float]]]:
        if not lanes.topped:
            return {}
        wanted = {row: seqs[row].request.num_top for row in lanes.topped}
        rows_R = torch.tensor(lanes.topped, device=logits_NV.device)
        tops = most_likely(self.model.ops, logits_NV[rows_R], max(wanted.values()))
        return {row: top[:num] for (row, num), top in zip(wanted.items(), tops, strict=True)}

    def _decode(self, chunks: list[Chunk]) -> Sampled:
        seqs = [c.seq for c in chunks]
        num_rows = next(b for b in BUCKETS if b >= len(seqs))
        fixed = self._steps.get(num_rows)
        if fixed is None:
            fixed = FixedStep(
                self.model, self.pages, num_rows=num_rows, max_len=self.max_len, spare_page=self.num_pages, memory=self._graph_memory
            )
            self._steps[num_rows] = fixed
        lanes, held = self._lanes_of(seqs), [s.holding.pages for s in seqs if s.holding is not None]
        fixed.fill(
            [s.tokens[-1] for s in seqs],
            [c.start for c in chunks],
            held,
            temperature_N=lanes.temperature_N,
            uniform_N=keyed_uniform(lanes.seed_N, _positions(seqs)),
        )
        out = fixed.run()
        if self._routes_SLK is not None and out.routes_BLK is not None:
            slots_N = [pages[c.start // PAGE] * PAGE + c.start % PAGE for pages, c in zip(held, chunks, strict=True)]
            self._routes_SLK[slots_N] = out.routes_BLK[: len(seqs)].cpu().numpy()
        logits_NV = out.logits_BV[: len(seqs)]
        if lanes.is_cut or lanes.guided:
            return self._sample(seqs, logits_NV, lanes)
        ids, logprobs = to_host(out.ids_B[: len(seqs)], out.logprobs_B[: len(seqs)])
        return Sampled(seqs, ids, logprobs, self._tops(seqs, logits_NV, lanes))

    def _hidden(self, chunks: list[Chunk]) -> torch.Tensor:
        device = self.model.embed.device
        held = [c.seq.holding for c in chunks]
        spans = Spans.of(
            new=[c.end - c.start for c in chunks],
            before=[c.start for c in chunks],
            pages=[h.pages for h in held if h is not None],
            device=device,
        )
        tokens = np.fromiter(chain.from_iterable(c.seq.tokens[c.start : c.end] for c in chunks), np.int64)
        positions = np.fromiter(chain.from_iterable(range(c.start, c.end) for c in chunks), np.int64)
        recorded = RecordedRoutes(self.model.config) if self._routes_SLK is not None else None
        hidden_TD = self.model(
            torch.from_numpy(tokens).to(device), torch.from_numpy(positions).to(device), PagedAttention(self.pages, spans), recorded
        )
        if recorded is not None:
            assert self._routes_SLK is not None
            self._routes_SLK[spans.slots_T.cpu().numpy()] = recorded.ids_TLK().cpu().numpy()
        return hidden_TD

    def _score(self, chunk: Chunk, hidden_TD: torch.Tensor) -> None:
        """Logprobs of the tokens that follow the chunk's own, from `score_from` on."""
        seq = chunk.seq
        assert seq.score_from is not None
        first = max(seq.score_from, chunk.start + 1)
        last = min(chunk.end + 1, len(seq.tokens))
        if first < last:
            ids_R = torch.tensor(seq.tokens[first:last], device=hidden_TD.device)
            rows_RD = hidden_TD[first - 1 - chunk.start : last - 1 - chunk.start]
            seq.logprobs += self.model.score(rows_RD, ids_R, seq.request.temperature)[0].tolist()

    def _lanes_of(self, seqs: list[Sequence]) -> Lanes:
        """Sampling parameters as arrays; they change only when the batch's membership does."""
        if self._lanes is None or seqs != self._lanes_for:
            self._lanes_for = seqs
            self._lanes = Lanes(
                temperature_N=np.array([s.request.temperature for s in seqs], np.float64),
                top_p_N=np.array([s.request.top_p for s in seqs], np.float64),
                top_k_N=np.array([s.request.top_k for s in seqs], np.int64),
                seed_N=np.array([s.seed for s in seqs], np.int64),
                guided=[row for row, s in enumerate(seqs) if s.guide is not None],
                topped=[row for row, s in enumerate(seqs) if s.request.num_top],
            )
        return self._lanes

    def keep_routes(self, seq: Sequence) -> None:
        """Before its pages go: the experts of every token computed so far, unless known from an earlier time; -1 in dense layers."""
        if seq.request.routes_from is None or seq.holding is None:
            return
        assert self._routes_SLK is not None
        start = sum(map(len, seq.early_routes))
        position_T = np.arange(start, max(start, seq.num_computed))
        pages = np.asarray(seq.holding.pages, np.int64)
        seq.early_routes.append(self._routes_SLK[pages[position_T // PAGE] * PAGE + position_T % PAGE])

    def record_routes(self, seq: Sequence) -> None:
        """At its end, while it holds its pages: the record that it asked for."""
        self.keep_routes(seq)
        if seq.request.routes_from is not None and seq.early_routes:
            routes_TLK = np.concatenate(seq.early_routes)[seq.request.routes_from :]
            seq.routes = RouteRecord.of(routes_TLK, route_shape(self.model.config)).to_bytes()

    @torch.inference_mode()
    def wipe(self, seq: Sequence, first: int) -> None:
        """Overwrite its keys and values from page `first` on: a number that is none would reach the pages' next owner through
        masked positions.
        """
        start = first * PAGE
        num_tokens = seq.num_computed - start
        if seq.holding is None or num_tokens <= 0:
            return
        c, live = self.model.config, self.model.embed
        spans = Spans.of(new=[num_tokens], before=[start], pages=[seq.holding.pages], device=live.device)
        zeros = torch.zeros(num_tokens, c.num_kv_heads, c.head_dim, dtype=live.dtype, device=live.device)
        for layer in range(c.num_layers):
            self.pages.write(layer, zeros, zeros, spans)

    @torch.inference_mode()
    def warm(self) -> None:
        """One token through everything, so that no request waits for kernels to be compiled and products to be proved."""
        page = self.num_pages if self._is_fixed else 0
        spans = Spans.of(new=[1], before=[0], pages=[[page]], device=self.model.embed.device)
        token = torch.zeros(1, dtype=torch.int64, device=self.model.embed.device)
        logits_1V = self.model.logits(self.model(token, token, PagedAttention(self.pages, spans)))
        self.model.ops.score(logits_1V, self.model.ops.pick(logits_1V, torch.zeros(1, dtype=torch.float64, device=token.device)))
