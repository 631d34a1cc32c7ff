"""Gives each allowed name one made-up address, the same in every box and after every fork, and knows the way back; it allows nothing."""

from __future__ import annotations

import hashlib
import ipaddress
import socket
from collections.abc import Iterable

BENCHMARK_NETWORK = "198.18.0.0/15"
"""Set aside for tests of networks, so no real host has an address in it."""


class AddressBook:
    """The place of a name comes from its hash, so that a program that kept an address over a fork still reaches the same name."""

    def __init__(self, names: Iterable[str] = (), *, limit: int = 4096, network: str = BENCHMARK_NETWORK) -> None:
        bounds = ipaddress.IPv4Network(network)
        self.first, self.num_places = int(bounds.network_address) + 1, bounds.num_addresses - 2
        assert limit <= self.num_places // 2, "probing stays short only in a table at most half full"
        self.limit = limit
        self._addresses: dict[str, str] = {}
        self._names: dict[str, str] = {}
        for name in sorted(names):
            self.address_of(name)

    def address_of(self, name: str) -> str:
        """Empty when the book is full."""
        if (known := self._addresses.get(name)) is not None:
            return known
        if len(self._addresses) >= self.limit:
            return ""
        place = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % self.num_places
        while (address := socket.inet_ntoa((self.first + place).to_bytes(4, "big"))) in self._names:
            place = (place + 1) % self.num_places
        self._addresses[name], self._names[address] = address, name
        return address

    def name_of(self, address: str) -> str:
        """Empty when no name has it."""
        return self._names.get(address, "")
