"""The engine's benchmark measures what it says: same tokens for everybody, peers that are missing named, every request counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rollmill.bench import engine as engine_bench
from rollmill.bench.beside import Beside, PeerFailed
from rollmill.bench.engine import _rates, _rows, bench_engine, prompts_of, step_bytes
from rollmill.bench.report import Row, result
from rollmill.bench.shapes import SHAPES, random_model, shape_of, twin
from rollmill.bench.swaps import SwapLog, _is_stamped, bench_swaps
from rollmill.cli import app
from rollmill.engine.protocol import FinishReason, GenerateReply, SwapMode, Timing, VersionSpan


def rows_of(found: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["name"], row["peer"]): row for row in found["rows"]}


def test_engine_bench_prints_one_json_object_with_a_reason_where_a_peer_is_missing() -> None:
    arguments = "bench engine --shape tiny --threads 1 --sequences 1,3 --prompt 9 --new 4 --rounds 1 --peers transformers,vllm --json"
    done = CliRunner().invoke(app, arguments.split())
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    rows = rows_of(found)
    for count in (1, 3):
        name = f"sampled tokens per second, {count} sequences"
        assert rows[name, "rollmill exact"]["ratio"] == 1.0
        for peer in ("rollmill fast", "transformers"):
            assert rows[name, peer]["value"] > 0 and rows[name, peer]["ratio"] > 0
        assert rows[name, "vllm"]["value"] is None and rows[name, "vllm"]["note"]
    assert (
        found["threads"] == 1 and found["hardware"]["num_cores"] and found["versions"]["torch"] and found["command"].startswith("rollmill")
    )
    assert "round 1" in done.stderr


def test_a_table_is_printed_without_json() -> None:
    done = CliRunner().invoke(app, "bench engine --shape tiny --threads 1 --sequences 2 --prompt 5 --new 3 --rounds 1 --peers=".split())
    assert done.exit_code == 0 and "rollmill exact" in done.stdout and "tokens/s" in done.stdout


class Talker:
    """Says it is `rate` tokens a second fast; breaks off after `breath` answers."""

    def __init__(self, rate: float, breath: int = 1000, extra: int = 0) -> None:
        self.rate, self.breath, self.extra = rate, breath, extra
        self.heard: list[list[list[int]]] = []

    def ask(self, *, prompts: list[list[int]], num_new: int) -> dict[str, Any]:
        self.heard.append(prompts)
        if len(self.heard) > self.breath:
            raise PeerFailed("out of breath")
        return {"seconds": len(prompts) * num_new / self.rate, "num_tokens": len(prompts) * num_new + self.extra}


def test_everybody_gets_the_same_new_prompts_each_round_and_ratios_are_ours_over_theirs() -> None:
    talkers = {"rollmill exact": Talker(100.0), "other": Talker(25.0)}
    missing: dict[str, str] = {}
    rates = _rates(talkers, missing, SHAPES["tiny"], 3, 7, 8, rounds=3)
    assert talkers["rollmill exact"].heard == talkers["other"].heard
    rounds = [str(prompts) for prompts in talkers["other"].heard]
    assert len(set(rounds)) == 4, "a warm-up and three rounds, no prompt twice"
    rows = {row.peer: row for row in _rows(3, rates, missing, ["other"])}
    assert (rows["other"].value, rows["other"].ratio) == (25.0, 4.0) and not missing


def test_a_peer_that_fails_or_stops_early_has_no_value() -> None:
    talkers = {"rollmill exact": Talker(100.0), "breaks": Talker(50.0, breath=2), "short": Talker(50.0, extra=-1)}
    missing: dict[str, str] = {}
    rows = {row.peer: row for row in _rows(2, _rates(talkers, missing, SHAPES["tiny"], 2, 4, 8, rounds=3), missing, ["breaks", "short"])}
    assert rows["breaks"].value is None and rows["breaks"].note == "out of breath"
    assert rows["short"].value is None and rows["short"].note == "it gave 7 tokens where 8 were asked for"
    assert rows["rollmill exact"].value == 100.0


def test_a_peers_process_that_ends_says_its_last_words() -> None:
    with pytest.raises(PeerFailed, match="no_such_peer"):
        Beside("rollmill.bench.transformers_peer:no_such_peer", threads=1)


def test_what_is_asked_for_wrongly_is_refused() -> None:
    with pytest.raises(ValueError, match="no peer 'llama'"):
        bench_engine(command="x", peers=["llama"])
    with pytest.raises(ValueError, match="at least 1"):
        bench_engine(command="x", sequences=(0,))
    with pytest.raises(ValueError, match="choose one of"):
        shape_of("huge")
    with pytest.raises(ValueError, match="has 2"):
        shape_of("tiny", 3)


def test_a_step_reads_every_weight_once_and_of_experts_those_it_touches() -> None:
    dense, sparse = random_model(SHAPES["tiny"]), random_model(SHAPES["tiny-moe"])
    assert step_bytes(dense, 1, 0.0) == 4 * dense.num_parameters
    keys = step_bytes(dense, 3, 10.0) - step_bytes(dense, 3, 0.0)
    assert keys == 4 * 2 * 3 * 10 * 2 * 2 * 16
    one, many = step_bytes(sparse, 1, 0.0), step_bytes(sparse, 1000, 0.0)
    assert one < many <= 4 * sparse.num_parameters and many == pytest.approx(4 * sparse.num_parameters)


def test_a_twin_computes_the_same_weights_by_another_profile() -> None:
    model = random_model(SHAPES["tiny"])
    other = twin(model, "fast")
    assert other.embed.data_ptr() == model.embed.data_ptr() and (model.ops.profile, other.ops.profile) == ("exact", "fast")


def test_prompts_are_a_function_of_the_seed() -> None:
    config = SHAPES["tiny"]
    assert prompts_of(config, 2, 5, 1) == prompts_of(config, 2, 5, 1) != prompts_of(config, 2, 5, 2)


def test_swaps_under_load_lose_no_request_in_either_mode() -> None:
    found = bench_swaps(command="x", num_swaps=6, shape="tiny", num_running=4, num_prompt=8, num_new=40, quiet_s=0.2)
    rows = rows_of(found)
    for mode in SwapMode:
        assert rows["swaps confirmed under load", mode]["value"] == 6
        assert rows["requests submitted", mode]["value"] >= 4
        for name in ("lost", "ended twice", "that ended short or in error"):
            assert rows[f"requests {name}", mode]["value"] == 0
        assert rows["replies with a token of a version that was not served", mode]["value"] == 0
        assert rows["live weights proved equal to the last published", mode]["value"] == 1
        assert len(found["pauses_s"][mode]) == 6


def reply(spans: list[tuple[int, int, int]], num_tokens: int) -> GenerateReply:
    return GenerateReply(
        token_ids=[1] * num_tokens, logprobs=b"", spans=[VersionSpan(*s) for s in spans], finish_reason=FinishReason.LENGTH, seed=0,
        num_reused=0, timing=Timing(queue_s=0, first_token_s=0, total_s=0),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("spans", "is_right"),
    [
        ([(0, 4, 1)], True),
        ([(0, 2, 1), (2, 4, 2)], True),
        ([(0, 2, 1), (2, 4, 9)], False),
        ([(0, 2, 2), (2, 4, 1)], False),
        ([(0, 2, 1), (3, 4, 2)], False),
        ([(0, 3, 1)], False),
    ],
)
def test_a_stamp_must_cover_every_token_with_versions_that_were_served_in_order(spans: list[tuple[int, int, int]], is_right: bool) -> None:
    assert _is_stamped(reply(spans, 4), {1, 2}) is is_right


def test_a_swap_that_never_comes_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollmill.bench.swaps.DEADLINE_S", 0.01)
    with pytest.raises(RuntimeError, match="version 3 was not served"):
        SwapLog().await_version(3)


def test_rows_without_ratio_or_note_leave_them_out() -> None:
    found = result("x", [Row(name="a", peer="b", value=None, unit="s")])
    assert found["rows"] == [{"name": "a", "peer": "b", "value": None, "unit": "s"}]


def test_vllm_without_a_tokenizer_is_refused_with_a_reason(tmp_path: Path) -> None:
    with (
        pytest.raises(PeerFailed, match=r"tokenizer|no vLLM"),
        engine_bench._peer("vllm", tmp_path, SHAPES["tiny"], device="cpu", folder=tmp_path, max_len=9, num_slots=1, threads=1),
    ):
        raise AssertionError("it started")
