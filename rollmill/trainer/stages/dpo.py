"""Preference learning: pairs of a chosen and a rejected answer, each pair in one micro-batch, against a reference that is the model itself
at the beginning."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from blake3 import blake3

from rollmill.model import Model
from rollmill.trainer.datasets.rows import Layout
from rollmill.trainer.datasets.shards import TokenShards
from rollmill.trainer.stages.order import EpochOrder, shared_out
from rollmill.trainer.stages.packed import Addends, Packed, attention_share, pack
from rollmill.trainer.stages.preference import Pairs, implicit_rewards, preference_losses
from rollmill.trainer.stages.reference import answer_logprobs, reference_logprobs
from rollmill.trainer.stages.settings import DpoLoss, DpoSettings
from rollmill.trainer.stages.sft import picked_aside
from rollmill.trainer.stages.stage import StageJob, Taught, run_stage


def dpo(job: StageJob, settings: DpoSettings = DpoSettings(), report: Callable[[str], None] = print) -> None:
    """Teach a model preferences (rows with `chosen` and `rejected`)."""
    run_stage("dpo", Layout.PAIR, job, settings, lambda model, taught: PairCourse(model, taught, settings, report), report)


class PairCourse:
    """Pair n is the sequences 2n and 2n + 1 of the shards."""

    def __init__(self, model: Model, taught: Taught, settings: DpoSettings, report: Callable[[str], None]) -> None:
        self._settings, self._train, self._eval = settings, taught.train, taught.eval
        self._lengths_N = taught.train.lengths_S().reshape(-1, 2).sum(1)
        self._order = EpochOrder(self._lengths_N, tokens_per_batch=settings.tokens_per_batch, seed=settings.seed)
        self.num_steps = self._order.num_steps(settings.epochs) if settings.epochs else settings.steps
        self._share = attention_share(model)
        self._eval_lengths_N = taught.eval.lengths_S().reshape(-1, 2).sum(1)
        self._aside = picked_aside(self._eval_lengths_N, settings)
        self._ref, self._eval_ref = (self._references(model, shards, taught, report) for shards in (taught.train, taught.eval))

    def _references(self, model: Model, shards: TokenShards, taught: Taught, report: Callable[[str], None]) -> np.ndarray:
        """[pairs, 2]."""
        if self._settings.loss is DpoLoss.SIMPO:
            return np.zeros((shards.num_sequences // 2, 2), np.float32)
        s = self._settings
        facts = f"{taught.model_digest} {shards.index.key} {shards.split} {s.precision} {s.numerics} {torch.device(s.device).type}"
        folder = taught.cache / "reference" / blake3(facts.encode()).hexdigest()[:32]
        found = reference_logprobs(model, shards, folder, max_tokens=s.tokens_per_microbatch, attention_share=self._share, report=report)
        return found.reshape(-1, 2)

    def begin(self, model: Model, step: int) -> float:
        return self._settings.lr

    def losses(self, model: Model, step: int) -> Iterator[tuple[torch.Tensor, Addends]]:
        numbers = self._order.batch(step)
        return self._learnt(model, self._train, self._ref, numbers, self._lengths_N)

    @torch.no_grad()
    def evaluate(self, model: Model) -> dict[str, float]:
        sums: dict[str, float] = {}
        for _, parts in self._learnt(model, self._eval, self._eval_ref, self._aside, self._eval_lengths_N):
            sums = {name: sums.get(name, 0.0) + float(value) for name, value in parts.items()}
        return {"loss/eval": sums["loss/preference"], "eval/accuracies": sums["rewards/accuracies"]} if sums else {}

    def _learnt(
        self, model: Model, shards: TokenShards, ref_N2: np.ndarray, numbers: np.ndarray, lengths_N: np.ndarray
    ) -> Iterator[tuple[torch.Tensor, Addends]]:
        s = self._settings
        if not len(numbers):
            return
        for part in shared_out(lengths_N[numbers], max_tokens=s.tokens_per_microbatch, attention_share=self._share):
            picked = numbers[part]
            packed = pack([shards.sequence(2 * int(n) + side) for n in picked for side in (0, 1)])
            pairs = _pairs(model, packed, ref_N2[picked])
            loss_N = preference_losses(pairs, loss=s.loss, beta=s.beta, label_smoothing=s.label_smoothing, gamma=s.gamma)
            preference = loss_N.sum() / len(numbers)
            nll = -(pairs.chosen_N / pairs.num_chosen_N).sum() / len(numbers)
            yield preference + s.nll_weight * nll, self._metrics(pairs, preference, nll, len(numbers), len(packed.tokens_T))

    @torch.no_grad()
    def _metrics(self, pairs: Pairs, preference: torch.Tensor, nll: torch.Tensor, num_pairs: int, num_tokens: int) -> Addends:
        chosen_N, rejected_N = implicit_rewards(pairs, loss=self._settings.loss, beta=self._settings.beta)
        values: Sequence[tuple[str, torch.Tensor]] = (
            ("rewards/chosen", chosen_N),
            ("rewards/rejected", rejected_N),
            ("rewards/margins", chosen_N - rejected_N),
            ("rewards/accuracies", (chosen_N > rejected_N).float()),
            ("logps/chosen", pairs.chosen_N),
            ("logps/rejected", pairs.rejected_N),
        )
        means: Addends = {name: value_N.sum() / num_pairs for name, value_N in values}
        return means | {"loss/preference": preference.detach(), "loss/chosen_nll": nll.detach(), "perf/num_tokens": num_tokens}


def _pairs(model: Model, packed: Packed, ref_N2: np.ndarray) -> Pairs:
    device = model.embed.device
    logprobs_N2 = answer_logprobs(model, packed).view(-1, 2)
    tokens = np.bincount(packed.sequence_N, weights=packed.weights_N, minlength=len(packed.seq_lens)).astype(np.float32).reshape(-1, 2)
    tokens_N2, ref = torch.from_numpy(tokens).to(device), torch.from_numpy(np.array(ref_N2)).to(device)
    return Pairs(
        chosen_N=logprobs_N2[:, 0],
        rejected_N=logprobs_N2[:, 1],
        num_chosen_N=tokens_N2[:, 0],
        num_rejected_N=tokens_N2[:, 1],
        ref_chosen_N=ref[:, 0],
        ref_rejected_N=ref[:, 1],
    )
