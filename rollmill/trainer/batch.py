"""From groups to token lessons: what one optimiser step learns from, and how it is cut into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
import numpy as np

from rollmill.algorithms import Effort
from rollmill.records import Trace, Window
from rollmill.trainer.advantages import Estimator, RewardTable
from rollmill.trainer.effort import cost, usage_of

PASS_BINS = ("0", "1_25", "26_50", "51_75", "76_99", "100")
METRICS = ("adv/std", "adv/abs_max", "adv/zero_var_frac", "adv/effort_mean", *(f"adv/group_pass_hist/{name}" for name in PASS_BINS))
"""Always written; `adv/per_key_std/<part>` comes by name, for the parts that every grade of the batch has."""


class GradedEpisode(msgspec.Struct, frozen=True, kw_only=True):
    """A graded episode of a group."""

    episode_id: str
    reward: float
    load: Callable[[], Trace]
    """Reads the trace; only called when the group teaches something."""
    success: bool | None = None
    """Whether the task counts as solved; None: not known."""
    parts: Mapping[str, float] = {}
    """Named components of the reward."""
    role: str = ""
    """The part it played in its group."""
    environment: str = ""
    """Version of the environment that it ran in."""
    chain_root: str = ""
    """The state that it was forked from."""

    @property
    def comparable(self) -> tuple[str, str, str]:
        """Within a group, only episodes that agree in this are compared."""
        return self.environment, self.role, self.chain_root


class Lesson(msgspec.Struct, frozen=True, kw_only=True):
    """One context window with its episode's advantage."""

    window: Window
    advantage: float
    episode_tokens: int | None = None
    """Sampled tokens of all windows of the episode; None: it has this window only."""

    @property
    def length(self) -> int:
        """What `sequence_mean` divides by: an episode is one sequence, however it was cut into windows."""
        return int(np.count_nonzero(self.window.sampled_T)) if self.episode_tokens is None else self.episode_tokens


class StepBatch(msgspec.Struct, frozen=True, kw_only=True):
    lessons: list[Lesson]
    num_episodes: int
    """All graded episodes, those without signal included: the loss divides by this."""
    rewards: list[float]
    num_groups: int
    num_groups_without_signal: int
    """Groups of which no episode has an advantage."""
    num_tokens: int
    stats: dict[str, float] = {}
    """The `adv/*` numbers."""


def table_of(groups: Sequence[Sequence[GradedEpisode]], costs: Sequence[float] = ()) -> RewardTable:
    """The rewards of a batch with what each may be compared with; `costs` are taken off."""
    flat = [(i, a) for i, attempts in enumerate(groups) for a in attempts]
    return RewardTable.of(
        rewards=[a.reward - c for (_, a), c in zip(flat, costs, strict=True)] if costs else [a.reward for _, a in flat],
        sets=[(i, *a.comparable) for i, a in flat],
        parts=[a.parts for _, a in flat],
    )


def make_batch(groups: Sequence[Sequence[GradedEpisode]], estimator: Estimator | None = None, effort: Effort | None = None) -> StepBatch:
    """Advantages of every episode; one that has none is counted and, unless effort is to be measured, never loaded."""
    estimator = Estimator() if estimator is None else estimator
    flat = [attempt for attempts in groups for attempt in attempts]
    costs: list[float] = []
    if effort is not None and effort.scale:
        flat = [msgspec.structs.replace(a, load=held(a.load())) for a in flat]
        costs = [cost(usage_of(attempt.load()), effort) for attempt in flat]
    table = table_of(groups, costs)
    estimator.watch(table)
    advantage_E = estimator.advantages(table)
    lessons: list[Lesson] = []
    for attempt, advantage in zip(flat, advantage_E.tolist(), strict=True):
        if advantage != 0.0:
            trace = attempt.load()
            num = trace.num_sampled
            lessons += [Lesson(window=w, advantage=advantage, episode_tokens=num) for w in trace.windows if w.sampled_T.any()]
    edges = np.cumsum([len(attempts) for attempts in groups])[:-1]
    is_telling = [bool(a.any()) for a in np.split(advantage_E, edges)] if groups else []
    return StepBatch(
        lessons=lessons,
        num_episodes=len(flat),
        rewards=[a.reward for a in flat],
        num_groups=len(groups),
        num_groups_without_signal=len(groups) - sum(is_telling),
        num_tokens=sum(s.window.num_tokens for s in lessons),
        stats=_stats(groups, table, advantage_E, costs),
    )


def held(trace: Trace) -> Callable[[], Trace]:
    """A `load` for a trace that has been read."""
    return lambda: trace


def _stats(
    groups: Sequence[Sequence[GradedEpisode]], table: RewardTable, advantage_E: np.ndarray, costs: Sequence[float]
) -> dict[str, float]:
    out = dict.fromkeys(METRICS, 0.0)
    if not len(advantage_E):
        return out
    has_signal = np.zeros(table.num_sets, bool)
    np.logical_or.at(has_signal, table.set_E, advantage_E != 0)
    out |= {
        "adv/std": float(advantage_E.std()),
        "adv/abs_max": float(np.abs(advantage_E).max()),
        "adv/zero_var_frac": float(1 - has_signal.mean()),
        "adv/effort_mean": float(np.mean(costs)) if costs else 0.0,
    }
    shares = [
        np.mean([bool(a.success) for a in attempts]) for attempts in groups if attempts and all(a.success is not None for a in attempts)
    ]
    for share in shares:
        # The first and last bin hold exactly none and all; the four between are half-open from below.
        at = 0 if share == 0 else 5 if share == 1 else 1 + min(3, int(np.ceil(share * 4)) - 1)
        out[f"adv/group_pass_hist/{PASS_BINS[at]}"] += 1 / len(shares)
    # A part that nobody weighs may be anything, but a number in the metrics is a number.
    usable = {name: column_E for name, column_E in table.parts.items() if np.isfinite(column_E).all()}
    return out | {f"adv/per_key_std/{name}": float(column_E.std()) for name, column_E in usable.items()}


def micro_batches(lessons: Sequence[Lesson], max_tokens: int) -> Iterator[list[Lesson]]:
    """Sequences of similar length together, at most `max_tokens` padded tokens each (one sequence may exceed it alone)."""
    chunk: list[Lesson] = []
    for sequence in sorted(lessons, key=lambda s: -s.window.num_tokens):
        longest = chunk[0].window.num_tokens if chunk else sequence.window.num_tokens
        if chunk and longest * (len(chunk) + 1) > max_tokens:
            yield chunk
            chunk = []
        chunk.append(sequence)
    if chunk:
        yield chunk


def dealt(lessons: Sequence[Lesson], num: int) -> list[list[Lesson]]:
    """At most `num` hands of about equally many tokens, none of them empty; one hand keeps the order."""
    if num == 1:
        return [list(lessons)] if lessons else []
    ordered = sorted(lessons, key=lambda s: -s.window.num_tokens)
    return [ordered[i::num] for i in range(min(num, len(ordered)))]
