"""Ways to bring new weights to somebody who holds the old ones, ours and those in use elsewhere; all take and give bytes, none keeps state.

Peers are written from their published formats as well as this language allows: buffers and (de)compressors are reused, no element loops.
"""

from __future__ import annotations

import importlib.util
import json
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import zstandard

from rollmill.bench.weight_states import State, Tensor
from rollmill.weights import chunk
from rollmill.weights.encode import cell_bytes, in_order
from rollmill.weights.schema import CHUNK_ELEMENTS, Cell, TensorSpec, place

Target = Mapping[str, np.ndarray]
"""name -> the old bytes, which decoding turns into the new ones in place, as a replica does."""
_LEVEL = 1
_ZIPNN_DTYPES = ("bfloat16", "float16", "float32")


class Codec(Protocol):
    """A codec over whole states. `why_not` says why it cannot be measured here; empty when it can."""

    @property
    def name(self) -> str: ...

    @property
    def needs_old(self) -> bool: ...

    def why_not(self, new: State) -> str: ...

    def encode(self, old: State, new: State, *, workers: int) -> list[bytes]: ...

    def decode(self, blobs: Sequence[bytes], new: State, target: Target, *, workers: int) -> None:
        """`new` is read for names, dtypes and shapes only."""


class Unit(NamedTuple):
    """What is coded alone: a cell of a tensor or all of it."""

    name: str
    dtype: str
    item_bytes: int
    cell: Cell


@dataclass(frozen=True, kw_only=True)
class ByUnit:
    """A codec that looks at one unit at a time and can therefore use several threads."""

    name: str
    code: Callable[[Unit, np.ndarray, np.ndarray], bytes]
    """unit, old bytes, new bytes."""
    restore: Callable[[Unit, bytes, np.ndarray], None]
    """unit, blob, old bytes that become the new ones."""
    by_cell: bool = False
    """Units are the cells of a store; otherwise whole tensors."""
    needs_old: bool = True
    package: str = ""
    dtypes: tuple[str, ...] = ()
    """Empty: all."""

    def why_not(self, new: State) -> str:
        if self.package and importlib.util.find_spec(self.package) is None:
            return f"package {self.package} is not installed"
        odd = sorted({tensor.dtype for tensor in new.values()} - set(self.dtypes)) if self.dtypes else []
        return f"it does not know {', '.join(odd)}" if odd else ""

    def encode(self, old: State, new: State, *, workers: int) -> list[bytes]:
        def work(unit: Unit) -> bytes:
            return self.code(unit, _bytes_of(unit, old[unit.name].data), _bytes_of(unit, new[unit.name].data))

        return list(in_order(work, self._units(new), workers=workers))

    def decode(self, blobs: Sequence[bytes], new: State, target: Target, *, workers: int) -> None:
        def work(item: tuple[Unit, bytes]) -> None:
            unit, blob = item
            held = _bytes_of(unit, target[unit.name])
            self.restore(unit, blob, held)
            if not unit.cell.is_contiguous:
                place(target[unit.name], _in_bytes(unit), held)

        for _ in in_order(work, list(zip(self._units(new), blobs, strict=True)), workers=workers):
            pass

    def _units(self, state: State) -> list[Unit]:
        return [unit for name, tensor in state.items() for unit in _units_of(name, tensor, by_cell=self.by_cell)]


class PulseLayout:
    """Changed places as row and column differences in narrow integers, new values as they are, everything in one zstd frame."""

    name = "pulse layout"
    needs_old = True

    def why_not(self, new: State) -> str:
        return ""

    def encode(self, old: State, new: State, *, workers: int) -> list[bytes]:
        header: list[Any] = []
        streams: list[bytes] = []
        for name, tensor in new.items():
            words, before = _words(tensor), _words(old[name])
            at = np.flatnonzero(words != before)
            rows, cols = np.divmod(at, _row_length(tensor))
            row_steps = np.diff(rows, prepend=0)
            # In a new row the column counts from the left edge, so it is never negative.
            col_steps = np.where(np.diff(rows, prepend=-1) == 0, np.diff(cols, prepend=0), cols)
            parts = [_narrow(row_steps, np.uint8), _narrow(col_steps, np.uint16), words[at]]
            header.append([name, len(at), *(part.dtype.str for part in parts)])
            streams += [part.tobytes() for part in parts]
        text = json.dumps(header).encode()
        return [_zstd().compressor.compress(b"".join([struct.pack("<Q", len(text)), text, *streams]))]

    def decode(self, blobs: Sequence[bytes], new: State, target: Target, *, workers: int) -> None:
        plain = _zstd().decompressor.decompress(blobs[0])
        length = struct.unpack_from("<Q", plain)[0]
        at = 8 + length
        for name, count, *dtypes in json.loads(plain[8:at]):
            parts = []
            for dtype in dtypes:
                parts.append(np.frombuffer(plain, dtype, count, at))
                at += parts[-1].nbytes
            if not count:
                continue
            row_steps, col_steps, values = parts
            rows, cols = np.cumsum(row_steps, dtype=np.int64), np.cumsum(col_steps, dtype=np.int64)
            begins = np.flatnonzero(row_steps)
            # What the running sum had reached before each row began belongs to the rows before it.
            before = np.zeros(count, np.int64)
            before[begins] = np.diff(np.concatenate([[0], cols[begins] - col_steps[begins]]))
            tensor = new[name]
            _words(Tensor(dtype=tensor.dtype, shape=tensor.shape, data=target[name]))[
                rows * _row_length(tensor) + cols - np.cumsum(before)
            ] = values


def codecs() -> list[Codec]:
    """Ours first, then the peers."""
    return [
        ByUnit(name="cgr", code=_ours, restore=_restore_ours, by_cell=True),
        ByUnit(name="sparse", code=_sparse, restore=_restore_ours, by_cell=True),
        ByUnit(name="full", code=_full, restore=_restore_ours, by_cell=True, needs_old=False),
        ByUnit(name="raw", code=lambda unit, old, new: new.tobytes(), restore=_overwrite, needs_old=False),
        ByUnit(name="xor+zstd-1", code=_xor_zstd, restore=_restore_xor_zstd),
        ByUnit(name="xor+lz4", code=_xor_lz4, restore=_restore_xor_lz4, package="lz4"),
        PulseLayout(),
        ByUnit(name="trl layout", code=_index_value, restore=_restore_index_value),
        ByUnit(name="zstd-1 full", code=_zstd_full, restore=_restore_zstd_full, needs_old=False),
        ByUnit(name="zipnn full", code=_zipnn, restore=_restore_zipnn, needs_old=False, package="zipnn", dtypes=_ZIPNN_DTYPES),
    ]


def _units_of(name: str, tensor: Tensor, *, by_cell: bool) -> Iterator[Unit]:
    spec = TensorSpec(name=name, dtype=tensor.dtype, shape=tensor.shape)
    count = spec.num_elements
    for cell in spec.cells(CHUNK_ELEMENTS) if by_cell else (Cell(0, 1, count, count),):
        yield Unit(name, tensor.dtype, spec.item_bytes, cell)


def _in_bytes(unit: Unit) -> Cell:
    cell, size = unit.cell, unit.item_bytes
    return Cell(cell.start * size, cell.rows, cell.width * size, cell.stride * size)


def _bytes_of(unit: Unit, data: np.ndarray) -> np.ndarray:
    return cell_bytes(data, unit.cell, unit.item_bytes)


def _ours(unit: Unit, old: np.ndarray, new: np.ndarray) -> bytes:
    return chunk.encode(new, old, unit.dtype).data


def _sparse(unit: Unit, old: np.ndarray, new: np.ndarray) -> bytes:
    return chunk.encode(new, old, unit.dtype, codec=chunk.Codec.SPARSE).data


def _full(unit: Unit, old: np.ndarray, new: np.ndarray) -> bytes:
    return chunk.encode(new, None, unit.dtype).data


def _restore_ours(unit: Unit, blob: bytes, held: np.ndarray) -> None:
    chunk.decode_into(blob, dtype=unit.dtype, target=held)


def _overwrite(unit: Unit, blob: bytes, held: np.ndarray) -> None:
    held[:] = np.frombuffer(blob, np.uint8)


class _Zstd(threading.local):
    """One of each for a thread: neither may be used by two at once."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=_LEVEL)
        self.decompressor = zstandard.ZstdDecompressor()
        self._buffer = np.empty(0, np.uint8)

    def xor(self, old: np.ndarray, new: np.ndarray) -> np.ndarray:
        if self._buffer.size < old.size:
            self._buffer = np.empty(old.size, np.uint8)
        return np.bitwise_xor(old, new, out=self._buffer[: old.size])


_thread_zstd = _Zstd()


def _zstd() -> _Zstd:
    return _thread_zstd


def _xor_zstd(unit: Unit, old: np.ndarray, new: np.ndarray) -> bytes:
    return _zstd().compressor.compress(_zstd().xor(old, new).data)


def _restore_xor_zstd(unit: Unit, blob: bytes, held: np.ndarray) -> None:
    np.bitwise_xor(held, np.frombuffer(_zstd().decompressor.decompress(blob), np.uint8), out=held)


def _xor_lz4(unit: Unit, old: np.ndarray, new: np.ndarray) -> bytes:
    import lz4.block

    return lz4.block.compress(_zstd().xor(old, new).data)


def _restore_xor_lz4(unit: Unit, blob: bytes, held: np.ndarray) -> None:
    import lz4.block

    np.bitwise_xor(held, np.frombuffer(lz4.block.decompress(blob), np.uint8), out=held)


def _zstd_full(unit: Unit, old: np.ndarray, new: np.ndarray) -> bytes:
    return _zstd().compressor.compress(new.data)


def _restore_zstd_full(unit: Unit, blob: bytes, held: np.ndarray) -> None:
    held[:] = np.frombuffer(_zstd().decompressor.decompress(blob), np.uint8)


def _zipnn(unit: Unit, old: np.ndarray, new: np.ndarray) -> bytes:
    from zipnn import ZipNN

    # It writes into what it is given, so it gets a copy.
    return bytes(ZipNN(input_format="byte", bytearray_dtype=unit.dtype, threads=1).compress(bytearray(new.data)))


def _restore_zipnn(unit: Unit, blob: bytes, held: np.ndarray) -> None:
    from zipnn import ZipNN

    held[:] = np.frombuffer(ZipNN(input_format="byte", bytearray_dtype=unit.dtype, threads=1).decompress(blob), np.uint8)


def _index_value(unit: Unit, old: np.ndarray, new: np.ndarray) -> bytes:
    """int32 places, then values, uncompressed."""
    width = min(8, unit.item_bytes)
    words = new.view(f"<u{width}")
    at = np.flatnonzero(words != old.view(f"<u{width}"))
    return at.astype(np.int32).tobytes() + words[at].tobytes()


def _restore_index_value(unit: Unit, blob: bytes, held: np.ndarray) -> None:
    width = min(8, unit.item_bytes)
    count = len(blob) // (4 + width)
    held.view(f"<u{width}")[np.frombuffer(blob, np.int32, count)] = np.frombuffer(blob, f"<u{width}", count, 4 * count)


def _words(tensor: Tensor) -> np.ndarray:
    return tensor.data.view(f"<u{min(8, _item_bytes(tensor))}")


def _item_bytes(tensor: Tensor) -> int:
    return TensorSpec(name="", dtype=tensor.dtype, shape=tensor.shape).item_bytes


def _row_length(tensor: Tensor) -> int:
    spec = TensorSpec(name="", dtype=tensor.dtype, shape=tensor.shape)
    return max(1, spec.matrix[1] * spec.item_bytes // min(8, spec.item_bytes))


def _narrow(steps: np.ndarray, small: type[np.unsignedinteger]) -> np.ndarray:
    fits = not steps.size or int(steps.max()) <= np.iinfo(small).max
    return steps.astype(small if fits else np.int32)
