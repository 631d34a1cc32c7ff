"""The way out leads to the open internet only, whatever a name claims."""

from __future__ import annotations

import asyncio
import socket

import pytest
from egress_fakes import in_time

from rollmill.sandbox.egress.upstream import NotPublic, Upstream, is_public, resolve_public

PRIVATE = """127.0.0.1 10.1.2.3 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 0.0.0.0 224.0.0.1 255.255.255.255 198.18.0.1 240.0.0.1
    ::1 :: fe80::1 fe80::1%eth0 fc00::1 fd00:ec2::254 ff02::1 ::ffff:127.0.0.1 ::ffff:169.254.169.254 64:ff9b::a9fe:a9fe 2002:7f00:1::
    2001::1 nonsense""".split()


@pytest.mark.parametrize("address", PRIVATE)
def test_addresses_of_this_network_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["1.1.1.1", "93.184.216.34", "2606:4700::1111", "::ffff:1.1.1.1", "64:ff9b::101:101"])
def test_addresses_of_the_internet_are_public(address: str) -> None:
    assert is_public(address)


def named(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """The machine's resolver gives these addresses for every name."""

    async def answer(self: object, host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        assert host.endswith("."), "the search list of the machine must not be used"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", answer)


def test_a_public_name_that_leads_inside_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    named(monkeypatch, "169.254.169.254", "10.0.0.1")
    with pytest.raises(NotPublic, match=r"169\.254\.169\.254"):
        in_time(Upstream(connect_s=5).connect("metadata.example", 80))


def test_of_mixed_addresses_only_the_public_ones_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    named(monkeypatch, "10.0.0.1", "1.1.1.1", "1.1.1.1", "127.0.0.1")
    assert in_time(resolve_public("mixed.example", 80)) == [("1.1.1.1", 80)]


def test_the_next_address_is_tried_when_one_refuses() -> None:
    async def scene() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as gone:
            closed = gone.getsockname()
            gone.close()

            async def resolve(host: str, port: int) -> list[tuple[str, int]]:
                return [closed, server.getsockname()]

            (await Upstream(connect_s=5, resolve=resolve).connect("a.org", 80)).close()
            with pytest.raises(ConnectionRefusedError):
                await Upstream(connect_s=5, resolve=lambda host, port: only(closed)).connect("a.org", 80)

    async def only(address: tuple[str, int]) -> list[tuple[str, int]]:
        return [address]

    in_time(scene())
