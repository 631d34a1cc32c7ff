"""The curriculum: what it aims at, that it repeats itself exactly, gives rows once, and does not care how fast a task is."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.ledger import GroupResult, GroupRow, Pacing, cut, may_open
from rollmill.records import GroupState
from rollmill.rollout.curriculum import Aim, Arm, Choice, Curriculum, arms_of, lag_of, signal_chance

FAST = settings(max_examples=60, deadline=None, derandomize=True)
G = 8


def curriculum(arms: list[Arm], *, num_groups: int = 1000, lag: int = 16, seed: int = 0, **aim: float) -> Curriculum:
    return Curriculum(arms, Aim(**aim), seed=seed, group_size=G, num_groups=num_groups, lag=lag)  # type: ignore[arg-type]


def endless(*kinds: str) -> list[Arm]:
    return [Arm(kind=kind, level=1) for kind in kinds]


def outcome(choice: Choice, rate: float) -> GroupResult:
    """What a group gets depends on its number alone, never on when it ends."""
    rng = random.Random(choice.seq)
    num_success = sum(rng.random() < rate for _ in range(G))
    return GroupResult(seq=choice.seq, num_graded=G, num_success=num_success, is_flat=num_success in (0, G))


def play(c: Curriculum, rates: Callable[[int, int], float], num_groups: int, start: int = 0) -> list[Choice]:
    """Everybody ends at once, in order: the simplest run."""
    choices = []
    for seq in range(start, num_groups):
        choices.append(c.choose(seq))
        c.note(outcome(choices[-1], rates(choices[-1].arm, seq)))
    return choices


def group_row(seq: int, state: GroupState, num_overtaken: int) -> GroupRow:
    return GroupRow(
        group_id=f"g{seq:06d}", seq=seq, task_id="t", group_size=G, state=state, num_graded=G, reward_sum=0.0, num_success=0,
        min_version=None, opened_at=0.0, opened_steps_cut=0, num_overtaken=num_overtaken, ready_at=None, step=None, version=None,
        staleness=None, age=None, drop_reason=None, ended_at=None, stats=None,
    )  # fmt: skip


def play_async(
    c: Curriculum, rate: float, duration: Callable[[Choice], float], pacing: Pacing, num_groups: int
) -> tuple[list[Choice], int]:
    """The real gate and the real cut over tasks that take different times; also how often an unfinished group held the fold back."""
    choices: list[Choice] = []
    live: dict[int, GroupRow] = {}
    ends: list[tuple[float, int]] = []
    now, num_cut, num_held = 0.0, 0, 0
    while len(choices) < num_groups:
        for _ in range(min(may_open(len(choices), num_cut, pacing), num_groups - len(choices))):
            seq = len(choices)
            choices.append(c.choose(seq))
            num_held += c.num_folded < seq - lag_of(pacing)
            live[seq] = group_row(seq, GroupState.OPEN, 0)
            heapq.heappush(ends, (now + duration(choices[-1]), seq))
        now, seq = heapq.heappop(ends)
        c.note(outcome(choices[seq], rate))
        live[seq] = group_row(seq, GroupState.READY, live[seq].num_overtaken)
        while admitted := cut([live[s] for s in sorted(live)], version=0, max_staleness=99, pacing=pacing).admit:
            num_cut += 1
            chosen = {live.pop(g.seq).seq for g in admitted}
            for s, g in live.items():
                live[s] = group_row(s, g.state, g.num_overtaken + sum(x > s for x in chosen))
    return choices, num_held


@pytest.mark.parametrize("staleness", [1, 2, 4, 8])
def test_fast_and_slow_tasks_of_equal_difficulty_get_the_same_groups_exactly(staleness: int) -> None:
    pacing, arms = Pacing.from_staleness(staleness, 4, "async"), endless("fast", "slow")

    def run(*seconds: float) -> tuple[list[Choice], int]:
        rng = random.Random(1)
        c = curriculum(arms, num_groups=600, lag=lag_of(pacing))
        return play_async(c, 0.5, lambda choice: seconds[choice.arm] * rng.uniform(0.5, 1.5), pacing, 600)

    (quick_first, held), (slow_first, _), (alike, _) = run(1.0, 50.0), run(50.0, 1.0), run(1.0, 1.0)
    assert held == 0, "the gate keeps every group that the choice needs ended"
    assert quick_first == slow_first == alike
    # 600 draws at one half: four standard deviations are 49.
    assert abs(Counter(choice.arm for choice in quick_first)[0] - 300) <= 49


def test_folding_by_finish_would_have_preferred_fast_tasks() -> None:
    """Why the order matters: the same run without the lag knows the fast kind first, and its choices depend on speed."""
    pacing, arms = Pacing.from_staleness(8, 4, "async"), endless("fast", "slow")

    def run(*seconds: float) -> list[Choice]:
        c = curriculum(arms, num_groups=200, lag=0)
        return play_async(c, 0.03, lambda choice: seconds[choice.arm], pacing, 200)[0]

    assert run(1.0, 50.0) != run(50.0, 1.0)


@FAST
@given(st.integers(1, 9), st.integers(1, 5), st.randoms(use_true_random=False))
def test_gate_never_lets_a_choice_wait_for_an_unfinished_group(staleness: int, groups_per_batch: int, rng: random.Random) -> None:
    pacing = Pacing.from_staleness(staleness, groups_per_batch, "async")
    c = curriculum(endless("a", "b"), num_groups=80, lag=lag_of(pacing))
    assert play_async(c, 0.5, lambda choice: rng.choice([1.0, 2.0, 100.0]), pacing, 80)[1] == 0


@FAST
@given(st.integers(0, 3), st.integers(1, 120), st.booleans())
def test_restart_goes_on_with_the_very_same_choices(seed: int, stop: int, has_rows: bool) -> None:
    arms = [Arm(kind=k, level=v, num_rows=15 if has_rows else None) for k in "ab" for v in (1, 2)]

    def fresh() -> Curriculum:
        return curriculum(arms, seed=seed, lag=5, max_passes=3, half_life=20.0)

    def rate(arm: int, seq: int) -> float:
        return 0.2 * (arm + 1) + 0.001 * seq

    undisturbed = play(fresh(), rate, 120)
    again = fresh()
    results = [outcome(choice, rate(choice.arm, choice.seq)) for choice in undisturbed[:stop]]
    for result in reversed(results):
        again.note(result)
    for choice in undisturbed[:stop]:
        again.adopt(choice)
    assert play(again, rate, 120, start=stop) == undisturbed[stop:]


def test_tasks_that_are_solved_sometimes_get_most_groups() -> None:
    rates = [0.0, 0.5, 1.0]
    c = curriculum(endless("impossible", "right", "trivial"), late_power=0.0)
    play(c, lambda arm, seq: rates[arm], 1000)
    impossible, right, trivial = c.records()
    assert right.share > 0.85
    assert min(impossible.share, trivial.share) >= 0.02, "no arm is ever given up"
    assert impossible.flat_frac == trivial.flat_frac == 1.0
    assert right.flat_frac < 0.05


def test_harder_tasks_are_preferred_late() -> None:
    rates = [0.3, 0.7]
    c = curriculum(endless("hard", "easy"), num_groups=2000)
    arms = [choice.arm for choice in play(c, lambda arm, seq: rates[arm], 2000)]
    early, late = arms[:500].count(0) / 500, arms[-500:].count(0) / 500
    assert abs(early - 0.5) < 0.12
    assert late > 0.6


def test_task_that_became_easy_gives_way() -> None:
    c = curriculum(endless("learnt", "new"), num_groups=4000, late_power=0.0, half_life=64.0)
    arms = [choice.arm for choice in play(c, lambda arm, seq: 0.5 if arm or seq < 300 else 1.0, 1200)]
    assert 0.3 < arms[:300].count(0) / 300 < 0.7
    assert arms[-300:].count(0) / 300 < 0.2


@FAST
@given(st.lists(st.integers(1, 12), min_size=1, max_size=4), st.integers(1, 3), st.integers(0, 5))
def test_no_row_is_given_more_often_than_allowed(num_rows: list[int], max_passes: int, seed: int) -> None:
    c = curriculum([Arm(kind=f"k{i}", level=1, num_rows=n) for i, n in enumerate(num_rows)], lag=0, seed=seed, max_passes=max_passes)
    given_: Counter[tuple[int, int | None]] = Counter()
    with pytest.raises(ValueError, match="all tasks were given"):
        for seq in range(sum(num_rows) * max_passes + 1):
            choice = c.choose(seq)
            given_[choice.arm, choice.row] += 1
            c.note(outcome(choice, 0.5))
    assert max(given_.values()) <= max_passes
    assert {row for row, _ in given_.items()} == {(arm, row) for arm, n in enumerate(num_rows) for row in range(n)}


def test_single_epoch_gives_every_row_once() -> None:
    c = curriculum([Arm(kind="a", level=1, num_rows=40), Arm(kind="b", level=1, num_rows=10)])
    choices = play(c, lambda arm, seq: 0.5, 50)
    assert len({(choice.arm, choice.row) for choice in choices}) == 50


def test_solved_rows_are_not_given_again() -> None:
    c = curriculum([Arm(kind="a", level=1, num_rows=20)], lag=0, max_passes=2)
    # Odd rows are always solved, even ones half of the time.
    seq, second = 0, []
    while seq < 30:
        choice = c.choose(seq)
        assert choice.row is not None
        if seq >= 20:
            second.append(choice.row)
        num_success = G if choice.row % 2 else G // 2
        c.note(GroupResult(seq=seq, num_graded=G, num_success=num_success, is_flat=bool(choice.row % 2)))
        seq += 1
    # The last row of the first pass has no result yet when the second one begins.
    assert sum(row % 2 for row in second) <= 1


def test_dropped_group_says_nothing_and_holds_nobody_back() -> None:
    c = curriculum(endless("a"), lag=0)
    for seq in range(10):
        c.choose(seq)
        c.note(GroupResult(seq=seq))
    (record,) = c.records()
    assert (record.num_opened, record.num_ended, record.solve_rate) == (10, 0, 0.5)


@FAST
@given(st.floats(0.1, 50), st.floats(0.1, 50), st.integers(2, 16))
def test_chance_of_signal_is_a_probability_and_symmetric(a: float, b: float, group_size: int) -> None:
    assert -1e-12 <= signal_chance(a, b, group_size) <= 1
    assert signal_chance(a, b, group_size) == pytest.approx(signal_chance(b, a, group_size), abs=1e-12)


def test_account_is_kept_by_kind() -> None:
    arms = arms_of(["a", "b"], [1, 2], None)
    assert [(arm.kind, arm.level) for arm in arms] == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]
    c = curriculum(arms)
    play(c, lambda arm, seq: 0.5, 200)
    found = c.metrics()
    assert sorted(found) == [f"curriculum/{kind}/{what}" for kind in "ab" for what in ("share", "solve_rate", "zero_std_frac")]
    assert found["curriculum/a/share"] + found["curriculum/b/share"] == pytest.approx(1.0)


def test_arms_of_a_listed_family_are_those_with_rows() -> None:
    listed = [("a", 1, 7), ("a", 1, 8), ("b", 2, 9), ("c", 1, 1)]
    assert arms_of(["a", "b"], [1, 2], listed) == [Arm(kind="a", level=1, num_rows=2), Arm(kind="b", level=2, num_rows=1)]


def test_rows_are_drawn_evenly_while_nothing_is_known() -> None:
    c = curriculum([Arm(kind="many", level=1, num_rows=30), Arm(kind="few", level=1, num_rows=10)])
    assert c.shares(0) == pytest.approx([0.75, 0.25])


@pytest.mark.parametrize("bad", [{"low": 0.0}, {"low": 0.9}, {"explore": 0.0}, {"half_life": 0.0}, {"max_passes": 0}])
def test_aim_that_cannot_work_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"choose|give|cannot"):
        Aim(**bad)  # type: ignore[arg-type]
