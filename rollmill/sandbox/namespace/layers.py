"""Layers as descriptors of detached mounts, counted by who uses them; and the order that stacks them into a box."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntFlag

import msgspec

from rollmill.sandbox.agent import wire
from rollmill.sandbox.namespace import template
from rollmill.sandbox.records import SandboxSpec, Service

_ORDER = struct.Struct("<IIIIIQQdHHHH")
MAX_PORTS = 32
MAX_STACK = 240
"""One message carries 253 descriptors; the socket and views need some."""
_HTTP_PORTS = (80, 443)


class Layer:
    """One frozen layer; its mount lives until nobody uses it, and then frees what it held.

    `fd` is its descriptor, or where the opener keeps layers its number there, which `drop` gives back.
    """

    def __init__(self, fd: int, drop: Callable[[int], None] = os.close) -> None:
        self.fd = fd
        self._drop = drop
        self._num_users = 1

    def use(self) -> Layer:
        assert self._num_users > 0, "a layer was used after it was let go"
        self._num_users += 1
        return self

    def let_go(self) -> None:
        self._num_users -= 1
        if self._num_users == 0:
            self._drop(self.fd)
            self.fd = -1


Stack = tuple[Layer, ...]
"""Top first."""


def use(stack: Iterable[Layer]) -> Stack:
    return tuple(layer.use() for layer in stack)


def let_go(stack: Iterable[Layer]) -> None:
    for layer in stack:
        layer.let_go()


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What a box is stacked on and who lives in it: the host's image, or one from the store."""

    is_host: bool = True
    digest: str = ""
    """The image's; empty for the host's."""
    user_id: int = template.USER_ID
    group_id: int = template.USER_ID
    home: str = template.HOME
    workdir: str = template.WORK
    hostname: str = template.HOSTNAME
    shell: tuple[str, ...] = ("/bin/bash", "-c")
    env: Mapping[str, str] = msgspec.field(default_factory=lambda: template.ENVIRON)
    services: tuple[Service, ...] = ()

    def num_own(self, num_layers: int) -> int:
        """How many layers of a stack are not the image's."""
        return num_layers if self.is_host else num_layers - 1


class OrderFlag(IntFlag):
    ROOT = 1
    EGRESS = 2
    BARE = 4
    HOST = 8
    LIVE = 16


def ports_of(spec: SandboxSpec) -> tuple[int, ...]:
    """Ports that are answered inside the box: those of the web, so that a refusal can be told, and those that are allowed."""
    if spec.egress is None:
        return ()
    ports = tuple(sorted({*_HTTP_PORTS, *(rule.port for rule in spec.egress.allow)}))
    if len(ports) > MAX_PORTS:
        raise ValueError(f"an egress list with {len(ports)} different ports is longer than {MAX_PORTS}; name fewer ports")
    return ports


def order(spec: SandboxSpec, machine: Machine, *, num_layers: int, num_views: int = 0, bare: bool = False, trust: str = "") -> bytes:
    flags = OrderFlag.HOST if machine.is_host else OrderFlag(0)
    user, group, env = machine.user_id, machine.group_id, dict(machine.env)
    if spec.root:
        flags |= OrderFlag.ROOT
        user = group = 0
        env |= {"HOME": "/root", "USER": "root", "LOGNAME": "root"}
    if spec.egress is not None:
        flags |= OrderFlag.EGRESS
    if bare:
        flags |= OrderFlag.BARE
    if spec.live:
        flags |= OrderFlag.LIVE
    ports = ports_of(spec)
    words: Sequence[str] = (spec.hostname or machine.hostname, machine.workdir, env.get("HOME", machine.home), trust)
    return (
        _ORDER.pack(
            flags, spec.num_processes, round(spec.cpus * 1000), user, group, spec.memory_bytes, spec.disk_bytes, spec.lifetime_s,
            num_layers, num_views, len(ports), len(env),
        )
        + struct.pack(f"<{len(ports)}H", *ports)
        + wire.texts(word.encode(errors="surrogateescape") for word in words)
        + wire.texts(f"{name}={value}".encode(errors="surrogateescape") for name, value in env.items())
    )  # fmt: skip
