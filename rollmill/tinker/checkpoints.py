"""Saved weights as directories: `ROOT/RUN/weights/NAME` with the optimiser, `ROOT/RUN/sampler_weights/NAME` without; whole or not there.

A run with adapters is kept as a PEFT directory, one of all weights as safetensors. `checkpoint.json` says what it is; what was saved on
other base weights is refused. Knows no HTTP and no model.
"""

from __future__ import annotations

import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rollmill.trainer.lora import Lora, LoraConfig
from rollmill.trainer.lora_files import load_adapter, save_adapter

CHECKPOINT_SCHEMA = 1
_SCHEME = "tinker://"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_FACTS, _WEIGHTS, _OPTIMIZER = "checkpoint.json", "weights.safetensors", "optimizer.safetensors"


class Kind(StrEnum):
    """The folder, which is also the middle of a path."""

    TRAINING = "weights"
    SAMPLER = "sampler_weights"


class CheckpointFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What `checkpoint.json` says."""

    schema: int = CHECKPOINT_SCHEMA
    run: str
    """Id of the training run."""
    kind: Kind
    name: str
    base_model: str
    base_fingerprint: str
    """Of the base model's weights."""
    fingerprint: str
    """Of the weights with this checkpoint."""
    lora: LoraConfig | None
    """None: all weights."""
    num_steps: int
    """Optimiser steps until then."""
    created: datetime
    expires: datetime | None = None
    user_metadata: dict[str, str] | None = None
    is_public: bool = False

    @property
    def path(self) -> str:
        return f"{_SCHEME}{self.run}/{self.kind}/{self.name}"


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint holds: adapters, or all weights; moments where it has an optimiser."""

    facts: CheckpointFacts
    lora: Lora | None
    tensors: Mapping[str, torch.Tensor] | None
    moments: Mapping[str, torch.Tensor] | None


class Checkpoints:
    """The directory of all of them."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def save(
        self,
        facts: CheckpointFacts,
        *,
        lora: Lora | None,
        tensors: Mapping[str, torch.Tensor] | None,
        moments: Mapping[str, torch.Tensor] | None,
        overwrite: bool,
    ) -> int:
        """Write one; returns its size in bytes. An existing one of that name is refused, or replaced in one move."""
        final = self._folder(facts.run, facts.kind, facts.name)
        if final.exists() and not overwrite:
            raise ValueError(f"checkpoint {facts.path} exists; choose another name, or save with overwrite=True")
        work = final.with_name(f".{facts.name}.{uuid.uuid4().hex}")
        work.mkdir(parents=True)
        if lora is not None:
            save_adapter(lora, work, base_model=facts.base_model)
        if tensors is not None:
            save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, work / _WEIGHTS)
        if moments is not None:
            save_file({name: t.detach().cpu().contiguous() for name, t in moments.items()}, work / _OPTIMIZER)
        self._write_facts(work, facts)
        if final.exists():
            final.rename(old := final.with_name(f".{facts.name}.{uuid.uuid4().hex}"))
            work.rename(final)
            shutil.rmtree(old)
        else:
            work.rename(final)
        return _size(final)

    def load(self, path: str, *, device: torch.device | str, with_optimizer: bool, now: datetime) -> Saved:
        facts = self.facts(path, now=now)
        folder = self._folder(facts.run, facts.kind, facts.name)
        if with_optimizer and not (folder / _OPTIMIZER).is_file():
            raise ValueError(f"{path} holds no optimiser; use one that save_state made")
        try:
            lora = None if facts.lora is None else load_adapter(folder, device=device)
            tensors = load_file(folder / _WEIGHTS, str(device)) if facts.lora is None else None
            moments = load_file(folder / _OPTIMIZER) if with_optimizer else None
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
        return Saved(facts=facts, lora=lora, tensors=tensors, moments=moments)

    def facts(self, path: str, *, now: datetime) -> CheckpointFacts:
        """What a checkpoint is; ValueError when there is none."""
        folder = self._folder(*parse_path(path))
        try:
            found = msgspec.json.decode((folder / _FACTS).read_bytes(), type=CheckpointFacts)
        except OSError as error:
            raise ValueError(f"there is no checkpoint {path}") from error
        except msgspec.DecodeError as error:
            raise ValueError(f"{folder / _FACTS} cannot be read: {error}") from error
        if found.schema != CHECKPOINT_SCHEMA:
            raise ValueError(f"{path} has schema {found.schema}, this version reads {CHECKPOINT_SCHEMA}")
        if found.expires is not None and found.expires <= now:
            shutil.rmtree(folder, ignore_errors=True)
            raise ValueError(f"checkpoint {path} expired at {found.expires:%Y-%m-%d %H:%M} UTC and is gone")
        return found

    def list(self, run: str | None = None, *, now: datetime) -> list[tuple[CheckpointFacts, int]]:
        """All of one run or of every run, newest first, with their sizes; those that have expired are removed on the way."""
        found = []
        for folder in self._folders(run):
            path = f"{_SCHEME}{_run_of(folder.parent.parent.name)}/{folder.parent.name}/{folder.name}"
            try:
                found.append((self.facts(path, now=now), _size(folder)))
            except ValueError:
                # Expired since it was listed, or damaged: there is nothing to load from it.
                continue
        return sorted(found, key=lambda entry: entry[0].created, reverse=True)

    def change(self, path: str, *, now: datetime, **changes: object) -> None:
        """Write some of its facts anew."""
        facts = self.facts(path, now=now)
        self._write_facts(self._folder(facts.run, facts.kind, facts.name), msgspec.structs.replace(facts, **changes))

    def delete(self, path: str, *, now: datetime) -> None:
        facts = self.facts(path, now=now)
        shutil.rmtree(self._folder(facts.run, facts.kind, facts.name))

    def _write_facts(self, folder: Path, facts: CheckpointFacts) -> None:
        work = folder / f"{_FACTS}.tmp"
        work.write_bytes(msgspec.json.format(msgspec.json.encode(facts)))
        work.replace(folder / _FACTS)

    def _folder(self, run: str, kind: Kind, name: str) -> Path:
        return self.root / run.replace(":", "~") / kind / name

    def _folders(self, run: str | None) -> Iterator[Path]:
        runs = [self.root / run.replace(":", "~")] if run is not None else sorted(self.root.glob("*~*"))
        for folder in runs:
            for kind in Kind:
                yield from (f for f in sorted((folder / kind).glob("*")) if not f.name.startswith("."))


def _run_of(folder: str) -> str:
    return folder.replace("~", ":")


def _size(folder: Path) -> int:
    return sum(f.stat().st_size for f in folder.iterdir())


def checked_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} cannot name a checkpoint; use up to 128 letters, digits, '.', '_' and '-', not starting with '.' or '-'"
        )
    return name


def parse_path(path: str) -> tuple[str, Kind, str]:
    """(run, kind, name) of `tinker://RUN/KIND/NAME`.

    >>> parse_path("tinker://s:train:0/weights/first")
    ('s:train:0', <Kind.TRAINING: 'weights'>, 'first')
    """
    run, _, rest = path.removeprefix(_SCHEME).partition("/")
    kind, _, name = rest.partition("/")
    is_run = re.fullmatch(r"[A-Za-z0-9_-]+(:[A-Za-z0-9_-]+)+", run)
    if not path.startswith(_SCHEME) or not is_run or kind not in list(Kind) or not _NAME.fullmatch(name):
        raise ValueError(f"{path!r} is no path of a checkpoint, such as tinker://RUN/weights/NAME or tinker://RUN/sampler_weights/NAME")
    return run, Kind(kind), name


def expiry(ttl_seconds: int | None, now: datetime) -> datetime | None:
    if ttl_seconds is not None and ttl_seconds < 1:
        raise ValueError(f"ttl_seconds is {ttl_seconds}, it must be at least 1; leave it out to keep the checkpoint for good")
    return None if ttl_seconds is None else now.astimezone(UTC) + timedelta(seconds=ttl_seconds)
