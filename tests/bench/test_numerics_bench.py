"""The benchmark of numerics tells time, tax and mismatch of both sides, and what replay buys."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from rollmill.bench.numerics import _time_rows, bench_numerics
from rollmill.bench.replay import replay_rows, route_bytes_rows
from rollmill.bench.report import Row
from rollmill.bench.sampled import mismatch_rows, packs, rescored, sample
from rollmill.bench.shapes import SHAPES, random_model, twin
from rollmill.bench.steps import made
from rollmill.cli import app


def test_numerics_bench_prints_one_json_object() -> None:
    arguments = "bench numerics --shape tiny --threads 1 --batches 1,2 --context 70 --forward 2x33 --rounds 1 --tokens 200 --json"
    done = CliRunner().invoke(app, arguments.split())
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    by_name: dict[str, list[dict[str, Any]]] = {}
    for row in found["rows"]:
        by_name.setdefault(row["name"], []).append(row)
    for name in ("decode step, batch 1, 70 keys", "decode step, batch 2, 70 keys", "prefill over pages, 33 tokens"):
        assert [r["peer"] for r in by_name[name]] == ["exact", "fast"] and all(r["value"] > 0 for r in by_name[name])
        assert f"tax of equal bits, {name}" in by_name
    assert "trainer's forward, 2 x 33 tokens" in by_name
    apart = next(rows for name, rows in by_name.items() if name.startswith("logprobs that differ"))
    assert [r["value"] for r in apart if r["peer"] == "exact engine, exact trainer"] == [0]
    assert found["num_layers"] == found["all_layers"] == 2 and found["versions"]["rollmill"]


@pytest.mark.parametrize("shape", ["tiny", "tiny-moe"])
def test_exact_profile_differs_in_no_bit_and_the_noisy_one_is_seen(shape: str) -> None:
    rows = {(row.name.split(",")[0], row.peer): row.value for row in mismatch_rows(random_model(SHAPES[shape]), num_tokens=600, threads=1)}
    assert rows["logprobs that differ in any bit", "exact engine, exact trainer"] == 0
    assert rows["largest difference", "exact engine, exact trainer"] == 0
    num_apart = rows["logprobs that differ in any bit", "noisy engine, exact trainer"]
    assert num_apart is not None and num_apart > 500


def test_packs_keep_every_sequence_in_order_within_their_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollmill.bench.sampled.PACK_TOKENS", 150)
    model = random_model(SHAPES["tiny"])
    sampled = sample(model, num_tokens=200, num_new=20, num_slots=4, threads=1)
    made_packs = list(packs(sampled))
    assert [pair for pack in made_packs for pair in pack] == sampled and len(made_packs) > 1
    assert all(len(pack) == 1 or sum(len(p) + len(r.token_ids) for p, r in pack) <= 150 for pack in made_packs)
    assert np.array_equal(rescored(model, sampled), np.concatenate([r.logprobs_T for _, r in sampled]))


def test_replay_brings_a_noisy_engine_and_an_exact_trainer_closer() -> None:
    rows = {(row.name.partition(": ")[2], row.peer): row.value for row in replay_rows(num_tokens=2048)}
    off, forced = rows["mm/k3", "replay off"], rows["mm/k3", "replay r3"]
    assert off is not None and forced is not None and 0 < forced < off
    # What is imposed in one layer moves the router of the next, so the two modes need not see the same flips.
    assert all((rows["route/any_flip_tok_frac", f"replay {mode}"] or 0.0) > 0 for mode in ("r3", "r3_plausible"))
    assert rows["route/plausible_replaced_frac", "replay r3"] == 0


def test_a_routing_record_takes_at_most_250_bytes_a_token() -> None:
    sizes = {row.peer: row.value for row in route_bytes_rows(256)}
    assert sizes["int32 ids"] == 1536 and sizes["uint8 ids"] == 384
    assert sizes["rollmill"] is not None and sizes["rollmill"] <= 250


def test_tax_is_the_exact_profiles_time_over_the_best_of_the_others() -> None:
    rows: list[Row] = list(_time_rows("step", {"exact": lambda: 3.0, "slow": lambda: 4.0, "best": lambda: 2.0}, rounds=3))
    assert [(r.peer, r.value, r.ratio) for r in rows[:3]] == [("exact", 3000.0, 1.5), ("slow", 4000.0, 2.0), ("best", 2000.0, 1.0)]
    assert (rows[3].value, rows[3].unit) == (50.0, "%")


@pytest.mark.parametrize(("kind", "first", "second"), [("decode", 3, 65), ("prefill", 1, 70), ("packed", 2, 9)])
@pytest.mark.parametrize("shape", ["tiny", "tiny-moe"])
def test_every_step_runs_by_every_profile(kind: str, first: int, second: int, shape: str) -> None:
    model = random_model(SHAPES[shape])
    for profile in ("exact", "fast"):
        made(twin(model, profile), kind, first, second)()


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        bench_numerics(command="x", shape="tiny", batches=(0,))
    with pytest.raises(ValueError, match="there is no shape"):
        bench_numerics(command="x", shape="none")


def test_random_weights_are_exact_in_the_serving_dtype() -> None:
    model = random_model(SHAPES["tiny-moe"])
    assert all(torch.equal(p, p.to(model.serving_dtype).to(p.dtype)) for p in model.parameters())
