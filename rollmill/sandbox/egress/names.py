"""DNS questions read and answered as bytes: pure, total over any packet, without a word on what is allowed."""

from __future__ import annotations

import ipaddress
import struct
from enum import IntEnum

import msgspec

HEADER = struct.Struct("!6H")
CLASS_IN = 1
TYPES = {1: "A", 2: "NS", 5: "CNAME", 6: "SOA", 12: "PTR", 15: "MX", 16: "TXT", 28: "AAAA", 33: "SRV", 64: "SVCB", 65: "HTTPS", 255: "ANY"}
TTL_S = 300
MAX_WIRE_NAME = 255
PLAIN = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789-_")


class Code(IntEnum):
    """The response codes used here."""

    OK = 0
    MALFORMED = 1
    FAILED = 2
    NO_SUCH_NAME = 3
    NOT_KNOWN = 4
    REFUSED = 5


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """One question. Its name is in lower case without final dot; bytes that no host name has are written \\DDD."""

    id: int
    is_recursion_desired: bool
    name: str = ""
    type: str = ""
    is_internet: bool = True
    section: bytes = b""
    """Question section as sent: some resolvers check that the letters' case comes back unchanged."""
    code: Code = Code.OK
    """Anything else: cannot be answered, say this."""


def read_question(packet: bytes) -> Question | None:
    """None: not a question at all, stay silent (two servers that answer each other's errors never stop)."""
    if len(packet) < HEADER.size:
        return None
    id_, flags, num_questions, *_ = HEADER.unpack_from(packet)
    if flags & 0x8000:
        return None
    wants = bool(flags & 0x0100)
    if flags & 0x7800:
        return Question(id=id_, is_recursion_desired=wants, code=Code.NOT_KNOWN)
    malformed = Question(id=id_, is_recursion_desired=wants, code=Code.MALFORMED)
    if num_questions != 1:
        return malformed
    labels, at = [], HEADER.size
    while at < len(packet) and (length := packet[at]):
        # Above 63 it is a pointer, which in a first name can only lead nowhere.
        if length > 63 or at + 1 + length > len(packet) or at - HEADER.size + length > MAX_WIRE_NAME - 2:
            return malformed
        label = packet[at + 1 : at + 1 + length].lower()
        labels.append("".join(chr(b) if b in PLAIN else f"\\{b:03d}" for b in label))
        at += 1 + length
    end = at + 5
    if end > len(packet):
        return malformed
    type_, class_ = struct.unpack_from("!2H", packet, at + 1)
    return Question(id=id_, is_recursion_desired=wants, name=".".join(labels), type=TYPES.get(type_, f"TYPE{type_}"),
                    is_internet=class_ == CLASS_IN, section=packet[HEADER.size : end])  # fmt: skip


def answer(question: Question, code: Code, address: str = "") -> bytes:
    """The whole response; with an address, one A record that points back to the name of the question."""
    flags = 0x8080 | (0x0100 if question.is_recursion_desired else 0) | code
    head = HEADER.pack(question.id, flags, 1 if question.section else 0, 1 if address else 0, 0, 0)
    if not address:
        return head + question.section
    record = struct.pack("!3HIH4s", 0xC000 | HEADER.size, 1, CLASS_IN, TTL_S, 4, ipaddress.IPv4Address(address).packed)
    return head + question.section + record
