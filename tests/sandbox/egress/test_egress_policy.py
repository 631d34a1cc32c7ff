"""The allow-list lets out what it names and nothing that merely looks like it."""

from __future__ import annotations

import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.sandbox.egress.addresses import AddressBook
from rollmill.sandbox.egress.policy import Policy, normal_name, wire_name
from rollmill.sandbox.records import Allow, Egress

FIXED = settings(derandomize=True, max_examples=100, deadline=None)
LABEL = st.text("abyz09-", max_size=8).map(lambda text: f"n{text}n")
NAME = st.lists(LABEL, min_size=2, max_size=5).map(".".join)


def policy(*rules: Allow) -> Policy:
    return Policy(Egress(allow=rules))


def test_nothing_is_allowed_without_a_rule() -> None:
    assert policy().refusal("example.org", 443, None) == "host is not allowed"


@FIXED
@given(NAME, st.text(string.ascii_lowercase + string.digits + ".-", min_size=1, max_size=12))
def test_no_name_around_an_allowed_name_is_allowed(name: str, extra: str) -> None:
    rules = policy(Allow(host=name))
    assert rules.refusal(name, 443, None) == ""
    for other in (extra + name, name + extra, f"{extra}.{name}", f"{name}.{extra}"):
        spelled = normal_name(other)
        assert spelled == name or not rules.may_resolve(spelled)


@FIXED
@given(NAME, NAME)
def test_a_wildcard_allows_every_name_below_and_nothing_else(name: str, other: str) -> None:
    rules = policy(Allow(host=f"*.{name}"))
    assert not rules.may_resolve(name)
    assert not rules.may_resolve(f"evil-{name}")
    assert not rules.may_resolve(f"{name}.{other}") or f"{name}.{other}".endswith(f".{name}")
    assert rules.may_resolve(f"a.{name}")
    assert rules.may_resolve(f"{other}.{name}")
    assert rules.may_resolve(other) == other.endswith(f".{name}")


@FIXED
@given(NAME, st.data())
def test_case_and_a_final_dot_make_no_difference(name: str, data: st.DataObject) -> None:
    mixed = "".join(c.upper() if data.draw(st.booleans()) else c for c in name)
    assert normal_name(mixed) == normal_name(f"{mixed}.") == name
    assert policy(Allow(host=mixed)).may_resolve(name)


@FIXED
@given(st.text(max_size=300))
def test_normal_name_is_total_and_stable(text: str) -> None:
    name = normal_name(text)
    assert normal_name(name) == name
    assert name == "" or name == text.lower().removesuffix(".")


@FIXED
@given(st.ip_addresses(v=4).map(str) | st.ip_addresses(v=6).map(str) | st.integers(0, 2**32 - 1).map(str))
def test_an_address_is_never_a_name(address: str) -> None:
    assert normal_name(address) == normal_name(f"[{address}]") == ""
    with pytest.raises(ValueError, match="never an address"):
        policy(Allow(host=address))


NO_NAMES = ["127.1", "0x7f.1", "a.0x7f", "", ".", "a..b", "-a.org", "a-.org", "a b.org", "a.org/", "a.org:80", "user@a.org", "*", "*."]
NO_NAMES += ["**.org", "a.*.org", "a" * 64 + ".org", "é.org", "a.org\n", "a\0.org", ".".join(["abcdefg"] * 32)]


@pytest.mark.parametrize("text", NO_NAMES)
def test_what_is_no_host_name_is_refused(text: str) -> None:
    assert normal_name(text) == ""


@pytest.mark.parametrize("host", ["*", "http://a.org", "a.org:80", "**.org", "", "10.0.0.1", "*.10.0.0.1"])
def test_a_rule_that_is_no_name_says_what_to_write(host: str) -> None:
    with pytest.raises(ValueError, match="is not a host name"):
        policy(Allow(host=host))


def test_letters_beyond_ascii_are_spelled_as_on_the_wire() -> None:
    assert wire_name("Bücher.example") == "xn--bcher-kva.example"
    assert policy(Allow(host="*.bücher.example")).may_resolve("www.xn--bcher-kva.example")
    with pytest.raises(ValueError, match="resolvers differ"):
        wire_name("straße.example")


def test_methods_and_ports_of_rules_add_up() -> None:
    rules = policy(
        Allow(host="a.org", methods=("get", "HEAD"), port=80),
        Allow(host="a.org", methods=("POST",), port=80),
        Allow(host="*.org", port=8080),
    )
    assert [rules.refusal("a.org", 80, m) for m in ("GET", "HEAD", "POST")] == ["", "", ""]
    assert rules.refusal("a.org", 80, "DELETE") == rules.refusal("a.org", 80, "get") == "method is not allowed"
    assert rules.refusal("a.org", 80, None) == "rule has methods, which TLS hides without intercept"
    assert rules.refusal("a.org", 443, "GET") == "port is not allowed"
    assert rules.refusal("a.org", 8080, None) == ""
    assert rules.ports == (80, 443, 8080)


@pytest.mark.parametrize("rule", [Allow(host="a.org", port=0), Allow(host="a.org", port=53), Allow(host="a.org", port=70000),
                                  Allow(host="a.org", methods=("GET /",)), Allow(host="a.org", methods=("",))])  # fmt: skip
def test_a_rule_that_could_never_match_is_refused(rule: Allow) -> None:
    with pytest.raises(ValueError, match=r"allow (port|method)"):
        policy(rule)


@FIXED
@given(st.sets(NAME, max_size=12))
def test_addresses_are_stable_distinct_and_lead_back(names: set[str]) -> None:
    book, other = AddressBook(names), AddressBook(sorted(names, reverse=True))
    addresses = {name: book.address_of(name) for name in names}
    assert addresses == {name: other.address_of(name) for name in names}
    assert len(set(addresses.values())) == len(names)
    assert all(book.name_of(address) == name and address.startswith(("198.18.", "198.19.")) for name, address in addresses.items())


def test_names_whose_places_collide_get_different_addresses_until_the_book_is_full() -> None:
    book = AddressBook(network="198.18.0.0/28", limit=7)
    found = [book.address_of(f"n{i}.org") for i in range(9)]
    assert len(set(found[:7])) == 7 and found[7:] == ["", ""]
    assert book.address_of("n3.org") == found[3]
