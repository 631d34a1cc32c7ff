"""Supervised fine-tuning: conversations packed whole, of which only what the assistant says is learnt."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from rollmill.model import Model
from rollmill.trainer.datasets.rows import Layout
from rollmill.trainer.datasets.shards import TokenShards
from rollmill.trainer.stages.order import EpochOrder
from rollmill.trainer.stages.packed import Addends, Packed, attention_share, mean_loss, micro_batches, weighted_losses
from rollmill.trainer.stages.settings import SftSettings, StageSettings
from rollmill.trainer.stages.stage import StageJob, Taught, run_stage


def sft(job: StageJob, settings: SftSettings = SftSettings(), report: Callable[[str], None] = print) -> None:
    """Fine-tune a model on conversations (rows with `messages`, `prompt` and `completion`, or `text`)."""
    run_stage("sft", Layout.CHAT, job, settings, lambda model, taught: SequenceCourse(model, taught, settings), report)


class SequenceCourse:
    def __init__(self, model: Model, taught: Taught, settings: StageSettings) -> None:
        self._settings, self._train, self._eval = settings, taught.train, taught.eval
        self._order = EpochOrder(taught.train.lengths_S(), tokens_per_batch=settings.tokens_per_batch, seed=settings.seed)
        self.num_steps = self._order.num_steps(settings.epochs) if settings.epochs else settings.steps
        self._share = attention_share(model)
        self._aside = picked_aside(taught.eval.lengths_S(), settings)

    def begin(self, model: Model, step: int) -> float:
        return self._settings.lr

    def losses(self, model: Model, step: int) -> Iterator[tuple[torch.Tensor, Addends]]:
        batch = self._packed(self._train, self._order.batch(step))
        return weighted_losses(model, batch, divisor=sum(p.weight for p in batch))

    def evaluate(self, model: Model) -> dict[str, float]:
        return {"loss/eval": mean_loss(model, self._packed(self._eval, self._aside))} if len(self._aside) else {}

    def _packed(self, shards: TokenShards, numbers: np.ndarray) -> list[Packed]:
        sequences = [shards.sequence(int(n)) for n in numbers]
        return micro_batches(sequences, max_tokens=self._settings.tokens_per_microbatch, attention_share=self._share)


def picked_aside(lengths_S: np.ndarray, settings: StageSettings) -> np.ndarray:
    """Numbers of the sequences that every evaluation looks at: a seeded choice of at most `eval_tokens` tokens, at least one of them."""
    order_S = np.random.default_rng(settings.seed).permutation(len(lengths_S))
    num = int(np.searchsorted(np.cumsum(lengths_S[order_S]), settings.eval_tokens, side="right"))
    return order_S[: max(1, num)]
