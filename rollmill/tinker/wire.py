"""The three messages that travel as protobuf: data to learn from, what a pass over them gave, and what was sampled.

Arrays stay raw little-endian memory all the way, so logprobs arrive bit for bit. Shapes: N positions of a datum, K targets a position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from rollmill.tinker.protobuf import as_bytes, as_double, as_int, as_ints, as_text, block, double, fields, number, packed, text

PROTOBUF = "application/x-protobuf"
MAX_TARGETS = 4096
"""K at most: a few bytes of a sparse tensor must not become a huge dense one."""
_DTYPES: Mapping[int, np.dtype] = {1: np.dtype("<f4"), 2: np.dtype("<i8")}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


class Datum(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence and what its loss needs of every position."""

    tokens_N: np.ndarray
    """int32: what the model reads."""
    inputs: dict[str, np.ndarray]
    """float32 or int64, by name, in the shape they were sent in."""


class Pass(msgspec.Struct, frozen=True, kw_only=True):
    """A request for a forward pass, or for a forward and backward pass."""

    model_id: str
    seq_id: int
    data: list[Datum]
    loss_fn: str
    config: dict[str, float | str]
    """The loss function's settings."""
    is_forward_only: bool


class Sampled(msgspec.Struct, frozen=True, kw_only=True):
    """One sampled sequence."""

    tokens_T: np.ndarray
    logprobs_T: np.ndarray
    is_stopped: bool
    """A stop token or text ended it, not its length."""
    tops: list[list[tuple[int, float]]] = []
    """Per token its most likely alternatives, when asked for."""


def read_pass(body: bytes) -> Pass:
    """Raises ValueError for what is not such a message."""
    model_id, seq_id, loss_fn, is_forward_only = "", 0, "", False
    data: list[Datum] = []
    plain: dict[str, float | str] = {}
    config: dict[str, float | str] = {}
    for field, value in fields(memoryview(body)):
        if field == 1:
            model_id = as_text(value)
        elif field == 2:
            seq_id = as_int(value)
        elif field == 3:
            data.append(_datum(as_bytes(value)))
        elif field == 4:
            loss_fn = as_text(value)
        elif field == 5:
            key, entry = _entry(as_bytes(value))
            plain[key] = as_double(entry)
        elif field == 6:
            is_forward_only = bool(as_int(value))
        elif field == 7:
            key, entry = _entry(as_bytes(value))
            for kind, inner in fields(as_bytes(entry)):
                config[key] = as_double(inner) if kind == 1 else as_text(inner)
    return Pass(model_id=model_id, seq_id=seq_id, data=data, loss_fn=loss_fn, config=plain | config, is_forward_only=is_forward_only)


def _entry(message: memoryview) -> tuple[str, int | memoryview]:
    """Key and value of a map's entry."""
    key, found = "", memoryview(b"")
    for field, value in fields(message):
        if field == 1:
            key = as_text(value)
        else:
            found = as_bytes(value)
    return key, found


def _datum(message: memoryview) -> Datum:
    tokens: list[np.ndarray] = []
    inputs: dict[str, np.ndarray] = {}
    for field, value in fields(message):
        if field == 1:
            tokens.append(_tokens(as_bytes(value)))
        elif field == 2:
            name, entry = _entry(as_bytes(value))
            inputs[name] = _tensor(as_bytes(entry))
        # Where tokens came from (fields 3 and 4) changes nothing here.
    return Datum(tokens_N=np.concatenate(tokens) if tokens else np.empty(0, np.int32), inputs=inputs)


def _tokens(chunk: memoryview) -> np.ndarray:
    for kind, value in fields(chunk):
        if kind != 1:
            raise ValueError("a datum holds an image or sound; this server trains on text tokens only")
        for _, raw in fields(as_bytes(value)):
            return np.frombuffer(as_bytes(raw), "<i4")
    return np.empty(0, np.int32)


def _tensor(message: memoryview) -> np.ndarray:
    code, shape = 0, list[int]()
    dense = sparse = None
    for field, value in fields(message):
        if field == 1:
            dense = as_bytes(value)
        elif field == 2:
            sparse = as_bytes(value)
        elif field == 3:
            code = as_int(value)
        else:
            shape += as_ints(value)
    if code not in _DTYPES:
        raise ValueError(f"a tensor has dtype {code}; float32 (1) and int64 (2) are read")
    if sparse is not None:
        return _dense_of(sparse, _DTYPES[code], shape)
    flat = np.frombuffer(dense or b"", _DTYPES[code])
    if not shape:
        return flat
    if any(side < 0 for side in shape) or int(np.prod(shape)) != len(flat):
        raise ValueError(f"a tensor of shape {shape} comes with {len(flat)} values")
    return flat.reshape(shape)


def _dense_of(message: memoryview, dtype: np.dtype, shape: list[int]) -> np.ndarray:
    """A CSR matrix written out; what it does not hold is 0."""
    parts = {field: as_bytes(value) for field, value in fields(message)}
    values = np.frombuffer(parts.get(1, b""), dtype)
    row_ends, columns = (np.frombuffer(parts.get(i, b""), "<i8") for i in (2, 3))
    if (
        len(shape) != 2
        or not 0 <= shape[1] <= MAX_TARGETS
        or len(row_ends) != shape[0] + 1
        or len(values) != len(columns)
        or row_ends[-1] != len(values)
    ):
        raise ValueError(f"a sparse tensor of shape {shape} has {len(row_ends)} row ends, {len(columns)} columns and {len(values)} values")
    per_row = np.diff(row_ends)
    if (len(columns) and not 0 <= columns.min() <= columns.max() < shape[1]) or per_row.min(initial=0) < 0:
        raise ValueError(f"a sparse tensor of shape {shape} has values outside it")
    out = np.zeros(shape, dtype)
    out[np.repeat(np.arange(shape[0]), per_row), columns] = values
    return out


def pass_output(outputs: Mapping[str, Sequence[np.ndarray]], num_data: int, metrics: Mapping[str, float]) -> bytes:
    """`outputs` holds per name one array for every datum; those of different trailing shape go into records of their own."""
    records = []
    first = next(iter(outputs.values()), [])
    starts = [i for i in range(num_data) if i == 0 or any(o[i].shape[1:] != o[i - 1].shape[1:] for o in outputs.values())]
    for start, end in zip(starts, [*starts[1:], num_data], strict=True):
        entries = [block(2, text(1, name), block(2, _batched(arrays[start:end]))) for name, arrays in outputs.items()]
        records.append(block(2, text(1, "ArrayRecord"), *entries, number(3, end - start)))
    assert len(first) in (0, num_data)
    told = [block(3, text(1, name), double(2, value)) for name, value in metrics.items()]
    return b"".join((text(1, "ArrayRecord"), *records, *told))


def _batched(arrays: Sequence[np.ndarray]) -> bytes:
    dtype, sizes = np.dtype(arrays[0].dtype).newbyteorder("<"), [a.nbytes for a in arrays]
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype("<i8")
    data = b"".join(np.ascontiguousarray(a, dtype).tobytes() for a in arrays)
    return block(1, data) + block(2, offsets.tobytes()) + number(3, _CODES[dtype]) + packed(4, arrays[0].shape[1:])


def sample_output(sequences: Sequence[Sampled], *, prompt_logprobs_T: np.ndarray | None = None, num_reused: int = 0) -> bytes:
    """`prompt_logprobs_T` has NaN where nothing was computed."""
    parts = [block(1, _sequence(s)) for s in sequences]
    if prompt_logprobs_T is not None:
        parts.append(block(2, prompt_logprobs_T.astype("<f4").tobytes()))
    return b"".join((*parts, number(4, num_reused)))


def _sequence(s: Sampled) -> bytes:
    tokens, logprobs = s.tokens_T.astype("<i4").tobytes(), s.logprobs_T.astype("<f4").tobytes()
    out = number(1, 0 if s.is_stopped else 1) + block(2, tokens) + block(3, logprobs)
    if not s.tops or not s.tops[0]:
        return out
    ids = np.array([[i for i, _ in row] for row in s.tops], "<i4")
    values = np.array([[lp for _, lp in row] for row in s.tops], "<f4")
    return out + block(4, block(1, ids.tobytes()), block(2, values.tobytes()), number(3, ids.shape[1]), number(4, ids.shape[0]))
