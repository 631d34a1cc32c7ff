"""One optimiser step: recompute the logprobs, accumulate the loss over micro-batches, apply it, and measure what happened."""

from __future__ import annotations

import numpy as np
import torch

from rollmill.model import Model, PackedAttention
from rollmill.trainer.batch import Lesson, StepBatch, micro_batches
from rollmill.trainer.loss import LossConfig, LossParts, dppo_tv
from rollmill.trainer.optimizer import MasterAdamW

LOGIT_ROWS = 4096
METRICS = (
    "mm/abs_diff_mean mm/abs_diff_max mm/single_version_abs_diff_max mm/k3 mm/ess corr/kept_token_frac corr/tv_masked_frac "
    "corr/w_clip_frac corr/veto_frac corr/opsm_frac corr/nonfinite_frac pol/entropy loss/sum grad/norm grad/is_dropped"
).split()
"""Always written, as zeros when a step had nothing to learn from."""


class Learner:
    """Owns the model in training and its optimiser."""

    def __init__(
        self, model: Model, optimizer: MasterAdamW, loss: LossConfig, *, temperature: float, length_norm: float, tokens_per_microbatch: int
    ) -> None:
        self.model, self.optimizer, self._loss = model, optimizer, loss
        self._temperature, self._length_norm, self._max_tokens = temperature, length_norm, tokens_per_microbatch

    def step(self, batch: StepBatch, *, version: int, lr_scale: float = 1.0) -> tuple[dict[str, float], bool]:
        """(metrics, whether the weights changed). `version` is that of the weights before the step."""
        gauge = _Gauge(self._loss.ratio_cap)
        device = self.model.embed.device
        for chunk in micro_batches(batch.lessons, self._max_tokens):
            logprobs_N, entropy_N, sampler_N, sequence_N = self._score(chunk)
            advantages_S = torch.tensor([lesson.advantage for lesson in chunk], dtype=torch.float32, device=device)
            parts = dppo_tv(logprobs_N, sampler_N, advantages_S, sequence_N, self._loss)
            torch.autograd.backward(parts.total / (batch.num_episodes * self._length_norm))
            gauge.add(parts, entropy_N, torch.tensor([_is_of(lesson, version) for lesson in chunk], device=device)[sequence_N])
        is_applied = False
        metrics = gauge.metrics()
        if batch.lessons:
            stats = self.optimizer.step(lr_scale)
            is_applied = stats.is_applied
            metrics |= {"grad/norm": stats.grad_norm, "grad/is_dropped": float(not is_applied)}
        return metrics, is_applied

    def _score(self, chunk: list[Lesson]) -> tuple[torch.Tensor, ...]:
        """Logprobs under the live weights of every sampled token, with what the sampler said of them."""
        device = self.model.embed.device
        windows = [lesson.window for lesson in chunk]
        tokens_T = torch.from_numpy(np.concatenate([w.tokens_T for w in windows]).astype(np.int64)).to(device)
        attention = PackedAttention([w.num_tokens for w in windows], device)
        hidden_TD = self.model(tokens_T, attention.positions_T, attention)
        # A sampled token is predicted by the position before it; the first token of a window is never sampled.
        masks = [w.sampled_T != 0 for w in windows]
        assert not any(m[0] for m in masks), "a window cannot start with a sampled token"
        at_N = torch.from_numpy(np.flatnonzero(np.concatenate(masks))).to(device)
        logprobs, entropies = [], []
        for rows in (at_N - 1).split(LOGIT_ROWS):
            logits_NV = torch.log_softmax(self.model.logits(hidden_TD[rows]) / self._temperature, -1)
            logprobs.append(logits_NV.gather(-1, tokens_T[rows + 1][:, None])[:, 0])
            entropies.append(-(logits_NV.detach().exp() * logits_NV.detach()).sum(-1))
        sampler = np.concatenate([w.logprobs_T[m] for w, m in zip(windows, masks, strict=True)])
        sequence = np.repeat(np.arange(len(windows)), [int(m.sum()) for m in masks])
        return (
            torch.cat(logprobs),
            torch.cat(entropies),
            torch.from_numpy(sampler).to(device),
            torch.from_numpy(sequence).to(device),
        )


def _is_of(lesson: Lesson, version: int) -> bool:
    """Whether every sampled token of a window came from exactly these weights: then both sides must agree."""
    versions = lesson.window.versions_T[lesson.window.sampled_T != 0]
    return bool((versions == version).all())


class _Gauge:
    """Mismatch and mask diagnostics over all tokens of a step, taken before any mask."""

    def __init__(self, ratio_cap: float) -> None:
        self._ratio_cap = ratio_cap
        self._parts: list[LossParts] = []
        self._entropy: list[torch.Tensor] = []
        self._is_single: list[torch.Tensor] = []
        self._loss = 0.0

    def add(self, parts: LossParts, entropy_N: torch.Tensor, is_single_N: torch.Tensor) -> None:
        self._loss += float(parts.total.detach())
        self._parts.append(parts)
        self._entropy.append(entropy_N)
        self._is_single.append(is_single_N)

    def metrics(self) -> dict[str, float]:
        out = dict.fromkeys(METRICS, 0.0)
        if not self._parts:
            return out
        finite = torch.cat([p.is_finite_N for p in self._parts])
        diff = torch.cat([p.log_ratio_N for p in self._parts])[finite].double()
        ratio = diff.clamp(-20, 20).exp()
        fresh = diff[torch.cat(self._is_single)[finite]].abs()
        vetoed, opsm = torch.cat([p.is_vetoed_S for p in self._parts]), torch.cat([p.is_opsm_S for p in self._parts])
        if diff.numel():
            out |= {
                "mm/abs_diff_mean": float(diff.abs().mean()),
                "mm/abs_diff_max": float(diff.abs().max()),
                "mm/single_version_abs_diff_max": float(fresh.max()) if fresh.numel() else 0.0,
                "mm/k3": float((ratio - 1 - diff.clamp(-20, 20)).mean()),
                "mm/ess": float(ratio.sum() ** 2 / (len(ratio) * ratio.square().sum())),
                "corr/w_clip_frac": float((ratio > self._ratio_cap).double().mean()),
            }
        return out | {
            "corr/kept_token_frac": float(torch.cat([p.is_kept_N for p in self._parts]).double().mean()),
            "corr/tv_masked_frac": float(torch.cat([p.is_tv_masked_N for p in self._parts]).double().mean()),
            "corr/veto_frac": float(vetoed.double().mean()),
            "corr/opsm_frac": float(opsm.double().mean()),
            "corr/nonfinite_frac": float((~finite).double().mean()),
            "pol/entropy": float(torch.cat(self._entropy).mean()),
            "loss/sum": self._loss,
        }
