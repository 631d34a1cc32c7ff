"""Reads W&B's offline files, only to learn which row is the newest that survived."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

FILE_HEADER_BYTES = 7
BLOCK_BYTES = 32768
RECORD_HEADER = struct.Struct("<IHB")
WHOLE, LAST = 1, 4


def newest_step(path: Path) -> int:
    """The greatest W&B step of any row in the file; -1 when it has none."""
    newest = -1
    for data in records(path.read_bytes()):
        record = Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            newest = max(newest, record.history.step.num)
    return newest


def records(data: bytes) -> Iterator[bytes]:
    """A LevelDB log behind a short header: blocks of (crc, length, kind, bytes); a record may go over several blocks.

    A record that was cut off by the death of its writer ends the file.
    """
    at, part = FILE_HEADER_BYTES, b""
    while at + RECORD_HEADER.size <= len(data):
        room = BLOCK_BYTES - at % BLOCK_BYTES
        if room < RECORD_HEADER.size:
            at += room
            continue
        _, length, kind = RECORD_HEADER.unpack_from(data, at)
        at += RECORD_HEADER.size + length
        if kind == 0 or at > len(data):
            return
        part += data[at - length : at]
        if kind in (WHOLE, LAST):
            yield part
            part = b""
