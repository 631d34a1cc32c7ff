"""The trainer replays the experts that the engine took, in the order of its packed tokens, and counts what differs or is damaged."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest
import torch
from trainer_worlds import config_of, fill, scored

from rollmill.algorithms import DppoTv
from rollmill.config import ConfigError, RunConfig
from rollmill.fleet.validate import check_inputs
from rollmill.ledger import Ledger
from rollmill.model import Model, ModelConfig, MoEConfig, save_model
from rollmill.model.route_record import RouteRecord, RouteShape
from rollmill.records import DropReason, GroupState, Role, Window
from rollmill.telemetry import Metrics, Waits, read_metrics
from rollmill.trainer.batch import Lesson, StepBatch
from rollmill.trainer.learn import Learner, _is_single
from rollmill.trainer.loop import TrainerLoop
from rollmill.trainer.optimizer import MasterAdamW

CONFIG = ModelConfig(
    family="qwen3_moe",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position=64,
    tied=False,
    dtype="float32",
    moe=MoEConfig(num_experts=8, top_k=2, expert_size=16, norm_topk=True, dense_layers=(0,)),
)
AGES = ((9, 9), (8, 23), (6, 14), (3, 6), (1, 31))
"""(weight version, tokens) of windows for a learner at version 9."""
MIXED = [1.0, 0.0, 0.0, 1.0]


def sharp(seed: int = 0) -> Model:
    """Fresh weights, far enough apart that tokens really take different experts."""
    model = Model(CONFIG)
    model.init_weights(seed)
    model.load_serving({name: t * 6 for name, t in model.serving_tensors().items() if t.dim() > 1})
    return model


def lessons(model: Model) -> list[Lesson]:
    """Windows of different lengths, so that micro-batches put them into another order."""
    windows = [scored(model, [(5 * i + 3 * n) % 64 for i in range(n)], 4, 0) for n in (9, 23, 14, 6, 30)]
    return [Lesson(window=w, advantage=1.0 if i % 2 else -0.5) for i, w in enumerate(windows)]


def learn(mode: str, taught: list[Lesson], *, version: int = 0) -> tuple[dict[str, float], Model]:
    model = sharp()
    optimizer = MasterAdamW(model, lr=1e-3, warmup_steps=0, clip_norm=1.0, eps=1e-8)
    learner = Learner(model, optimizer, DppoTv(), temperature=1.0, length_norm=8.0, tokens_per_microbatch=48, router_replay=mode)
    batch = StepBatch(lessons=taught, num_episodes=len(taught), rewards=[], num_groups=1, num_groups_without_signal=0, num_tokens=82)
    metrics, is_changed = learner.step(batch, version=version)
    assert is_changed
    return metrics, model


@pytest.mark.parametrize("mode", ["r3", "r3_plausible"])
def test_own_experts_replayed_over_micro_batches_change_no_weight_and_flip_nothing(mode: str) -> None:
    taught = lessons(sharp())
    metrics, model = learn(mode, taught)
    plain, wanted = learn("off", taught)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), wanted.parameters(), strict=True))
    # Were the rows in any other order than the tokens, another token's experts would show as flips.
    assert metrics["route/any_flip_tok_frac"] == metrics["route/plausible_replaced_frac"] == metrics["route/missing_row_frac"] == 0.0
    assert {n for n in metrics if n.startswith("route/flip_frac_layer")} == {"route/flip_frac_layer_1", "route/flip_frac_layer_2"}
    assert {n: v for n, v in metrics.items() if n in plain} == plain


def test_another_routers_experts_are_imposed_counted_and_learnt_from() -> None:
    taught = lessons(sharp(seed=7))
    off, _ = learn("off", taught)
    forced, trained = learn("r3", taught)
    plausible, _ = learn("r3_plausible", taught)
    assert forced["mm/k3"] != off["mm/k3"] and forced["route/plausible_replaced_frac"] == 0.0
    assert forced["route/any_flip_tok_frac"] > 0.5 and 0.0 < plausible["route/plausible_replaced_frac"] < 1.0
    before = sharp().layers[1].mlp.router.weight  # type: ignore[union-attr]
    assert not torch.equal(trained.layers[1].mlp.router.weight, before)  # type: ignore[union-attr]


def test_tokens_without_routes_are_counted_as_missing_and_routed_live() -> None:
    taught = [msgspec.structs.replace(x, window=msgspec.structs.replace(x.window, routes=b"")) for x in lessons(sharp())]
    metrics, model = learn("r3", taught)
    _, wanted = learn("off", taught)
    assert metrics["route/missing_row_frac"] == 1.0 and metrics["route/any_flip_tok_frac"] == 0.0
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), wanted.parameters(), strict=True))
    half = [taught[0], *lessons(sharp())[1:]]
    metrics, _ = learn("r3", half)
    assert metrics["route/missing_row_frac"] == 8 / (9 + 23 + 14 + 6 + 30 - 5)


def test_numbers_are_split_by_lag_and_replica() -> None:
    model, stale = sharp(), sharp(seed=7)
    made = {version: scored(stale if version < 9 else model, [(5 * i + n) % 64 for i in range(n)], 4, version) for version, n in AGES}
    metrics, _ = learn("off", [Lesson(window=w, advantage=1.0) for w in made.values()], version=9)
    total = sum(n - 4 for _, n in AGES)
    for lag, version in {"0": 9, "1": 8, "2_3": 6, "4_7": 3, "8_up": 1}.items():
        assert metrics[f"mm/lag_{lag}/token_frac"] == pytest.approx((made[version].num_tokens - 4) / total)
        assert (metrics[f"mm/lag_{lag}/abs_diff_max"] < 1e-5) == (lag == "0")
    assert metrics["mm/single_version_abs_diff_max"] == metrics["mm/lag_0/abs_diff_max"]
    # engine-0 sampled the windows of even length.
    even = sum(n - 4 for _, n in AGES if n % 2 == 0) / total
    assert metrics["mm/engine_engine-0/token_frac"] == pytest.approx(even)
    assert metrics["mm/engine_engine-1/token_frac"] == pytest.approx(1 - even)


@pytest.mark.parametrize(("mode", "wanted"), [("off", [5, 6, 9]), ("r3", [])])
def test_tokens_whose_context_other_weights_computed_are_not_held_against_numerics(mode: str, wanted: list[int]) -> None:
    """Three turns: of version 2 after a turn of version 1, then one that is stale from its second token on."""
    sampled = [0, 0, 1, 0, 0, 1, 1, 0, 0, 1, 1]
    versions = [-1, -1, 1, -1, -1, 2, 2, -1, -1, 2, 2]
    window = Window.of(tokens=[7] * 11, sampled=sampled, logprobs=[-1.0] * 11, versions=versions, stale=((10, 11),))
    is_single = _is_single(window, 2, is_replayed=mode != "off") & (window.sampled_T != 0)
    assert is_single.nonzero()[0].tolist() == wanted
    fresh = msgspec.structs.replace(
        window, versions=Window.of(tokens=[7] * 11, sampled=sampled, logprobs=[0.0] * 11, versions=[2] * 11).versions
    )
    assert _is_single(fresh, 2, is_replayed=True)[window.sampled_T != 0].tolist() == [True] * 4 + [False]


def test_replay_on_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path, router_replay="r3")
    with pytest.raises(ConfigError, match=r"router_replay is 'r3', but .* has no experts"):
        check_inputs(config)
    with pytest.raises(ValueError, match="without experts has no routes"), Ledger.create_or_open(tmp_path, Role.TRAINER) as ledger:
        TrainerLoop(config, ledger, Metrics(tmp_path, "trainer"), Waits(), lambda: True)


@pytest.fixture(scope="module")
def sparse_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sparse")
    save_model(sharp(), path)
    return path


def train(config: RunConfig) -> list[dict[str, float]]:
    with Ledger.create_or_open(config.run.dir, Role.TRAINER) as ledger:
        TrainerLoop(config, ledger, Metrics(config.run.dir, "trainer"), Waits(), lambda: False).run()
    return [r for r in read_metrics(config.run.dir, "trainer") if "reward/mean" in r]


def test_run_replays_what_its_traces_hold(tmp_path: Path, sparse_dir: Path) -> None:
    fill(tmp_path, [MIXED] * 4 + [[1.0] * 4] * 2, model_dir=sparse_dir)
    rows = train(config_of(tmp_path, model_dir=sparse_dir, router_replay="r3", steps=3))
    assert [r["route/missing_row_frac"] for r in rows] == [0.0] * 3 and rows[0]["route/any_flip_tok_frac"] == 0.0
    assert rows[0]["mm/lag_0/token_frac"] == 1.0 and rows[1]["mm/lag_1/token_frac"] == 1.0
    assert set(rows[0]) == set(rows[2]), "a step without signal writes zeros, not gaps"


def other_shape(window: Window) -> Window:
    shape = RouteShape(num_layers=3, layers=(1, 2), num_experts=9, top_k=2)
    return msgspec.structs.replace(window, routes=RouteRecord.missing(shape, window.num_tokens).to_bytes())


def one_row_less(window: Window) -> Window:
    record = RouteRecord.from_bytes(window.routes)
    return msgspec.structs.replace(window, routes=record.cut(1, record.num_tokens).to_bytes())


def impossible_rank(window: Window) -> Window:
    # 28 sets of two of eight experts: rank 29 of the five-bit field is neither a set nor `missing`.
    return msgspec.structs.replace(window, routes=window.routes[:-2] + b"\x1d\x00")


@pytest.mark.parametrize(
    ("edit", "why"),
    [(other_shape, "routes are those of another model"), (one_row_less, "has routes of"), (impossible_rank, "holds the rank 29")],
)
def test_damaged_routes_drop_their_group_and_training_goes_on(
    tmp_path: Path, sparse_dir: Path, caplog: pytest.LogCaptureFixture, edit: object, why: str
) -> None:
    fill(tmp_path, [MIXED], model_dir=sparse_dir, edit=edit)  # type: ignore[arg-type]
    fill(tmp_path, [MIXED] * 3, model_dir=sparse_dir)
    with caplog.at_level(logging.ERROR):
        train(config_of(tmp_path, model_dir=sparse_dir, router_replay="r3", steps=2))
    assert why in caplog.text
    with Ledger.open_reader(tmp_path) as ledger:
        states = [(row.state, row.drop_reason) for step in (0, 1) for row in ledger.batch(step)]
        assert states[0] == (GroupState.DROPPED, DropReason.CORRUPT_BLOB)
        assert [s for s, _ in states[1:]] == [GroupState.TRAINED] * 3 and ledger.audit() == []


def test_alarm_reaches_the_log_once_and_the_metrics_each_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def distort(window: Window) -> Window:
        return msgspec.structs.replace(window, logprobs=(window.logprobs_T - 0.7 * window.sampled_T).astype("<f4").tobytes())

    fill(tmp_path, [MIXED] * 4, edit=distort)
    with caplog.at_level(logging.WARNING, logger="rollmill.trainer"):
        rows = train(config_of(tmp_path, steps=2, lr=1e-9))
    said = [r for r in caplog.records if "mm/extreme_frac_2 is 1, above 0.001" in r.getMessage()]
    assert len(said) == 1 and said[0].getMessage().startswith("step 0: ") and said[0].levelno == logging.WARNING
    assert all(r["mm/num_alarms"] >= 5 for r in rows)
    severe = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert any("mm/k3" in text for text in severe)
