"""When a number of a step deserves a person's attention: bounds, and one message per crossing; without clock, log or metrics stream."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec


class Alarm(msgspec.Struct, frozen=True, kw_only=True):
    """A metric and the range it should stay in."""

    metric: str
    low: float = -math.inf
    high: float = math.inf
    is_severe: bool = False
    meaning: str
    """What it says when the range is left, and where to look."""

    def is_crossed(self, value: float) -> bool:
        return not self.low <= value <= self.high


ALARMS = (
    Alarm(metric="mm/abs_diff_mean", high=0.02, meaning="trainer and sampler disagree on most tokens"),
    Alarm(metric="mm/k3", high=1e-3, meaning="the policy has left the one that sampled"),
    Alarm(metric="mm/k3", high=1e-2, is_severe=True, meaning="the batch is off-policy: lower trainer.max_staleness or trainer.lr"),
    Alarm(metric="mm/token_mult_prob_error", high=1.02, meaning="probabilities are off by a factor"),
    Alarm(metric="mm/ratio_mean", low=0.98, high=1.02, meaning="importance ratios are biased"),
    Alarm(metric="mm/ess", low=0.9, meaning="few tokens carry most of the weight"),
    Alarm(metric="mm/tv_token_max", high=0.3, meaning="a token's probability moved by more than the loss allows"),
    Alarm(metric="mm/extreme_frac_2", high=1e-3, meaning="tokens are off by more than a factor of two"),
    Alarm(metric="mm/corr_prob", low=0.99, meaning="the probabilities of both sides are hardly related"),
    Alarm(metric="route/any_flip_tok_frac", high=0.2, meaning="the router now takes other experts than the engine did"),
    Alarm(metric="route/missing_row_frac", high=1e-3, meaning="tokens came without their experts, so the live router chose"),
    Alarm(metric="corr/kept_token_frac", low=0.9, meaning="the loss throws much of the batch away"),
)
EXACT = Alarm(
    metric="mm/single_version_abs_diff_max",
    high=0.0,
    is_severe=True,
    meaning="trainer and engine promise the same bits on the same weights and do not give them",
)


class Crossing(msgspec.Struct, frozen=True, kw_only=True):
    """An alarm that was quiet at the step before."""

    alarm: Alarm
    value: float

    def __str__(self) -> str:
        a = self.alarm
        bound = f"above {a.high:g}" if self.value > a.high else f"below {a.low:g}"
        return f"{a.metric} is {self.value:.4g}, {bound}: {a.meaning}"


class AlarmBoard:
    """Remembers which alarms are on, so that each is told once when it goes on and again only after it went off.

    >>> board = AlarmBoard(is_exact=False)
    >>> [str(c) for c in board.look({"mm/num_tokens": 9, "mm/ess": 0.5})]
    ['mm/ess is 0.5, below 0.9: few tokens carry most of the weight']
    >>> board.look({"mm/num_tokens": 9, "mm/ess": 0.4}), board.num_on
    ([], 1)
    """

    def __init__(self, *, is_exact: bool) -> None:
        self._alarms = (*ALARMS, EXACT) if is_exact else ALARMS
        self._on: frozenset[Alarm] = frozenset()

    @property
    def num_on(self) -> int:
        return len(self._on)

    def look(self, values: Mapping[str, float]) -> list[Crossing]:
        """What went on with this step. A step that compared no token changes nothing: its zeros are no measurement."""
        if not values.get("mm/num_tokens"):
            return []
        on = [Crossing(alarm=a, value=values[a.metric]) for a in self._alarms if a.metric in values and a.is_crossed(values[a.metric])]
        new = [c for c in on if c.alarm not in self._on]
        self._on = frozenset(c.alarm for c in on)
        return new
