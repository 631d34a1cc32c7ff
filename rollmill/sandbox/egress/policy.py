"""Decides from an `Egress` alone whether a name, port and method may leave a box; it knows neither sockets nor the bytes of a request."""

from __future__ import annotations

import ipaddress
import re

from rollmill.sandbox.records import Allow, Egress

LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
MAX_NAME = 253


def normal_name(text: str) -> str:
    """A host name in its one spelling (lower case, no final dot); empty when it is none.

    A name whose last label is a number is an address to every resolver (`127.1`, `0x7f.1`), so it never counts as a name.
    Letters beyond ASCII do not occur on the wire; what brings them is refused, not guessed at.
    """
    name = text[:-1] if text.endswith(".") else text
    if not name.isascii() or len(name) > MAX_NAME:
        return ""
    labels = name.lower().split(".")
    if not all(LABEL.fullmatch(label) for label in labels) or NUMBER.fullmatch(labels[-1]):
        return ""
    return ".".join(labels)


def wire_name(text: str) -> str:
    """The spelling on the wire of a name that a person wrote, which may hold letters beyond ASCII."""
    if not text.isascii():
        try:
            spelled = text.lower().encode("idna").decode()
            unchanged = spelled.encode().decode("idna") == text.lower()
        except UnicodeError as e:
            raise ValueError(f"allow host {text!r} is not a host name: {e}; write it in its xn-- form") from e
        if not unchanged:
            raise ValueError(f"allow host {text!r} has letters on which resolvers differ; write it in its xn-- form")
        text = spelled
    name = normal_name(text)
    if not name:
        raise ValueError(
            f"allow host {text!r} is not a host name; write a name such as 'api.example.org' or '*.example.org', never an address"
        )
    return name


def parse_upstream(text: str) -> tuple[str, int]:
    address, _, port = text.rpartition(":")
    try:
        ip = ipaddress.ip_address(address.strip("[]"))
    except ValueError as e:
        raise ValueError(f"upstream {text!r} is not an address and a port; write e.g. '127.0.0.1:8080'") from e
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError(f"upstream {text!r} has no port from 1 to 65535; write e.g. '127.0.0.1:8080'")
    return str(ip), int(port)


class Policy:
    """The allow-list, ready to ask. Rules add up: a request leaves when one of them lets it."""

    def __init__(self, egress: Egress) -> None:
        self.names: dict[str, list[Allow]] = {}
        self.suffixes: dict[str, list[Allow]] = {}
        for rule in egress.allow:
            if not 0 < rule.port < 65536 or rule.port == 53:
                raise ValueError(
                    f"allow port {rule.port} for {rule.host!r} cannot be reached; use 1 to 65535, not 53 (names are answered there)"
                )
            if bad := [m for m in rule.methods if not m.isascii() or not m.isalpha()]:
                raise ValueError(f"allow method {bad[0]!r} for {rule.host!r} is not an HTTP method; write e.g. 'GET'")
            if rule.upstream:
                parse_upstream(rule.upstream)
                if rule.host.startswith("*."):
                    raise ValueError(f"allow host {rule.host!r} has an upstream; give one to a single name, or leave it out")
            table, host = (self.suffixes, rule.host[2:]) if rule.host.startswith("*.") else (self.names, rule.host)
            table.setdefault(wire_name(host), []).append(rule)
        for host, rules in self.names.items():
            for rule in rules:
                if len(ways := {r.upstream for r in rules if r.port == rule.port}) > 1:
                    raise ValueError(
                        f"allow host {host!r} has several upstreams for port {rule.port}: {', '.join(sorted(ways))}; leave one"
                    )

    @property
    def ports(self) -> tuple[int, ...]:
        """Where a box may have to be listened to: 80 and 443 always, so that what is refused there is written down."""
        rules = (rule for table in (self.names, self.suffixes) for rules in table.values() for rule in rules)
        return tuple(sorted({80, 443} | {rule.port for rule in rules}))

    def rules(self, host: str) -> list[Allow]:
        """Every line that speaks of this host (in its normal spelling)."""
        labels = host.split(".")
        found = list(self.names.get(host, ()))
        for i in range(1, len(labels)):
            found += self.suffixes.get(".".join(labels[i:]), ())
        return found

    def upstream(self, host: str, port: int) -> tuple[str, int] | None:
        """Where an allowed request really goes; None: to whatever the name leads to."""
        given = next((rule.upstream for rule in self.names.get(host, ()) if rule.port == port), "")
        return parse_upstream(given) if given else None

    def may_resolve(self, host: str) -> bool:
        return bool(host) and bool(self.rules(host))

    def refusal(self, host: str, port: int, method: str | None) -> str:
        """Why the request may not leave; empty when it may. `method` None: hidden by TLS."""
        if not (host and (rules := self.rules(host))):
            return "host is not allowed"
        rules = [rule for rule in rules if rule.port == port]
        if not rules:
            return "port is not allowed"
        if any(not rule.methods for rule in rules):
            return ""
        if method is None:
            return "rule has methods, which TLS hides without intercept"
        if any(method in (m.upper() for m in rule.methods) for rule in rules):
            return ""
        return "method is not allowed"
