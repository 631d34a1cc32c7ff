"""Advantages: pure functions from the rewards of a whole batch to one number per episode, compared only with what is comparable.

Shapes: E graded episodes of the batch, in C sets of comparable ones. A set without spread gets zeros from every function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import numpy as np

from rollmill.algorithms import BatchStd, DrGrpo, Gdpo, GdpoEma, GroupStd, LeaveOneOut, MaxRl, Options

ZERO_SPREAD = 1e-6


class RewardTable(msgspec.Struct, frozen=True, kw_only=True):
    """The rewards of a batch. Episodes with the same number in `set_E` are compared with each other.

    >>> table = RewardTable.of(rewards=[1.0, 0.0, 0.0], sets=["a", "a", "a"])
    >>> leave_one_out(table, LeaveOneOut(), {}).tolist()
    [1.0, -0.5, -0.5]
    """

    reward_E: np.ndarray
    """float64: what is compared, effort taken off."""
    set_E: np.ndarray
    """int: index of the set, in order of first appearance."""
    parts: dict[str, np.ndarray] = {}
    """float64 by name: the components of each grade; only those that every grade has."""

    @classmethod
    def of(cls, *, rewards: list[float], sets: list[object], parts: list[Mapping[str, float]] | None = None) -> RewardTable:
        """Refuses rewards that are no numbers. Parts may be any: most are for people, and those in use are checked when they are used."""
        assert len(rewards) == len(sets)
        found: dict[object, int] = {}
        index = [found.setdefault(key, len(found)) for key in sets]
        names = list(dict.fromkeys(name for p in parts or () for name in p))
        columns = {n: np.array([p[n] for p in parts or ()], np.float64) for n in names if all(n in p for p in parts or ())}
        table = cls(reward_E=np.asarray(rewards, np.float64), set_E=np.asarray(index, np.int64), parts=columns)
        _check("rewards", table.reward_E)
        return table

    @property
    def num_sets(self) -> int:
        return int(self.set_E.max(initial=-1)) + 1

    def means(self, column_E: np.ndarray) -> np.ndarray:
        """[E]: the mean of each episode's set. One set at a time, so that it does not depend on what else is in the batch."""
        out_E = np.zeros(len(column_E))
        for at in self._sets():
            out_E[at] = column_E[at].mean()
        return out_E

    def stds(self, column_E: np.ndarray) -> np.ndarray:
        """[E]: the sample standard deviation of each episode's set; 0 for a lone episode."""
        out_E = np.zeros(len(column_E))
        for at in self._sets():
            out_E[at] = column_E[at].std(ddof=1) if len(at) > 1 else 0.0
        return out_E

    def sizes(self) -> np.ndarray:
        return np.bincount(self.set_E, minlength=self.num_sets)[self.set_E]

    def is_telling(self, column_E: np.ndarray) -> np.ndarray:
        """bool [E]: whether the numbers of the episode's set differ at all; without that there is nothing to learn from it."""
        lowest, highest = np.full(self.num_sets, np.inf), np.full(self.num_sets, -np.inf)
        np.minimum.at(lowest, self.set_E, column_E)
        np.maximum.at(highest, self.set_E, column_E)
        return (highest - lowest)[self.set_E] > ZERO_SPREAD

    def weighted_parts(self, weights: Mapping[str, float]) -> dict[str, float]:
        """The weight of each part in use; all with 1 when none is given."""
        missing = [name for name in weights if name not in self.parts]
        if len(self.reward_E) and (missing or not self.parts):
            has = ", ".join(self.parts) or "none"
            what = f"{missing[0]!r} is no part" if missing else "there is no part"
            hint = "set trainer.advantage_options.weights to names in Grade.parts"
            raise ValueError(f"{what} that every grade of the batch has (those are: {has}); {hint}")
        used = dict(weights) or dict.fromkeys(self.parts, 1.0)
        for name in used if len(self.reward_E) else ():
            _check(f"part {name!r} of the grades", self.parts[name])
        return used

    def _sets(self) -> list[np.ndarray]:
        order = np.argsort(self.set_E, kind="stable")
        return np.split(order, np.cumsum(np.bincount(self.set_E, minlength=self.num_sets))[:-1]) if len(order) else []


Spreads = Mapping[str, float]
"""By part: the running standard deviation; only `gdpo_ema` keeps one."""


def leave_one_out(table: RewardTable, options: LeaveOneOut, spreads: Spreads) -> np.ndarray:
    """A_i = R_i - mean of the others = (R_i - mean) G / (G - 1): an unbiased baseline, not divided by any spread."""
    size_E = table.sizes()
    centred_E = (table.reward_E - table.means(table.reward_E)) * size_E / np.maximum(size_E - 1, 1)
    return np.where(table.is_telling(table.reward_E), centred_E, 0.0)


def dr_grpo(table: RewardTable, options: DrGrpo, spreads: Spreads) -> np.ndarray:
    """A_i = R_i - mean."""
    return np.where(table.is_telling(table.reward_E), table.reward_E - table.means(table.reward_E), 0.0)


def grpo(table: RewardTable, options: GroupStd, spreads: Spreads) -> np.ndarray:
    """A_i = (R_i - mean) / (std + eps), the sample standard deviation of the set.   eps 1e-6.

    Weighs very easy and very hard tasks up: the rarer the odd one out, the smaller the spread.
    """
    return _standardised(table, table.reward_E, options.eps)


def batch_std(table: RewardTable, options: BatchStd, spreads: Spreads) -> np.ndarray:
    """A_i = (R_i - mean of the set) / (sigma + eps), sigma the root mean square of R - mean over all sets that differ.   eps 1e-6."""
    return _scaled(table, table.reward_E - table.means(table.reward_E), table.is_telling(table.reward_E), options.eps)


def max_rl(table: RewardTable, options: MaxRl, spreads: Spreads) -> np.ndarray:
    """A_i = (R_i - mean) / (mean + eps), for rewards >= 0: the rarer the success, the larger its push.   eps 1e-6."""
    if len(table.reward_E) and table.reward_E.min() < 0:
        raise ValueError(
            f"the advantage 'max_rl' needs rewards >= 0, got {table.reward_E.min()}; use another advantage, or no trainer.effort"
        )
    mean_E = table.means(table.reward_E)
    return np.where(table.is_telling(table.reward_E), (table.reward_E - mean_E) / (mean_E + options.eps), 0.0)


def gdpo(table: RewardTable, options: Gdpo, spreads: Spreads) -> np.ndarray:
    """A = sum_k w_k (r_k - mean_k) / (std_k + eps) within the set, then divided by its root mean square over the batch.   eps 1e-6.

    Normalised part by part, so that (1, 0) and (0, 1) stay different. A part that hardly varies in a set is blown up to full size;
    `gdpo_ema` does not.
    """
    total_E, is_telling_E = np.zeros(len(table.reward_E)), np.zeros(len(table.reward_E), bool)
    for name, weight in table.weighted_parts(options.weights).items():
        total_E += weight * _standardised(table, table.parts[name], options.eps)
        is_telling_E |= table.is_telling(table.parts[name])
    return _scaled(table, total_E, is_telling_E, options.eps)


def gdpo_ema(table: RewardTable, options: GdpoEma, spreads: Spreads) -> np.ndarray:
    """A = sum_k w_k (r_k - mean_k of the set) / max(sigma_k, sigma_min).   decay 0.99, sigma_min 0.05.

    sigma_k is the running spread of the part over batches, see `updated`: a part that hardly varies in one set is not blown up.
    """
    total_E = np.zeros(len(table.reward_E))
    for name, weight in table.weighted_parts(options.weights).items():
        column_E = table.parts[name]
        centred_E = np.where(table.is_telling(column_E), column_E - table.means(column_E), 0.0)
        total_E += weight * centred_E / max(spreads[name], options.min_spread)
    return total_E


def updated(spreads: Spreads, table: RewardTable, options: GdpoEma) -> dict[str, float]:
    """sigma_k after one more batch: decay sigma_k + (1 - decay) std of the part over the batch; the first batch's own at first."""
    out = dict(spreads)
    for name in table.weighted_parts(options.weights) if len(table.reward_E) else ():
        spread = float(table.parts[name].std())
        out[name] = options.decay * out[name] + (1 - options.decay) * spread if name in out else spread
    return out


FUNCTIONS: dict[type[Options], Callable[..., np.ndarray]] = {
    LeaveOneOut: leave_one_out,
    GroupStd: grpo,
    DrGrpo: dr_grpo,
    BatchStd: batch_std,
    MaxRl: max_rl,
    Gdpo: gdpo,
    GdpoEma: gdpo_ema,
}


class Estimator:
    """An advantage with what it remembers of earlier batches. The memory follows from the batches alone, in their order."""

    def __init__(self, options: Options | None = None) -> None:
        self.options = LeaveOneOut() if options is None else options
        self.spreads: dict[str, float] = {}

    @property
    def remembers(self) -> bool:
        """Whether batches of before a restart must be shown to it again."""
        return isinstance(self.options, GdpoEma)

    @property
    def reads_parts(self) -> bool:
        """Whether it looks at the parts of the grades, not only at the reward."""
        return isinstance(self.options, Gdpo | GdpoEma)

    def watch(self, table: RewardTable) -> None:
        """See a batch; before `advantages` of the same batch."""
        if isinstance(self.options, GdpoEma):
            self.spreads = updated(self.spreads, table, self.options)

    def advantages(self, table: RewardTable) -> np.ndarray:
        """float64 [E]; finite."""
        return FUNCTIONS[type(self.options)](table, self.options, self.spreads)


def _standardised(table: RewardTable, column_E: np.ndarray, eps: float) -> np.ndarray:
    return np.where(table.is_telling(column_E), (column_E - table.means(column_E)) / (table.stds(column_E) + eps), 0.0)


def _scaled(table: RewardTable, centred_E: np.ndarray, is_telling_E: np.ndarray, eps: float) -> np.ndarray:
    """Sets that do not differ are no part of the spread: how many of them a batch holds says nothing about the others."""
    if not is_telling_E.any():
        return np.zeros(len(centred_E))
    return np.where(is_telling_E, centred_E / (np.sqrt(np.square(centred_E[is_telling_E]).mean()) + eps), 0.0)


def _check(name: str, column_E: np.ndarray) -> None:
    if not np.isfinite(column_E).all():
        raise ValueError(f"{name} must be finite, got {column_E.tolist()}; a grader that cannot tell must fail instead")
