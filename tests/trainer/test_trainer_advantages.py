"""Advantages: each equals its formula, compares only what is comparable, and is zero where there is nothing to compare."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.algorithms import ADVANTAGES, Gdpo, GdpoEma, Options
from rollmill.trainer.advantages import FUNCTIONS, Estimator, RewardTable, updated

PLAIN = [name for name in ADVANTAGES if not name.startswith("gdpo")]
every = pytest.mark.parametrize("name", list(ADVANTAGES))
group = st.lists(st.integers(0, 8).map(lambda n: n / 8), min_size=1, max_size=8)
groups = st.lists(group, min_size=1, max_size=5)
wide = settings(max_examples=60, deadline=None, derandomize=True)


def table(rewards: list[list[float]], parts: list[list[dict[str, float]]] | None = None) -> RewardTable:
    flat = [(i, r) for i, g in enumerate(rewards) for r in g]
    columns = [p for g in parts for p in g] if parts else [{"only": r} for _, r in flat]
    return RewardTable.of(rewards=[r for _, r in flat], sets=[i for i, _ in flat], parts=columns)


def found(
    name_or_options: str | Options, rewards: list[list[float]], parts: list[list[dict[str, float]]] | None = None
) -> list[list[float]]:
    options = ADVANTAGES[name_or_options]() if isinstance(name_or_options, str) else name_or_options
    estimator, facts = Estimator(options), table(rewards, parts)
    estimator.watch(facts)
    flat = estimator.advantages(facts).tolist()
    return [[flat.pop(0) for _ in g] for g in rewards]


def formula(name: str, rewards: list[list[float]]) -> list[list[float]]:
    """One group at a time, in plain Python; with one part of weight 1 the gdpo advantages are functions of the reward too."""
    centred = [[r - statistics.fmean(g) for r in g] for g in rewards]
    is_flat = [max(g) - min(g) <= 1e-6 for g in rewards]
    telling = [c for g, flat in zip(centred, is_flat, strict=True) if not flat for c in g]
    rms = math.sqrt(statistics.fmean(c * c for c in telling)) if telling else 1.0
    spread = max(statistics.pstdev([r for g in rewards for r in g]), 0.05)
    std = [statistics.stdev(g) if len(g) > 1 else 0.0 for g in rewards]
    unit = [[c / (std[i] + 1e-6) for c in g] for i, g in enumerate(centred)]
    telling_units = [u for g, flat in zip(unit, is_flat, strict=True) if not flat for u in g]
    unit_rms = math.sqrt(statistics.fmean(u * u for u in telling_units)) if telling_units else 1.0
    out = {
        "leave_one_out": lambda i, k: centred[i][k] * len(rewards[i]) / max(1, len(rewards[i]) - 1),
        "dr_grpo": lambda i, k: centred[i][k],
        "grpo": lambda i, k: unit[i][k],
        "batch_std": lambda i, k: centred[i][k] / (rms + 1e-6),
        "max_rl": lambda i, k: centred[i][k] / (statistics.fmean(rewards[i]) + 1e-6),
        "gdpo": lambda i, k: unit[i][k] / (unit_rms + 1e-6),
        "gdpo_ema": lambda i, k: centred[i][k] / spread,
    }[name]
    return [[0.0 if is_flat[i] else out(i, k) for k in range(len(g))] for i, g in enumerate(rewards)]


@every
@wide
@given(rewards=groups)
def test_advantage_equals_its_formula(name: str, rewards: list[list[float]]) -> None:
    for mine, wanted in zip(found(name, rewards), formula(name, rewards), strict=True):
        assert mine == pytest.approx(wanted, rel=1e-9, abs=1e-9)


@wide
@given(groups)
def test_leave_one_out_is_bit_equal_whatever_else_is_in_the_batch(rewards: list[list[float]]) -> None:
    for mine, alone in zip(found("leave_one_out", rewards), rewards, strict=True):
        r = np.array(alone)
        plain = (r - r.mean()) * len(r) / (len(r) - 1) if len(r) > 1 and r.max() - r.min() > 1e-6 else np.zeros(len(r))
        assert mine == plain.tolist()


@every
@wide
@given(rewards=groups, shift=st.integers(1, 3))
def test_shifting_a_groups_rewards_changes_nothing_but_for_max_rl(name: str, rewards: list[list[float]], shift: int) -> None:
    moved = [[r + shift for r in rewards[0]], *rewards[1:]]
    if name in ("max_rl", "gdpo_ema"):
        # max_rl is relative to the mean on purpose, and one group's level is part of the whole batch's spread.
        return
    for mine, wanted in zip(found(name, moved), found(name, rewards), strict=True):
        assert mine == pytest.approx(wanted, rel=1e-9, abs=1e-9)


@every
@wide
@given(rewards=groups)
def test_scaling_scales_what_is_not_normalised(name: str, rewards: list[list[float]]) -> None:
    is_linear = name in ("leave_one_out", "dr_grpo")
    scaled = found(name, [[4.0 * r for r in g] for g in rewards])
    if name == "gdpo_ema" and statistics.pstdev([r for g in rewards for r in g]) < 0.05:
        return
    for mine, plain in zip(scaled, found(name, rewards), strict=True):
        assert mine == pytest.approx([x * (4.0 if is_linear else 1.0) for x in plain], rel=1e-4, abs=1e-9)


@every
@wide
@given(rewards=groups)
def test_groups_sum_to_zero_and_flat_or_lone_ones_are_zero(name: str, rewards: list[list[float]]) -> None:
    for mine, given_ in zip(found(name, [*rewards, [0.3, 0.3, 0.3], [0.9]]), [*rewards, [0.3] * 3, [0.9]], strict=True):
        assert sum(mine) == pytest.approx(0.0, abs=1e-6 * (1 + max(map(abs, mine))))
        assert any(mine) == (max(given_) - min(given_) > 1e-6)


@every
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_that_are_none_are_refused_by_name(name: str, bad: float) -> None:
    with pytest.raises(ValueError, match="rewards must be finite"):
        found(name, [[1.0, bad]])
    parts = [[{"style": bad}, {"style": 1.0}]]
    if name.startswith("gdpo"):
        with pytest.raises(ValueError, match="part 'style' of the grades must be finite"):
            found(name, [[1.0, 0.0]], parts)
    else:
        assert any(found(name, [[1.0, 0.0]], parts)[0]), "a part that nobody weighs may be anything"


def test_every_advantage_has_a_function_of_its_name() -> None:
    assert {ADVANTAGES[n] for n in ADVANTAGES} == set(FUNCTIONS) and [FUNCTIONS[k].__name__ for k in ADVANTAGES.values()] == list(
        ADVANTAGES
    )


def test_parts_that_cancel_in_the_sum_still_differ_under_gdpo() -> None:
    parts = [[{"right": 1.0, "short": 0.0}, {"right": 0.0, "short": 1.0}, {"right": 0.0, "short": 0.0}]]
    rewards = [[1.0, 1.0, 0.0]]
    a, b, c = found(Gdpo(weights={"right": 2.0, "short": 1.0}), rewards, parts)[0]
    assert a > b > c
    assert found("leave_one_out", rewards, parts)[0][0] == found("leave_one_out", rewards, parts)[0][1]


def test_a_part_that_hardly_varies_counts_fully_in_gdpo_and_hardly_in_its_ema() -> None:
    parts = [[{"right": r, "style": s} for r, s in ((1.0, 0.5), (0.0, 0.501), (0.0, 0.5))]]
    rewards = [[1.0, 0.0, 0.0]]
    a, b, _ = found("gdpo", rewards, parts)[0]
    assert a == pytest.approx(b, rel=0.01)
    a, b, c = found("gdpo_ema", rewards, parts)[0]
    assert a > 0 > b and b == pytest.approx(c, rel=0.05)


def test_missing_parts_are_an_error_that_names_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"'style' is no part that every grade of the batch has \(those are: right\)"):
        found(Gdpo(weights={"style": 1.0}), [[1.0, 0.0]], [[{"right": 1.0, "style": 1.0}, {"right": 0.0}]])
    with pytest.raises(ValueError, match=r"there is no part .* Grade.parts"):
        found("gdpo_ema", [[1.0, 0.0]], [[{}, {}]])
    with pytest.raises(ValueError, match="needs rewards >= 0, got -1"):
        found("max_rl", [[1.0, -1.0]])


def test_running_spread_follows_from_the_batches_in_order() -> None:
    first, second = table([[0.0, 1.0]]), table([[0.0, 4.0]])
    options = GdpoEma(decay=0.9)
    assert updated({}, first, options) == {"only": 0.5}
    assert updated(updated({}, first, options), second, options)["only"] == pytest.approx(0.9 * 0.5 + 0.1 * 2.0)
    assert updated({"only": 3.0}, table([]), options) == {"only": 3.0}
    one, two = Estimator(GdpoEma()), Estimator(GdpoEma())
    for estimator in (one, two):
        estimator.watch(first)
        estimator.watch(second)
    assert one.spreads == two.spreads and one.remembers and not Estimator().remembers
