"""The trainer's own checkpoints: masters and moments in one safetensors file, complete or not there at all.

A checkpoint counts only once the ledger has committed it; a directory without a row is the remains of a crash.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch
from blake3 import blake3
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rollmill.trainer.optimizer import MasterAdamW

CHECKPOINT_SCHEMA = 1
KEEP = 2


class CheckpointDamaged(ValueError):
    """A committed checkpoint that is missing or altered."""


def save_checkpoint(run_dir: Path, *, step: int, optimizer: MasterAdamW) -> tuple[str, str]:
    """(path below the run directory, digest of its manifest). Durable when it returns."""
    name = f"checkpoints/step_{step:08d}"
    final, work = run_dir / name, run_dir / f"{name}.tmp"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    state = optimizer.state_dict()
    tensors = {f"master.{i}": t for i, t in enumerate(state["masters"])}
    for i, slot in state["adam"]["state"].items():
        tensors |= {f"adam.{i}.{key}": value for key, value in slot.items()}
    save_file(tensors, work / "state.safetensors")
    digest = blake3().update_mmap(work / "state.safetensors").hexdigest()
    manifest = json.dumps({"schema": CHECKPOINT_SCHEMA, "step": step, "num_steps": state["num_steps"], "state": digest}).encode()
    (work / "manifest.json").write_bytes(manifest)
    for file in (work / "state.safetensors", work / "manifest.json", work):
        _sync(file)
    shutil.rmtree(final, ignore_errors=True)
    work.rename(final)
    _sync(final.parent)
    return name, blake3(manifest).hexdigest()


def load_checkpoint(run_dir: Path, path: str, digest: str, optimizer: MasterAdamW) -> None:
    """Put a committed checkpoint back into the optimiser and the live weights."""
    folder = run_dir / path
    hint = "restore it from a copy, or start again in a new run.dir"
    try:
        manifest = (folder / "manifest.json").read_bytes()
        body = blake3().update_mmap(folder / "state.safetensors").hexdigest()
    except OSError as error:
        raise CheckpointDamaged(f"the ledger's checkpoint {folder} cannot be read: {error}; {hint}") from error
    if blake3(manifest).hexdigest() != digest:
        raise CheckpointDamaged(f"{folder}/manifest.json is not the one the ledger committed; {hint}")
    facts = json.loads(manifest)
    if facts["schema"] != CHECKPOINT_SCHEMA:
        raise CheckpointDamaged(f"{folder} has schema {facts['schema']}, this version reads {CHECKPOINT_SCHEMA}")
    if body != facts["state"]:
        raise CheckpointDamaged(f"{folder}/state.safetensors is altered or torn; {hint}")
    try:
        tensors = load_file(folder / "state.safetensors")
    except SafetensorError as error:
        raise CheckpointDamaged(f"{folder}/state.safetensors cannot be read: {error}; {hint}") from error
    masters = [tensors[f"master.{i}"] for i in range(sum(k.startswith("master.") for k in tensors))]
    state: dict[int, dict[str, torch.Tensor]] = {}
    for key, value in tensors.items():
        if key.startswith("adam."):
            _, index, field = key.split(".", 2)
            state.setdefault(int(index), {})[field] = value
    adam = optimizer.state_dict()["adam"] | {"state": state}
    optimizer.load_state_dict({"masters": masters, "adam": adam, "num_steps": facts["num_steps"]})


def prune_checkpoints(run_dir: Path, committed_step: int) -> None:
    """Keep the newest committed ones; remove older ones and the remains of crashes."""
    folders = sorted((run_dir / "checkpoints").glob("step_*"))
    committed = [f for f in folders if f.suffix != ".tmp" and int(f.name[5:]) <= committed_step]
    for folder in folders:
        if folder not in committed[-KEEP:]:
            shutil.rmtree(folder, ignore_errors=True)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
