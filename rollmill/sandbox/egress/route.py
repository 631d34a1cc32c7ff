"""The rtnetlink message that makes every IPv4 address local to a network namespace; plain bytes, sent by whoever lives inside."""

from __future__ import annotations

import ipaddress
import struct

RTM_NEWROUTE = 24
NLM_F_REQUEST, NLM_F_ACK, NLM_F_REPLACE, NLM_F_CREATE = 0x1, 0x4, 0x100, 0x400
AF_INET = 2
RT_TABLE_LOCAL, RTPROT_STATIC, RT_SCOPE_HOST, RTN_LOCAL = 255, 4, 254, 2
RTA_DST, RTA_OIF, RTA_PREFSRC = 1, 4, 7
LOOPBACK_INDEX = 1
"""Loopback is the first device of every network namespace."""


def local_route(destination: str = "0.0.0.0/0", *, source: str = "", index: int = LOOPBACK_INDEX, sequence: int = 1) -> bytes:
    """`ip route replace local DESTINATION dev lo [src SOURCE]`, for an AF_NETLINK socket of NETLINK_ROUTE; lo must be up.

    The kernel answers with one NLMSG_ERROR whose code is 0. `source` is what programs see as their own address; it must itself
    be local already, so send `local_route(f"{source}/32")` first. Without it a connection's own address is the one it dialled.
    """
    network = ipaddress.IPv4Network(destination)
    # struct rtmsg: family, dst_len, src_len, tos, table, protocol, scope, type, flags
    body = struct.pack("=8BI", AF_INET, network.prefixlen, 0, 0, RT_TABLE_LOCAL, RTPROT_STATIC, RT_SCOPE_HOST, RTN_LOCAL, 0)
    # struct rtattr: length with its own header, type, value; every value here is four bytes, so none needs padding
    if network.prefixlen:
        body += struct.pack("=HH4s", 8, RTA_DST, network.network_address.packed)
    body += struct.pack("=HHi", 8, RTA_OIF, index)
    if source:
        body += struct.pack("=HH4s", 8, RTA_PREFSRC, ipaddress.IPv4Address(source).packed)
    flags = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE | NLM_F_REPLACE
    # struct nlmsghdr: length, type, flags, sequence, port (0: the kernel)
    return struct.pack("=IHHII", 16 + len(body), RTM_NEWROUTE, flags, sequence, 0) + body
