"""A rule may name where its host really lies: that server is reached, streams flow through it, and nothing else on this machine is."""

from __future__ import annotations

import asyncio
import socket

import pytest
from egress_fakes import NETWORK, Outside, Stage, in_time, raw_outside

from rollmill.sandbox.egress import EgressGuard, Limits, Verdict
from rollmill.sandbox.egress.policy import Policy
from rollmill.sandbox.records import Allow, Egress, SandboxSpec

GET = b"GET /x HTTP/1.1\r\nHost: %b\r\nConnection: close\r\n\r\n"


async def nowhere(host: str, port: int) -> list[tuple[str, int]]:
    raise OSError(f"{host} was looked up")


async def guarded(*rules: tuple[str, int], limits: Limits = Limits()) -> Stage:
    """A stage whose rules lead to ports of this machine, port 0 to nowhere in particular."""
    listener = socket.create_server(("0.0.0.0", 0), backlog=128)
    port = listener.getsockname()[1]
    allow = tuple(Allow(host=host, port=port, upstream=f"127.0.0.1:{at}" if at else "") for host, at in rules)
    guard = await EgressGuard.start("box", Egress(allow=allow), [listener.detach()], resolve=nowhere, network=NETWORK, limits=limits)
    return Stage(guard, port)


def test_host_with_an_upstream_is_reached_on_loopback_and_no_other_is() -> None:
    async def scene() -> None:
        outside = Outside()
        async with outside.serve() as port:
            stage = await guarded(("model.internal", port), ("other.example", 0))
            try:
                assert (await stage.say("model.internal", GET % b"model.internal")).endswith(b"hello from /x")
                assert b"502" in (await stage.say("other.example", GET % b"other.example")).splitlines()[0]
                refused = await stage.say("other.example", GET % b"model.internal")
                assert b"403" in refused.splitlines()[0], "another host's address is no door to it"
                assert [r.verdict for r in stage.records] == [Verdict.ALLOWED, Verdict.FAILED, Verdict.DENIED]
            finally:
                await stage.guard.close()
        assert [path for _, path, *_ in outside.requests] == ["/x"]

    in_time(scene())


def test_events_of_a_stream_arrive_one_by_one() -> None:
    """Each event is sent only after the client has told that it read the one before: a buffer in between would stand still."""
    go_on = asyncio.Event()

    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for number in range(20):
            event = b"data: %d\n\n" % number
            writer.write(b"%x\r\n%b\r\n" % (len(event), event))
            await writer.drain()
            await go_on.wait()
            go_on.clear()
        writer.write(b"0\r\n\r\n")

    async def scene() -> None:
        async with raw_outside(server) as port:
            stage = await guarded(("model.internal", port))
            reader, writer = await stage.connect("model.internal")
            try:
                writer.write(GET % b"model.internal")
                for number in range(20):
                    await reader.readuntil(b"data: %d\n\n" % number)
                    go_on.set()
                assert (await reader.read()).endswith(b"0\r\n\r\n")
            finally:
                writer.close()
                await stage.guard.close()

    in_time(scene())


def test_server_of_our_own_may_think_longer_than_a_stranger() -> None:
    answered = asyncio.Event()

    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(0.3)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        await writer.drain()
        answered.set()

    async def scene() -> None:
        async with raw_outside(server) as port:
            stage = await guarded(("model.internal", port), limits=Limits(idle_s=0.05))
            try:
                assert (await stage.say("model.internal", GET % b"model.internal")).endswith(b"ok") and answered.is_set()
            finally:
                await stage.guard.close()

    in_time(scene())


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ([Allow(host="a.org", upstream="localhost:80")], "not an address and a port"),
        ([Allow(host="a.org", upstream="127.0.0.1")], "not an address and a port"),
        ([Allow(host="a.org", upstream="127.0.0.1:0")], "no port from 1"),
        ([Allow(host="a.org", upstream="127.0.0.1:x")], "no port from 1"),
        ([Allow(host="*.a.org", upstream="127.0.0.1:80")], "single name"),
        ([Allow(host="a.org", upstream="127.0.0.1:80"), Allow(host="A.org")], "several upstreams"),
    ],
)
def test_upstream_that_cannot_be_meant_is_refused(rules: list[Allow], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Policy(Egress(allow=tuple(rules)))


def test_upstream_holds_for_its_port_alone() -> None:
    policy = Policy(Egress(allow=(Allow(host="a.org", port=80, upstream="[::1]:8080"), Allow(host="a.org", port=443))))
    assert (policy.upstream("a.org", 80), policy.upstream("a.org", 443), policy.upstream("b.org", 80)) == (("::1", 8080), None, None)


def test_spec_shows_nothing_of_this_machine_by_default() -> None:
    assert SandboxSpec().shares == ()
