"""The system-call filter, run by a small interpreter of the instructions it uses, for both machine types."""

from __future__ import annotations

import errno
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.sandbox.namespace.filter import program

ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOW, ERRNO = 0x7FFF0000, 0x00050000


def verdict(code: bytes, arch: int, number: int, *arguments: int) -> int:
    given = (*arguments, 0, 0, 0)
    words = {0: number, 4: arch, 16: given[0] & 0xFFFFFFFF, 24: given[1] & 0xFFFFFFFF, 32: given[2] & 0xFFFFFFFF}
    here, accumulator = 0, 0
    while True:
        op, yes, no, operand = struct.unpack_from("<HBBI", code, here * 8)
        here += 1
        match op:
            case 0x20:
                accumulator = words[operand]
            case 0x15:
                here += yes if accumulator == operand else no
            case 0x35:
                here += yes if accumulator >= operand else no
            case 0x45:
                here += yes if accumulator & operand else no
            case 0x06:
                return operand


@pytest.mark.parametrize(
    ("machine", "name", "number", "argument", "expected"),
    [
        ("x86_64", "read", 0, 0, ALLOW),
        ("aarch64", "read", 63, 0, ALLOW),
        ("x86_64", "mount", 165, 0, ERRNO | errno.EPERM),
        ("aarch64", "mount", 40, 0, ERRNO | errno.EPERM),
        ("x86_64", "clone thread", 56, 0x3D0F00, ALLOW),
        ("x86_64", "clone user namespace", 56, 0x10000011, ERRNO | errno.EPERM),
        ("aarch64", "clone mount namespace", 220, 0x20011, ERRNO | errno.EPERM),
        ("x86_64", "clone3", 435, 0, ERRNO | errno.ENOSYS),
        ("x86_64", "inet socket", 41, 2, ALLOW),
        ("x86_64", "vsock", 41, 40, ERRNO | errno.EAFNOSUPPORT),
        ("aarch64", "vsock", 198, 40, ERRNO | errno.EAFNOSUPPORT),
        ("x86_64", "x32 call", 0x40000001, 0, ERRNO | errno.EPERM),
        ("x86_64", "SCTP socket", 41, (2, 1, 132), ERRNO | errno.EPROTONOSUPPORT),
        ("x86_64", "TCP socket", 41, (2, 1, 6), ALLOW),
        ("x86_64", "unix socket", 41, (1, 1, 0), ALLOW),
        ("x86_64", "route socket", 41, (16, 3, 0), ALLOW),
        ("aarch64", "netfilter socket", 198, (16, 3, 12), ERRNO | errno.EPROTONOSUPPORT),
        ("x86_64", "asynchronous I/O of the whole machine", 206, 8, ERRNO | errno.ENOSYS),
        ("aarch64", "asynchronous I/O of the whole machine", 0, 8, ERRNO | errno.ENOSYS),
        ("x86_64", "a call newer than the table", 480, 0, ERRNO | errno.ENOSYS),
        ("x86_64", "own limit", 302, (0, 7), ALLOW),
        ("x86_64", "a child's limit", 302, (17, 7), ALLOW),
        ("x86_64", "the first process's limit", 302, (1, 7), ERRNO | errno.EPERM),
        ("aarch64", "the first process's scheduler", 119, (1, 5), ERRNO | errno.EPERM),
        ("x86_64", "own priority", 141, (0, 0, 5), ALLOW),
        ("x86_64", "the first process's priority", 141, (0, 1, 19), ERRNO | errno.EPERM),
        ("x86_64", "the priority of its user", 141, (2, 0, 19), ERRNO | errno.EPERM),
        ("x86_64", "the I/O priority of a group", 251, (2, 0, 7), ALLOW),
        ("x86_64", "the I/O priority of its user", 251, (3, 0, 7), ERRNO | errno.EPERM),
    ],
)
def test_filter_decides(machine, name, number, argument, expected):
    arguments = argument if isinstance(argument, tuple) else (argument,)
    assert verdict(program(machine), ARCH[machine], number, *arguments) == expected, name


@given(st.sampled_from(sorted(ARCH)), st.integers(0, 2**32 - 1), st.integers(0, 1000), st.integers(0, 2**32 - 1))
def test_filter_refuses_every_call_of_a_foreign_machine_type(machine, arch, number, argument):
    if arch != ARCH[machine]:
        assert verdict(program(machine), arch, number, argument) == ERRNO | errno.EPERM


def test_unknown_machine_type_has_no_filter():
    assert program("riscv64") is None
