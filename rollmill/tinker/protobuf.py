"""The protobuf wire format, as far as messages of numbers, bytes, texts and messages need it; knows no message.

Written out because the few messages here are mostly raw arrays: reading them is slicing, and no generated code has to be kept.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_DOUBLE = struct.Struct("<d")


def fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """(field number, value) in order: integers of varints, raw views of everything else."""
    at, end = 0, len(message)
    while at < end:
        tag, at = _varint(message, at)
        number, kind = tag >> 3, tag & 7
        if kind == VARINT:
            value, at = _varint(message, at)
            yield number, value
            continue
        if kind == BYTES:
            size, at = _varint(message, at)
        elif kind in (FIXED64, FIXED32):
            size = 8 if kind == FIXED64 else 4
        else:
            raise ValueError(f"field {number} has wire type {kind}, which no message here uses")
        if at + size > end:
            raise ValueError(f"field {number} is cut off: {size} bytes are announced, {end - at} are left")
        yield number, message[at : at + size]
        at += size


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(message) or shift > 63:
            raise ValueError("the message ends within a number")
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value & (2**64 - 1), at


def as_bytes(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise ValueError(f"a number ({value}) stands where bytes are expected")
    return value


def as_text(value: int | memoryview) -> str:
    return str(as_bytes(value), "utf-8")


def as_int(value: int | memoryview) -> int:
    """A signed 64-bit integer."""
    if not isinstance(value, int):
        raise ValueError(f"{len(value)} bytes stand where a number is expected")
    return value - 2**64 if value >= 2**63 else value


def as_double(value: int | memoryview) -> float:
    if len(as_bytes(value)) != _DOUBLE.size:
        raise ValueError("a double needs 8 bytes")
    return float(_DOUBLE.unpack(as_bytes(value))[0])


def as_ints(value: int | memoryview) -> list[int]:
    """One entry of a repeated number, or a packed run of them."""
    if isinstance(value, int):
        return [as_int(value)]
    found, at = [], 0
    while at < len(value):
        one, at = _varint(value, at)
        found.append(as_int(one))
    return found


def varint(value: int) -> bytes:
    value &= 2**64 - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def number(field: int, value: int) -> bytes:
    return varint(field << 3 | VARINT) + varint(value)


def double(field: int, value: float) -> bytes:
    return varint(field << 3 | FIXED64) + _DOUBLE.pack(value)


def block(field: int, *parts: bytes) -> bytes:
    """Bytes, a text's bytes or a message, given in pieces."""
    return varint(field << 3 | BYTES) + varint(sum(map(len, parts))) + b"".join(parts)


def text(field: int, value: str) -> bytes:
    return block(field, value.encode())


def packed(field: int, values: Iterable[int]) -> bytes:
    return block(field, *map(varint, values))
