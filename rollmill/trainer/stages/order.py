"""Which sequences or windows a step learns from, and how they are shared out among micro-batches: functions of the seed and the step.

Nothing is remembered between steps, so a resumed stage sees exactly what an undisturbed one would. Shapes: S sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np


class WindowOrder:
    """Windows of equal length, a new seeded permutation for each pass, `per_step` of them a step."""

    def __init__(self, num_windows: int, *, per_step: int, seed: int) -> None:
        assert num_windows > 0 and per_step > 0, "a stage has data"
        self.num_windows, self.per_step = num_windows, per_step
        # Two passes may meet in one step.
        self._pass = lru_cache(maxsize=2)(lambda n: np.random.default_rng([seed, n]).permutation(num_windows))

    def windows(self, step: int) -> list[int]:
        first = step * self.per_step
        return [int(self._pass(k // self.num_windows)[k % self.num_windows]) for k in range(first, first + self.per_step)]


class EpochOrder:
    """Sequences of unequal length in a seeded order, cut into batches of about the same number of tokens; each once per pass."""

    def __init__(self, lengths_S: np.ndarray, *, tokens_per_batch: int, seed: int) -> None:
        assert len(lengths_S), "a stage has data"
        self._lengths_S, self._seed = lengths_S, seed
        self._num_wanted = max(1, round(int(lengths_S.sum()) / tokens_per_batch))
        self._starts = [0]
        """Step at which each pass begins, as far as it is known."""
        self._pass = lru_cache(maxsize=2)(self._cut)

    def _cut(self, number: int) -> list[np.ndarray]:
        order_S = np.random.default_rng([self._seed, number]).permutation(len(self._lengths_S))
        ends_S = np.cumsum(self._lengths_S[order_S])
        cuts = np.searchsorted(ends_S, ends_S[-1] * np.arange(1, self._num_wanted) / self._num_wanted)
        # A sequence longer than a whole batch swallows its neighbours' cuts.
        return [part for part in np.split(order_S, cuts) if len(part)]

    def num_steps(self, epochs: float) -> int:
        whole = int(epochs)
        steps = self._start(whole)
        return max(1, steps + round((epochs - whole) * len(self._pass(whole))))

    def _start(self, number: int) -> int:
        while len(self._starts) <= number:
            self._starts.append(self._starts[-1] + len(self._pass(len(self._starts) - 1)))
        return self._starts[number]

    def batch(self, step: int) -> np.ndarray:
        """Numbers of the sequences of a step."""
        number = 0
        while self._start(number + 1) <= step:
            number += 1
        return self._pass(number)[step - self._start(number)]


def shared_out(lengths_S: np.ndarray, *, max_tokens: int, attention_share: float) -> list[np.ndarray]:
    """Micro-batches of at most `max_tokens` padded tokens (one sequence may exceed it alone) whose costs are as even as can be.

    n sequences of at most L tokens count as n L tokens and cost n L + attention_share n L^2: attention pads a micro-batch to its longest,
    so sequences of similar length stay together, and the quadratic term keeps the one with the longest from holding up the rest.
    No other way to cut the sequences in order of length into as many parts has a smaller largest cost.
    """
    order_S = np.argsort(-lengths_S, kind="stable")
    lens = lengths_S[order_S].astype(np.float64)
    cost_of_one = lens + attention_share * lens**2

    def cut(bound: float) -> list[int]:
        """Ends of the parts when each takes all it can."""
        at, out = 0, []
        while at < len(lens):
            most = min(bound / cost_of_one[at], max_tokens / lens[at], len(lens) - at)
            at += max(1, int(most))
            out.append(at)
        return out

    num_parts = len(cut(np.inf))
    bound = _smallest(lambda x: len(cut(x)) <= num_parts, float(cost_of_one[0]), float(cost_of_one[0]) * len(lens))
    return np.split(order_S, cut(bound)[:-1])


def _smallest(fits: Callable[[float], bool], low: float, high: float) -> float:
    """By halving; `high` fits."""
    for _ in range(40):
        middle = (low + high) / 2
        if fits(middle):
            high = middle
        else:
            low = middle
    return high
