"""The record of a stage in its output folder: what it was started with, how far it got, whether it is done.

    OUT/stage/stage.json       RUNNING -> FINISHED; replaced whole, so it always names a checkpoint that is complete
    OUT/stage/checkpoints/     masters and moments, the format of the trainer
    OUT/stage/metrics/         one JSONL stream

One process writes; the lock dies with it, also by kill -9.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from rollmill.trainer.datasets.shards import replace_file

STAGE_SCHEMA = 1
MODEL_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


class StageState(StrEnum):
    RUNNING = "running"
    FINISHED = "finished"


class StageRecord(msgspec.Struct, frozen=True, kw_only=True):
    schema: int = STAGE_SCHEMA
    kind: str
    """midtrain, sft, dpo or rl."""
    state: StageState = StageState.RUNNING
    facts: dict[str, Any]
    """Everything the result is a function of: digests of model and data, and the settings."""
    step: int = 0
    """Steps in the checkpoint, or all of them."""
    checkpoint: str = ""
    """Its path below the stage folder; empty before the first."""
    digest: str = ""
    """Of the checkpoint's manifest."""


def model_digest(path: Path) -> str:
    """Changes with any bit of the weights, the tokenizer or the template."""
    files = [path / n for n in MODEL_FILES if (path / n).is_file()] + sorted(path.glob("*.safetensors"))
    return blake3(msgspec.json.encode([(f.name, blake3().update_mmap(f).hexdigest()) for f in files])).hexdigest()


def read_record(out: Path) -> StageRecord | None:
    """None where no stage has written."""
    path = out / "stage" / "stage.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=StageRecord)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is not readable: {error}; remove {path.parent} to start the stage again") from error


class StageBook:
    """The open record."""

    def __init__(self, out: Path, record: StageRecord) -> None:
        self.folder, self.record = out / "stage", record

    def commit(self, **changes: Any) -> None:
        self.record = msgspec.structs.replace(self.record, **changes)
        replace_file(self.folder / "stage.json", msgspec.json.format(msgspec.json.encode(self.record), indent=2))


@contextlib.contextmanager
def open_stage(out: Path, kind: str, facts: dict[str, Any], *, resume: bool, redo_changed: bool = False) -> Iterator[StageBook]:
    """Begin a stage in `out`, or go on with the one there; a finished one of the same inputs is simply found finished when resumed.

    `redo_changed`: one that had other inputs is begun again instead of refused.
    """
    folder = out / "stage"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process is at work on {out}; wait for it or choose another --out") from None
        now, before = StageRecord(kind=kind, facts=_plain(facts)), read_record(out)
        changed = changes(before, now) if before is not None else ""
        if before is not None and resume and not (changed and redo_changed):
            if changed:
                raise ValueError(
                    f"{changed} the stage in {out} was started; a resumed stage must keep it. Change it back or choose another --out"
                )
            yield StageBook(out, before)
            return
        if before is not None and before.state is StageState.RUNNING and before.step and not redo_changed:
            raise ValueError(
                f"{out} holds an unfinished {before.kind} stage at step {before.step}; add --resume to go on with it, "
                f"or remove {folder} to start again"
            )
        book = StageBook(out, now)
        # The record first: a crash between the two leaves a stage that has not begun, beside files that nobody names.
        book.commit()
        for name in ("checkpoints", "metrics"):
            shutil.rmtree(folder / name, ignore_errors=True)
        yield book


def changes(before: StageRecord, now: StageRecord) -> str:
    """The first thing that differs, as `lr is 0.1 and was 0.2 when`; empty when the two have the same inputs."""
    old, new = ({"schema": r.schema, "kind": r.kind, **r.facts} for r in (before, now))
    for key in ("schema", "kind", *sorted({*old, *new})):
        if old.get(key) != new.get(key):
            return f"{key} is {new.get(key)!r} and was {old.get(key)!r} when"
    return ""


def _plain(facts: dict[str, Any]) -> dict[str, Any]:
    """As it reads back from the file."""
    return msgspec.json.decode(msgspec.json.encode(facts))
