"""DNS: allowed names have an address, others do not exist, and no packet upsets the answerer."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import struct

from egress_fakes import in_time
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.sandbox.egress import EgressGuard, Kind, Limits, Verdict
from rollmill.sandbox.egress.addresses import AddressBook
from rollmill.sandbox.egress.names import Code, answer, read_question
from rollmill.sandbox.egress.nameserver import NameServer
from rollmill.sandbox.egress.policy import Policy
from rollmill.sandbox.egress.record import Journal
from rollmill.sandbox.records import Allow, Egress

FIXED = settings(derandomize=True, max_examples=200, deadline=None)
A, TXT, AAAA, HTTPS = 1, 16, 28, 65
ALLOWED = Egress(allow=(Allow(host="ok.example"), Allow(host="*.wild.example", port=80)))


def question(name: str, type_: int = A, *, id_: int = 7, flags: int = 0x0100, class_: int = 1, num: int = 1) -> bytes:
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    return struct.pack("!6H", id_, flags, num, 0, 0, 0) + labels + b"\0" + struct.pack("!2H", type_, class_)


def server(limits: Limits = Limits()) -> NameServer:
    policy = Policy(ALLOWED)
    return NameServer(policy, AddressBook(policy.names, limit=limits.num_names), Journal("box", limits), limits)


def reply(names: NameServer, packet: bytes) -> tuple[int, list[str]]:
    """Response code and addresses."""
    data = names.respond(packet, "9.9.9.9:53")
    assert data is not None and data[:2] == packet[:2] and data[2] & 0x80
    num_answers = struct.unpack_from("!H", data, 6)[0]
    assert num_answers in (0, 1)
    return data[3] & 15, [str(ipaddress.IPv4Address(data[-4:]))] if num_answers else []


def test_allowed_names_get_one_address_of_their_own_and_denied_names_do_not_exist() -> None:
    names = server()
    code, (first,) = reply(names, question("ok.example"))
    assert code == Code.OK and names.book.name_of(first) == "ok.example"
    assert reply(names, question("OK.eXample")) == (Code.OK, [first])
    assert reply(names, question("a.b.wild.example"))[1] not in ([], [first])
    for denied in ("wild.example", "evil-ok.example", "ok.example.evil.com", "com", "secret-data.evil.com"):
        assert reply(names, question(denied)) == (Code.NO_SUCH_NAME, [])
    last = names.journal.records[-1]
    assert (last.kind, last.host, last.method, last.verdict) == (Kind.NAME, "secret-data.evil.com", "A", Verdict.DENIED)
    assert len(names.journal.records) == 8


def test_other_types_of_an_allowed_name_are_empty_and_of_a_denied_name_do_not_exist() -> None:
    names = server()
    assert [reply(names, question("ok.example", t)) for t in (AAAA, TXT, HTTPS)] == [(Code.OK, [])] * 3
    assert [reply(names, question("evil.com", t)) for t in (AAAA, TXT, HTTPS)] == [(Code.NO_SUCH_NAME, [])] * 3


def test_the_question_comes_back_letter_for_letter() -> None:
    packet = question("oK.ExAmPlE", id_=4711)
    data = server().respond(packet, "9.9.9.9:53")
    assert data is not None and data[:2] == packet[:2] and data[12:].startswith(packet[12:])


def test_malformed_questions_get_a_code_and_answers_get_silence() -> None:
    names = server()
    assert reply(names, question("ok.example", flags=0x0800)) == (Code.NOT_KNOWN, [])
    assert reply(names, question("ok.example", num=2)) == (Code.MALFORMED, [])
    assert reply(names, question("ok.example")[:-1]) == (Code.MALFORMED, [])
    assert reply(names, question("ok.example")[:12] + b"\xc0\x0c\0\1\0\1") == (Code.MALFORMED, [])
    assert reply(names, question("ok.example", class_=3)) == (Code.REFUSED, [])
    assert reply(names, question(".".join(["abcdefg"] * 40))) == (Code.MALFORMED, [])
    assert names.respond(question("ok.example", flags=0x8100), "9.9.9.9:53") is None
    assert names.respond(b"\0" * 11, "9.9.9.9:53") is None


def test_a_dot_inside_a_label_does_not_forge_a_name() -> None:
    packet = question("x")[:12] + b"\x0aok.example\0" + struct.pack("!2H", A, 1)
    assert reply(server(), packet) == (Code.NO_SUCH_NAME, [])


def test_a_flood_of_names_below_a_wildcard_is_bounded() -> None:
    names = server(Limits(num_names=10, num_records=20))
    codes = [reply(names, question(f"n{i}.wild.example"))[0] for i in range(50)]
    assert codes.count(Code.OK) == 9 and codes[-1] == Code.FAILED
    assert reply(names, question("ok.example"))[0] == Code.OK
    assert len(names.journal.records) == 20 and sum(names.journal.counts.values()) == 51


@FIXED
@given(st.binary(max_size=600) | st.binary(max_size=80).map(lambda tail: question("ok.example")[:12] + tail))
def test_no_packet_upsets_the_answerer(packet: bytes) -> None:
    names = server()
    data = names.respond(packet, "9.9.9.9:53")
    assert data is None or (data[:2] == packet[:2] and data[2] & 0x80)
    assert len(names.journal.records) == 1


@FIXED
@given(st.lists(st.binary(min_size=1, max_size=63), max_size=3), st.integers(0, 65535), st.integers(0, 65535))
def test_any_labels_are_read_and_answered_with_their_own_bytes(labels: list[bytes], id_: int, type_: int) -> None:
    section = b"".join(bytes([len(label)]) + label for label in labels) + b"\0" + struct.pack("!2H", type_, 1)
    read = read_question(struct.pack("!6H", id_, 0, 1, 0, 0, 0) + section + b"trailing")
    assert read is not None and read.code is Code.OK and read.section == section and read.id == id_
    assert answer(read, Code.OK, "198.18.0.1").startswith(struct.pack("!6H", id_, 0x8080, 1, 1, 0, 0) + section)


def test_questions_are_answered_over_udp_and_tcp_from_the_address_that_was_asked() -> None:
    async def scene() -> None:
        udp, tcp = socket.socket(type=socket.SOCK_DGRAM), socket.create_server(("0.0.0.0", 0))
        udp.bind(("0.0.0.0", 0))
        udp_port, tcp_port = udp.getsockname()[1], tcp.getsockname()[1]
        guard = await EgressGuard.start("box", ALLOWED, [udp.detach(), tcp.detach()], name_port=tcp_port)
        loop = asyncio.get_running_loop()
        with socket.socket(type=socket.SOCK_DGRAM) as asker:
            asker.setblocking(False)
            asker.connect(("127.9.9.9", udp_port))  # a connected socket takes answers from that address alone
            await loop.sock_sendall(asker, b"\xff")
            await loop.sock_sendall(asker, question("ok.example"))
            over_udp = await loop.sock_recv(asker, 512)
        reader, writer = await asyncio.open_connection("127.9.9.9", tcp_port)
        packet = question("ok.example")
        framed = len(packet).to_bytes(2, "big") + packet
        writer.write(framed + framed[:5])
        await writer.drain()
        writer.write(framed[5:])
        over_tcp = [await reader.readexactly(int.from_bytes(await reader.readexactly(2), "big")) for _ in range(2)]
        writer.close()
        assert over_tcp == [over_udp, over_udp] and over_udp[-4:-2] in (b"\xc6\x12", b"\xc6\x13")
        assert [r.dialled for r in guard.records] == [f"127.9.9.9:{udp_port}"] * 2 + [f"127.9.9.9:{tcp_port}"] * 2
        await guard.close()

    in_time(scene())


def test_questions_beyond_the_rate_wait_for_the_next_window() -> None:
    async def scene() -> None:
        udp = socket.socket(type=socket.SOCK_DGRAM)
        udp.bind(("127.0.0.1", 0))
        port = udp.getsockname()[1]
        guard = await EgressGuard.start("box", ALLOWED, [udp.detach()], limits=Limits(queries_per_s=5))
        loop = asyncio.get_running_loop()
        with socket.socket(type=socket.SOCK_DGRAM) as asker:
            asker.setblocking(False)
            asker.connect(("127.0.0.1", port))
            for i in range(8):
                asker.send(question("ok.example", id_=i))
            ids = [int.from_bytes((await loop.sock_recv(asker, 512))[:2], "big") for _ in range(8)]
        assert ids == list(range(8)) and guard.num(Verdict.ALLOWED) == 8
        await guard.close()

    in_time(scene())
