"""Token sequences on disk: raw little-endian arrays per shard with an index of checksums; a damaged file is refused when first touched.

A shard holds the sequences of one piece of the data, split into `train` and `eval`. Knows neither rows nor tokenizers.
Shapes: T tokens, S sequences.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from blake3 import blake3

SHARD_SCHEMA = 1
INDEX = "index.json"
SPLITS = ("train", "eval")


class ShardDamaged(ValueError):
    """A shard that is missing or altered."""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """The sequences of one split in one shard. Files are `NNNNN.SPLIT.tokens`, `.starts` and, where a mask exists, `.weights`."""

    num_tokens: int
    num_sequences: int
    digests: dict[str, str]
    """tokens, starts, weights -> BLAKE3 of the file."""


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """Written last, as `NNNNN.json`: with it the shard counts."""

    number: int
    num_rows: int
    num_skipped: int
    """Rows that gave no sequence."""
    num_long: int
    """Sequences that were left out because they exceed the longest allowed."""
    parts: dict[str, Part]


class Index(msgspec.Struct, frozen=True, kw_only=True):
    """`index.json`: the whole set is complete."""

    schema: int = SHARD_SCHEMA
    key: str
    """What the sequences are a function of: data, tokenizer and how rows were read."""
    dtype: str
    """uint16 or uint32."""
    shards: tuple[Shard, ...]


class TokenSequence(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence. `weights_T[i]` is the loss weight of predicting token i from those before it."""

    tokens_T: np.ndarray
    weights_T: np.ndarray | None = None
    """None: every token but the first counts 1."""


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    return np.dtype("<u2") if vocab_size <= 2**16 else np.dtype("<u4")


def write_shard(
    folder: Path,
    number: int,
    sequences: dict[str, list[TokenSequence]],
    *,
    dtype: np.dtype[Any],
    num_rows: int,
    num_skipped: int,
    num_long: int,
) -> Shard:
    """Durable and complete when it returns; a crash before leaves files without their `NNNNN.json`, which nobody reads."""
    parts = {split: _write_part(folder, f"{number:05d}.{split}", found, dtype) for split, found in sequences.items() if found}
    shard = Shard(number=number, num_rows=num_rows, num_skipped=num_skipped, num_long=num_long, parts=parts)
    replace_file(folder / f"{number:05d}.json", msgspec.json.encode(shard))
    return shard


def _write_part(folder: Path, stem: str, sequences: Sequence[TokenSequence], dtype: np.dtype[Any]) -> Part:
    lens = np.array([len(s.tokens_T) for s in sequences], np.int64)
    arrays = {
        "tokens": np.concatenate([s.tokens_T for s in sequences]).astype(dtype),
        "starts": (np.cumsum(lens) - lens).astype("<u8"),
    }
    if any(s.weights_T is not None for s in sequences):
        weights = [np.ones(len(s.tokens_T), np.float32) if s.weights_T is None else s.weights_T for s in sequences]
        arrays["weights"] = np.concatenate(weights).astype("<f4")
    digests = {}
    for name, array in arrays.items():
        body = array.tobytes()
        replace_file(folder / f"{stem}.{name}", body)
        digests[name] = blake3(body).hexdigest()
    return Part(num_tokens=int(lens.sum()), num_sequences=len(lens), digests=digests)


def read_shard(folder: Path, number: int) -> Shard | None:
    """The shard if it was finished."""
    try:
        return msgspec.json.decode((folder / f"{number:05d}.json").read_bytes(), type=Shard)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def replace_file(path: Path, body: bytes) -> None:
    """Synced, then renamed: the old file or the new one, never half of it."""
    work = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with work.open("wb") as file:
        file.write(body)
        file.flush()
        os.fsync(file.fileno())
    work.replace(path)


class TokenShards:
    """All sequences of one split, in the order of the data: by number, or as one stream of tokens."""

    def __init__(self, folder: Path, split: str = "train") -> None:
        try:
            self.index = msgspec.json.decode((folder / INDEX).read_bytes(), type=Index)
        except (FileNotFoundError, msgspec.DecodeError) as error:
            raise ShardDamaged(f"{folder} is no finished set of token shards: {error}; remove the folder and prepare it again") from error
        if self.index.schema != SHARD_SCHEMA:
            raise ShardDamaged(f"{folder} has schema {self.index.schema}, this version reads {SHARD_SCHEMA}; remove the folder")
        self.folder, self.split = folder, split
        self._shards = [s for s in self.index.shards if split in s.parts]
        parts = [s.parts[split] for s in self._shards]
        self._first_token = np.cumsum([0, *(p.num_tokens for p in parts)]).tolist()
        self._first_sequence = np.cumsum([0, *(p.num_sequences for p in parts)]).tolist()
        self.num_tokens, self.num_sequences = self._first_token[-1], self._first_sequence[-1]
        self._mapped: dict[tuple[int, str], np.ndarray] = {}
        self._dtype = {"tokens": np.dtype(self.index.dtype).newbyteorder("<"), "starts": np.dtype("<u8"), "weights": np.dtype("<f4")}

    def lengths_S(self) -> np.ndarray:
        """Tokens of every sequence."""
        found = [
            np.diff(self._map(k, "starts"), append=np.uint64(s.parts[self.split].num_tokens)).astype(np.int64)
            for k, s in enumerate(self._shards)
        ]
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def sequence(self, number: int) -> TokenSequence:
        shard = bisect.bisect_right(self._first_sequence, number) - 1
        starts = self._map(shard, "starts")
        at = number - self._first_sequence[shard]
        begin = int(starts[at])
        end = int(starts[at + 1]) if at + 1 < len(starts) else self._shards[shard].parts[self.split].num_tokens
        has_mask = "weights" in self._shards[shard].parts[self.split].digests
        weights_T = np.array(self._map(shard, "weights")[begin:end]) if has_mask else None
        return TokenSequence(tokens_T=self._map(shard, "tokens")[begin:end].astype(np.int64), weights_T=weights_T)

    def stretch(self, begin: int, end: int) -> list[np.ndarray]:
        """The tokens [begin, end) of the stream, cut where a sequence starts."""
        assert 0 <= begin < end <= self.num_tokens, "a stretch lies inside the stream"
        out: list[np.ndarray] = []
        shard = bisect.bisect_right(self._first_token, begin) - 1
        while begin < end:
            first = self._first_token[shard]
            stop = min(end, self._first_token[shard + 1])
            starts = self._map(shard, "starts")
            low, high = np.searchsorted(starts, [begin - first + 1, stop - first])
            cuts = starts[low:high].astype(np.int64) - (begin - first)
            out += np.split(self._map(shard, "tokens")[begin - first : stop - first].astype(np.int64), cuts)
            begin, shard = stop, shard + 1
        return out

    def check(self) -> None:
        """Read everything once; raises ShardDamaged at the first file that is not what was written."""
        for k, shard in enumerate(self._shards):
            for name in shard.parts[self.split].digests:
                self._map(k, name)

    def _map(self, shard: int, name: str) -> np.ndarray:
        if (shard, name) not in self._mapped:
            part, path = self._shards[shard].parts[self.split], self.folder / f"{self._shards[shard].number:05d}.{self.split}.{name}"
            hint = f"remove {self.folder} and start again: it is made anew from the data"
            try:
                digest = blake3().update_mmap(path).hexdigest()
            except OSError as error:
                raise ShardDamaged(f"token shard {path} cannot be read: {error}; {hint}") from error
            if digest != part.digests[name]:
                raise ShardDamaged(f"token shard {path} is altered or torn; {hint}")
            self._mapped[shard, name] = np.memmap(path, self._dtype[name], mode="r")
        return self._mapped[shard, name]
