"""Every loss, correction and advantage that a run file can name runs in the real learner and the real loop; any other is an error."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
import torch
from trainer_worlds import bits, fill, scored

from rollmill.algorithms import (
    ADVANTAGES,
    CORRECTIONS,
    LOSSES,
    DppoTv,
    Grpo,
    LossOptions,
    Options,
    Tis,
    advantage_options,
    corrections_of,
    loss_options,
)
from rollmill.config import ConfigError, RunConfig, parse_config
from rollmill.ledger import Ledger
from rollmill.model import Model, ModelConfig, save_model
from rollmill.records import Grade, Role, StopReason, Trace
from rollmill.telemetry import Metrics, Waits, read_metrics
from rollmill.trainer import batch as batch_module
from rollmill.trainer import loop as loop_module
from rollmill.trainer.advantages import Estimator
from rollmill.trainer.batch import GradedEpisode, StepBatch, make_batch
from rollmill.trainer.learn import METRICS, Learner
from rollmill.trainer.loop import TrainerLoop
from rollmill.trainer.optimizer import MasterAdamW

CONFIG = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position=64,
    dtype="float32",
)
PAGE = Path(__file__).parents[2] / "docs" / "losses.md"
PARTS = ({"right": 1.0, "short": 0.25}, {"right": 0.0, "short": 1.0}, {"right": 0.0, "short": 0.5})


def tiny(seed: int = 0) -> Model:
    """Weights far enough apart that probabilities differ."""
    model = Model(CONFIG)
    model.init_weights(seed)
    model.load_serving({name: t * 4 for name, t in model.serving_tensors().items() if t.dim() > 1})
    return model


def batch_of(estimator: Estimator | None = None, *, sampler: Model | None = None) -> StepBatch:
    """Two groups of three episodes, sampled by a policy that is two versions older than the learner's."""
    sampler = tiny(seed=3) if sampler is None else sampler
    groups = []
    for g in range(2):
        attempts = []
        for i, parts in enumerate(PARTS):
            window = scored(sampler, [(7 * k + 3 * i + g) % 64 for k in range(9 + 5 * i)], 4, 0)
            trace = Trace(episode_id=f"{g}.{i}", windows=(window,), stop=StopReason.SUBMITTED)
            attempts.append(GradedEpisode(episode_id=f"{g}.{i}", reward=sum(parts.values()), load=lambda t=trace: t, parts=parts))
        groups.append(attempts)
    return make_batch(groups, estimator)


def learner_of(loss: LossOptions, **changes: object) -> Learner:
    model = tiny()
    optimizer = MasterAdamW(model, lr=1e-3, eps=1e-8)
    facts = {"temperature": 1.0, "length_norm": 8.0, "tokens_per_microbatch": 32} | changes
    return Learner(model, optimizer, loss, **facts)  # type: ignore[arg-type]


def weights(learner: Learner) -> list[torch.Tensor]:
    return [p.detach().clone() for p in learner.model.parameters()]


def is_same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def taken(learner: Learner, num_steps: int = 2) -> list[dict[str, float]]:
    out = []
    for version in range(2, 2 + num_steps):
        metrics, is_changed = learner.step(batch_of(), version=version)
        assert is_changed and set(METRICS) <= set(metrics)
        out.append(metrics)
    return out


@pytest.mark.parametrize("minibatches", [1, 3])
@pytest.mark.parametrize("name", list(LOSSES))
def test_every_loss_learns_from_real_windows(name: str, minibatches: int) -> None:
    # Two versions apart a window's ratio leaves the published band of gspo at once, which is its point, not ours.
    loss = loss_options(name, {"eps_low": 0.9, "eps_high": 9.0} if name == "gspo" else {"max_m2": 9.0} if name == "m2po" else {})
    learner = learner_of(loss, minibatches=minibatches, corrections=())
    before = weights(learner)
    for metrics in taken(learner):
        assert metrics["grad/norm"] > 0 and metrics["grad/is_dropped"] == metrics["corr/nonfinite_frac"] == 0.0
        assert 0 < metrics["corr/kept_token_frac"] <= 1
    assert not is_same(before, weights(learner)) and all(torch.isfinite(w).all() for w in weights(learner))


@pytest.mark.parametrize("name", list(ADVANTAGES))
def test_every_advantage_teaches(name: str) -> None:
    estimator, learner = Estimator(advantage_options(name, {})), learner_of(DppoTv())
    for version in (2, 3):
        batch = batch_of(estimator)
        assert batch.lessons and batch.stats["adv/std"] > 0
        assert learner.step(batch, version=version)[1]


def test_every_correction_is_counted_in_the_metrics() -> None:
    learner = learner_of(loss_options("reinforce", {}), corrections=tuple(kind() for kind in CORRECTIONS.values()))
    metrics, _ = learner.step(batch_of(), version=2)
    assert all(0 <= metrics[f"corr/{name}_frac"] <= 1 for name in CORRECTIONS) and metrics["corr/sequence_band_frac"] > 0


def test_proximal_policy_costs_a_pass_only_when_there_are_several_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    real = Model.forward
    monkeypatch.setattr(Model, "forward", lambda self, *a, **k: (seen.append(torch.is_grad_enabled()), real(self, *a, **k))[1])
    batch = batch_of()
    for loss, minibatches, num_extra in ((DppoTv(), 3, 0), (Grpo(anchor="proximal"), 1, 0), (Grpo(anchor="proximal"), 3, 1)):
        seen.clear()
        learner_of(loss, minibatches=minibatches).step(batch, version=2)
        assert seen.count(False) == num_extra * seen.count(True) and seen.count(True) >= minibatches
        assert seen == sorted(seen), "the extra passes come before the first update"


def test_proximal_ratio_moves_only_with_the_updates_of_its_own_step() -> None:
    """A batch far off the policy stops nothing when the ratio is taken to the policy before the step and there is one update."""
    far = learner_of(Grpo()).step(batch_of(), version=2)[0]
    near = learner_of(Grpo(anchor="proximal"), corrections=(Tis(),)).step(batch_of(), version=2)[0]
    assert far["corr/stopped_frac"] > 0 and near["corr/stopped_frac"] == 0.0 and near["corr/tis_frac"] > 0


def test_reference_divergence_is_measured_and_pulls_back() -> None:
    learner = learner_of(DppoTv(), kl_ref=0.5, reference=tiny().requires_grad_(False))
    first, second = taken(learner)
    assert first["kl/ref_k1"] == first["kl/ref_k3"] == 0.0 and second["kl/ref_k3"] > 0
    plain = learner_of(DppoTv())
    taken(plain)
    assert not is_same(weights(learner), weights(plain)), "from the second step on the pull is there"
    one_step, plain_step = learner_of(DppoTv(), kl_ref=0.5, reference=tiny().requires_grad_(False)), learner_of(DppoTv())
    taken(one_step, 1)
    taken(plain_step, 1)
    assert is_same(weights(one_step), weights(plain_step)), "at the reference itself there is nothing to pull"


@pytest.mark.parametrize("aggregation", ["constant", "token_mean", "sequence_mean"])
def test_gradient_does_not_depend_on_the_micro_batches(aggregation: str) -> None:
    """The sums are taken in another order, so equal up to rounding: float32, 1e-7 per sum of a few hundred."""
    norms = [
        learner_of(DppoTv(), aggregation=aggregation, tokens_per_microbatch=size).step(batch_of(), version=2)[0]["grad/norm"]
        for size in (16, 4096)
    ]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_a_window_of_numbers_that_are_none_never_reaches_the_weights() -> None:
    """A sampler that reported NaN for a whole window: its tokens are counted, the others learnt from, whatever the loss."""
    batch = batch_of()
    bad = msgspec.structs.replace(batch.lessons[1].window, logprobs=b"\x00\x00\xc0\x7f" * batch.lessons[1].window.num_tokens)
    spoilt = [msgspec.structs.replace(x, window=bad) if i == 1 else x for i, x in enumerate(batch.lessons)]
    for name in LOSSES:
        learner = learner_of(loss_options(name, {}), corrections=())
        metrics, _ = learner.step(msgspec.structs.replace(batch, lessons=spoilt), version=2)
        assert metrics["corr/nonfinite_frac"] > 0 and metrics["grad/is_dropped"] == 0.0
        assert all(torch.isfinite(w).all() for w in weights(learner)), name


def test_options_are_checked_with_the_run_file() -> None:
    def error(**trainer: object) -> str:
        with pytest.raises(ConfigError) as caught:
            parse_config({"model": {"path": "x"}, "trainer": trainer}, "run.toml")
        return str(caught.value)

    assert "'pp0' is unknown; the nearest is 'ppo'" in error(loss="pp0")
    assert "trainer.loss_options.eps_hi is no option of the loss 'ppo'; the nearest is 'eps_high'" in error(
        loss="ppo", loss_options={"eps_hi": 0.3}
    )
    assert "trainer.loss_options.eps_high = -1.0 is not usable for the loss 'ppo': expected" in error(
        loss="ppo", loss_options={"eps_high": -1.0}
    )
    assert "give a finite number" in error(loss_options={"tv_delta": float("nan")})
    assert "low = 3.0 is not below high = 2.0" in error(loss="mis", loss_options={"low": 3.0})
    assert "the nearest known key is 'trainer.loss_options.tv_delta'" in error(tv_delta=0.2)
    assert "'tiz' is unknown; the nearest is 'tis'" in error(corrections=["tiz"])
    assert "names one twice" in error(corrections=["veto", "veto"])
    assert "add 'tis' to it" in error(correction_options={"tis": {"cap": 2.0}})
    assert "already weighs them by; leave it out" in error(corrections=["tis"])
    assert 'set anchor = "proximal"' in error(loss="ppo", corrections=["tis"])
    assert "the nearest is 'gdpo_ema'" in error(advantage="gdpo_em")
    assert "no option of the advantage 'dr_grpo'; it has none" in error(advantage="dr_grpo", advantage_options={"eps": 1.0})
    assert "trainer.effort.scal is no option of the effort penalty; the nearest is 'scale'" in error(effort={"scal": 1.0})
    assert "use one of the two" in error(advantage="max_rl", effort={"scale": 0.1})
    assert "kl_ref" in error(kl_ref=-1.0)


@pytest.mark.parametrize("name", list(LOSSES))
def test_every_option_of_every_loss_can_be_written_in_a_run_file(name: str) -> None:
    loss = LOSSES[name]()
    raw = {"loss": name, "loss_options": msgspec.structs.asdict(loss)}
    config = parse_config({"model": {"path": "x"}, "trainer": raw}, "run.toml")
    assert loss_options(config.trainer.loss, config.trainer.loss_options) == loss


@pytest.mark.parametrize(("title", "registry"), [("Losses", LOSSES), ("Corrections", CORRECTIONS), ("Advantages", ADVANTAGES)])
def test_page_has_every_name_with_every_option_and_its_default(title: str, registry: dict[str, type[Options]]) -> None:
    section = PAGE.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]
    rows = {row.split("`")[1]: row for row in section.split("\n### ")[0].splitlines() if row.startswith("| `")}
    assert list(rows) == list(registry)
    for name, kind in registry.items():
        for option, value in msgspec.structs.asdict(kind()).items():
            shown = f'"{value}"' if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else str(value)
            assert re.search(rf"`{option}` {re.escape(shown)}(?:\.0)?[, ]", rows[name]), f"{name}: `{option}` {shown}"


def test_the_python_blocks_of_the_page_run() -> None:
    for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE):
        exec(compile(block, PAGE.name, "exec"), {})


def test_every_number_of_the_advantages_is_documented() -> None:
    text = (PAGE.parent / "metrics.md").read_text()
    assert [name for name in batch_module.METRICS if f"`{name}`" not in text] == []


def test_tis_goes_with_losses_that_do_not_weigh_by_the_sampler_themselves() -> None:
    for name, kind in LOSSES.items():
        options = kind(anchor="proximal") if hasattr(kind(), "anchor") and name != "minirl" else kind()
        if name in ("ppo", "grpo", "cispo", "gspo", "sapo", "reinforce"):
            assert corrections_of(["tis"], {"tis": {"cap": 3.0}}, options) == (Tis(cap=3.0),)
        else:
            with pytest.raises(ValueError, match="already weighs"):
                corrections_of(["tis"], {}, options)


# --- the loop ------------------------------------------------------------------------------------------------------------------


def config_of(run_dir: Path, model_dir: Path, **trainer: object) -> RunConfig:
    facts = {"groups_per_batch": 1, "lr": 1e-3, "warmup_steps": 0, "max_staleness": 40, "batch_s": 30.0} | trainer
    raw = {"run": {"dir": str(run_dir), "steps": facts.pop("steps", 3)}, "model": {"path": str(model_dir)}, "trainer": facts}
    return parse_config(raw, "test")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model(tiny(), folder)
    return folder


@pytest.fixture
def graded_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grades with parts, two of which cancel in the reward of every second group."""
    real = Ledger.finish_episode

    def finish(self: Ledger, episode_id: str, *, grade: Grade, **facts: object) -> None:
        short = (int(episode_id[6]) % 3) / 4 + 0.1 * int(episode_id[8])
        real(self, episode_id, grade=msgspec.structs.replace(grade, parts={"right": grade.reward, "short": short}), **facts)  # type: ignore[arg-type]

    monkeypatch.setattr(Ledger, "finish_episode", finish)


def train(config: RunConfig) -> dict[str, bytes]:
    with Ledger.create_or_open(config.run.dir, Role.TRAINER) as ledger:
        loop = TrainerLoop(config, ledger, Metrics(config.run.dir, "trainer"), Waits(), lambda: False)
        loop.run()
        return bits(loop._model)


class Crash(Exception):
    """Stands for the death of the process."""


@pytest.mark.usefixtures("graded_parts")
def test_what_an_advantage_remembers_survives_a_crash(tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {}
    for run in ("straight", "crashed"):
        fill(tmp_path / run, [[1.0, 0.0, 0.5], [1.0, 1.0, 1.0], [0.0, 1.0, 0.0], [0.2, 0.9, 0.0]], model_dir=model_dir)
    options = {"steps": 4, "advantage": "gdpo_ema", "advantage_options": {"decay": 0.5}}
    wanted = train(config_of(tmp_path / "straight", model_dir, **options))
    real = loop_module.save_checkpoint

    def dying(*args: object, step: int, **facts: object) -> object:
        if step == 2:
            raise Crash
        return real(*args, step=step, **facts)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(loop_module, "save_checkpoint", dying)
        with pytest.raises(Crash):
            train(config_of(tmp_path / "crashed", model_dir, **options))
    assert train(config_of(tmp_path / "crashed", model_dir, **options)) == wanted


@pytest.mark.usefixtures("graded_parts")
def test_group_of_equal_rewards_is_read_when_its_parts_differ(tmp_path: Path, model_dir: Path) -> None:
    fill(tmp_path, [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]], model_dir=model_dir)
    train(config_of(tmp_path, model_dir, steps=1, advantage="gdpo", advantage_options={"weights": {"short": 1.0}}))
    train(config_of(tmp_path, model_dir, steps=2))
    parts, plain = [r for r in read_metrics(tmp_path, "trainer") if "reward/mean" in r]
    assert parts["perf/num_tokens"] > 0 and parts["frac_reward_zero_std"] == 0.0 and parts["adv/per_key_std/short"] > 0
    assert plain["perf/num_tokens"] == 0 and plain["frac_reward_zero_std"] == 1.0


def test_everything_at_once_in_the_real_loop(tmp_path: Path, model_dir: Path) -> None:
    fill(tmp_path, [[1.0, 0.0, 0.0]] * 2, model_dir=model_dir)
    config = config_of(
        tmp_path,
        model_dir,
        steps=2,
        loss="ppo",
        loss_options={"anchor": "proximal"},
        corrections=["tis", "veto"],
        correction_options={"tis": {"cap": 3.0}},
        advantage="batch_std",
        aggregation="token_mean",
        minibatches=2,
        kl_ref=0.01,
        effort={"scale": 0.01, "turns": 1.0},
    )
    train(config)
    rows = [r for r in read_metrics(tmp_path, "trainer") if "reward/mean" in r]
    assert len(rows) == 2 and rows[1]["kl/ref_k3"] > 0 and all(r["adv/effort_mean"] > 0 and r["grad/norm"] > 0 for r in rows)
