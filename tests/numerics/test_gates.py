"""The gates of numerics on the CPU, dense and with experts; and that they fail where they must."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from rollmill.cli import app
from rollmill.model import Model, ModelConfig, MoEConfig, load_model, save_model
from rollmill.numerics.gates import engine_gates, fault_gates, layout_gates, row_gates, run_gates
from rollmill.numerics.trace import first_difference, trace_packed, trace_paged
from rollmill.ops import ops_for

DENSE = ModelConfig(
    family="qwen3",
    vocab_size=307,
    hidden_size=80,
    intermediate_size=160,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=20,
    max_position=512,
)
SPARSE = ModelConfig(
    family="qwen3_moe",
    vocab_size=307,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position=512,
    moe=MoEConfig(num_experts=8, top_k=3, expert_size=48, norm_topk=True),
)
DEMO = Path(__file__).parents[2] / "models" / "demo"


def lively(config: ModelConfig, numerics: str = "exact") -> Model:
    """Random weights, large enough that tokens and experts really differ."""
    model = Model(config, numerics=numerics)
    model.init_weights(0)
    model.load_serving({name: t * 4 for name, t in model.serving_tensors().items() if t.dim() > 1})
    return model


@pytest.mark.parametrize("config", [DENSE, SPARSE], ids=["dense", "experts"])
def test_every_gate_holds_on_the_exact_profile(config: ModelConfig) -> None:
    gates = list(run_gates(lively(config), num_tokens=150, num_sequences=6))
    assert [g for g in gates if not g.passed] == []
    names = " ".join(g.name for g in gates)
    for claim in (
        "decode token by token",
        "chunks of 64",
        "chunks of 777",
        "shared prefix",
        "scored by prefill",
        "one by one, recomputed",
        "flipped",
    ):
        assert claim in names


def test_every_gate_holds_on_a_trained_model() -> None:
    model, _ = load_model(DEMO)
    assert [g for g in run_gates(model, num_tokens=150, num_sequences=8) if not g.passed] == []


@pytest.mark.parametrize("threads", [1, 2])
def test_the_number_of_threads_changes_no_bit(threads: int) -> None:
    model, before = lively(SPARSE), torch.get_num_threads()
    whole = trace_packed(model, list(range(100)))
    torch.set_num_threads(threads)
    try:
        assert first_difference(whole, trace_paged(model, list(range(100)), chunk=9)) is None
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("profile", ["fast", "noisy"])
def test_profiles_without_a_promise_fail_the_gates(profile: str) -> None:
    model = lively(SPARSE, profile)
    assert not all(g.passed for g in layout_gates(model, num_tokens=130))
    if profile == "noisy":
        assert not all(g.passed for g in row_gates(model))
        assert not all(g.passed for g in engine_gates(model, num_sequences=4, num_tokens=40))


def test_faults_are_seen_on_the_exact_profile_and_the_model_is_left_as_it_was() -> None:
    model = lively(DENSE)
    before = model.serving_tensors()
    assert all(g.passed for g in fault_gates(model, num_tokens=40))
    assert all(torch.equal(t, before[name]) for name, t in model.serving_tensors().items())


def test_the_first_operation_that_differs_is_named() -> None:
    model, tokens = lively(DENSE), list(range(60))
    before = trace_packed(model, tokens)
    weight = dict(model.named_parameters())["layers.1.mlp.down"]
    with torch.no_grad():
        weight[3, 4] += 0.25
    apart = first_difference(before, trace_paged(model, tokens, chunk=7))
    assert apart is not None
    assert apart.op == "linear (of layers.1.mlp.down)" and apart.token == 0 and apart.num_tokens == 60
    assert "layers.1.mlp.down" in str(apart) and "60 rows differ" in str(apart)


def test_a_difference_in_attention_is_told_from_one_in_the_products() -> None:
    """The fast profile's own attention beside the exact one, everything else equal."""
    model, tokens = lively(DENSE), list(range(130))
    fast, exact = ops_for("fast", "cpu"), model.ops

    class OtherAttention:
        def __getattr__(self, name: str) -> object:
            return getattr(fast if name in ("attend_packed", "new_pages") else exact, name)

    apart = first_difference(trace_packed(model, tokens), trace_packed(model, tokens, OtherAttention()))
    assert apart is not None and apart.op.startswith("attend (after layers.0.attn.")


def test_commands_say_where_and_exit_with_the_verdict(tmp_path: Path) -> None:
    model = lively(DENSE)
    save_model(model, tmp_path / "a")
    with torch.no_grad():
        model.layers[2].attn.out[0, 0] += 0.5
    save_model(model, tmp_path / "b")
    runner = CliRunner()
    fine = runner.invoke(app, ["numerics", "bisect", str(tmp_path / "a"), "--tokens", "70"])
    assert (fine.exit_code, "no difference" in fine.stdout) == (0, True), fine.output
    other = runner.invoke(app, ["numerics", "bisect", str(tmp_path / "a"), "--against", str(tmp_path / "b"), "--tokens", "30"])
    assert other.exit_code == 1 and "layers.2.attn.out" in other.stdout
    checked = runner.invoke(app, ["numerics", "check", str(tmp_path / "a"), "--tokens", "80", "--sequences", "3", "--json"])
    assert checked.exit_code == 0, checked.output
    noisy = runner.invoke(app, ["numerics", "check", str(tmp_path / "a"), "--profile", "noisy", "--tokens", "80", "--sequences", "3"])
    assert noisy.exit_code == 1 and "differ" in noisy.stdout
