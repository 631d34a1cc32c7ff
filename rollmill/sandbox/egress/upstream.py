"""The way out: resolves an allowed name on the owner's side and connects to a public address of it, never to one of this network."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence

from rollmill.sandbox.egress.channel import Channel, SocketChannel, TlsChannel

Resolve = Callable[[str, int], Awaitable[Sequence[tuple[str, int]]]]
"""Name and port -> the addresses and ports to try, in order."""
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
MAX_ADDRESSES = 4


class NotPublic(PermissionError):
    """The name leads to this machine or its network, where credentials and control planes live."""


def is_public(address: str) -> bool:
    """Whether an address lies on the open internet, also when it is an IPv4 address wrapped in an IPv6 one."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF) if ip in NAT64 else None)
        if inner is not None:
            return is_public(str(inner))
    return ip.is_global and not ip.is_multicast


async def resolve_public(host: str, port: int) -> list[tuple[str, int]]:
    """By this machine's resolver, without its search list (hence the dot). The caller connects to what was checked here, so a name
    that changes in between gains nothing."""
    found = await asyncio.get_running_loop().getaddrinfo(f"{host}.", port, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    public = [address for address in addresses if is_public(address)]
    if not public:
        raise NotPublic(f"name leads to {addresses[0]}, which is not a public address")
    return [(address, port) for address in public]


class Upstream:
    """Opens connections to the outside; `resolve` and `tls` are given by those who bring their own outside, such as tests."""

    def __init__(self, *, connect_s: float, resolve: Resolve = resolve_public, tls: ssl.SSLContext | None = None) -> None:
        self.connect_s, self.resolve = connect_s, resolve
        self._tls = tls

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
            self._tls.set_alpn_protocols(["http/1.1"])
            self._tls.options |= ssl.OP_NO_RENEGOTIATION
        return self._tls

    async def connect(self, host: str, port: int, *, tls: bool = False, given: tuple[str, int] | None = None) -> Channel:
        """Raises NotPublic, or OSError (a time-out and a bad certificate are such) when the outside cannot be reached.

        `given`: the owner's own address and port for this host, which is believed.
        """
        async with asyncio.timeout(self.connect_s):
            raw = await self._dial([given] if given else await self.resolve(host, port))
            if not tls:
                return raw
            try:
                channel = TlsChannel(raw, self._context(), server_name=host)
                await channel.handshake()
            except BaseException:
                raw.close()
                raise
            return channel

    async def _dial(self, addresses: Sequence[tuple[str, int]]) -> SocketChannel:
        loop, last = asyncio.get_running_loop(), OSError("the name has no address")
        for address, port in addresses[:MAX_ADDRESSES]:
            sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
            sock.setblocking(False)
            try:
                # An address that drops packets must leave time for the next one.
                async with asyncio.timeout(max(self.connect_s / 2, 0.1)):
                    await loop.sock_connect(sock, (address, port))
            except OSError as e:
                sock.close()
                last = e
            except BaseException:
                sock.close()
                raise
            else:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return SocketChannel(sock)
        raise last
