"""The network namespace of a box: its loopback, and the ports on which its owner answers whatever address a program dials."""

from __future__ import annotations

import fcntl
import os
import socket
import struct

from . import kernel as k

_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_NLMSG = struct.Struct("=IHHII")
_RTMSG = struct.Struct("=8BI")
_RTATTR = struct.Struct("=HHI")
_RTM_NEWROUTE, _RTA_OIF = 24, 4
_REQUEST_ACK_REPLACE_CREATE = 0x1 | 0x4 | 0x100 | 0x400
_RT_TABLE_LOCAL, _RTPROT_BOOT, _RT_SCOPE_HOST, _RTN_LOCAL = 255, 3, 254, 2
_LOOPBACK = 1
"""The index of the first device of every network namespace."""
_IP_PKTINFO = 8
_NAME_PORT = 53
_BACKLOG = 128


def loopback_up() -> None:
    with k.step("bring the loopback up"), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = bytearray(struct.pack("16sH22x", b"lo", 0))
        fcntl.ioctl(probe, _SIOCGIFFLAGS, request)
        (flags,) = struct.unpack_from("H", request, 16)
        fcntl.ioctl(probe, _SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", flags | _IFF_UP))


def open_ports(ports: tuple[int, ...]) -> tuple[int, ...]:
    """Listening descriptors in the order of the ports, then names by datagram and by stream."""
    _make_every_address_local()
    with k.step("listen on a port"):
        return (*(_listen(port) for port in ports), _hear_names(), _listen(_NAME_PORT))


def _make_every_address_local() -> None:
    """Every IPv4 address becomes local, so that our listeners are whatever a program dials."""
    route = _RTMSG.pack(socket.AF_INET, 0, 0, 0, _RT_TABLE_LOCAL, _RTPROT_BOOT, _RT_SCOPE_HOST, _RTN_LOCAL, 0)
    body = route + _RTATTR.pack(_RTATTR.size, _RTA_OIF, _LOOPBACK)
    head = _NLMSG.pack(_NLMSG.size + len(body), _RTM_NEWROUTE, _REQUEST_ACK_REPLACE_CREATE, 1, 0)
    with k.step("add a route"), socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as kernel:
        kernel.send(head + body)
        (number,) = struct.unpack_from("=i", kernel.recv(4096), _NLMSG.size)
        if number:
            raise OSError(-number, os.strerror(-number))


def _listen(port: int) -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("0.0.0.0", port))
        sock.listen(_BACKLOG)
        return sock.detach()


def _hear_names() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.IPPROTO_IP, _IP_PKTINFO, 1)  # which address was asked: the answer must come from it
        sock.bind(("0.0.0.0", _NAME_PORT))
        return sock.detach()
