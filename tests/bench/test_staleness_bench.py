"""The staleness table: a cell repeats itself, the lag is what it says, on-policy is on-policy, and the verb prints every cell."""

from __future__ import annotations

import json
from collections.abc import Iterator

import msgspec
import pytest
import torch
import typer
from typer.testing import CliRunner

from rollmill.bench.staleness import CORRECTIONS, LAGS, QUICK, Lag, run_cell
from rollmill.bench.staleness_command import bench_staleness_command


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_cell_gives_the_same_numbers_again() -> None:
    lag, correction = Lag(bound=2), CORRECTIONS[0]
    assert run_cell(lag, correction, QUICK, 3) == run_cell(lag, correction, QUICK, 3)


def test_fresh_samples_need_no_correction_and_get_none() -> None:
    corrected, plain = (run_cell(Lag(bound=0), correction, QUICK, 0) for correction in CORRECTIONS)
    # Sampler and trainer compute the same tokens in packs of other lengths: float32 rounding, so not 0 but far below any policy change.
    assert max(corrected.k3) < 1e-9
    assert min(corrected.ess) > 1 - 1e-6
    # With ratios of 1 up to rounding both losses have the same gradient, and dppo_tv's pull towards the sampler has none.
    assert corrected.rewards == pytest.approx(plain.rewards, abs=0.02)


def test_old_samples_are_off_the_policy() -> None:
    fresh, old = (run_cell(Lag(bound=bound), CORRECTIONS[0], QUICK, 0) for bound in (0, 4))
    assert sum(old.ess) < sum(fresh.ess)
    assert max(old.k3) > 1e-4


@pytest.mark.parametrize(("bound", "expected"), [(0, [0, 0, 0, 0, 0, 0]), (2, [0, 1, 2, 2, 2, 2]), (None, [0, 0, 1, 1, 2, 2])])
def test_lag_is_what_it_says(bound: int | None, expected: list[int]) -> None:
    assert [Lag(bound=bound).at(step) for step in range(6)] == expected


def test_verb_prints_every_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollmill.bench.staleness.QUICK", msgspec.structs.replace(QUICK, steps=2, num_groups=2, warm_steps=1))
    app = typer.Typer()
    app.command()(bench_staleness_command)
    done = CliRunner().invoke(app, ["--quick", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    peers = {f"staleness {lag.name}, {correction.name}" for lag in LAGS for correction in CORRECTIONS}
    assert {row["peer"] for row in found["rows"]} == peers
    assert {row["name"] for row in found["rows"]} == {"reward at the end", "steps to 80%", "effective sample size", "mismatch k3"}
    assert len(found["cells"]) == 12
