"""The server name is found in real hellos however they are cut, and nothing else is taken for one."""

from __future__ import annotations

import ssl

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.sandbox.egress.hello import Malformed, read_hello

FIXED = settings(derandomize=True, max_examples=200, deadline=None)


def hello(name: str | None) -> bytes:
    """What the ssl module sends first."""
    context = ssl.create_default_context()
    context.check_hostname = False
    inward, outward = ssl.MemoryBIO(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(inward, outward, server_hostname=name).do_handshake()
    return outward.read()


HELLO = hello("api.example.org")


def records(message: bytes, size: int) -> bytes:
    return b"".join(b"\x16\x03\x01" + len(p).to_bytes(2, "big") + p for p in (message[i : i + size] for i in range(0, len(message), size)))


def test_the_server_name_is_read() -> None:
    assert read_hello(HELLO) == read_hello(HELLO + b"more") == "api.example.org"
    assert read_hello(hello(None)) == ""


def test_a_hello_that_is_still_coming_asks_for_more() -> None:
    assert {read_hello(HELLO[:i]) for i in range(len(HELLO))} == {None}


@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_hello_spread_over_records_is_read(size: int) -> None:
    assert read_hello(records(HELLO[5:], size)) == "api.example.org"


def test_two_server_names_are_refused() -> None:
    name = b"\0\0\x05a.org"
    names = name + name
    extension = b"\0\0" + (len(names) + 2).to_bytes(2, "big") + len(names).to_bytes(2, "big") + names
    body = b"\x03\x03" + b"r" * 32 + b"\0" + b"\0\x02\x13\x01" + b"\x01\0" + len(extension).to_bytes(2, "big") + extension
    with pytest.raises(Malformed, match="more than one"):
        read_hello(records(b"\x01" + len(body).to_bytes(3, "big") + body, 1000))


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\n", b"\x16\x02\0\0\x05hello", b"\x16\x03\x01\0\0", b"\x16\x03\x01\0\x04\x02\0\0\0", b"\x80\x2e\1\3\1"]
)
def test_what_is_no_hello_is_refused(data: bytes) -> None:
    with pytest.raises(Malformed):
        read_hello(data)


@FIXED
@given(st.binary(max_size=200), st.integers(0, len(HELLO) - 1), st.integers(0, 255))
def test_any_bytes_give_a_name_nothing_or_malformed(data: bytes, at: int, byte: int) -> None:
    for bad in (data, b"\x16\x03\x01" + data, HELLO[:at] + bytes([byte]) + HELLO[at + 1 :], HELLO[:at] + data):
        try:
            found = read_hello(bad)
        except Malformed:
            continue
        assert found is None or found.isascii()
