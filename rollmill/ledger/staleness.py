"""Chooses the staleness bound from what was measured: a pure state machine, one reading per optimiser step, without I/O or clock.

The bound is the smallest lag at which trainer and rollouts do not wait for each other and old tokens still teach. Always
1 <= bound <= hard_max. docs/staleness.md says what each rule is for and who acts on the bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum

import msgspec

LAG_BINS = (("1", 1), ("2_3", 2), ("4_7", 4), ("8_up", 8))
"""The `mm/lag_*` bins of tokens that are not fresh, with the least lag in each."""


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """What one optimiser step showed.

    >>> Reading(ess=0.99, k3_fresh=0.0, k3_old=1e-4, trainer_wait_frac=0.2, rollout_idle_frac=0.3, tokens_per_s=1e4).wasted
    0.2
    """

    ess: float
    """Effective sample size over the step's tokens, 0..1 (`mm/ess`)."""
    k3_fresh: float
    """`mm/k3` of tokens that the weights before the step sampled, in nats: numerics, which no bound can mend."""
    k3_old: float
    """The greatest `mm/k3` of any bin of older tokens that holds a telling share of the tokens, in nats."""
    trainer_wait_frac: float
    """Share of the step's time that the trainer waited for a batch."""
    rollout_idle_frac: float
    """Share of the slot time that stood empty because the gate was closed."""
    tokens_per_s: float
    """Trained tokens per second of wall time, waits included."""

    @property
    def wasted(self) -> float:
        """Time lost because each side waits for the other. One alone that waits is slower hardware on the other side: no bound helps."""
        return min(self.trainer_wait_frac, self.rollout_idle_frac)

    @classmethod
    def from_metrics(cls, metrics: Mapping[str, float], *, rollout_idle_frac: float, min_share: float = 0.02) -> Reading | None:
        """From a trainer's metrics of one step; None when the step compared no tokens, which says nothing about staleness."""
        if not metrics.get("mm/num_tokens"):
            return None
        old = [metrics[f"mm/lag_{name}/k3"] for name, _ in LAG_BINS if metrics[f"mm/lag_{name}/token_frac"] >= min_share]
        waited_s = metrics["timing_s/wait_batch"]
        wall_s = max(waited_s + metrics["timing_s/step"], 1e-9)
        return cls(
            ess=metrics["mm/ess"],
            k3_fresh=metrics["mm/lag_0/k3"],
            k3_old=max(old, default=0.0),
            trainer_wait_frac=waited_s / wall_s,
            rollout_idle_frac=rollout_idle_frac,
            tokens_per_s=metrics["perf/num_tokens"] / wall_s,
        )


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What counts as healthy, harmful and waiting, for a loss that corrects; docs/staleness.md says where the values come from."""

    hard_max: int = 8
    """Never above; a group older than this is dropped."""
    first: int = 2
    """Where a run begins."""
    ess_good: float = 0.95
    """Above, more lag may be tried. Effective sample sizes: of the step, and of its oldest tokens by `ess_of_k3`."""
    ess_bad: float = 0.85
    """Below, old tokens teach badly."""
    ess_worst: float = 0.7
    """Below, halve at once."""
    wasted_high: float = 0.05
    """Raise while each side waits at least so much for the other."""
    min_gain: float = 0.02
    """A raise that buys less throughput than this, and takes less than a tenth off the waste, is taken back."""
    judge_after: int = 8
    """Settled steps after which a raise is judged."""
    patience: int = 3
    """Steps in a row that must agree before the bound moves."""
    retry_after: int = 32
    """Steps until a bound that did harm is tried again; doubles each time it does harm again."""

    def __post_init__(self) -> None:
        if not 1 <= self.first <= self.hard_max:
            raise ValueError(f"the first bound is {self.first}; choose one from 1 to the hard maximum, which is {self.hard_max}")
        if not 0 < self.ess_worst <= self.ess_bad < self.ess_good <= 1:
            raise ValueError("0 < ess_worst <= ess_bad < ess_good <= 1 must hold: the gap prevents swinging")
        if min(self.patience, self.judge_after, self.retry_after) < 1:
            raise ValueError(
                f"patience {self.patience}, judge_after {self.judge_after} and retry_after {self.retry_after} count steps, from 1"
            )

    @classmethod
    def up_to(cls, hard_max: int) -> Limits:
        """The starting values below a hard maximum of one's own."""
        return cls(hard_max=hard_max, first=min(2, hard_max))


class Verdict(StrEnum):
    """Why the bound is what it is."""

    START = "start"
    HOLD = "hold"
    RAISED = "raised"
    HARMFUL = "harmful"
    """Lowered: old tokens teach badly."""
    NO_GAIN = "no_gain"
    """Lowered: the last raise bought no throughput."""


class ControllerState(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the next decision depends on; MessagePack and JSON keep it."""

    bound: int
    verdict: Verdict = Verdict.START
    num_steps: int = 0
    """Readings seen."""
    since_change: int = 0
    """Readings since the bound moved."""
    num_harmful: int = 0
    """Harmful readings in a row."""
    num_waiting: int = 0
    """Healthy readings with waste in a row."""
    ceiling: int = 0
    """This bound and those above did harm; 0: none known."""
    ceiling_until: int = 0
    """`num_steps` from which the ceiling may be tried again."""
    num_ceilings: int = 0
    """How often a bound did harm."""
    tokens_per_s: float = 0.0
    """Mean since the bound moved and settled."""
    wasted: float = 0.0
    """The same of `Reading.wasted`."""
    before_raise: tuple[float, float] | None = None
    """(tokens_per_s, wasted) before the last raise, until the raise is judged."""
    futile_wasted: float = 0.0
    """The waste at which a raise bought nothing; only clearly more waste is worth another try."""


def start(limits: Limits) -> ControllerState:
    return ControllerState(bound=limits.first)


def ess_of_k3(k3: float) -> float:
    """The effective sample size that a k3 in nats amounts to: for small d both are functions of d's variance v, 1 / (1 + v) and v / 2.

    >>> round(ess_of_k3(0.021), 2)
    0.96
    """
    return 1.0 / (1.0 + 2.0 * k3)


def harm(reading: Reading, limits: Limits) -> int:
    """How badly old tokens teach: 0 well, 1 between, 2 badly, 3 so badly that waiting costs more than acting."""
    ess, stale_k3 = _number(reading.ess, 0.0), max(0.0, _number(reading.k3_old, math.inf) - _number(reading.k3_fresh, 0.0))
    if reading.k3_fresh > stale_k3:
        # The fresh tokens disagree more than age adds: numerics. The low ESS is theirs too, and a smaller lag would only cost time.
        ess = 1.0
    # The step's own ESS is a mean over fresh and old tokens; the oldest ones may be worse.
    ess = min(ess, ess_of_k3(stale_k3))
    return (ess < limits.ess_good) + (ess < limits.ess_bad) + (ess < limits.ess_worst)


def update(state: ControllerState, reading: Reading, limits: Limits) -> ControllerState:
    """The state after one more step."""
    state = _seen(state, reading, limits)
    level = harm(reading, limits)
    # Groups opened under the old bound are still in the batches for so many steps: what they show is not the new bound's doing.
    num_settled = state.since_change - state.bound
    if state.bound > 1 and (level == 3 or (num_settled > 0 and state.num_harmful >= limits.patience)):
        return _lower_harmful(state, level, limits)
    if state.before_raise is not None and num_settled >= limits.judge_after:
        tokens_per_s, wasted = state.before_raise
        if state.tokens_per_s < tokens_per_s * (1 + limits.min_gain) and state.wasted > 0.9 * wasted:
            lowered = _moved(state, state.bound - 1, Verdict.NO_GAIN)
            return msgspec.structs.replace(lowered, futile_wasted=max(state.wasted, limits.wasted_high))
        state = msgspec.structs.replace(state, before_raise=None, futile_wasted=0.0)
    if state.before_raise is None and num_settled >= limits.patience <= state.num_waiting and _may_raise(state, limits):
        raised = _moved(state, state.bound + 1, Verdict.RAISED)
        return msgspec.structs.replace(raised, before_raise=(state.tokens_per_s, state.wasted))
    return state


def _seen(state: ControllerState, reading: Reading, limits: Limits) -> ControllerState:
    """The same bound with the reading counted."""
    level, since = harm(reading, limits), state.since_change + 1
    share = 1 / max(1, since - state.bound)
    tokens_per_s, wasted = _number(reading.tokens_per_s, 0.0), _number(reading.wasted, 0.0)
    return msgspec.structs.replace(
        state,
        verdict=Verdict.HOLD,
        num_steps=state.num_steps + 1,
        since_change=since,
        num_harmful=state.num_harmful + 1 if level >= 2 else 0,
        num_waiting=state.num_waiting + 1 if level == 0 and wasted >= limits.wasted_high else 0,
        # The first settled reading has the share 1, so that what came before it leaves no trace.
        tokens_per_s=state.tokens_per_s + share * (tokens_per_s - state.tokens_per_s),
        wasted=state.wasted + share * (wasted - state.wasted),
    )


def _lower_harmful(state: ControllerState, level: int, limits: Limits) -> ControllerState:
    bound = max(1, state.bound // 2 if level == 3 else state.bound - 1)
    wait = limits.retry_after * 2 ** min(state.num_ceilings, 10)
    lowered = _moved(state, bound, Verdict.HARMFUL)
    return msgspec.structs.replace(
        lowered, ceiling=state.bound, ceiling_until=state.num_steps + wait, num_ceilings=state.num_ceilings + 1, futile_wasted=0.0
    )


def _may_raise(state: ControllerState, limits: Limits) -> bool:
    if state.bound >= limits.hard_max or state.wasted < 1.5 * state.futile_wasted:
        return False
    return not state.ceiling or state.bound + 1 < state.ceiling or state.num_steps >= state.ceiling_until


def _moved(state: ControllerState, bound: int, verdict: Verdict) -> ControllerState:
    return msgspec.structs.replace(
        state, bound=bound, verdict=verdict, since_change=0, num_harmful=0, num_waiting=0, tokens_per_s=0.0, wasted=0.0, before_raise=None
    )


def _number(value: float, otherwise: float) -> float:
    """Nothing that is not a number may look healthy."""
    return value if math.isfinite(value) else otherwise
