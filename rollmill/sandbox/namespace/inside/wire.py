"""The frames between an owner and PID 1 of its box: two lengths, a JSON header, raw bytes."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

LENGTHS = struct.Struct("<II")
LAST_WORDS = -1
"""The id of the frame in which PID 1 says why it ends; answers carry the id of their request."""
Header = dict[str, Any]


def pack(header: Header, payload: bytes = b"") -> bytes:
    head = json.dumps(header).encode()
    return LENGTHS.pack(len(head), len(payload)) + head + payload


def take(buffer: bytearray) -> tuple[Header, bytes] | None:
    """Remove the first whole frame from the buffer; None when it has not arrived in full."""
    if len(buffer) < LENGTHS.size:
        return None
    num_head, num_payload = LENGTHS.unpack_from(buffer)
    end = LENGTHS.size + num_head + num_payload
    if len(buffer) < end:
        return None
    with memoryview(buffer) as view:
        head = bytes(view[LENGTHS.size : LENGTHS.size + num_head])
        payload = bytes(view[LENGTHS.size + num_head : end])
    del buffer[:end]
    return json.loads(head), payload


def receive(sock: socket.socket) -> tuple[Header, bytes] | None:
    """The next frame from a blocking socket; None when the other side has gone."""
    lengths = _exactly(sock, LENGTHS.size)
    if lengths is None:
        return None
    num_head, num_payload = LENGTHS.unpack(lengths)
    head = _exactly(sock, num_head)
    payload = _exactly(sock, num_payload)
    if head is None or payload is None:
        return None
    return json.loads(head), payload


def _exactly(sock: socket.socket, count: int) -> bytes | None:
    got = bytearray(count)
    view = memoryview(got)
    while view:
        num = sock.recv_into(view)
        if num == 0:
            return None
        view = view[num:]
    return bytes(got)
