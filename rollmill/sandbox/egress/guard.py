"""The guard of one box's network: takes the listening sockets made inside it, serves them by its `Egress`, and keeps the records."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Sequence
from pathlib import Path

from rollmill.sandbox.egress.accept import Acceptor, Dialled
from rollmill.sandbox.egress.addresses import BENCHMARK_NETWORK, AddressBook
from rollmill.sandbox.egress.authority import Authority
from rollmill.sandbox.egress.nameserver import NameServer
from rollmill.sandbox.egress.policy import Policy
from rollmill.sandbox.egress.proxy import Proxy
from rollmill.sandbox.egress.record import Journal, Kind, Limits, Record, Verdict
from rollmill.sandbox.egress.upstream import Resolve, Upstream, resolve_public
from rollmill.sandbox.records import Egress

NAME_PORT = 53


class EgressGuard:
    """RUNNING -> CLOSED. It serves as long as it lives; the box's programs see ordinary hosts."""

    def __init__(self, box_name: str, egress: Egress, *, log_path: Path | None, limits: Limits, authority: Authority | None,
                 upstream: Upstream, network: str) -> None:  # fmt: skip
        policy = Policy(egress)
        self.authority = (authority or Authority()) if egress.intercept else None
        self.journal = Journal(box_name, limits, log_path)
        self.num_faults = 0
        """Mistakes of our own while serving; each is also reported to the loop's exception handler."""
        book = AddressBook(policy.names, limit=limits.num_names, network=network)
        self._names = NameServer(policy, book, self.journal, limits)
        self._proxy = Proxy(policy, book, self.journal, limits, upstream, self.authority)
        self._acceptor = Acceptor(limits, self._on_fault)
        self._sockets: list[socket.socket] = []

    @classmethod
    async def start(cls, box_name: str, egress: Egress, fds: Sequence[int], *, log_path: Path | None = None, limits: Limits = Limits(),
                    authority: Authority | None = None, resolve: Resolve = resolve_public, upstream_tls: ssl.SSLContext | None = None,
                    network: str = BENCHMARK_NETWORK, name_port: int = NAME_PORT) -> EgressGuard:  # fmt: skip
        """Serve these sockets, which are the guard's from now on: datagram sockets and `name_port` answer names, the rest is the proxy's.

        `authority`: the run's, for `intercept`, so that forks go on trusting it. `resolve`, `upstream_tls`, `network` and `name_port` are
        for those who bring their own outside: a resolver given here is believed, private addresses included.
        """
        sockets = [socket.socket(fileno=fd) for fd in fds]
        try:
            upstream = Upstream(connect_s=limits.connect_s, resolve=resolve, tls=upstream_tls)
            guard = cls(box_name, egress, log_path=log_path, limits=limits, authority=authority, upstream=upstream, network=network)
        except BaseException:
            for sock in sockets:
                sock.close()
            raise
        guard._sockets = sockets
        for sock in sockets:
            if sock.type == socket.SOCK_DGRAM:
                guard._names.listen(sock)
            else:
                guard._acceptor.listen(sock, guard._names.serve if sock.getsockname()[1] == name_port else guard._proxy.serve)
        return guard

    @property
    def records(self) -> list[Record]:
        """The newest, oldest first."""
        return list(self.journal.records)

    @property
    def authority_pem(self) -> bytes:
        """What the box must trust; empty without intercept."""
        return self.authority.pem if self.authority else b""

    def num(self, verdict: Verdict) -> int:
        """Over the whole life, also of records no longer in memory."""
        return self.journal.counts[verdict]

    def _on_fault(self, dialled: Dialled, fault: BaseException) -> None:
        self.num_faults += 1
        self.journal.write(
            Kind.OTHER, f"{dialled[0]}:{dialled[1]}", Verdict.FAILED, reason=f"fault of the guard: {type(fault).__name__}: {fault}"
        )
        asyncio.get_running_loop().call_exception_handler({"message": f"egress guard of {self.journal.box}", "exception": fault})

    async def close(self) -> None:
        """End every connection and write down what was under way. A second call does nothing."""
        self._names.close()
        await self._acceptor.close()
        for sock in self._sockets:
            sock.close()
        self._sockets.clear()
        self.journal.close()
