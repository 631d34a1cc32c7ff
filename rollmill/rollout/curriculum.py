"""Which task comes next: a pure chooser that aims at tasks the policy solves sometimes, the same for the same ledger, blind to speed.

Group n is chosen from the results of groups 0 .. n - 1 - D alone, folded in the order of opening, never of finishing. D = L P + W - 1
is how far the pacing gate can ever let rollouts run ahead, so those groups have ended already and nobody waits (docs/curriculum.md).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import msgspec

from rollmill.ledger import GroupResult, Pacing

MIN_WEIGHT = 1e-3
PRIOR_GROUPS = 2.0
"""How many observed groups weigh as much as the chance of signal computed from the solve rate."""


class Arm(msgspec.Struct, frozen=True, kw_only=True):
    """Tasks that are estimated together."""

    kind: str
    level: int
    num_rows: int | None = None
    """How many there are; None: a generator makes as many as asked for."""


class Aim(msgspec.Struct, frozen=True, kw_only=True):
    """What is aimed at."""

    low: float = 0.2
    """Solve rates from here ..."""
    high: float = 0.8
    """... to here are wanted; outside, an arm's weight falls evenly to nothing at 0 and at 1."""
    explore: float = 0.1
    """Share of the groups that are drawn as if nothing were known: no arm is ever given up."""
    late_power: float = 1.0
    """At the end of the run an arm's weight is multiplied by (1 - solve rate) to this power, at its beginning by 1; 0: never."""
    half_life: float = 256.0
    """Results are forgotten by half after this many groups: the policy moves on."""
    max_passes: int = 1
    """How often a row may be given; 1: a single epoch."""
    retire_at: float = 0.9
    """With more passes: a row solved at least so often is not given again."""

    def __post_init__(self) -> None:
        if not 0 < self.low < self.high < 1:
            raise ValueError(f"the wanted solve rates are {self.low} to {self.high}; choose 0 < low < high < 1")
        if not 0 < self.explore <= 1:
            raise ValueError(
                f"explore is {self.explore}; give a share above 0, or arms once found hard are never seen again, and at most 1"
            )
        if self.late_power < 0 or self.half_life <= 0 or self.max_passes < 1:
            raise ValueError(
                f"late_power {self.late_power}, half_life {self.half_life} and max_passes {self.max_passes} cannot be so small"
            )


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """What group `seq` plays."""

    seq: int
    arm: int
    row: int | None = None
    """Index within the arm's rows; None where a generator makes the task, which then is seeded with `seq`."""


class ArmRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One arm's share of the groups opened, and what is believed of it."""

    arm: Arm
    num_opened: int
    share: float
    solve_rate: float
    flat_frac: float
    """Share of its ended groups that taught nothing, over the whole run."""
    num_ended: int


class _Belief(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of one arm, decayed to the moment when `num_folded` groups had been folded."""

    solved: float = 0.0
    failed: float = 0.0
    telling: float = 0.0
    flat: float = 0.0
    num_folded: int = 0

    def later(self, num_folded: int, half_life: float) -> _Belief:
        keep = 0.5 ** ((num_folded - self.num_folded) / half_life)
        return _Belief(
            solved=keep * self.solved, failed=keep * self.failed, telling=keep * self.telling, flat=keep * self.flat, num_folded=num_folded
        )

    def with_result(self, result: GroupResult) -> _Belief:
        return msgspec.structs.replace(
            self,
            solved=self.solved + result.num_success,
            failed=self.failed + result.num_graded - result.num_success,
            telling=self.telling + (not result.is_flat),
            flat=self.flat + result.is_flat,
        )

    @property
    def solve_rate(self) -> float:
        return (1 + self.solved) / (2 + self.solved + self.failed)

    def signal(self, group_size: int) -> float:
        """The chance that a group's rewards differ: seen, and where little was seen, expected from the solve rate."""
        expected = signal_chance(1 + self.solved, 1 + self.failed, group_size)
        return (PRIOR_GROUPS * expected + self.telling) / (PRIOR_GROUPS + self.telling + self.flat)


class Curriculum:
    """Chooses arms and rows. Call `choose` for group 0, 1, 2, ...; tell `note` how groups ended, in any order.

    After a restart: `adopt` every choice the ledger holds, `note` every result, and go on.
    """

    def __init__(self, arms: Sequence[Arm], aim: Aim, *, seed: int, group_size: int, num_groups: int, lag: int) -> None:
        if not arms:
            raise ValueError("there are no tasks to choose from; change `tasks.kinds` or `tasks.levels`")
        self.arms, self._aim, self._seed = tuple(arms), aim, seed
        self._group_size, self._num_groups, self._lag = group_size, max(1, num_groups), lag
        self._beliefs = [_Belief() for _ in arms]
        self._num_opened, self._num_ended, self._num_flat = ([0] * len(arms) for _ in range(3))
        self._rows = [None if arm.num_rows is None else _Rows(arm.num_rows, f"{seed}/{arm.kind}/{arm.level}", aim) for arm in arms]
        self._chosen: list[tuple[int, int | None]] = []
        self._waiting: dict[int, GroupResult] = {}
        self._num_folded = 0

    @property
    def num_chosen(self) -> int:
        return len(self._chosen)

    @property
    def num_folded(self) -> int:
        """Groups, from the first on, whose results are in the estimates."""
        return self._num_folded

    def choose(self, seq: int) -> Choice:
        """The task of group `seq`, which must be the next one; ValueError when every row was given as often as allowed."""
        assert seq == self.num_chosen, f"group {seq} is not the next one, {self.num_chosen} is"
        self._fold(seq)
        weights = self.shares(seq)
        if not any(weights):
            raise ValueError(
                f"all tasks were given {self._aim.max_passes} times after {seq} groups; take fewer steps, add tasks, or raise "
                "`tasks.curriculum_passes`"
            )
        rng = random.Random(f"curriculum/{self._seed}/{seq}")
        arm = rng.choices(range(len(self.arms)), weights)[0]
        rows = self._rows[arm]
        choice = Choice(seq=seq, arm=arm, row=None if rows is None else rows.next())
        self._take(choice)
        return choice

    def adopt(self, choice: Choice) -> None:
        """Count a group that was opened before a restart."""
        assert choice.seq == self.num_chosen, f"group {choice.seq} is not the next one, {self.num_chosen} is"
        self._fold(choice.seq)
        self._take(choice)

    def note(self, result: GroupResult) -> None:
        """How a group ended; kept until every older group has ended too and the lag has passed. Telling it again changes nothing."""
        if result.seq >= self._num_folded:
            self._waiting[result.seq] = result

    def shares(self, seq: int) -> list[float]:
        """The chance of each arm to be drawn for group `seq`; zeros when nothing is left."""
        # Rows are drawn evenly while nothing is known, so an arm counts by the rows it has left; generators count alike.
        base = [1.0 if rows is None else float(rows.num_left) for rows in self._rows]
        wanted = [b and b * self._worth(arm, seq) for arm, b in enumerate(base)]
        total, even = sum(wanted), sum(base)
        if not even:
            return [0.0] * len(base)
        return [(1 - self._aim.explore) * w / total + self._aim.explore * b / even for w, b in zip(wanted, base, strict=True)]

    def records(self) -> list[ArmRecord]:
        """The account, one line per arm."""
        return [
            ArmRecord(
                arm=arm,
                num_opened=self._num_opened[i],
                share=self._num_opened[i] / max(1, self.num_chosen),
                solve_rate=self._belief(i).solve_rate,
                flat_frac=self._num_flat[i] / max(1, self._num_ended[i]),
                num_ended=self._num_ended[i],
            )
            for i, arm in enumerate(self.arms)
        ]

    def metrics(self) -> dict[str, float]:
        """The account by kind, levels together, under `curriculum/KIND/`."""
        out: dict[str, float] = {}
        for kind in dict.fromkeys(arm.kind for arm in self.arms):
            mine = [r for r in self.records() if r.arm.kind == kind]
            num_opened, num_ended = sum(r.num_opened for r in mine), sum(r.num_ended for r in mine)
            weigh = [r.num_opened / num_opened if num_opened else 1 / len(mine) for r in mine]
            out[f"curriculum/{kind}/share"] = num_opened / max(1, self.num_chosen)
            out[f"curriculum/{kind}/solve_rate"] = sum(w * r.solve_rate for w, r in zip(weigh, mine, strict=True))
            out[f"curriculum/{kind}/zero_std_frac"] = sum(r.flat_frac * r.num_ended for r in mine) / max(1, num_ended)
        return out

    def _belief(self, arm: int) -> _Belief:
        return self._beliefs[arm].later(self._num_folded, self._aim.half_life)

    def _worth(self, arm: int, seq: int) -> float:
        belief = self._belief(arm)
        rate, late = belief.solve_rate, min(1.0, seq / self._num_groups)
        band = min(1.0, rate / self._aim.low, (1 - rate) / (1 - self._aim.high))
        return max(MIN_WEIGHT, belief.signal(self._group_size) * band * (1 - rate) ** (self._aim.late_power * late))

    def _take(self, choice: Choice) -> None:
        rows = self._rows[choice.arm]
        if rows is not None:
            assert choice.row is not None
            rows.take(choice.row)
        self._chosen.append((choice.arm, choice.row))
        self._num_opened[choice.arm] += 1

    def _fold(self, seq: int) -> None:
        """Learn from groups 0 .. seq - 1 - D. One that has not ended yet stops the fold, or the quick ones after it would count first."""
        while self._num_folded < seq - self._lag and (result := self._waiting.pop(self._num_folded, None)) is not None:
            self._num_folded += 1
            if not result.num_graded:
                continue
            arm, row = self._chosen[result.seq]
            # Decayed only where a result is added: a restart, which adds the same results, then gets the same bits.
            self._beliefs[arm] = self._belief(arm).with_result(result)
            self._num_ended[arm] += 1
            self._num_flat[arm] += result.is_flat
            if row is not None and (rows := self._rows[arm]) is not None:
                rows.note(row, result.num_success / result.num_graded)
        for rows in self._rows:
            if rows is not None:
                rows.advance()


class _Rows:
    """The rows of one arm, each given once per pass; the first pass in a random order, later ones the most uncertain first."""

    def __init__(self, num_rows: int, name: str, aim: Aim) -> None:
        self._num_rows, self._name, self._aim = num_rows, name, aim
        self._rates: dict[int, float] = {}
        self._num_passes = 0
        self._order: list[int] = []
        self._given: set[int] = set()
        self._place = 0
        self.advance()

    @property
    def num_left(self) -> int:
        """Rows that this pass still has."""
        return len(self._order) - self._place

    def advance(self) -> None:
        """Begin the next pass when this one is through: what is known now decides its order."""
        while not self.num_left and self._num_passes < self._aim.max_passes:
            self._begin_pass()

    def next(self) -> int:
        assert self.num_left
        return self._order[self._place]

    def take(self, row: int) -> None:
        """Mark a row as given, also one that another state of knowledge would have given later or not at all."""
        self._given.add(row)
        while self.num_left and self._order[self._place] in self._given:
            self._place += 1

    def note(self, row: int, rate: float) -> None:
        self._rates[row] = rate

    def _begin_pass(self) -> None:
        rows = [row for row in range(self._num_rows) if self._rates.get(row, 0.0) < self._aim.retire_at]
        random.Random(f"rows/{self._name}/{self._num_passes}").shuffle(rows)
        if self._num_passes:
            rows.sort(key=lambda row: abs(self._rates.get(row, 0.5) - 0.5))
        self._order, self._given, self._place = rows, set(), 0
        self._num_passes += 1


def signal_chance(a: float, b: float, group_size: int) -> float:
    """1 - E[p^G] - E[(1 - p)^G] for p ~ Beta(a, b): how likely a group of G attempts holds both a success and a failure.

    >>> round(signal_chance(1, 1, 8), 3)
    0.778
    """
    all_solved = all_failed = 1.0
    for i in range(group_size):
        all_solved *= (a + i) / (a + b + i)
        all_failed *= (b + i) / (a + b + i)
    return 1.0 - all_solved - all_failed


def lag_of(pacing: Pacing) -> int:
    """D = L P + W - 1: when group n is opened, every group up to n - 1 - D has ended, see docs/curriculum.md."""
    return pacing.lead * pacing.groups_per_batch + pacing.window - 1


def arms_of(kinds: Iterable[str], levels: Iterable[int], listed: Sequence[tuple[str, int, int]] | None) -> list[Arm]:
    """One arm per kind and level; of a family that lists its tasks, those that have rows."""
    pairs = [(kind, level) for kind in kinds for level in levels]
    if listed is None:
        return [Arm(kind=kind, level=level) for kind, level in pairs]
    counts = dict.fromkeys(pairs, 0)
    for kind, level, _ in listed:
        if (kind, level) in counts:
            counts[kind, level] += 1
    return [Arm(kind=kind, level=level, num_rows=n) for (kind, level), n in counts.items() if n]
