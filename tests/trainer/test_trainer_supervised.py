"""The stages learn a toy, write a model that loads, name the row they cannot use, and grow a context."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from stage_worlds import CHATS, CONVERSATION, DEMO, DOCUMENTS, PAIRS, job_of, quiet, tiny_model, weight_bits, write_rows
from typer.testing import CliRunner

from rollmill.model import Tokenizer, load_model, read_model_config
from rollmill.telemetry import read_metrics
from rollmill.trainer import commands
from rollmill.trainer.stages import reference
from rollmill.trainer.stages.book import StageState, read_record
from rollmill.trainer.stages.dpo import dpo
from rollmill.trainer.stages.midtrain import grown, midtrain
from rollmill.trainer.stages.settings import DpoSettings, MidtrainSettings, Phase, SftSettings, parse_phase, parse_settings
from rollmill.trainer.stages.sft import sft

FEW: dict[str, Any] = {"tokens_per_batch": 512, "tokens_per_microbatch": 256, "warmup_steps": 2, "num_threads": 1, "num_workers": 1}


def midtrained(tmp_path: Path, **more: Any) -> Path:
    model, data = tiny_model(tmp_path / "model"), write_rows(tmp_path / "d.jsonl", DOCUMENTS)
    midtrain(job_of(model, data, tmp_path / "mid"), MidtrainSettings(**FEW | {"steps": 6, "length": 32} | more), quiet)
    return tmp_path / "mid"


def test_each_stage_learns_and_writes_a_model_that_the_next_one_takes(tmp_path: Path) -> None:
    mid = midtrained(tmp_path, steps=40, lr=1e-2, eval_frac=0.2, eval_every=20)
    rows = read_metrics(mid / "stage", "midtrain")
    assert [r["step"] for r in rows] == list(range(1, 41)) and rows[-1]["loss/nll"] < rows[0]["loss/nll"] / 2
    evals = [r["loss/eval"] for r in rows if "loss/eval" in r]
    assert len(evals) == 2 and evals[1] < evals[0]
    chats, pairs = write_rows(tmp_path / "c.jsonl", CHATS), write_rows(tmp_path / "p.jsonl", PAIRS)
    sft(job_of(mid, chats, tmp_path / "sft"), SftSettings(**FEW | {"epochs": 20, "lr": 1e-2, "schedule": "cosine"}), quiet)
    losses = [r["loss/nll"] for r in read_metrics(tmp_path / "sft" / "stage", "sft")]
    assert losses[-1] < losses[0] / 2
    dpo(job_of(tmp_path / "sft", pairs, tmp_path / "dpo"), DpoSettings(**FEW | {"epochs": 6, "lr": 1e-3, "eval_frac": 0.2}), quiet)
    rows = read_metrics(tmp_path / "dpo" / "stage", "dpo")
    assert rows[0]["loss/preference"] == pytest.approx(0.6931, abs=1e-3) and rows[0]["rewards/margins"] == pytest.approx(0, abs=1e-4)
    assert rows[-1]["loss/preference"] < 0.6
    assert (rows[-1]["rewards/accuracies"], rows[-1]["eval/accuracies"]) == (pytest.approx(1.0), pytest.approx(1.0))
    _, shape = load_model(tmp_path / "dpo")
    assert shape == read_model_config(tmp_path / "model")
    assert Tokenizer(tmp_path / "dpo").chat_template.render(CONVERSATION) == Tokenizer(DEMO).chat_template.render(CONVERSATION)
    record = read_record(tmp_path / "dpo")
    assert record is not None and record.state is StageState.FINISHED and not (tmp_path / "dpo" / "stage" / "checkpoints").exists()


def test_a_later_phase_has_longer_windows_and_the_model_a_longer_context(tmp_path: Path) -> None:
    mid = midtrained(tmp_path, phases=(Phase(steps=3, length=128, rope="yarn", lr=1e-4),))
    config = read_model_config(mid)
    assert config.max_position == 128 and config.rope_scaling is not None
    assert (config.rope_scaling.rule, config.rope_scaling.factor, config.rope_scaling.original_max_position) == ("yarn", 2.0, 64)
    rows = read_metrics(mid / "stage", "midtrain")
    assert len(rows) == 9 and rows[-1]["optim/lr"] < 1e-4 < rows[5]["optim/lr"]


def test_growing_a_context_needs_a_rule_that_fits(tmp_path: Path) -> None:
    config = read_model_config(tiny_model(tmp_path / "m"))
    with pytest.raises(ValueError, match="windows of 128 tokens exceed the model's context of 64"):
        grown(config, Phase(steps=1, length=128))
    assert grown(config, Phase(steps=1, length=128, theta=5e5)).rope_theta == 5e5
    assert grown(config, Phase(steps=1, length=128, rope="keep")).max_position == 128
    twice = grown(grown(config, Phase(steps=1, length=128, rope="yarn")), Phase(steps=1, length=256, rope="yarn"))
    assert twice.rope_scaling is not None and twice.rope_scaling.factor == 4.0 and twice.rope_scaling.original_max_position == 64
    linear = grown(grown(config, Phase(steps=1, length=128, rope="linear")), Phase(steps=1, length=256, rope="linear"))
    assert linear.rope_scaling is not None and linear.rope_scaling.factor == 4.0
    with pytest.raises(ValueError, match="follow 'yarn' already"):
        grown(twice, Phase(steps=1, length=512, rope="linear"))
    assert grown(config, Phase(steps=1, length=32)) == config


def test_reference_logprobs_are_computed_once_and_again_only_where_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "PART", 16)
    model, data = tiny_model(tmp_path / "model"), write_rows(tmp_path / "p.jsonl", PAIRS)
    settings = DpoSettings(**FEW | {"steps": 2, "lr": 1e-3})
    real, made = reference._compute, []
    monkeypatch.setattr(reference, "_compute", lambda m, s, numbers, *rest: made.append(numbers[0]) or real(m, s, numbers, *rest))
    dpo(job_of(model, data, tmp_path / "a"), settings, quiet)
    assert made == [0, 16, 32, 48, 64]
    parts = sorted((tmp_path / "cache" / "reference").rglob("*.logprobs"))
    parts[2].write_bytes(parts[2].read_bytes()[:-1] + b"\x01")
    made.clear()
    dpo(job_of(model, data, tmp_path / "b"), settings, quiet)
    assert made == [32] and weight_bits(tmp_path / "a") == weight_bits(tmp_path / "b")
    made.clear()
    dpo(job_of(model, data, tmp_path / "c"), DpoSettings(**FEW | {"steps": 2, "loss": "simpo", "beta": 2.0}), quiet)
    assert made == []


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ("{", "is not JSON"),
        ("[1]", "holds a list, expected an object"),
        ({"x": "x"}, "a chat row needs a list `messages`"),
        ({"messages": []}, "a chat row needs a list `messages`"),
        ({"messages": ["hello"]}, "every message of a chat row needs to be an object with a `role`"),
        ({"messages": [{"content": "x"}]}, "every message of a chat row needs to be an object with a `role`"),
        ({"messages": [{"role": "user", "content": "x"}]}, "at least one assistant message"),
    ],
)
def test_bad_row_is_named_by_file_and_line(tmp_path: Path, bad: object, told: str) -> None:
    data = write_rows(tmp_path / "chat.jsonl", [{"messages": CONVERSATION}, bad])
    with pytest.raises(ValueError, match=told) as caught:
        sft(job_of(DEMO, data, tmp_path / "out"), SftSettings(steps=1), quiet)
    assert str(caught.value).startswith(f"{data}:2")
    assert not (tmp_path / "out").exists()


def test_missing_or_overlong_data_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no data at"):
        sft(job_of(DEMO, tmp_path / "none.jsonl", tmp_path / "out"), report=quiet)
    long = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "owl " * 2000}]}
    with pytest.raises(ValueError, match=r"no usable row: 1 rows, .* 1 sequences were longer than 512 tokens"):
        sft(job_of(DEMO, write_rows(tmp_path / "c.jsonl", [long]), tmp_path / "out"), report=quiet)


def test_a_stage_does_not_overwrite_its_model_and_refuses_two_ways_to_evaluate(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "c.jsonl", CHATS)
    with pytest.raises(ValueError, match="is the model itself"):
        sft(job_of(DEMO, data, DEMO, cache=tmp_path), report=quiet)
    with pytest.raises(ValueError, match="do not go together"):
        sft(job_of(DEMO, data, tmp_path / "out", eval_data=(str(data),)), SftSettings(eval_frac=0.1), quiet)


def test_own_rows_may_be_evaluated_on(tmp_path: Path) -> None:
    model, data = tiny_model(tmp_path / "model"), write_rows(tmp_path / "c.jsonl", CHATS)
    aside = write_rows(tmp_path / "e.jsonl", CHATS[:3])
    sft(job_of(model, data, tmp_path / "out", eval_data=(str(aside),)), SftSettings(**FEW | {"steps": 2}), quiet)
    assert "loss/eval" in read_metrics(tmp_path / "out" / "stage", "sft")[-1]


def test_wrong_settings_say_what_to_change() -> None:
    with pytest.raises(ValueError, match="unknown key 'lrr'; the nearest known key is 'lr'"):
        parse_settings(SftSettings, {"lrr": 1}, "here")
    for bad in ({"lr": 0.0}, {"schedule": "square"}, {"eval_frac": 1.0}, {"precision": "int8"}, {"steps": "many"}):
        with pytest.raises(ValueError, match=f"here: .*{next(iter(bad))}"):
            parse_settings(SftSettings, bad, "here")
    assert parse_phase("steps=200, length=4096,rope=yarn") == Phase(steps=200, length=4096, rope="yarn")
    with pytest.raises(ValueError, match="'length' has no '='"):
        parse_phase("steps=1,length")
    with pytest.raises(ValueError, match="rope"):
        parse_phase("steps=1,length=8,rope=magic")


@pytest.mark.parametrize(
    ("verb", "kind"),
    [(commands.midtrain_command, MidtrainSettings), (commands.sft_command, SftSettings), (commands.dpo_command, DpoSettings)],
)
def test_a_verb_has_every_setting_as_an_option_with_its_default(verb: Any, kind: Any) -> None:
    options = {n: p.default for n, p in inspect.signature(verb).parameters.items() if n not in commands._NOT_SETTINGS}
    assert options == {n: v for n, v in json.loads(json.dumps(_defaults(kind))).items() if n != "phases"}


def _defaults(kind: Any) -> dict[str, Any]:
    record = kind()
    return {name: getattr(record, name) for name in kind.__struct_fields__}


def test_the_verbs_run_the_stages(tmp_path: Path) -> None:
    app = typer.Typer()
    for name, verb in (("midtrain", commands.midtrain_command), ("sft", commands.sft_command), ("dpo", commands.dpo_command)):
        app.command(name)(verb)
    model, where = tiny_model(tmp_path / "model"), ["--cache", str(tmp_path / "cache"), "--num-threads", "1", "--steps", "2"]
    for kind, rows, more in (
        ("midtrain", DOCUMENTS, ["--phase", "steps=1,length=128,rope=linear"]),
        ("sft", CHATS, []),
        ("dpo", PAIRS, []),
    ):
        data, out = write_rows(tmp_path / f"{kind}.jsonl", rows), tmp_path / kind
        done = CliRunner().invoke(app, [kind, str(model), "--data", str(data), "--out", str(out), *where, *more], catch_exceptions=False)
        assert done.exit_code == 0 and f"wrote {out}" in done.output
        model = out
    assert read_model_config(tmp_path / "dpo").max_position == 128


def test_the_verbs_are_listed_without_torch_numpy_or_msgspec() -> None:
    code = (
        "import sys, rollmill.trainer.commands, rollmill.fleet.pipeline_commands; print({'torch', 'numpy', 'msgspec'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "set()\n"
