"""From a data set to token shards, once: on all cores, resumable, in a folder named after everything the tokens are a function of.

Two runs over the same data with the same tokenizer share the folder; a killed preparation goes on with the shards that are missing.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from rollmill.model.tokenizer import Tokenizer
from rollmill.trainer.datasets.rows import Layout, RowEncoder
from rollmill.trainer.datasets.shards import (
    INDEX,
    SHARD_SCHEMA,
    Index,
    Shard,
    TokenSequence,
    read_shard,
    replace_file,
    token_dtype,
    write_shard,
)
from rollmill.trainer.datasets.sources import Piece, fetch_dataset, named, open_source, read_rows

ROWS_SCHEMA = 1
"""Counts up when the same row gives other tokens or another mask."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """How rows become sequences; with the data and the tokenizer it names the folder."""

    layout: Layout
    max_length: int
    """Longer sequences are left out and counted; 0: none is too long."""
    eval_frac: float = 0.0
    """Share of the rows put aside, chosen by a hash of each row, so that equal rows never stand on both sides."""
    vocab_size: int
    """Of the model: a token beyond it is an error."""


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    folder: Path
    key: str
    num_rows: int
    num_skipped: int
    num_long: int
    num_tokens: dict[str, int]
    """By split."""


def cache_folder() -> Path:
    """Where prepared data lies unless told otherwise: `$ROLLMILL_HOME` or `~/.cache/rollmill`."""
    return Path(os.environ.get("ROLLMILL_HOME") or Path.home() / ".cache" / "rollmill") / "stages"


def prepare(
    data: Sequence[str | Path],
    model_dir: Path,
    recipe: Recipe,
    *,
    cache: Path,
    num_workers: int = 0,
    report: Callable[[str], None] = print,
) -> Prepared:
    """The finished shards of a data set; made when they are not there. `num_workers` 0: one per core."""
    source = open_source([_local(str(spec), cache, report) for spec in data])
    tokenizer = [blake3((model_dir / n).read_bytes()).hexdigest() if (model_dir / n).is_file() else "" for n in TOKENIZER_FILES]
    stops = sorted(Tokenizer(model_dir).stop_ids)
    facts = [SHARD_SCHEMA, ROWS_SCHEMA, recipe.layout, recipe.max_length, recipe.eval_frac, recipe.vocab_size, tokenizer, stops]
    # Pieces are part of it: they say which rows lie in which shard.
    facts += [source.digests, [(p.kind, p.begin, p.end) for p in source.pieces]]
    key = blake3(msgspec.json.encode(facts)).hexdigest()[:32]
    folder = cache / "tokens" / key
    folder.mkdir(parents=True, exist_ok=True)
    with _only_one(folder / "lock"):
        if not (folder / INDEX).is_file():
            shards = _make(folder, source.pieces, model_dir, recipe, num_workers, report)
            index = Index(key=key, dtype=token_dtype(recipe.vocab_size).name, shards=tuple(shards))
            replace_file(folder / INDEX, msgspec.json.encode(index))
    index = msgspec.json.decode((folder / INDEX).read_bytes(), type=Index)
    return Prepared(
        folder=folder,
        key=key,
        num_rows=sum(s.num_rows for s in index.shards),
        num_skipped=sum(s.num_skipped for s in index.shards),
        num_long=sum(s.num_long for s in index.shards),
        num_tokens={k: sum(s.parts[k].num_tokens for s in index.shards if k in s.parts) for k in ("train", "eval")},
    )


def _local(spec: str, cache: Path, report: Callable[[str], None]) -> str:
    if not spec.startswith("hf:"):
        return spec
    name = spec.removeprefix("hf:")
    path = cache / "fetched" / f"{name.replace('/', '--').replace(':', '--')}.jsonl"
    if not path.is_file():
        report(f"fetching {name} to {path}")
        fetch_dataset(name, path)
    return str(path)


def _make(
    folder: Path, pieces: Sequence[Piece], model_dir: Path, recipe: Recipe, num_workers: int, report: Callable[[str], None]
) -> list[Shard]:
    done = {n: shard for n in range(len(pieces)) if (shard := read_shard(folder, n))}
    missing = [n for n in range(len(pieces)) if n not in done]
    workers = min(len(missing), num_workers or len(os.sched_getaffinity(0)))
    if done:
        report(f"{len(done)} of {len(pieces)} token shards are there already")
    if workers <= 1:
        encoder = RowEncoder(model_dir, recipe.layout)
        for n in missing:
            done[n] = _tokenise(folder, n, pieces[n], encoder, recipe)
    else:
        # Spawned, not forked: this process may have threads of torch already, and a fork would copy their locks.
        with ProcessPoolExecutor(
            workers, mp_context=multiprocessing.get_context("spawn"), initializer=_begin_worker, initargs=(model_dir, recipe.layout)
        ) as pool:
            jobs = [(n, pool.submit(_tokenise_piece, folder, n, pieces[n], recipe)) for n in missing]
            try:
                for count, (n, job) in enumerate(jobs, 1):
                    done[n] = job.result()
                    if count % 50 == 0:
                        report(f"tokenised {count} of {len(missing)} shards")
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
    return [done[n] for n in range(len(pieces))]


_worker_encoder: list[RowEncoder] = []


def _begin_worker(model_dir: Path, layout: Layout) -> None:
    # Each process is one core's worth already.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker_encoder.append(RowEncoder(model_dir, layout))
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A pool's worker holds both ends of its queue, so it would outlive a parent that was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "runs in a worker only"
    parent.join()
    os._exit(1)


def _tokenise_piece(folder: Path, number: int, piece: Piece, recipe: Recipe) -> Shard:
    return _tokenise(folder, number, piece, _worker_encoder[0], recipe)


def _tokenise(folder: Path, number: int, piece: Piece, encode: RowEncoder, recipe: Recipe) -> Shard:
    found: dict[str, list[TokenSequence]] = {"train": [], "eval": []}
    num_rows = num_skipped = num_long = 0
    for where, row in read_rows(piece):
        num_rows += 1
        try:
            sequences = encode(row)
        except ValueError as error:
            raise ValueError(f"{named(piece, where)}: {error}") from error
        top = max((int(s.tokens_T.max()) for s in sequences), default=0)
        if top >= recipe.vocab_size:
            raise ValueError(
                f"{named(piece, where)}: token {top} is beyond the model's {recipe.vocab_size}; tokenizer and model do not fit"
            )
        if not sequences:
            num_skipped += 1
        elif recipe.max_length and (long := [s for s in sequences if len(s.tokens_T) > recipe.max_length]):
            # The sequences of a row belong together: a pair without its other half teaches nothing.
            num_long += len(long)
            sequences = [] if recipe.layout is Layout.PAIR else [s for s in sequences if len(s.tokens_T) <= recipe.max_length]
        found["eval" if recipe.eval_frac and _share(row) < recipe.eval_frac else "train"] += sequences
    return write_shard(
        folder,
        number,
        found,
        dtype=token_dtype(recipe.vocab_size),
        num_rows=num_rows,
        num_skipped=num_skipped,
        num_long=num_long,
    )


def _share(row: dict[str, Any]) -> float:
    """Evenly spread over [0, 1), the same for equal rows."""
    body = json.dumps(row, sort_keys=True, default=str).encode()
    return int.from_bytes(blake3(body).digest(8), "little") / 2**64


@contextlib.contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """A second process that wants the same shards waits for the first and then finds them."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
