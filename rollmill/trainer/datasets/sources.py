"""Where rows come from: JSONL, Parquet and Hugging Face Arrow files, as pieces that any process can read on its own; knows no tokens.

A piece is a stretch of one file, so a data set larger than memory streams through, and many processes share one large file.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

PIECE_BYTES = 16 * 2**20
"""About what one process tokenises at a time: seconds of work, and what a killed preparation loses per process."""
KINDS = {".jsonl": "jsonl", ".json": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".arrow": "arrow"}
INSTALL = "pip install 'rollmill[datasets]'"

Row = dict[str, Any]


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of one file."""

    path: str
    kind: str
    """jsonl, parquet or arrow."""
    begin: int
    """jsonl: the first byte; a line belongs to the piece it starts in. parquet: the first row group. arrow: 0."""
    end: int
    """The byte or row group behind the last one."""


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A data set: its files in order, and what they hold."""

    files: tuple[str, ...]
    digests: tuple[str, ...]
    """BLAKE3 of each file."""
    pieces: tuple[Piece, ...]


def open_source(specs: Sequence[str | Path]) -> Source:
    """Files, folders and globs; a folder stands for every data file below it, one that `save_to_disk` wrote for its Arrow files."""
    files = [file for spec in specs for file in files_of(str(spec))]
    if not files:
        raise ValueError("no data; name JSONL or Parquet files, folders of them, or a folder that datasets' save_to_disk wrote")
    if twice := {str(f) for f in files if files.count(f) > 1}:
        raise ValueError(f"{min(twice)} is named twice; give every file once, and `epochs` for several passes")
    return Source(
        files=tuple(str(f) for f in files),
        digests=tuple(blake3().update_mmap(f).hexdigest() for f in files),
        pieces=tuple(piece for f in files for piece in _pieces(f)),
    )


def files_of(spec: str) -> list[Path]:
    """The data files that a file's name, a folder or a glob stands for."""
    path = Path(spec)
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.suffix in KINDS and _is_rows(p))
        if not found:
            raise ValueError(f"{spec} holds no data file; known endings are {', '.join(KINDS)}")
        return found
    found = [path] if path.is_file() else sorted(Path(p) for p in glob.glob(spec, recursive=True) if Path(p).is_file())
    if not found:
        raise ValueError(f"no data at {spec}; `rollmill tasks export` writes some")
    if foreign := [p for p in found if p.suffix not in KINDS]:
        raise ValueError(f"{foreign[0]} has an unknown ending; known are {', '.join(KINDS)}")
    return found


def _is_rows(path: Path) -> bool:
    """Folders of Hugging Face data sets also hold descriptions and leftovers of `map`."""
    parent = path.parent
    is_saved = (parent / "state.json").is_file() and (parent / "dataset_info.json").is_file()
    described = {"state.json", "dataset_info.json", "dataset_dict.json", "dataset_infos.json"}
    return path.name not in described and not (is_saved and path.name.startswith("cache-"))


def _pieces(path: Path) -> Iterator[Piece]:
    kind = KINDS[path.suffix]
    if kind == "jsonl":
        size = path.stat().st_size
        for begin in range(0, size, PIECE_BYTES):
            yield Piece(path=str(path), kind=kind, begin=begin, end=min(size, begin + PIECE_BYTES))
    elif kind == "parquet":
        import_pyarrow()
        import pyarrow.parquet

        meta = pyarrow.parquet.ParquetFile(path).metadata
        begin = 0
        size = 0
        for group in range(meta.num_row_groups):
            size += meta.row_group(group).total_byte_size
            if size >= PIECE_BYTES or group + 1 == meta.num_row_groups:
                yield Piece(path=str(path), kind=kind, begin=begin, end=group + 1)
                begin, size = group + 1, 0
    else:
        yield Piece(path=str(path), kind=kind, begin=0, end=1)


def read_rows(piece: Piece) -> Iterator[tuple[int, Row]]:
    """(where, row) of a piece: the byte of a JSONL line, the number of a row otherwise; `named` turns it into words."""
    if piece.kind == "jsonl":
        yield from _read_jsonl(piece)
    elif piece.kind == "parquet":
        yield from _read_parquet(piece)
    else:
        yield from _read_arrow(piece)


def named(piece: Piece, where: int) -> str:
    """`file:line` for JSONL, `file, row n` otherwise. Lines are only counted here: when something is wrong."""
    if piece.kind != "jsonl":
        return f"{piece.path}, row {where + 1}"
    with open(piece.path, "rb") as file:
        num_before = 0
        while where > 0 and (block := file.read(min(where, 2**20))):
            num_before, where = num_before + block.count(b"\n"), where - len(block)
    return f"{piece.path}:{num_before + 1}"


def _read_jsonl(piece: Piece) -> Iterator[tuple[int, Row]]:
    decoder = msgspec.json.Decoder(Any)
    with open(piece.path, "rb") as file:
        at = piece.begin
        if at:
            file.seek(at - 1)
            at += len(file.readline()) - 1
        while at < piece.end:
            line = file.readline()
            if line.strip():
                try:
                    row = decoder.decode(line)
                except (ValueError, RecursionError):
                    row = _lenient(piece, at, line)
                if not isinstance(row, dict):
                    raise ValueError(f"{named(piece, at)} holds a {type(row).__name__}, expected an object")
                yield at, row
            at += len(line)


def _lenient(piece: Piece, at: int, line: bytes) -> Any:
    """Python's own reader also takes NaN and half surrogate pairs, which exist in the wild."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{named(piece, at)} is not JSON: {error}") from error


def _read_parquet(piece: Piece) -> Iterator[tuple[int, Row]]:
    import_pyarrow()
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(piece.path) as file:
        number = sum(file.metadata.row_group(g).num_rows for g in range(piece.begin))
        for batch in file.iter_batches(batch_size=1024, row_groups=list(range(piece.begin, piece.end))):
            for row in batch.to_pylist():
                yield number, without_nulls(row)
                number += 1


def _read_arrow(piece: Piece) -> Iterator[tuple[int, Row]]:
    import_pyarrow()
    import pyarrow
    import pyarrow.ipc

    with pyarrow.memory_map(piece.path) as file:
        try:
            batches: Iterable[Any] = pyarrow.ipc.open_stream(file)
        except pyarrow.ArrowInvalid:
            reader = pyarrow.ipc.open_file(file)
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
        number = 0
        for batch in batches:
            for row in batch.to_pylist():
                yield number, without_nulls(row)
                number += 1


def without_nulls(value: Any) -> Any:
    """Columns give every record the fields of all others, null where it has none: those are taken for absent.

    >>> without_nulls({"role": "user", "content": "hi", "tool_calls": None})
    {'role': 'user', 'content': 'hi'}
    """
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [without_nulls(v) for v in value]
    return value


def write_dataset(dataset: Any, path: Path) -> Path:
    """A `datasets.Dataset` or `IterableDataset` of yours as a JSONL file that every stage reads, row by row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    work = path.with_name(path.name + ".tmp")
    with work.open("w") as file:
        for row in dataset:
            file.write(json.dumps(without_nulls(dict(row)), ensure_ascii=False) + "\n")
    work.replace(path)
    return path


def fetch_dataset(name: str, path: Path) -> Path:
    """`org/name`, `org/name:split` or `org/name:config:split` by Hugging Face `datasets`, kept as JSONL at `path`."""
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"hf:{name} needs the package `datasets`: {INSTALL}") from error
    repo, *rest = name.split(":")
    split = rest[-1] if rest else "train"
    config = rest[0] if len(rest) == 2 else None
    return write_dataset(datasets.load_dataset(repo, config, split=split, streaming=True), path)


def import_pyarrow() -> None:
    """Only columnar files need it."""
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise ValueError(f"Parquet and Arrow files need the package `pyarrow`: {INSTALL}") from error
