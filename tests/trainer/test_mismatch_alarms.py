"""Alarms go on once per crossing, and only for what was measured."""

from __future__ import annotations

import doctest
import math
import re
from pathlib import Path

import pytest

from rollmill.trainer import alarms
from rollmill.trainer.alarms import ALARMS, EXACT, AlarmBoard
from rollmill.trainer.learn import METRICS

FINE = {
    **dict.fromkeys(METRICS, 0.0),
    "mm/num_tokens": 100.0,
    "mm/token_mult_prob_error": 1.0,
    "mm/ratio_mean": 1.0,
    "mm/ess": 1.0,
    "mm/corr_prob": 1.0,
    "corr/kept_token_frac": 1.0,
}


def heard(board: AlarmBoard, **values: float) -> list[str]:
    return [c.alarm.metric for c in board.look(FINE | {name.replace("__", "/"): v for name, v in values.items()})]


def test_every_alarm_watches_a_number_that_is_always_written() -> None:
    assert {a.metric for a in (*ALARMS, EXACT)} <= set(METRICS)
    assert AlarmBoard(is_exact=True).look(FINE) == []


def test_alarm_is_told_when_it_goes_on_and_again_only_after_it_went_off() -> None:
    board = AlarmBoard(is_exact=False)
    assert heard(board, mm__ess=0.8) == ["mm/ess"]
    assert heard(board, mm__ess=0.7) == [] and board.num_on == 1
    assert heard(board) == [] and board.num_on == 0
    assert heard(board, mm__ess=0.8, mm__ratio_mean=1.2) == ["mm/ratio_mean", "mm/ess"]


def test_second_bound_of_one_number_is_severe_and_told_by_itself() -> None:
    board = AlarmBoard(is_exact=False)
    assert [c.alarm.is_severe for c in board.look(FINE | {"mm/k3": 2e-3})] == [False]
    assert [c.alarm.is_severe for c in board.look(FINE | {"mm/k3": 2e-2})] == [True]


@pytest.mark.parametrize(("is_exact", "wanted"), [(True, ["mm/single_version_abs_diff_max"]), (False, [])])
def test_the_smallest_difference_is_severe_where_bits_are_promised(is_exact: bool, wanted: list[str]) -> None:
    found = AlarmBoard(is_exact=is_exact).look(FINE | {"mm/single_version_abs_diff_max": 5e-324})
    assert [c.alarm.metric for c in found] == wanted and all(c.alarm.is_severe for c in found)


def test_number_that_is_no_number_is_alarming() -> None:
    assert heard(AlarmBoard(is_exact=False), mm__k3=float("nan")) == ["mm/k3", "mm/k3"]


def test_step_that_compared_nothing_changes_nothing() -> None:
    board = AlarmBoard(is_exact=True)
    assert board.look(dict.fromkeys(METRICS, 0.0)) == [] and board.num_on == 0
    assert heard(board, mm__ess=0.5) == ["mm/ess"]
    assert board.look(dict.fromkeys(METRICS, 0.0)) == [] and board.num_on == 1
    assert heard(board, mm__ess=0.5) == []


def test_the_page_of_metrics_has_every_bound() -> None:
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    section = page.partition("### Alarms")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `([\w/]+)` \| (.*) \|$", section, re.MULTILINE))
    for alarm in (*ALARMS, EXACT):
        bounds = [f"below {alarm.low:g}"] * math.isfinite(alarm.low) + [f"above {alarm.high:g}"] * math.isfinite(alarm.high)
        assert bounds and all(bound in rows[alarm.metric] for bound in bounds), alarm
    assert rows.keys() == {a.metric for a in (*ALARMS, EXACT)}


def test_examples_in_the_docstrings_hold() -> None:
    assert doctest.testmod(alarms).failed == 0
