"""The order of one box as its owner packs it: what it is stacked on, who lives in it, and its bounds."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntFlag

from .. import wire

_HEAD = struct.Struct("<IIIIIQQdHHHH")


class OrderFlag(IntFlag):
    ROOT = 1
    EGRESS = 2
    BARE = 4
    HOST = 8


@dataclass(frozen=True, kw_only=True)
class Order:
    flags: OrderFlag
    num_processes: int
    cpu_milli: int
    uid: int
    gid: int
    memory_bytes: int
    disk_bytes: int
    lifetime_s: float
    ports: tuple[int, ...]
    hostname: bytes
    workdir: bytes
    home: bytes
    trust: bytes
    """Certificates to add to those the box believes."""
    env: dict[bytes, bytes]
    layers: tuple[int, ...]
    """Descriptors, top first."""
    views: tuple[int, ...]


def parse(message: bytes, fds: list[int]) -> Order:
    """`fds`: those that came with the message, the socket not among them."""
    body = wire.Body(message)
    flags, num_processes, cpu_milli, uid, gid, memory, disk, lifetime_s, num_layers, num_views, num_ports, num_env = body.take(_HEAD)
    if num_layers + num_views != len(fds):
        raise ValueError(f"{num_layers} layers and {num_views} views came with {len(fds)} descriptors")
    ports = body.take(struct.Struct(f"<{num_ports}H"))
    hostname, workdir, home, trust = (body.text() for _ in range(4))
    env = {name: value for name, _, value in (body.text().partition(b"=") for _ in range(num_env))}
    if any(b"\0" in word for word in (hostname, workdir, home, *env, *env.values())):
        raise ValueError("a name holds a zero byte")
    return Order(
        flags=OrderFlag(flags), num_processes=num_processes, cpu_milli=cpu_milli, uid=uid, gid=gid, memory_bytes=memory, disk_bytes=disk,
        lifetime_s=lifetime_s, ports=ports, hostname=hostname, workdir=workdir, home=home, trust=trust, env=env,
        layers=tuple(fds[:num_layers]), views=tuple(fds[num_layers:]),
    )  # fmt: skip
