"""The routing record: which experts every token took, as bytes; lossless, a fixed number of them per token, without torch or a model.

A token's experts in a layer are a set, so only the set is coded: its rank among all sets of that size, in the combinatorial
number system. 8 of 128 experts take 41 bits, where eight ids take 56. The format is on docs/formats/routes.md.
Shapes: T tokens, L layers, S sparse layers, K experts per token, X experts, F fields of a row, W words of a row.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import comb

import msgspec
import numpy as np

MAGIC, SCHEMA = b"RMRT", 1
HEADER = struct.Struct("<4sBBHIHH")
RANKS, IDS = 0, 1
# What a decoder will believe of a stranger's header before it sets memory aside.
MAX_LAYERS, MAX_EXPERTS, MAX_TOP_K = 1024, 4096, 256
# Tokens worked on at once: what they need stays in the second-level cache.
BLOCK = 2048


class RouteShape(msgspec.Struct, frozen=True, kw_only=True):
    """What one row of a record holds.

    >>> RouteShape(num_layers=48, layers=tuple(range(48)), num_experts=128, top_k=8).row_bytes
    246
    """

    num_layers: int
    """All layers of the model, dense ones included."""
    layers: tuple[int, ...]
    """The absolute indexes of the sparse ones, ascending."""
    num_experts: int
    top_k: int

    def __post_init__(self) -> None:
        if not 1 <= self.num_layers <= MAX_LAYERS or not 1 <= self.top_k <= min(self.num_experts, MAX_TOP_K):
            raise ValueError(f"a routing record cannot hold {self.num_layers} layers with {self.top_k} of {self.num_experts} experts")
        if self.num_experts > MAX_EXPERTS:
            raise ValueError(f"a routing record names at most {MAX_EXPERTS} experts, not {self.num_experts}")
        is_sorted = all(a < b for a, b in zip(self.layers, self.layers[1:], strict=False))
        if not self.layers or not is_sorted or not 0 <= self.layers[0] <= self.layers[-1] < self.num_layers:
            raise ValueError(f"sparse layers {list(self.layers)} are not ascending indexes below {self.num_layers}")

    @property
    def num_sets(self) -> int:
        return comb(self.num_experts, self.top_k)

    @property
    def coding(self) -> int:
        """Ranks, unless they outgrow a machine word."""
        return RANKS if self.num_sets < 2**63 else IDS

    @property
    def width(self) -> int:
        """Bits of a field. All ones always stays free to say `missing`: as a rank it is no set's, as ids it repeats one."""
        return self.num_sets.bit_length() if self.coding == RANKS else (self.num_experts - 1).bit_length()

    @property
    def num_fields(self) -> int:
        return len(self.layers) * (1 if self.coding == RANKS else self.top_k)

    @property
    def row_bytes(self) -> int:
        return (self.num_fields * self.width + 7) // 8


class RouteRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of consecutive tokens. Cutting and joining copy bytes and decode nothing."""

    shape: RouteShape
    rows: bytes

    @classmethod
    def of(cls, ids_TLK: np.ndarray, shape: RouteShape) -> RouteRecord:
        """Code ids [T, L, K] in any order within K; -1 throughout in dense layers, and where a token's experts are not known."""
        ids = np.asarray(ids_TLK)
        if ids.ndim != 3 or ids.shape[1:] != (shape.num_layers, shape.top_k) or ids.dtype.kind not in "iu":
            raise ValueError(f"routes are {ids.dtype} {ids.shape}, expected integers (tokens, {shape.num_layers}, {shape.top_k})")
        dense = np.setdiff1d(np.arange(shape.num_layers), shape.layers)
        if (ids[:, dense] != -1).any():
            raise ValueError(f"routes name experts in a dense layer; the sparse ones are {list(shape.layers)}")
        rows = [_encode(_sets(ids[at : at + BLOCK], shape), shape) for at in range(0, len(ids), BLOCK)]
        return cls(shape=shape, rows=b"".join(rows))

    @classmethod
    def missing(cls, shape: RouteShape, num_tokens: int) -> RouteRecord:
        """Rows of tokens whose experts nobody recorded."""
        row = ((1 << shape.num_fields * shape.width) - 1).to_bytes(shape.row_bytes, "little")
        return cls(shape=shape, rows=row * num_tokens)

    @classmethod
    def join(cls, records: Sequence[RouteRecord]) -> RouteRecord:
        """One record after the other."""
        assert records, "there is no record without a shape"
        for other in records[1:]:
            if other.shape != records[0].shape:
                raise ValueError(f"routing records of two models cannot be joined: {records[0].shape} and {other.shape}")
        return cls(shape=records[0].shape, rows=b"".join(r.rows for r in records))

    @classmethod
    def from_bytes(cls, data: bytes) -> RouteRecord:
        """Read what `to_bytes` wrote; ValueError for anything else. Rows are looked into by `ids_TLK`."""
        if len(data) < HEADER.size:
            raise ValueError(f"a routing record starts with {HEADER.size} bytes, this one has {len(data)}")
        magic, schema, coding, num_layers, num_tokens, num_experts, top_k = HEADER.unpack_from(data)
        if magic != MAGIC or schema != SCHEMA:
            raise ValueError(f"not a routing record of schema {SCHEMA}: it starts with {data[:5].hex()}")
        end = HEADER.size + (num_layers + 7) // 8
        # Read before it is bounded: the field has 16 bits, so this is 8 kB at most.
        flags = np.unpackbits(np.frombuffer(data[HEADER.size : end], np.uint8), bitorder="little")
        layers = tuple(np.flatnonzero(flags).tolist())
        shape = RouteShape(num_layers=num_layers, layers=layers, num_experts=num_experts, top_k=top_k)
        if coding != shape.coding:
            raise ValueError(f"a routing record of {top_k} of {num_experts} experts has coding {shape.coding}, this one says {coding}")
        if len(data) - end != num_tokens * shape.row_bytes:
            raise ValueError(f"{num_tokens} rows of {shape.row_bytes} bytes were announced, {len(data) - end} bytes follow")
        return cls(shape=shape, rows=data[end:])

    def to_bytes(self) -> bytes:
        s = self.shape
        header = HEADER.pack(MAGIC, SCHEMA, s.coding, s.num_layers, self.num_tokens, s.num_experts, s.top_k)
        is_sparse = np.zeros(s.num_layers, np.uint8)
        is_sparse[list(s.layers)] = 1
        return header + np.packbits(is_sparse, bitorder="little").tobytes() + self.rows

    @property
    def num_tokens(self) -> int:
        return len(self.rows) // self.shape.row_bytes

    def cut(self, start: int, stop: int) -> RouteRecord:
        """The rows of tokens [start, stop)."""
        assert 0 <= start <= stop <= self.num_tokens, f"rows {start}..{stop} of {self.num_tokens}"
        size = self.shape.row_bytes
        return RouteRecord(shape=self.shape, rows=self.rows[start * size : stop * size])

    def check(self) -> None:
        """ValueError for rows that hold no routes; several times cheaper than `ids_TLK`, which then cannot fail."""
        for _, rows in self._blocks():
            _codes(rows, self.shape)

    def ids_TLK(self) -> np.ndarray:
        """int16, ascending within K; -1 in dense layers and where a token's experts are not known. ValueError for damaged rows."""
        s = self.shape
        out = np.full((self.num_tokens, s.num_layers, s.top_k), -1, np.int16)
        for at, rows in self._blocks():
            out[at : at + BLOCK, list(s.layers)] = _decode(rows, s).transpose(2, 1, 0)
        return out

    def _blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        rows = np.frombuffer(self.rows, np.uint8).reshape(self.num_tokens, self.shape.row_bytes)
        for at in range(0, len(rows), BLOCK):
            yield at, rows[at : at + BLOCK]


def _sets(ids_TLK: np.ndarray, shape: RouteShape) -> np.ndarray:
    """The sparse layers' ids as int16 [K, S, T], ascending in K and checked."""
    if ids_TLK.size and (int(ids_TLK.min()) < -1 or int(ids_TLK.max()) >= shape.num_experts):
        raise ValueError(f"routes name experts {int(ids_TLK.min())}..{int(ids_TLK.max())}; there are 0..{shape.num_experts - 1}")
    sets = np.ascontiguousarray(ids_TLK.astype(np.int16, copy=False)[:, list(shape.layers)].transpose(2, 1, 0))
    if not (sets[1:] >= sets[:-1]).all():
        sets.sort(axis=0)
    is_missing = sets == -1
    is_wrong = (sets[1:] == sets[:-1]) & ~is_missing[1:]
    if is_wrong.any() or (is_missing.any(0) != is_missing.all(0)).any():
        raise ValueError("routes name an expert twice or only some of a token's experts; give all of them, or -1 throughout")
    return sets


class _Ladder:
    """Finds, for many ranks at once, the greatest x with counts[x] <= rank: what a binary search does, in a fixed number of steps.

    The leading bits of a rank as a float64 name a bucket that is narrower than any two neighbouring counts above it are apart:
    C(x + 1, k) / C(x, k) >= 1 + 1 / X, and a bucket spans less than a factor of 1 + 1 / (4 X). So a bucket has one count inside at
    most, and one comparison decides. Ranks beyond 2^53 round, by 2^-53 of themselves: a bucket starts that much earlier.
    """

    def __init__(self, counts_X: np.ndarray, limit: int) -> None:
        """`limit`: ranks are below this."""
        self._counts = np.append(counts_X, np.uint64(2**63))
        num_bits = len(counts_X).bit_length() + 2
        self._shift, self._base = 52 - num_bits, (1023 << num_bits) - 1
        # One exponent more than the limit has bits, since rounding may reach the next power of two.
        starts = (np.arange(limit.bit_length() + 1 << num_bits, dtype=np.int64) + self._base << self._shift).view(np.float64)
        # Bucket 0 is the rank 0, which has no exponent.
        starts = np.concatenate([[0.0], starts[1:] * (1 - 2.0**-50)])
        self._first = (counts_X.astype(np.float64).searchsorted(starts, side="right") - 1).astype(np.int16)

    def __call__(self, ranks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(x, counts[x]) of each rank."""
        bucket = np.maximum((ranks.astype(np.float64).view(np.int64) >> self._shift) - self._base, 0)
        x = self._first.take(bucket)
        x += self._counts.take(x + np.int16(1)) <= ranks
        return x, self._counts.take(x)


@lru_cache(maxsize=8)
def _ladders(num_experts: int, top_k: int) -> tuple[_Ladder, ...]:
    spare = num_experts - top_k
    # What is left of a rank once the greater ids are taken off is below the count of the next id that could have been.
    return tuple(_Ladder(counts_X, comb(spare + i + 1, i + 1)) for i, counts_X in enumerate(_counts(num_experts, top_k)))


@lru_cache(maxsize=8)
def _counts(num_experts: int, top_k: int) -> np.ndarray:
    """counts[i, x] = C(x, i + 1): the rank of an ascending set is the sum of counts[i, ids[i]]. Rows rise, for searching.

    Of a set of K the i-th id is at most X - K + i. Beyond that counts may overflow, so they are set out of reach.
    """
    counts = np.full((top_k, num_experts), 2**63, np.uint64)
    for i in range(top_k):
        counts[i, : num_experts - top_k + i + 1] = [comb(x, i + 1) for x in range(num_experts - top_k + i + 1)]
    return counts


def _encode(sets_KST: np.ndarray, shape: RouteShape) -> bytes:
    ones = np.uint64((1 << shape.width) - 1)
    is_missing = sets_KST[0] < 0
    if shape.coding == RANKS:
        counts = _counts(shape.num_experts, shape.top_k)
        codes = np.zeros(is_missing.shape, np.uint64)
        for i, ids_ST in enumerate(sets_KST):
            # A missing set reads the last count, whatever it is: it is overwritten below.
            codes += counts[i].take(ids_ST, mode="wrap")
        codes[is_missing] = ones
        return _pack(codes, shape)
    # Wraps -1 around to all ones.
    return _pack((sets_KST.astype(np.uint64) & ones).swapaxes(0, 1).reshape(shape.num_fields, -1), shape)


def _codes(rows_TB: np.ndarray, shape: RouteShape) -> tuple[np.ndarray, np.ndarray]:
    """(ranks [1, S, T] or ids [K, S, T], which sets [S, T] are missing), checked."""
    ones = np.uint64((1 << shape.width) - 1)
    codes = _unpack(rows_TB, shape).reshape(len(shape.layers), -1, len(rows_TB)).swapaxes(0, 1)
    is_missing = (codes == ones).all(0)
    if shape.coding == RANKS:
        codes[0, is_missing] = 0
        if codes.size and int(codes.max()) >= shape.num_sets:
            raise ValueError(f"a routing record holds the rank {int(codes.max())}, there are {shape.num_sets} sets")
    elif ((codes[-1] >= shape.num_experts) | (codes[1:] <= codes[:-1]).any(0))[~is_missing].any():
        raise ValueError(f"a routing record holds ids that are not an ascending set below {shape.num_experts}")
    return codes, is_missing


def _decode(rows_TB: np.ndarray, shape: RouteShape) -> np.ndarray:
    """int16 [K, S, T] of rows [T, bytes]."""
    codes, is_missing = _codes(rows_TB, shape)
    if shape.coding == RANKS:
        ranks_ST, ladders = np.ascontiguousarray(codes[0]), _ladders(shape.num_experts, shape.top_k)
        sets = np.empty((shape.top_k, *ranks_ST.shape), np.int16)
        for i in range(shape.top_k - 1, -1, -1):
            sets[i], taken_ST = ladders[i](ranks_ST)
            ranks_ST -= taken_ST
    else:
        sets = codes.astype(np.int16)
    sets[:, is_missing] = -1
    return sets


def _pack(codes_FT: np.ndarray, shape: RouteShape) -> bytes:
    """Every token's fields side by side, lowest bit first, each token filled up to a whole byte."""
    num_fields, num_tokens = codes_FT.shape
    words_WT = np.zeros((-(-num_fields * shape.width // 64), num_tokens), np.uint64)
    for f, code_T in enumerate(codes_FT):
        w, shift = divmod(f * shape.width, 64)
        words_WT[w] |= code_T << np.uint64(shift)
        if shift + shape.width > 64:
            words_WT[w + 1] |= code_T >> np.uint64(64 - shift)
    return words_WT.T.astype("<u8", order="C").view(np.uint8)[:, : shape.row_bytes].tobytes()


def _unpack(rows_TB: np.ndarray, shape: RouteShape) -> np.ndarray:
    """The fields, uint64 [F, T]."""
    num_bits = shape.num_fields * shape.width
    if num_bits % 8 and (rows_TB[:, -1] >> np.uint8(num_bits % 8)).any():
        raise ValueError("a routing record has bits set after the last field of a row")
    padded = np.zeros((len(rows_TB), -(-num_bits // 64) * 8), np.uint8)
    padded[:, : shape.row_bytes] = rows_TB
    words_WT = np.ascontiguousarray(padded.view("<u8").T, dtype=np.uint64)
    codes_FT = np.empty((shape.num_fields, len(rows_TB)), np.uint64)
    mask = np.uint64((1 << shape.width) - 1)
    for f in range(shape.num_fields):
        w, shift = divmod(f * shape.width, 64)
        code_T = words_WT[w] >> np.uint64(shift)
        if shift + shape.width > 64:
            code_T |= words_WT[w + 1] << np.uint64(64 - shift)
        codes_FT[f] = code_T & mask
    return codes_FT
