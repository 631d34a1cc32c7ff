"""Answers the DNS questions of one box over UDP and TCP from its allow-list and address book; no question ever leaves this process."""

from __future__ import annotations

import asyncio
import socket
import struct

from rollmill.sandbox.egress.accept import Dialled
from rollmill.sandbox.egress.addresses import AddressBook
from rollmill.sandbox.egress.channel import BudgetSpent, SocketChannel
from rollmill.sandbox.egress.names import Code, Question, answer, read_question
from rollmill.sandbox.egress.policy import Policy, normal_name
from rollmill.sandbox.egress.record import Journal, Kind, Limits, Verdict

IP_PKTINFO = 8
PACKET_INFO = struct.Struct("=i4s4s")
"""struct in_pktinfo: device, our address, address the packet was sent to."""
MAX_PACKET = 4096
PER_WAKE = 32


class NameServer:
    """Allowed names get their made-up address, every other name does not exist."""

    def __init__(self, policy: Policy, book: AddressBook, journal: Journal, limits: Limits) -> None:
        self.policy, self.book, self.journal, self.limits = policy, book, journal, limits
        self._sockets: list[socket.socket] = []
        self._num_window, self._window_ends = 0, 0.0

    def respond(self, packet: bytes, dialled: str) -> bytes | None:
        """The answer to one packet; None: stay silent."""
        question = read_question(packet)
        if question is None:
            self.journal.write(Kind.NAME, dialled, Verdict.DENIED, num_sent_bytes=len(packet), reason="not a question")
            return None
        code, address, reason = self._decide(question)
        response = answer(question, code, address)
        verdict = Verdict.DENIED if reason else Verdict.ALLOWED
        self.journal.write(Kind.NAME, dialled, verdict, host=question.name, method=question.type, status=code, num_sent_bytes=len(packet),
                           num_received_bytes=len(response), reason=reason)  # fmt: skip
        return response

    def _decide(self, question: Question) -> tuple[Code, str, str]:
        if question.code:
            return question.code, "", "malformed question"
        if not question.is_internet:
            return Code.REFUSED, "", "not an internet name"
        name = normal_name(question.name)
        if not self.policy.may_resolve(name):
            return Code.NO_SUCH_NAME, "", "host is not allowed"
        address = self.book.address_of(name)
        if not address:
            return Code.FAILED, "", "box has asked for too many names"
        # Only A: no IPv6 here, and without HTTPS records no client learns keys that would hide the server name in its hello.
        return Code.OK, address if question.type in ("A", "ANY") else "", ""

    def listen(self, sock: socket.socket) -> None:
        """Answer on a UDP socket, which stays its owner's, until `close`."""
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_IP, IP_PKTINFO, 1)
        self._sockets.append(sock)
        asyncio.get_running_loop().add_reader(sock, self._on_packets, sock)

    def _on_packets(self, sock: socket.socket) -> None:
        for _ in range(PER_WAKE):
            if not self._has_turn(sock):
                return
            try:
                packet, control, _, peer = sock.recvmsg(MAX_PACKET, socket.CMSG_SPACE(PACKET_INFO.size))
            except OSError:  # nothing there, or an unreachable asker reported on our socket: neither is ours to act on
                return
            self._num_window += 1
            target = next((PACKET_INFO.unpack(data)[2] for _, kind, data in control if kind == IP_PKTINFO), b"\0\0\0\0")
            response = self.respond(packet, f"{socket.inet_ntoa(target)}:{sock.getsockname()[1]}")
            if response is None:
                continue
            # The answer must come from the address that was asked, whichever of all addresses that was.
            source = (socket.IPPROTO_IP, IP_PKTINFO, PACKET_INFO.pack(0, target, target))
            try:
                sock.sendmsg([response], [source], 0, peer)
            except OSError:  # the asker's buffer is full or it is gone; it will ask again
                return

    def _has_turn(self, sock: socket.socket) -> bool:
        loop = asyncio.get_running_loop()
        if (now := loop.time()) >= self._window_ends:
            self._num_window, self._window_ends = 0, now + 1.0
        if self._num_window < self.limits.queries_per_s:
            return True
        loop.remove_reader(sock)
        loop.call_at(self._window_ends, self._listen_again, sock)
        return False

    def _listen_again(self, sock: socket.socket) -> None:
        if sock in self._sockets:
            asyncio.get_running_loop().add_reader(sock, self._on_packets, sock)

    async def serve(self, channel: SocketChannel, dialled: Dialled) -> None:
        """Answer on one TCP connection until it is done."""
        where, buffer = f"{dialled[0]}:{dialled[1]}", b""
        try:
            while True:
                async with asyncio.timeout(self.limits.head_s):
                    while len(buffer) < 2 or len(buffer) < 2 + int.from_bytes(buffer[:2], "big"):
                        if not (data := await channel.read()):
                            return
                        buffer += data
                    end = 2 + int.from_bytes(buffer[:2], "big")
                    response = self.respond(buffer[2:end], where)
                    buffer = buffer[end:]
                    if response is None:
                        return
                    await channel.write(len(response).to_bytes(2, "big") + response)
        except BudgetSpent as e:
            self.journal.write(Kind.NAME, where, Verdict.DENIED, reason=str(e))
        except OSError:  # it hung up or kept silent too long, as clients do once they have their answer
            return

    def close(self) -> None:
        for sock in self._sockets:
            asyncio.get_running_loop().remove_reader(sock)
        self._sockets.clear()
