"""One optimiser step: recompute the logprobs, accumulate the loss over micro-batches, apply it, and measure what happened."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rollmill.algorithms import USUAL_CORRECTIONS, Aggregation, LossOptions, Options
from rollmill.model import Model, PackedAttention
from rollmill.model.route_record import RouteRecord
from rollmill.model.routes import ForcedRoutes, RouteTally, replayed, route_shape
from rollmill.records import Window
from rollmill.trainer import mismatch
from rollmill.trainer.batch import Lesson, StepBatch, dealt, micro_batches
from rollmill.trainer.losses import LossInputs, LossParts, policy_loss
from rollmill.trainer.mismatch import TokenScores
from rollmill.trainer.optimizer import MasterAdamW

METRICS = (*mismatch.METRICS, "pol/entropy", "loss/sum", "grad/norm", "grad/is_dropped")
"""Always written, as zeros when a step had nothing to learn from."""


class Learner:
    """Owns the model in training and its optimiser. `loss`, `corrections`, `aggregation`, `minibatches`, `kl_ref` and `router_replay` are
    the run file's keys of these names, `aggregation` None the loss's own; `reference` is the frozen model that `kl_ref` measures from.
    """

    def __init__(
        self,
        model: Model,
        optimizer: MasterAdamW,
        loss: LossOptions,
        *,
        temperature: float,
        length_norm: float,
        tokens_per_microbatch: int,
        router_replay: str = "off",
        corrections: Sequence[Options] = USUAL_CORRECTIONS,
        aggregation: Aggregation | None = None,
        minibatches: int = 1,
        kl_ref: float = 0.0,
        reference: Model | None = None,
    ) -> None:
        assert bool(kl_ref) == (reference is not None), "a reference is kept for kl_ref and for nothing else"
        self.model, self.optimizer, self._loss, self._corrections = model, optimizer, loss, tuple(corrections)
        self._temperature, self._length_norm, self._max_tokens = temperature, length_norm, tokens_per_microbatch
        self._aggregation: Aggregation = loss.aggregation if aggregation is None else aggregation
        self._num_minibatches, self._kl_ref, self._reference = minibatches, kl_ref, reference
        self._replay = router_replay
        self._route_shape = None if router_replay == "off" else route_shape(model.config)
        self._sources: dict[str, int] = {}

    def step(self, batch: StepBatch, *, version: int, lr_scale: float = 1.0) -> tuple[dict[str, float], bool]:
        """(metrics, whether the weights changed). `version` is that of the weights before the step."""
        gauge = _Gauge(self._route_shape.layers if self._route_shape else ())
        hands = [list(micro_batches(hand, self._max_tokens)) for hand in dealt(batch.lessons, self._num_minibatches)]
        # Scored before the first update moves the weights. Where there is one update only, the policy is its own proximal policy.
        needs_pass = self._loss.needs_proximal and len(hands) > 1
        proximal = [[self._peek(self.model, chunk) if needs_pass else None for chunk in hand] for hand in hands]
        stats = []
        for hand, before in zip(hands, proximal, strict=True):
            divisor = self._divisor(batch, hand, len(hands))
            for chunk, proximal_N in zip(hand, before, strict=True):
                self._backward(chunk, proximal_N, divisor, version, gauge)
            stats.append(self.optimizer.step(lr_scale))
        metrics = gauge.metrics(list(self._sources))
        if stats:
            metrics["grad/norm"] = float(np.mean([s.grad_norm for s in stats]))
            metrics["grad/is_dropped"] = float(np.mean([not s.is_applied for s in stats]))
        return metrics, any(s.is_applied for s in stats)

    def _backward(self, chunk: list[Lesson], proximal_N: torch.Tensor | None, divisor: float, version: int, gauge: _Gauge) -> None:
        """Add the gradient of one micro-batch, and what it showed to the gauge."""
        windows = [lesson.window for lesson in chunk]
        routes = self._routes(windows, gauge)
        logprobs_N, entropy_N = self._score(self.model, windows, routes)
        scores = self._evidence(windows, logprobs_N.detach(), version)
        advantages_S = torch.tensor([lesson.advantage for lesson in chunk], dtype=torch.float32, device=logprobs_N.device)
        if proximal_N is None and self._loss.needs_proximal:
            proximal_N = logprobs_N.detach()
        inputs = LossInputs(
            logprobs_N=logprobs_N,
            sampler_N=scores.sampler_N,
            advantages_S=advantages_S,
            sequence_N=scores.sequence_N,
            length_S=torch.tensor([x.length for x in chunk], device=logprobs_N.device) if self._aggregation == "sequence_mean" else None,
            lag_N=scores.lag_N,
            proximal_N=proximal_N,
            reference_N=None if self._reference is None else self._peek(self._reference, chunk),
            kl_ref=self._kl_ref,
        )
        parts = policy_loss(inputs, self._loss, self._corrections, self._aggregation)
        torch.autograd.backward(parts.total / divisor)
        gauge.add(parts, entropy_N, scores, advantages_S[scores.sequence_N] > 0, routes.tally() if routes else None)

    def _divisor(self, batch: StepBatch, hand: Sequence[Sequence[Lesson]], num_hands: int) -> float:
        """Counts what there was before any mask, so that masks never re-scale the rest."""
        if self._aggregation == "token_mean":
            return float(sum(int(np.count_nonzero(lesson.window.sampled_T)) for chunk in hand for lesson in chunk))
        per_episode = self._length_norm if self._aggregation == "constant" else 1.0
        return batch.num_episodes * per_episode / num_hands

    @torch.no_grad()
    def _peek(self, model: Model, chunk: list[Lesson]) -> torch.Tensor:
        """The logprobs that a model gives the sampled tokens now. The reference has its own routes; what was replayed is not its choice."""
        windows = [lesson.window for lesson in chunk]
        return self._score(model, windows, self._routes(windows, None) if model is self.model else None)[0]

    def _routes(self, windows: list[Window], gauge: _Gauge | None) -> ForcedRoutes | None:
        """The experts that the engine took, in the order of the packed tokens; None when they are not replayed."""
        shape = self._route_shape
        if shape is None:
            return None
        records = [RouteRecord.from_bytes(w.routes) if w.routes else RouteRecord.missing(shape, w.num_tokens) for w in windows]
        ids_TLK = RouteRecord.join(records).ids_TLK()
        # A window's last token predicts nothing that is trained, and no engine computes it.
        is_used = np.ones(len(ids_TLK), bool)
        is_used[np.cumsum([w.num_tokens for w in windows]) - 1] = False
        is_missing = np.any(ids_TLK[:, list(shape.layers), 0] < 0, axis=1)
        if gauge is not None:
            gauge.count_rows(int(np.sum(is_missing & is_used)), int(is_used.sum()))
        return replayed(self._replay, torch.from_numpy(ids_TLK), self.model.config)

    def _score(self, model: Model, windows: list[Window], routes: ForcedRoutes | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(logprob under the model's weights, entropy) of every sampled token."""
        device = model.embed.device
        tokens_T = torch.from_numpy(np.concatenate([w.tokens_T for w in windows]).astype(np.int64)).to(device)
        attention = PackedAttention([w.num_tokens for w in windows], device)
        hidden_TD = model(tokens_T, attention.positions_T, attention, routes)
        # A sampled token is predicted by the position before it; the first token of a window is never sampled.
        assert not any(w.sampled_T[0] for w in windows), "a window cannot start with a sampled token"
        at_N = torch.from_numpy(np.flatnonzero(np.concatenate([w.sampled_T for w in windows]))).to(device)
        return model.score(hidden_TD[at_N - 1], tokens_T[at_N], self._temperature)

    def _evidence(self, windows: list[Window], logprobs_N: torch.Tensor, version: int) -> TokenScores:
        """What the sampler said of the same tokens, and where they come from."""
        masks = [w.sampled_T != 0 for w in windows]
        lag = version - np.concatenate([w.versions_T[m] for w, m in zip(windows, masks, strict=True)]).astype(np.int64)
        is_single = [_is_single(w, version, is_replayed=self._route_shape is not None)[m] for w, m in zip(windows, masks, strict=True)]

        def there(x: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(x)).to(logprobs_N.device)

        return TokenScores(
            logprobs_N=logprobs_N,
            sampler_N=there(np.concatenate([w.logprobs_T[m] for w, m in zip(windows, masks, strict=True)])),
            sequence_N=there(np.repeat(np.arange(len(windows)), [int(m.sum()) for m in masks])),
            position_N=there(np.concatenate([np.flatnonzero(m) for m in masks])),
            lag_N=there(np.maximum(lag, 0)),
            source_N=there(np.concatenate([self._source_of(w)[m] for w, m in zip(windows, masks, strict=True)])),
            is_single_N=there(np.concatenate(is_single)),
        )

    def _source_of(self, window: Window) -> np.ndarray:
        source_T = np.full(window.num_tokens, -1, np.int64)
        for span in window.sources:
            source_T[span.start : span.end] = self._sources.setdefault(span.replica, len(self._sources))
        return source_T


def _is_single(window: Window, version: int, *, is_replayed: bool) -> np.ndarray:
    """Sampled tokens for which trainer and replica compute the same thing, so that only numerics can differ.

    A turn's context is computed by the weights of the turn, or was cached by the same ones, whatever earlier turns came from. But the
    routes of a token are kept from when it was first computed, so where they are replayed earlier turns must be of this version too.
    """
    is_single_T = window.versions_T == version
    for start, end in window.stale:
        is_single_T[start:end] = False
    return np.logical_and.accumulate(is_single_T | (window.sampled_T == 0)) if is_replayed else is_single_T


class _Gauge:
    """Gathers what a step's micro-batches showed; numbers leave the device once, at the end."""

    def __init__(self, layers: tuple[int, ...]) -> None:
        self._layers = layers
        self._parts: list[LossParts] = []
        self._entropy: list[torch.Tensor] = []
        self._scores: list[TokenScores] = []
        self._is_positive: list[torch.Tensor] = []
        self._tallies: list[RouteTally] = []
        self._num_missing = self._num_rows = 0

    def count_rows(self, num_missing: int, num_rows: int) -> None:
        self._num_missing += num_missing
        self._num_rows += num_rows

    def add(
        self, parts: LossParts, entropy_N: torch.Tensor, scores: TokenScores, is_positive_N: torch.Tensor, tally: RouteTally | None
    ) -> None:
        self._parts.append(parts)
        self._entropy.append(entropy_N)
        self._scores.append(scores)
        self._is_positive.append(is_positive_N)
        self._tallies += [tally] if tally else []

    def metrics(self, sources: list[str]) -> dict[str, float]:
        splits = [f"mm/engine_{name}/{what}" for name in sources for what in mismatch.SPLIT]
        out = dict.fromkeys([*METRICS, *splits, *(f"route/flip_frac_layer_{layer}" for layer in self._layers)], 0.0)
        if not self._parts:
            return out
        found = mismatch.mismatch(TokenScores.join(self._scores), sources)
        found |= mismatch.corrections(self._parts, torch.cat(self._is_positive))
        if self._tallies:
            found |= mismatch.route_flips(self._tallies, self._layers)
        found["pol/entropy"] = torch.cat(self._entropy).mean()
        found["loss/sum"] = torch.stack([p.total.detach() for p in self._parts]).sum()
        missing = {"route/missing_row_frac": self._num_missing / max(1, self._num_rows)}
        return out | mismatch.to_floats(found) | missing
