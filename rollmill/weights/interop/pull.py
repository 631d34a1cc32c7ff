"""A plain safetensors directory that follows a store: only differences are fetched, and what lies there is proved before and after.

A state file beside the shards says which version they are. It says `is_whole: false` from before the first shard is touched until
all are in place, so a pull that was killed is seen and done again; a directory without it belongs to somebody else and is left alone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rollmill.weights.errors import CorruptSnapshot, UnknownFormat
from rollmill.weights.interop.hf import INDEX, MAX_FILE_BYTES, grouped, index_text, layout, write_group, wrong_tensors
from rollmill.weights.interop.tensor_file import Tensor, read_file, sync_directory
from rollmill.weights.manifest import FORMAT, Version, seal, unseal
from rollmill.weights.plan import plan
from rollmill.weights.schema import Schema
from rollmill.weights.store import WeightStore

STATE = ".rollmill-pull.json"
_NEW = ".new"


class Pulled(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of the state file."""

    format: int = FORMAT
    version: int
    schema: str
    tensors: tuple[str, ...]
    """Each tensor's fingerprint, in schema order."""
    files: tuple[str, ...]
    is_whole: bool


@dataclass(frozen=True, kw_only=True)
class Pull:
    """What one pull did."""

    record: Version
    started_from: int | None
    """The version that lay there and was used; None: everything was fetched."""
    num_files_written: int
    num_files: int
    bytes_to_read: int
    """Of the routes taken."""
    why_full: str = ""


def pull(store: WeightStore, version: int, folder: Path, *, max_file_bytes: int = MAX_FILE_BYTES) -> Pull:
    """Make `folder` hold exactly this version, proved; from what is there when that is whole."""
    record = store.version(version)
    schema = store.schema(record.schema)
    files = layout(schema, max_file_bytes)
    folder.mkdir(parents=True, exist_ok=True)
    state = _state(folder)
    if state is None and (foreign := sorted(path.name for path in folder.glob("*.safetensors"))):
        raise ValueError(f"{folder} holds {foreign[0]} and was not written by a pull; give another directory")
    held, why_full = _held(folder, state, record, schema, tuple(files))
    old = None if held is None or state is None else dict(zip((s.name for s in schema.tensors), state.tensors, strict=True))
    new = record.print_of(schema).tensors
    stale = {file: names for file, names in files.items() if old is None or any(old[name] != new[name] for name in names)}
    for left in folder.glob(f"*{_NEW}"):
        left.unlink()
    start = None if held is None or state is None else (state.version, held)
    for group in grouped(schema, stale):
        write_group(store, record, schema, folder, {file + _NEW: names for file, names in group.items()}, start=start)
    done = Pulled(version=version, schema=record.schema, tensors=record.tensors, files=tuple(files), is_whole=True)
    if stale or state is None or state != done:
        _put(folder, STATE, seal(msgspec.structs.replace(done, is_whole=False)))
        _place(folder, stale, schema, files, () if state is None else state.files)
        _put(folder, STATE, seal(done))
    started_from = None if start is None else start[0]
    return Pull(
        record=record, started_from=started_from, num_files_written=len(stale), num_files=len(files),
        bytes_to_read=_planned(store, started_from, version), why_full=why_full,
    )  # fmt: skip


def _state(folder: Path) -> Pulled | None:
    try:
        return unseal((folder / STATE).read_bytes(), Pulled, str(folder / STATE))
    except FileNotFoundError:
        return None
    except (CorruptSnapshot, UnknownFormat):
        # Ours by its name, and of no use: the same as a pull that was killed.
        return Pulled(version=-1, schema="", tensors=(), files=(), is_whole=False)


def _held(
    folder: Path, state: Pulled | None, record: Version, schema: Schema, files: tuple[str, ...]
) -> tuple[dict[str, Tensor] | None, str]:
    """The tensors that lie there, proved, or None and the reason why they are of no use."""
    if state is None:
        return None, "nothing was pulled here before"
    if not state.is_whole:
        return None, "an earlier pull was interrupted"
    if state.schema != record.schema or state.files != files:
        return None, "the tensors or the limit of a file have changed"
    if state.version > record.version:
        return None, f"version {state.version} lies here and deltas only lead forward"
    try:
        held = {name: tensor for file in state.files for name, tensor in read_file(folder / file)[0].items()}
    except (FileNotFoundError, CorruptSnapshot, UnknownFormat) as error:
        return None, f"a shard cannot be used: {error}"
    expected = dict(zip((spec.name for spec in schema.tensors), state.tensors, strict=True))
    missing = [name for name in expected if name not in held]
    if wrong := missing or wrong_tensors(expected, schema, held):
        return None, f"{wrong[0]} is not what was pulled"
    return held, ""


def _place(folder: Path, stale: dict[str, list[str]], schema: Schema, files: dict[str, list[str]], before: Sequence[str]) -> None:
    for file in stale:
        os.replace(folder / (file + _NEW), folder / file)
    for gone in set(before) - set(files):
        (folder / gone).unlink(missing_ok=True)
    if len(files) > 1:
        _put(folder, INDEX, index_text(schema, files).encode())
    else:
        (folder / INDEX).unlink(missing_ok=True)
    sync_directory(folder)


def _put(folder: Path, name: str, data: bytes) -> None:
    temporary = folder / (name + _NEW)
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, folder / name)
    sync_directory(folder)


def _planned(store: WeightStore, held: int | None, version: int) -> int:
    names = store.routes(after=-1 if held is None else held)
    return sum(route.num_bytes for route in plan(names, held=held, target=version) or ())
