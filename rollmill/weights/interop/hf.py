"""Plain Hugging Face safetensors directories: read into tensors, and written from a version so that any loader takes them.

A directory is written beside its place, proved by reading it back, and moved there whole; knows no delta format.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollmill.weights.errors import CorruptSnapshot, WrongWeights
from rollmill.weights.interop.intake import tensors_of
from rollmill.weights.interop.tensor_file import Tensor, Tensors, cut_into_files, read_file, sync_directory, their_dtype, write_file
from rollmill.weights.manifest import Version
from rollmill.weights.proof import fingerprint_bytes
from rollmill.weights.reader import materialise
from rollmill.weights.schema import Schema
from rollmill.weights.shard import whole
from rollmill.weights.store import WeightStore

INDEX = "model.safetensors.index.json"
MAX_FILE_BYTES = 5_000_000_000
"""Hosted providers ask for files under 5 GB."""
MEMORY_BYTES = 32_000_000_000
"""Tensors held in memory at a time while a version is written; one file's at least."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """A version as plain files."""

    record: Version
    files: tuple[str, ...]
    num_bytes: int


def read_directory(path: Path) -> dict[str, Tensor]:
    """Every tensor of a safetensors file or of a directory of them, mapped. An index, when there is one, must agree with the files."""
    if path.is_file():
        return read_file(path)[0]
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ValueError(f"there are no weights at {path}; give a safetensors file or a directory of them")
    index = read_index(path)
    if index is not None:
        named = {name for name in index.values() if "/" not in name}
        missing = sorted(set(index.values()) - {file.name for file in files})
        if missing:
            raise CorruptSnapshot(f"{path / INDEX} names {missing[0]}, which is not there; the directory is incomplete")
        files = [file for file in files if file.name in named]
    found: dict[str, Tensor] = {}
    for file in files:
        tensors = read_file(file)[0]
        if both := tensors.keys() & found.keys():
            raise ValueError(f"{min(both)} is in two files of {path}; remove the files that do not belong to the model")
        found |= tensors
    if index is not None and (lost := sorted(index.keys() - found.keys())):
        raise CorruptSnapshot(f"{path / INDEX} names {lost[0]}, which is in none of the files; the directory is incomplete")
    return found


def read_index(path: Path) -> dict[str, str] | None:
    """name -> file, or None for a directory without an index."""
    return None if (whole_index := read_whole_index(path)) is None else whole_index[0]


def read_whole_index(path: Path) -> tuple[dict[str, str], dict[str, object]] | None:
    """(weight map, metadata)."""
    file = path / INDEX
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text())
        weight_map = {str(name): str(where) for name, where in content["weight_map"].items()}
        return weight_map, dict(content.get("metadata") or {})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptSnapshot(f"{file} cannot be read ({error!r}); fetch or make it again") from error


def export_directory(
    store: WeightStore, version: int, out: Path, *, like: Path | None = None, max_file_bytes: int = MAX_FILE_BYTES
) -> Written:
    """Write a version as a Hugging Face directory; configuration and tokenizer come from `like`. `out` must not exist, or be empty."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is not empty; give a directory that does not exist yet")
    if like is not None and not like.is_dir():
        raise ValueError(f"there is no directory {like} to copy the configuration from")
    record = store.version(version)
    schema = store.schema(record.schema)
    files = layout(schema, max_file_bytes)
    out.parent.mkdir(parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        for group in grouped(schema, files):
            write_group(store, record, schema, making, group, start=None)
        if len(files) > 1:
            (making / INDEX).write_text(index_text(schema, files))
        for source in sorted(like.iterdir()) if like is not None else ():
            if source.is_file() and ".safetensors" not in source.name and source.suffix not in (".bin", ".pt", ".pth"):
                shutil.copyfile(source, making / source.name)
        making.chmod(0o755)
        sync_directory(making)
        making.rename(out)
        sync_directory(out.parent)
    finally:
        # Moved away by now, unless something went wrong.
        shutil.rmtree(making, ignore_errors=True)
    return Written(record=record, files=tuple(files), num_bytes=sum((out / name).stat().st_size for name in files))


def layout(schema: Schema, max_file_bytes: int) -> dict[str, list[str]]:
    """file -> names, as the usual loaders expect them; depends on nothing but the tensor table and the limit."""
    for spec in schema.tensors:
        their_dtype(spec.name, spec.dtype)
    cut = cut_into_files(((spec.name, spec.num_bytes) for spec in schema.tensors), max_file_bytes) or [[]]
    if len(cut) == 1:
        return {"model.safetensors": cut[0]}
    return {f"model-{at:05d}-of-{len(cut):05d}.safetensors": names for at, names in enumerate(cut, 1)}


def index_text(schema: Schema, files: Mapping[str, Sequence[str]]) -> str:
    weight_map = {name: file for file, names in files.items() for name in names}
    return json.dumps({"metadata": {"total_size": schema.num_bytes}, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n"


def grouped(schema: Schema, files: Mapping[str, Sequence[str]], memory_bytes: int = MEMORY_BYTES) -> list[dict[str, Sequence[str]]]:
    """The files in groups whose tensors fit into memory together."""
    size = {spec.name: spec.num_bytes for spec in schema.tensors}
    cut = cut_into_files(((file, sum(size[name] for name in names)) for file, names in files.items()), memory_bytes)
    return [{file: files[file] for file in group} for group in cut]


def write_group(
    store: WeightStore,
    record: Version,
    schema: Schema,
    folder: Path,
    files: Mapping[str, Sequence[str]],
    *,
    start: tuple[int, Tensors] | None,
) -> None:
    """Rebuild the tensors of some files, from nothing or from (version, tensors), write the files and prove what was written."""
    wanted = {name for names in files.values() for name in names}
    held = {spec.name: whole(spec) for spec in schema.tensors if spec.name in wanted}
    base = None if start is None else (start[0], {name: start[1][name].data for name in held})
    _, _, data = materialise(store, record.version, start=base, held=held)
    tensors = tensors_of(schema, data)
    for file, names in files.items():
        write_file(folder / file, {name: tensors[name] for name in names}, metadata_of(record))
        prove(record, schema, read_file(folder / file)[0], str(folder / file))


def metadata_of(record: Version) -> dict[str, str]:
    return {"format": "pt", "rollmill_version": str(record.version), "rollmill_fingerprint": record.fingerprint}


def prove(record: Version, schema: Schema, tensors: Tensors, where: str) -> None:
    """Recompute the fingerprints of these tensors from their bytes; raise WrongWeights unless they are those of the version."""
    if wrong := wrong_tensors(record.print_of(schema).tensors, schema, tensors):
        raise WrongWeights(
            f"{where} does not hold version {record.version}: {len(wrong)} tensors differ, first {wrong[0]}", tensors=tuple(wrong)
        )


def wrong_tensors(expected: Mapping[str, str], schema: Schema, tensors: Tensors) -> list[str]:
    """Names whose bytes do not show the expected fingerprint, in schema order."""
    wrong = []
    for spec in schema.tensors:
        if (tensor := tensors.get(spec.name)) is None:
            continue
        is_sized = tensor.data.nbytes == spec.num_bytes
        if not is_sized or fingerprint_bytes(spec.name, spec.dtype, spec.shape, tensor.data) != expected[spec.name]:
            wrong.append(spec.name)
    return wrong
