"""A pipeline file: stages in a row, each begins with the model that the one before made; what is finished with the same inputs stays.

Everything is checked before the first stage starts. Run again, a pipeline goes on where it was.
"""

from __future__ import annotations

import difflib
import gc
import shutil
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch

from rollmill.config import RunConfig, load_config, parse_config
from rollmill.model import check_model
from rollmill.trainer.datasets.prepare import TOKENIZER_FILES
from rollmill.trainer.datasets.sources import files_of
from rollmill.trainer.stages.book import StageRecord, StageState, changes, model_digest, open_stage, read_record
from rollmill.trainer.stages.dpo import dpo
from rollmill.trainer.stages.midtrain import midtrain
from rollmill.trainer.stages.settings import DpoSettings, MidtrainSettings, SftSettings, StageSettings, parse_settings
from rollmill.trainer.stages.sft import sft
from rollmill.trainer.stages.stage import StageJob, stage_facts
from rollmill.weights.interop.pull import pull
from rollmill.weights.store import find_store

SETTINGS: dict[str, type[StageSettings]] = {"midtrain": MidtrainSettings, "sft": SftSettings, "dpo": DpoSettings}
RUN: dict[str, Callable[..., None]] = {"midtrain": midtrain, "sft": sft, "dpo": dpo}
KINDS = (*SETTINGS, "rl")
_SECTIONS = tuple(RunConfig.model_fields)


class Train(Protocol):
    """What carries out an rl stage: `rollmill.fleet.train.train_run`."""

    def __call__(self, config: RunConfig, *, resume: bool) -> bool: ...


class StagePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One stage of a pipeline."""

    kind: str
    name: str
    model: Path
    """Where it begins."""
    out: Path
    """The model directory it makes."""
    data: tuple[str, ...] = ()
    eval_data: tuple[str, ...] = ()
    settings: StageSettings | None = None
    """None for rl."""
    run: RunConfig | None = None
    """rl only."""


class Pipeline(msgspec.Struct, frozen=True, kw_only=True):
    folder: Path
    """Everything it makes lies here."""
    cache: Path | None
    stages: tuple[StagePlan, ...]


def load_pipeline(path: Path) -> Pipeline:
    """Read and check a pipeline file; unknown keys are errors that name the nearest known one."""
    if not path.is_file():
        raise ValueError(f"there is no pipeline file {path}")
    try:
        raw = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from error
    _known(raw, ("pipeline", "stage"), str(path))
    head, rows = raw.get("pipeline", {}), raw.get("stage", [])
    _known(head, ("model", "dir", "cache"), f"{path} [pipeline]")
    if not isinstance(head.get("model"), str) or not isinstance(head.get("dir"), str):
        raise ValueError(f"{path} [pipeline] needs `model`, where it begins, and `dir`, where everything is kept")
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"{path} has no stage; add [[stage]] with a kind: {', '.join(KINDS)}")
    model, folder = Path(head["model"]), Path(head["dir"])
    check_model(model)
    stages: list[StagePlan] = []
    for number, row in enumerate(rows, 1):
        stages.append(_stage(row, number, stages[-1].out if stages else model, folder, f"{path} stage {number}"))
    if len({s.out for s in stages}) < len(stages):
        raise ValueError(f"{path}: two stages have the same name; give each its own")
    return Pipeline(folder=folder, cache=Path(head["cache"]) if "cache" in head else None, stages=tuple(stages))


def _stage(row: dict[str, Any], number: int, model: Path, folder: Path, where: str) -> StagePlan:
    kind = row.get("kind")
    if kind not in KINDS:
        raise ValueError(f"{where} has kind {kind!r}; known are {', '.join(KINDS)}")
    name = str(row.get("name", f"{number:02d}-{kind}"))
    if Path(name).name != name or name in (".", ".."):
        raise ValueError(f"{where} has the name {name!r}; it becomes a folder in the pipeline's dir, give one without slashes")
    out = folder / name
    if kind == "rl":
        _known(row, ("kind", "name", "run_file", "set", *_SECTIONS), where)
        return StagePlan(kind=kind, name=name, model=model, out=out, run=_run_config(row, model, out, where))
    kept = ("kind", "name", "data", "eval_data")
    _known(row, (*kept, *SETTINGS[kind].__struct_fields__), where)
    settings = parse_settings(SETTINGS[kind], {k: v for k, v in row.items() if k not in kept}, where)
    data, eval_data = _paths(row.get("data", ()), where), _paths(row.get("eval_data", ()), where)
    if not data:
        raise ValueError(f"{where} has no data; add data = [...]")
    for spec in (*data, *eval_data):
        if not spec.startswith("hf:"):
            files_of(spec)
    return StagePlan(kind=kind, name=name, model=model, out=out, data=data, eval_data=eval_data, settings=settings)


def _run_config(row: dict[str, Any], model: Path, out: Path, where: str) -> RunConfig:
    raw: dict[str, Any] = {}
    ours = (f"model.path='{model}'", f"run.dir='{out / 'run'}'")
    sets = _paths(row.get("set", ()), where)
    if "run_file" in row:
        raw = load_config(Path(row["run_file"]), (*sets, *ours)).model_dump(mode="json", exclude_unset=True)
    elif sets:
        raise ValueError(f"{where}: `set` changes a run_file, and there is none; write the tables out instead")
    for section in _SECTIONS:
        if section in row:
            raw[section] = {**raw.get(section, {}), **row[section]}
    raw["model"] = {**raw.get("model", {}), "path": str(model)}
    raw["run"] = {**raw.get("run", {}), "dir": str(out / "run")}
    return parse_config(raw, where)


def describe_plan(pipeline: Pipeline) -> list[str]:
    """A line per stage: what it is, where it begins and ends, and whether there is anything to do."""
    lines, is_fresh = [], True
    for stage in pipeline.stages:
        now = "to run"
        before = read_record(stage.out)
        if before is not None and is_fresh:
            # The data's own digest is only known once it is read: what is compared here is all the rest.
            facts = before.facts | _facts(stage)
            changed = changes(before, StageRecord(kind=stage.kind, facts=msgspec.json.decode(msgspec.json.encode(facts))))
            if changed:
                now = f"to run again: {changed} it ran last"
            else:
                now = "finished" if before.state is StageState.FINISHED else f"to go on behind step {before.step}"
        elif before is not None:
            now = "to run again if the stage before it changes"
        is_fresh = is_fresh and now == "finished"
        lines.append(f"{stage.name}: {stage.kind} {stage.model} -> {stage.out}  [{now}]")
    return lines


def run_pipeline(pipeline: Pipeline, *, train: Train, report: Callable[[str], None] = print) -> bool:
    """All stages in order; False when a person stopped an rl stage."""
    for stage in pipeline.stages:
        report(f"== {stage.name} ({stage.kind}): {stage.model} -> {stage.out}")
        if stage.run is not None:
            if not _run_rl(stage, stage.run, train, report):
                return False
            continue
        job = StageJob(
            model=stage.model,
            data=stage.data,
            eval_data=stage.eval_data,
            out=stage.out,
            resume=True,
            redo_changed=True,
            cache=pipeline.cache,
        )
        RUN[stage.kind](job, stage.settings, report)
        _free()
    report(f"the pipeline is finished: {pipeline.stages[-1].out}")
    return True


def _facts(stage: StagePlan) -> dict[str, Any]:
    """What a stage's result is a function of, as far as it is known without reading the data."""
    if stage.settings is not None:
        return stage_facts(stage.model, stage.settings)
    assert stage.run is not None
    config = stage.run.model_dump(mode="json")
    del config["run"]["dir"], config["model"]["path"]
    return {"model": model_digest(stage.model), "run": config}


def _run_rl(stage: StagePlan, config: RunConfig, train: Train, report: Callable[[str], None]) -> bool:
    with open_stage(stage.out, "rl", _facts(stage), resume=True, redo_changed=True) as book:
        if book.record.state is StageState.FINISHED:
            report(f"{stage.out} is finished already")
            return True
        if not book.record.checkpoint:
            # What lies there belongs to other inputs.
            for old in [config.run.dir, *(p for p in stage.out.iterdir() if p.is_file())]:
                shutil.rmtree(old, ignore_errors=True) if not old.is_file() else old.unlink()
            book.commit(checkpoint="run")
        if not train(config, resume=(config.run.dir / "run.toml").is_file()):
            return False
        store = find_store(config.weight_store)
        pointer = store.latest()
        if pointer is None:
            raise ValueError(f"the run in {config.run.dir} published no weights; see {config.run.dir}/logs")
        pull(store, pointer.version, stage.out)
        for name in (*TOKENIZER_FILES, "config.json"):
            if (stage.model / name).is_file():
                shutil.copy(stage.model / name, stage.out / name)
        book.commit(state=StageState.FINISHED, step=config.run.steps)
    report(f"wrote {stage.out}")
    return True


def _free() -> None:
    """The next stage's processes need the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _known(row: dict[str, Any], keys: Iterable[str], where: str) -> None:
    if not isinstance(row, dict):
        raise ValueError(f"{where} needs to be a table")
    known = list(keys)
    if unknown := sorted(set(row) - set(known)):
        near = difflib.get_close_matches(unknown[0], known, 1, 0.0)
        raise ValueError(f"{where}: unknown key {unknown[0]!r}; the nearest known key is {near[0]!r}")


def _paths(value: Any, where: str) -> tuple[str, ...]:
    found = (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(v, str) for v in found):
        raise ValueError(f"{where}: {value!r} is no text or list of texts")
    return found
