"""Mid-training: documents as one stream of tokens, learnt in windows of equal length; later phases may have longer ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import torch

from rollmill.model import Model, ModelConfig
from rollmill.model.rope import RopeScaling, rope_tables
from rollmill.trainer.datasets.rows import Layout
from rollmill.trainer.datasets.shards import TokenSequence, TokenShards
from rollmill.trainer.stages.order import WindowOrder
from rollmill.trainer.stages.packed import Addends, Packed, attention_share, mean_loss, micro_batches, weighted_losses
from rollmill.trainer.stages.settings import MidtrainSettings, Phase
from rollmill.trainer.stages.stage import StageJob, Taught, run_stage


def midtrain(job: StageJob, settings: MidtrainSettings = MidtrainSettings(), report: Callable[[str], None] = print) -> None:
    """Continue pre-training a model on documents (rows with `text`)."""
    run_stage("midtrain", Layout.TEXT, job, settings, lambda model, taught: WindowCourse(model, taught, settings), report)


class WindowCourse:
    """Windows are cut where a document starts: tokens of one document never see another."""

    def __init__(self, model: Model, taught: Taught, settings: MidtrainSettings) -> None:
        self._settings, self._train, self._eval = settings, taught.train, taught.eval
        first = Phase(steps=settings.steps, length=settings.length or model.config.max_position)
        self._phases = [first, *settings.phases]
        self._configs: list[ModelConfig] = []
        for phase in self._phases:
            self._configs.append(grown(self._configs[-1] if self._configs else model.config, phase))
        self._orders = [self._order(n, phase) for n, phase in enumerate(self._phases)]
        if settings.epochs:
            steps = max(1, math.ceil(settings.epochs * self._orders[0].num_windows / self._orders[0].per_step))
            self._phases[0] = msgspec.structs.replace(first, steps=steps)
        self._ends = np.cumsum([p.steps for p in self._phases]).tolist()
        self.num_steps: int = self._ends[-1]
        self._share, self._phase = attention_share(model), -1

    def _order(self, number: int, phase: Phase) -> WindowOrder:
        num_windows = max(1, self._train.num_tokens // phase.length)
        return WindowOrder(num_windows, per_step=max(1, self._settings.tokens_per_batch // phase.length), seed=self._settings.seed + number)

    def begin(self, model: Model, step: int) -> float:
        phase = next(n for n, end in enumerate(self._ends) if step < end)
        if phase != self._phase:
            stretch(model, self._configs[phase])
            self._phase = phase
        return self._phases[phase].lr or self._settings.lr

    def losses(self, model: Model, step: int) -> Iterator[tuple[torch.Tensor, Addends]]:
        order, length = self._orders[self._phase], self._phases[self._phase].length
        batch = self._packed(self._train, order.windows(step - self._ends[self._phase] + self._phases[self._phase].steps), length)
        return weighted_losses(model, batch, divisor=sum(p.weight for p in batch))

    def evaluate(self, model: Model) -> dict[str, float]:
        length = self._phases[self._phase].length
        num_windows = -(-self._eval.num_tokens // length)
        if not num_windows:
            return {}
        num_picked = max(1, min(num_windows, self._settings.eval_tokens // length))
        picked = np.random.default_rng(self._settings.seed).permutation(num_windows)[:num_picked]
        return {"loss/eval": mean_loss(model, self._packed(self._eval, [int(w) for w in picked], length))}

    def _packed(self, shards: TokenShards, windows: list[int], length: int) -> list[Packed]:
        cut = [s for w in windows for s in shards.stretch(w * length, min((w + 1) * length, shards.num_tokens))]
        sequences = [TokenSequence(tokens_T=tokens_T) for tokens_T in cut]
        return micro_batches(sequences, max_tokens=self._settings.tokens_per_microbatch, attention_share=self._share)


def grown(config: ModelConfig, phase: Phase) -> ModelConfig:
    """The model's shape in a phase: positions for the window, by the rule that the phase names."""
    length = max(config.max_position, phase.length)
    theta = phase.theta or config.rope_theta
    if length == config.max_position and phase.rope in ("", "keep"):
        return msgspec.structs.replace(config, rope_theta=theta)
    if not phase.rope and not phase.theta:
        raise ValueError(
            f"windows of {phase.length} tokens exceed the model's context of {config.max_position}; "
            "say how positions reach there: rope=yarn, rope=linear, theta=NUMBER or rope=keep in a --phase"
        )
    scaling = config.rope_scaling
    if phase.rope in ("yarn", "linear"):
        if scaling is not None and scaling.rule != phase.rope:
            raise ValueError(f"the model's positions follow {scaling.rule!r} already; rope={phase.rope} would undo what it learnt")
        original = scaling.original_max_position if scaling and scaling.original_max_position else config.max_position
        factor = length / original if phase.rope == "yarn" else (scaling.factor if scaling else 1.0) * length / config.max_position
        raw: dict[str, object] = {"rope_type": phase.rope, "factor": factor}
        if phase.rope == "yarn":
            raw["original_max_position_embeddings"] = original
        scaling = RopeScaling.from_hf(raw, max_position=length)
    return msgspec.structs.replace(config, max_position=length, rope_theta=theta, rope_scaling=scaling)


def stretch(model: Model, config: ModelConfig) -> None:
    """Give a live model another table of positions; its weights stay where they are."""
    if config == model.config:
        return
    model.config = config
    tables = rope_tables(head_dim=config.head_dim, theta=config.rope_theta, max_position=config.max_position, scaling=config.rope_scaling)
    model.cos, model.sin = (table.to(model.embed.device) for table in tables)
