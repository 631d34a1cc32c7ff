"""The run file: mistakes name key, value and remedy; what is written out feeds back in unchanged."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.config import ConfigError, RunConfig, dump_config, known_keys, load_config, parse_config

BASE = '[model]\npath = "models/demo"\n'


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(BASE)
    return path


def set_(run_file: Path, *overrides: str) -> RunConfig:
    return load_config(run_file, overrides)


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("trainer.learning_rat=1", "trainer"),
        ("trainer.lrr=1", "trainer.lr"),
        ("rollout.groupsize=4", "rollout.group_size"),
        ("engine.max_staleness=3", "trainer.max_staleness"),
        ("group_size=4", "rollout.group_size"),
        ("trainr.lr=1e-5", "trainer"),
    ],
)
def test_unknown_key_names_the_nearest_known_one(run_file: Path, override: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match="unknown key") as caught:
        set_(run_file, override)
    key = override.partition("=")[0]
    assert f"unknown key {key.partition('.')[0]}" in str(caught.value).replace("'", "")
    assert nearest in str(caught.value)


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("trainer.lr=0", "trainer.lr", "0"),
        ("trainer.lr=inf", "trainer.lr", "inf"),
        ("trainer.lr=nan", "trainer.lr", "nan"),
        ("trainer.lr=fast", "trainer.lr", "'fast'"),
        ("rollout.group_size=1", "rollout.group_size", "1"),
        ("rollout.group_size=2.5", "rollout.group_size", "2.5"),
        ("rollout.episode_s=inf", "rollout.episode_s", "inf"),
        ("run.mode=semi", "run.mode", "'semi'"),
        ("engine.port=70000", "engine.port", "70000"),
        ("tasks.levels=3", "tasks.levels", "3"),
        ("trainer=7", "trainer", "7"),
        ("trainer.max_staleness=-1", "trainer.max_staleness", "-1"),
        ("trainer.max_staleness=2.5", "trainer.max_staleness", "2.5"),
        ("trainer.max_staleness=automatic", "trainer.max_staleness", "'automatic'"),
        ("trainer.staleness_limit=0", "trainer.staleness_limit", "0"),
        ("tasks.curriculum=hard", "tasks.curriculum", "'hard'"),
    ],
)
def test_wrong_type_or_range_names_key_and_value(run_file: Path, override: str, key: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        set_(run_file, override)
    assert f"{key} = {value} is not usable: " in str(caught.value)


def test_every_mistake_is_told_at_once(run_file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        set_(run_file, "trainer.lr=-1", "run.steps=0", "run.setps=1")
    assert len(str(caught.value).splitlines()) == 3


def test_missing_model_path_is_named(run_file: Path) -> None:
    run_file.write_text("")
    with pytest.raises(ConfigError, match="'model' is missing"):
        set_(run_file)


def test_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no run file"):
        load_config(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_bytes(b"[run\n")
    with pytest.raises(ConfigError, match=r"bad\.toml is not valid TOML"):
        load_config(tmp_path / "bad.toml")
    (tmp_path / "bad.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        load_config(tmp_path / "bad.toml")


def test_overrides_are_toml_values_and_bare_words_are_strings(run_file: Path) -> None:
    config = set_(
        run_file,
        "trainer.lr=1e-5",
        "run.steps=7",
        "run.mode=sync",
        'run.dir="a b/c"',
        "model.path=models/other",
        'tasks.kinds=["fix", "move"]',
        "rollout.tool_latency_s=[0.5, 1]",
        "engine={num_replicas=2, port=9000}",
    )
    assert (config.trainer.lr, config.run.steps, config.run.mode, config.run.dir) == (1e-5, 7, "sync", Path("a b/c"))
    assert (config.model.path, config.tasks.kinds) == (Path("models/other"), ("fix", "move"))
    assert config.rollout.tool_latency_s == (0.5, 1.0) and (config.engine.num_replicas, config.engine.port) == (2, 9000)


def test_later_override_wins(run_file: Path) -> None:
    assert set_(run_file, "run.steps=7", "run.steps=8").run.steps == 8


@pytest.mark.parametrize("override", ["trainer.lr", "=3", "", "run.steps.deep=1"])
def test_malformed_override_is_refused(run_file: Path, override: str) -> None:
    with pytest.raises(ConfigError):
        set_(run_file, "run.steps=5", override)


def test_async_needs_staleness_and_sync_has_none(run_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.max_staleness is 0 but run\.mode is 'async'"):
        set_(run_file, "trainer.max_staleness=0")
    assert set_(run_file, "trainer.max_staleness=0", "run.mode=sync").max_staleness == 0
    assert set_(run_file, "trainer.max_staleness=4", "run.mode=sync").max_staleness == 0
    assert set_(run_file, "trainer.max_staleness=4").max_staleness == 4


def test_measured_bound_has_the_limit_as_its_hard_maximum(run_file: Path) -> None:
    auto = set_(run_file, "trainer.max_staleness=auto", "trainer.staleness_limit=6")
    assert (auto.max_staleness, auto.is_staleness_auto) == (6, True)
    sync = set_(run_file, "trainer.max_staleness=auto", "run.mode=sync")
    assert (sync.max_staleness, sync.is_staleness_auto) == (0, False)
    assert not set_(run_file).is_staleness_auto
    with pytest.raises(ConfigError, match="staleness_limit means nothing with max_staleness = 4"):
        set_(run_file, "trainer.staleness_limit=6")


def test_curriculum_keys_without_a_curriculum_are_told(run_file: Path) -> None:
    assert set_(run_file, "tasks.curriculum=target", "tasks.curriculum_band=[0.1, 0.6]").tasks.curriculum_band == (0.1, 0.6)
    with pytest.raises(ConfigError, match="curriculum_passes means nothing"):
        set_(run_file, "tasks.curriculum_passes=2")
    with pytest.raises(ConfigError, match=r"curriculum_band is \[0.8, 0.2\]"):
        set_(run_file, "tasks.curriculum=target", "tasks.curriculum_band=[0.8, 0.2]")


@pytest.mark.parametrize("latency", ["[2.0, 1.0]", "[-1.0, 1.0]"])
def test_latency_range_must_be_ordered(run_file: Path, latency: str) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.tool_latency_s"):
        set_(run_file, f"rollout.tool_latency_s={latency}")


def test_ports_must_leave_room_for_every_replica(run_file: Path) -> None:
    assert set_(run_file, "engine.port=65534", "engine.num_replicas=2").engine.port == 65534
    with pytest.raises(ConfigError, match="leaves no room"):
        set_(run_file, "engine.port=65535", "engine.num_replicas=2")


def test_configuration_is_frozen(run_file: Path) -> None:
    with pytest.raises(ValueError, match="frozen"):
        set_(run_file).run.steps = 3  # type: ignore[misc]


def test_known_keys_cover_every_field() -> None:
    keys = known_keys()
    assert {"run", "run.dir", "trainer.lr", "weights.store"} <= set(keys) and len(keys) == len(set(keys))


positive = st.floats(min_value=1e-30, max_value=1e30, allow_nan=False)
name = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12)


@st.composite
def raw_configs(draw: st.DrawFn) -> dict[str, Any]:
    low = draw(st.floats(0, 10))
    return {
        "run": {"dir": draw(name), "seed": draw(st.integers(0, 2**62)), "mode": draw(st.sampled_from(["async", "sync"]))},
        "model": {"path": draw(name)},
        "tasks": {"kinds": draw(st.lists(name, max_size=3)), "levels": draw(st.lists(st.integers(-5, 9), max_size=3))},
        "rollout": {
            "temperature": draw(positive),
            "episode_s": draw(positive),
            "tool_latency_s": [low, low + draw(st.floats(0, 10))],
        },
        "trainer": {"lr": draw(positive), "max_staleness": draw(st.integers(1, 99)), "loss_options": {"kl_tau": draw(st.floats(0, 1))}},
        "engine": {"num_replicas": draw(st.integers(1, 9)), "port": draw(st.sampled_from([0, 1, 8000]))},
    }


@settings(max_examples=60, deadline=None)
@given(raw_configs())
def test_resolved_file_feeds_back_equal(raw: dict[str, Any]) -> None:
    config = parse_config(raw, "here")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "resolved.toml"
        path.write_text(dump_config(config), encoding="utf-8")
        assert load_config(path) == config
