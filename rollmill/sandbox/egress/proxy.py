"""Serves the connections that a box made: finds the host each is for, asks the policy, passes on what may leave and writes down all."""

from __future__ import annotations

import asyncio
import contextlib
import time

from rollmill.sandbox.egress.accept import Dialled
from rollmill.sandbox.egress.addresses import AddressBook
from rollmill.sandbox.egress.authority import Authority
from rollmill.sandbox.egress.channel import BudgetSpent, Channel, SocketChannel, TlsChannel
from rollmill.sandbox.egress.exchange import BoxBroke, Exchange, OutsideBroke
from rollmill.sandbox.egress.hello import Malformed, read_hello
from rollmill.sandbox.egress.http import BadMessage, Head, HeadTooLarge, MessageReader, refusal
from rollmill.sandbox.egress.policy import Policy, normal_name
from rollmill.sandbox.egress.record import Journal, Kind, Limits, Verdict
from rollmill.sandbox.egress.upstream import NotPublic, Upstream

ALERT_ACCESS_DENIED = b"\x15\x03\x03\x00\x02\x02\x31"
ALERT_INTERNAL_ERROR = b"\x15\x03\x03\x00\x02\x02\x50"
LINGER_S = 1.0
GUARD_CLOSED = "box closed meanwhile"


class Denied(Exception):
    """What the box asked for may not leave; `status` is the answer to give where one can be given."""

    def __init__(self, reason: str, status: int = 403, phrase: str = "Forbidden") -> None:
        super().__init__(reason)
        self.status, self.phrase = status, phrase


class Failed(Exception):
    """It was allowed, but the outside did not do its part."""

    def __init__(self, reason: str, status: int, phrase: str) -> None:
        super().__init__(reason)
        self.status, self.phrase = status, phrase


class Proxy:
    """What all connections of one box share."""

    def __init__(
        self, policy: Policy, book: AddressBook, journal: Journal, limits: Limits, upstream: Upstream, authority: Authority | None
    ) -> None:
        self.policy, self.book, self.journal, self.limits, self.upstream = policy, book, journal, limits, upstream
        self.authority = authority
        """Opens TLS when given."""

    async def serve(self, channel: SocketChannel, dialled: Dialled) -> None:
        await Visit(self, channel, dialled).run()


class Visit:
    """One connection of the box."""

    def __init__(self, proxy: Proxy, raw: SocketChannel, dialled: Dialled) -> None:
        self.proxy, self.raw, self.dialled, self.limits = proxy, raw, dialled, proxy.limits
        self._begin()

    def _begin(self) -> None:
        """From here on time and bytes count for the next record."""
        self._start_s, self._num_sent, self._num_received = time.monotonic(), self.raw.num_read_bytes, self.raw.num_written_bytes

    def _note(
        self, kind: Kind, verdict: Verdict, *, host: str = "", request: Head | None = None, status: int = 0, reason: str = ""
    ) -> None:
        self.proxy.journal.write(
            kind,
            f"{self.dialled[0]}:{self.dialled[1]}",
            verdict,
            host=host or self.proxy.book.name_of(self.dialled[0]),
            method=request.method if request else "",
            path=request.target if request else "",
            status=status,
            num_sent_bytes=self.raw.num_read_bytes - self._num_sent,
            num_received_bytes=self.raw.num_written_bytes - self._num_received,
            reason=reason,
            wall_s=time.monotonic() - self._start_s,
        )
        self._begin()

    async def run(self) -> None:
        try:
            async with asyncio.timeout(self.limits.head_s):
                first = await self.raw.read()
        except OSError as e:
            return self._note(Kind.OTHER, Verdict.DENIED, reason="said nothing" if isinstance(e, TimeoutError) else str(e))
        if not first:
            # A name that is allowed may be dialled ahead of need; elsewhere it is a probe.
            verdict = Verdict.ALLOWED if self.proxy.book.name_of(self.dialled[0]) else Verdict.DENIED
            return self._note(Kind.OTHER, verdict, reason="closed without a word")
        self.raw.push_back(first)
        if first[0] == 0x16:
            await self._serve_tls()
        else:
            await self._serve_http(self.raw, tls=False)

    def _check_host(self, host: str) -> None:
        """The name asked for must be the name that was dialled: else an allowed address would be a door to whatever shares it."""
        if not self.proxy.policy.may_resolve(host):
            raise Denied("host is not allowed")
        if self.proxy.book.address_of(host) != self.dialled[0]:
            raise Denied("host is not the one that was dialled")

    # TLS

    async def _serve_tls(self) -> None:
        host, verdict, reason = "", Verdict.DENIED, GUARD_CLOSED
        client: TlsChannel | None = None
        try:
            host = await self._read_hello()
            self._check_host(host)
            if self.proxy.authority is not None:
                opened = TlsChannel(self.raw, self.proxy.authority.context(host))
                async with asyncio.timeout(self.limits.head_s):
                    await opened.handshake()
                client = opened
            else:
                if why := self.proxy.policy.refusal(host, self.dialled[1], None):
                    raise Denied(why)
                verdict = Verdict.ALLOWED
                await self._tunnel(host)
            reason = ""
        except (Denied, Failed) as e:
            verdict, reason = Verdict.DENIED if isinstance(e, Denied) else Verdict.FAILED, str(e)
            await self._say(self.raw, ALERT_ACCESS_DENIED if isinstance(e, Denied) else ALERT_INTERNAL_ERROR)
        except OSError as e:
            # A tunnel that breaks off stays allowed; a box that spends its bytes, or does not trust us, is not.
            verdict = Verdict.DENIED if isinstance(e, BudgetSpent) else verdict
            reason = str(e) or "nothing was said for too long"
        finally:
            if client is None:
                self._note(Kind.TLS, verdict, host=host, reason=reason)
        if client is None:
            await self._linger(self.raw)
        else:
            await self._serve_http(client, tls=True)

    async def _read_hello(self) -> str:
        hello, name = b"", None
        try:
            async with asyncio.timeout(self.limits.head_s):
                while name is None:
                    if len(hello) > self.limits.head_bytes:
                        raise Denied(f"hello is larger than {self.limits.head_bytes} bytes")
                    if not (data := await self.raw.read()):
                        raise Denied("hello is cut short")
                    hello += data
                    name = read_hello(hello)
        except Malformed as e:
            raise Denied(str(e)) from e
        self.raw.push_back(hello)
        if not name:
            raise Denied("hello has no server name")
        return normal_name(name)

    async def _tunnel(self, host: str) -> None:
        """Bytes both ways until both are done, one breaks off, or nothing moves for `idle_s`."""
        outside, idle_s = await self._connect(host, tls=False), self._idle_s(host)
        try:
            async with asyncio.timeout(idle_s) as timer:
                out, back = self._pump(self.raw, outside, timer, idle_s), self._pump(outside, self.raw, timer, idle_s)
                pumps = [asyncio.create_task(out), asyncio.create_task(back)]
                try:
                    done, _ = await asyncio.wait(pumps, return_when=asyncio.FIRST_EXCEPTION)
                finally:
                    for pump in pumps:
                        pump.cancel()
                    await asyncio.wait(pumps)
            for pump in done:
                # Programs end TLS by closing over unread session tickets, which resets: an end like any other.
                with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                    pump.result()
        finally:
            outside.close()

    async def _pump(self, source: Channel, sink: Channel, timer: asyncio.Timeout, idle_s: float) -> None:
        while data := await source.read():
            await sink.write(data)
            self._touch(timer, idle_s)
        await sink.finish()

    def _idle_s(self, host: str) -> float:
        given = self.proxy.policy.upstream(host, self.dialled[1])
        return self.limits.idle_s if given is None else self.limits.upstream_idle_s

    def _touch(self, timer: asyncio.Timeout, idle_s: float) -> None:
        # Past its deadline a timer cannot be moved any more.
        if not timer.expired() and timer.when() is not None:
            timer.reschedule(asyncio.get_running_loop().time() + idle_s)

    # HTTP

    async def _serve_http(self, client: Channel, *, tls: bool) -> None:
        box = MessageReader(client, is_request=True, head_bytes=self.limits.head_bytes)
        exchange: Exchange | None = None
        wait_s = self.limits.head_s
        try:
            while await self._is_waiting(box, wait_s):
                exchange = await self._serve_request(client, box, exchange, tls=tls)
                if exchange is None:
                    return
                wait_s = self.limits.idle_s
        except BudgetSpent as e:
            self._note(Kind.HTTP, Verdict.DENIED, reason=str(e))
        except OSError:  # it hung up between two requests, or kept silent too long
            return
        finally:
            if exchange is not None:
                exchange.outside.close()

    async def _is_waiting(self, box: MessageReader, wait_s: float) -> bool:
        async with asyncio.timeout(wait_s):
            is_waiting = await box.is_waiting()
        return is_waiting

    async def _serve_request(self, client: Channel, box: MessageReader, exchange: Exchange | None, *, tls: bool) -> Exchange | None:
        """Returns what the next request can go out on; None: the connection ends here."""
        request, host, verdict, status, reason = None, "", Verdict.DENIED, 0, GUARD_CLOSED
        is_kept = False
        try:
            request = await self._read_head(box)
            host = self._judge(request)
            verdict = Verdict.ALLOWED
            if exchange is None or not exchange.is_outside_kept or exchange.outside.is_stale():
                if exchange is not None:
                    exchange.outside.close()
                exchange = None
                exchange = Exchange(await self._connect(host, tls=tls), self.limits.head_bytes)
            await self._exchange(exchange, request, box, client, self._idle_s(host))
            status, reason, is_kept = exchange.status, "", exchange.is_box_kept
        except (Denied, Failed) as e:
            verdict, status, reason = Verdict.DENIED if isinstance(e, Denied) else Verdict.FAILED, e.status, str(e)
            if status:
                await self._say(client, refusal(status, e.phrase, e.phrase))
        except BudgetSpent as e:
            verdict, reason = Verdict.DENIED, str(e)
        except BoxBroke as e:
            status, reason = exchange.status if exchange else 0, f"box broke off: {e}"
        finally:
            self._note(Kind.HTTP, verdict, host=host, request=request, status=status, reason=reason)
            if not is_kept and exchange is not None:
                exchange.outside.close()
        if is_kept:
            return exchange
        await self._linger(client)
        return None

    async def _read_head(self, box: MessageReader) -> Head:
        try:
            async with asyncio.timeout(self.limits.head_s):
                return await box.head()
        except HeadTooLarge as e:
            raise Denied(str(e), 431, "Request Header Fields Too Large") from e
        except BadMessage as e:
            raise Denied(f"not HTTP/1: {e}", 400, "Bad Request") from e
        except TimeoutError as e:
            raise Denied("head took too long", 408, "Request Timeout") from e
        except BudgetSpent:
            raise
        except (EOFError, OSError) as e:
            raise Denied("head is cut short", 0) from e

    def _judge(self, request: Head) -> str:
        """The host, when the request may leave."""
        hosts = request.values(b"host")
        if len(hosts) != 1:
            raise Denied("not exactly one Host header", 400, "Bad Request")
        text, _, port = hosts[0].decode("ascii", "backslashreplace").partition(":")
        host = normal_name(text)
        self._check_host(host)
        if port not in ("", str(self.dialled[1])):
            raise Denied("port of the Host header is not the one that was dialled")
        if not (request.target.startswith("/") or (request.target == "*" and request.method == "OPTIONS")):
            raise Denied("request target is not a path", 400, "Bad Request")
        if why := self.proxy.policy.refusal(host, self.dialled[1], request.method):
            raise Denied(why)
        return host

    async def _exchange(self, exchange: Exchange, request: Head, box: MessageReader, client: Channel, idle_s: float) -> None:
        is_first = exchange.num_done == 0
        try:
            async with asyncio.timeout(idle_s) as timer:
                await exchange.run(request, box, client, lambda: self._touch(timer, idle_s))
        except OutsideBroke as e:
            # On a connection kept from before, closing without an answer tells the box to send it again, as any server would.
            raise Failed(f"outside broke off: {e}", 502 if is_first and not exchange.status else 0, "Bad Gateway") from e
        except TimeoutError as e:
            raise Failed(f"no byte for {idle_s:g} s", 0 if exchange.status else 504, "Gateway Timeout") from e

    # Both

    async def _connect(self, host: str, *, tls: bool) -> Channel:
        given = self.proxy.policy.upstream(host, self.dialled[1])
        try:
            return await self.proxy.upstream.connect(host, self.dialled[1], tls=tls, given=given)
        except NotPublic as e:
            raise Denied(str(e)) from e
        except TimeoutError as e:
            raise Failed("outside did not answer in time", 504, "Gateway Timeout") from e
        except OSError as e:
            raise Failed(f"outside cannot be reached: {e}", 502, "Bad Gateway") from e

    async def _say(self, client: Channel, data: bytes) -> None:
        with contextlib.suppress(OSError):  # the record tells what happened; whether it was heard does not matter
            async with asyncio.timeout(LINGER_S):
                await client.write(data)

    async def _linger(self, client: Channel) -> None:
        """Read for a moment what is still on its way: closing over unread bytes would destroy what we said last."""
        with contextlib.suppress(OSError):
            async with asyncio.timeout(LINGER_S):
                await client.finish()
                while await client.read():
                    pass
