"""Reads the server name out of the first bytes of a TLS connection; pure, total over any bytes, it never decrypts."""

from __future__ import annotations

HANDSHAKE, CLIENT_HELLO = 0x16, 0x01
SERVER_NAME, HOST_NAME = 0, 0
MAX_RECORD = (1 << 14) + 256


class Malformed(ValueError):
    """Not a TLS hello."""


class _Bytes:
    """A cursor that refuses to read past the end."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, num: int) -> bytes:
        if self.at + num > len(self.data):
            raise Malformed("the hello is cut short")
        self.at += num
        return self.data[self.at - num : self.at]

    def number(self, num: int) -> int:
        return int.from_bytes(self.take(num), "big")

    def block(self, num: int) -> _Bytes:
        """What a length of `num` bytes announces."""
        return _Bytes(self.take(self.number(num)))

    def __bool__(self) -> bool:
        return self.at < len(self.data)


def read_hello(data: bytes) -> str | None:
    """The server name as sent, empty when there is none; None: more bytes are needed."""
    hello, at = b"", 0
    while len(hello) < 4 or len(hello) < 4 + int.from_bytes(hello[1:4], "big"):
        if hello and hello[0] != CLIENT_HELLO:
            raise Malformed("the first message is not a hello")
        if data[at : at + 1] not in (b"", bytes([HANDSHAKE])):
            raise Malformed("not a TLS handshake")
        if len(data) < at + 5:
            return None
        length = int.from_bytes(data[at + 3 : at + 5], "big")
        if data[at + 1] != 3 or not 0 < length <= MAX_RECORD:
            raise Malformed("not a TLS record")
        hello += data[at + 5 : at + 5 + length]
        at += 5 + length
        if len(data) < at:
            return None
    if hello[0] != CLIENT_HELLO:
        raise Malformed("the first message is not a hello")
    return _server_name(_Bytes(hello[4 : 4 + int.from_bytes(hello[1:4], "big")]))


def _server_name(hello: _Bytes) -> str:
    hello.take(2 + 32)
    hello.block(1)
    hello.block(2)
    hello.block(1)
    if not hello:
        return ""
    found: list[str] = []
    extensions = hello.block(2)
    while extensions:
        kind, body = extensions.number(2), extensions.block(2)
        if kind != SERVER_NAME:
            continue
        names = body.block(2)
        while names:
            form, name = names.number(1), names.block(2).data
            if form == HOST_NAME:
                found.append(name.decode("ascii", "backslashreplace"))
    # Two names could be read as the first here and as the second by the server.
    if len(found) > 1:
        raise Malformed("more than one server name")
    return found[0] if found else ""
