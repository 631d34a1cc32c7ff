"""What lies where in a GGUF file: no count, length or offset is believed before it is checked against the file's size.

Knows the container only; what the metadata and the tensors mean for a model is `gguf`'s business.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

MAGIC = b"GGUF"
VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_DIMS, _MAX_NAME = 4, 256


class GGUFError(ValueError):
    """A GGUF file that is damaged, or holds something this version does not import."""


class TensorPlace(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of the file, not yet read."""

    kind: str
    """Name of the quantisation, such as Q4_K."""
    shape: tuple[int, ...]
    """Outermost dimension first, as torch has it; the file states the reverse."""
    offset: int
    """From the start of the file, in bytes."""
    num_bytes: int


class GGUFFile:
    """An open file: `metadata` by key, `tensors` by name, values on request."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._gguf = _library()
        if not path.is_file():
            raise FileNotFoundError(f"no GGUF file at {path}")
        if path.stat().st_size < 24:
            raise GGUFError(f"{path} is no GGUF file: {path.stat().st_size} bytes are less than a header")
        self._bytes = np.memmap(path, mode="r", dtype=np.uint8)
        head = _Cursor(path, self._bytes)
        if head.take(4) != MAGIC:
            raise GGUFError(f"{path} is no GGUF file: it does not start with {MAGIC.decode()!r}")
        version = head.number("I")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            why = "it is big-endian" if swapped else f"it has format version {version}, this version reads 2 and 3"
            raise GGUFError(f"{path} cannot be read: {why}; convert the model to GGUF again with a present llama.cpp")
        # The least an entry can take: a tensor has length, dimension count, one dimension, kind and offset; a pair has length, type, value.
        num_tensors = head.count(least_bytes=32, what="tensors")
        num_pairs = head.count(least_bytes=13, what="metadata keys")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = head.name()
            if key in self.metadata:
                raise GGUFError(f"{path} is damaged: it states {key!r} twice")
            self.metadata[key] = head.value(key)
        self.tensors = self._places(head, num_tensors)

    def _places(self, head: _Cursor, num_tensors: int) -> dict[str, TensorPlace]:
        rows = [
            (head.name(), [head.number("Q") for _ in range(head.dims())], head.number("I"), head.number("Q")) for _ in range(num_tensors)
        ]
        align = self.metadata.get("general.alignment", 32)
        if not isinstance(align, int) or align < 1 or align & (align - 1):
            raise GGUFError(f"{self.path} is damaged: general.alignment is {align!r}, not a power of two")
        start = -(-head.at // align) * align
        found: dict[str, TensorPlace] = {}
        for name, dims, number, offset in rows:
            if name in found:
                raise GGUFError(f"{self.path} is damaged: it has the tensor {name!r} twice")
            found[name] = self._place(name, tuple(reversed(dims)), number, start + offset)
        end, before = 0, ""
        for name, place in sorted(found.items(), key=lambda item: item[1].offset):
            if place.offset < end:
                raise GGUFError(f"{self.path} is damaged: the tensors {before!r} and {name!r} overlap")
            end, before = place.offset + place.num_bytes, name
        return found

    def _place(self, name: str, shape: tuple[int, ...], number: int, offset: int) -> TensorPlace:
        kinds, sizes = self._gguf.GGMLQuantizationType, self._gguf.GGML_QUANT_SIZES
        if number not in set(kinds) or kinds(number) not in sizes:
            raise GGUFError(
                f"{self.path}: tensor {name!r} has quantisation number {number}, which the installed gguf package does not know"
            )
        kind = kinds(number)
        block, block_bytes = sizes[kind]
        num_elements = math.prod(shape)
        if not num_elements or shape[-1] % block:
            raise GGUFError(
                f"{self.path} is damaged: tensor {name!r} of kind {kind.name} has shape {shape}; rows come in blocks of {block}"
            )
        place = TensorPlace(kind=kind.name, shape=shape, offset=offset, num_bytes=num_elements // block * block_bytes)
        if offset + place.num_bytes > len(self._bytes):
            raise GGUFError(
                f"{self.path} is cut short or damaged: tensor {name!r} ends at byte {offset + place.num_bytes:,} of {len(self._bytes):,}; "
                "fetch it again"
            )
        return place

    def read(self, name: str, part: int | None = None) -> np.ndarray:
        """One tensor in float32, or of a stack its entry `part`."""
        place = self.tensors[name]
        kind = self._gguf.GGMLQuantizationType[place.kind]
        shape, offset, num_bytes = place.shape, place.offset, place.num_bytes
        if part is not None:
            shape, num_bytes = shape[1:], num_bytes // shape[0]
            offset += part * num_bytes
        # A copy: the caller may write to it, and the map is the file.
        raw = np.array(self._bytes[offset : offset + num_bytes])
        rows = raw.reshape(*shape[:-1], num_bytes // math.prod(shape[:-1]))
        try:
            # Damaged scales overflow; what is not finite the caller refuses.
            with np.errstate(all="ignore"):
                return np.asarray(self._gguf.dequantize(rows, kind), dtype=np.float32).reshape(shape)
        except NotImplementedError as error:
            raise GGUFError(
                f"{self.path}: tensor {name!r} is quantised as {place.kind}, which the installed gguf package cannot read; "
                "fetch the model in another quantisation, such as Q8_0 or BF16"
            ) from error


class _Cursor:
    """Reads forward through the header; what would lie beyond the end is refused before memory is taken for it."""

    def __init__(self, path: Path, data: np.ndarray) -> None:
        self.path, self.at = path, 0
        self._data, self._size = memoryview(data.data), len(data)

    def take(self, num_bytes: int) -> bytes:
        if num_bytes > self._size - self.at:
            raise GGUFError(f"{self.path} is cut short or damaged: at byte {self.at:,} of {self._size:,} it asks for {num_bytes:,} more")
        self.at += num_bytes
        return bytes(self._data[self.at - num_bytes : self.at])

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(code)))[0]

    def count(self, *, least_bytes: int, what: str) -> int:
        asked = self.number("Q")
        if asked * least_bytes > self._size - self.at:
            raise GGUFError(f"{self.path} is cut short or damaged: it claims {asked:,} {what}, more than its {self._size:,} bytes can hold")
        return asked

    def dims(self) -> int:
        asked = self.number("I")
        if not 1 <= asked <= _MAX_DIMS:
            raise GGUFError(f"{self.path} is damaged: a tensor claims {asked} dimensions, the format allows 1 to {_MAX_DIMS}")
        return asked

    def name(self) -> str:
        found = self.string()
        if not 1 <= len(found) <= _MAX_NAME:
            raise GGUFError(f"{self.path} is damaged: before byte {self.at:,} is a name of {len(found):,} characters")
        return found

    def string(self) -> str:
        raw = self.take(self.number("Q"))
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise GGUFError(f"{self.path} is damaged: the text before byte {self.at:,} is not UTF-8") from error

    def value(self, key: str) -> Any:
        kind = self.number("I")
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind != _ARRAY:
            raise GGUFError(f"{self.path} is damaged: {key!r} has the unknown type {kind}")
        kind = self.number("I")
        if kind == _STRING:
            return [self.string() for _ in range(self.count(least_bytes=8, what=f"entries of {key!r}"))]
        if kind not in _SCALARS:
            raise GGUFError(f"{self.path} is damaged: {key!r} is a list of type {kind}, which nothing here reads")
        size = struct.calcsize(_SCALARS[kind])
        num = self.count(least_bytes=size, what=f"entries of {key!r}")
        return list(struct.unpack(f"<{num}{_SCALARS[kind]}", self.take(num * size)))


def _library() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise ValueError(f"reading GGUF files needs the gguf package ({error}): pip install 'rollmill[gguf]'") from error
    return gguf
