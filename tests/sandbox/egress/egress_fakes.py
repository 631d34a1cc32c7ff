"""A stage for the guard on loopback: every 127.x address is local on Linux, so made-up addresses from 127.64.0.0/15 can be dialled."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web

from rollmill.sandbox.egress import Authority, EgressGuard, Limits, Record
from rollmill.sandbox.egress.addresses import AddressBook
from rollmill.sandbox.records import Allow, Egress

T = TypeVar("T")
DEADLINE_S = 60.0
NETWORK = "127.64.0.0/15"
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def in_time(scene: Coroutine[Any, Any, T]) -> T:
    async def whole() -> T:
        async with asyncio.timeout(DEADLINE_S):
            return await scene

    return asyncio.run(whole())


def pass_time(seconds: float) -> None:
    """Put the running loop's clock forward."""
    loop = asyncio.get_running_loop()
    then = loop.time
    loop.time = lambda: then() + seconds  # type: ignore[method-assign]


class Outside:
    """A real HTTP server that says what it was asked, and counts the connections made to it."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []
        self.peers: set[object] = set()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.peers.add(request.transport)
        body = await request.read()
        self.requests.append((request.method, request.path_qs, dict(request.headers), body))
        if request.path == "/chunks":
            response = web.StreamResponse(headers={"X-Kind": "chunks"})
            response.enable_chunked_encoding()
            await response.prepare(request)
            for i in range(5):
                await response.write(b"%d" % i * 1000)
            return response
        if request.path == "/big":
            return web.Response(body=bytes(range(256)) * 8192)
        if request.path == "/empty":
            return web.Response(status=204)
        return web.Response(status=201 if request.method == "POST" else 200, body=body or b"hello from " + request.path.encode())

    @contextlib.asynccontextmanager
    async def serve(self, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
        runner = web.AppRunner(web.Application(client_max_size=1 << 26), access_log=None, handle_signals=False, shutdown_timeout=0.1)
        runner.app.router.add_route("*", "/{tail:.*}", self._answer)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
        await site.start()
        try:
            yield runner.addresses[0][1]
        finally:
            await runner.cleanup()


@contextlib.asynccontextmanager
async def raw_outside(handler: Handler) -> AsyncIterator[int]:
    """A server that does what `handler` does, right or wrong."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handler(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


class Stage:
    """A guard whose outside is one local server, and clients that dial made-up addresses."""

    def __init__(self, guard: EgressGuard, port: int) -> None:
        self.guard, self.port, self.book = guard, port, AddressBook(network=NETWORK)

    @property
    def records(self) -> list[Record]:
        return self.guard.records

    async def connect(self, name: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self.book.address_of(name), self.port)

    async def say(self, name: str, data: bytes) -> bytes:
        """Everything that comes back until the connection closes."""
        reader, writer = await self.connect(name)
        writer.write(data)
        try:
            return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.close()

    async def recorded(self, num: int) -> list[Record]:
        """The records, once there are so many: the last one is written just after the client has its answer."""
        while len(self.guard.records) < num:  # noqa: ASYNC110 - records have no listeners
            await asyncio.sleep(0.005)
        return self.guard.records

    async def curl(self, name: str, path: str, *args: str, scheme: str = "http") -> tuple[int, bytes]:
        """Status of curl and what it printed."""
        where = ["--resolve", f"{name}:{self.port}:{self.book.address_of(name)}", f"{scheme}://{name}:{self.port}{path}"]
        process = await asyncio.create_subprocess_exec(
            "curl", "-q", "-sS", "--noproxy", "*", "-m", "30", *args, *where, stdout=-1, stderr=-2
        )
        out, _ = await process.communicate()
        assert process.returncode is not None
        return process.returncode, out


@contextlib.asynccontextmanager
async def stage(
    outside_port: int,
    *hosts: str,
    methods: tuple[str, ...] = (),
    intercept: bool = False,
    limits: Limits = Limits(),
    authority: Authority | None = None,
    upstream_tls: ssl.SSLContext | None = None,
    log_path: Path | None = None,
) -> AsyncIterator[Stage]:
    async def resolve(host: str, port: int) -> list[tuple[str, int]]:
        return [("127.0.0.1", outside_port)]

    listener = socket.create_server(("0.0.0.0", 0), backlog=128)
    port = listener.getsockname()[1]
    egress = Egress(allow=tuple(Allow(host=host, methods=methods, port=port) for host in hosts), intercept=intercept)
    more: dict[str, Any] = {"limits": limits, "authority": authority, "upstream_tls": upstream_tls, "log_path": log_path}
    guard = await EgressGuard.start("box", egress, [listener.detach()], resolve=resolve, network=NETWORK, **more)
    try:
        yield Stage(guard, port)
        assert guard.num_faults == 0
    finally:
        await guard.close()
