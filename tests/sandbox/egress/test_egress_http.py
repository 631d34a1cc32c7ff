"""Plain HTTP through the guard: what is allowed arrives whole, everything else gets a short answer and a record."""

from __future__ import annotations

import asyncio
import json
import socket
import urllib.request
from pathlib import Path

import httpx
import msgspec
import pytest
from egress_fakes import Outside, in_time, raw_outside, stage

from rollmill.sandbox.egress import Kind, Limits, Record, Verdict
from rollmill.sandbox.egress.http import Head
from rollmill.sandbox.egress.record import Journal

OK = "ok.example"


def test_curl_reaches_an_allowed_host_and_is_recorded() -> None:
    async def scene() -> None:
        outside = Outside()
        async with outside.serve() as port, stage(port, OK) as s:
            assert await s.curl(OK, "/a?b=c") == (0, b"hello from /a")
            (record,) = await s.recorded(1)
            assert (record.kind, record.host, record.method, record.path, record.status) == (Kind.HTTP, OK, "GET", "/a?b=c", 200)
            assert (
                record.verdict is Verdict.ALLOWED and record.num_sent_bytes > 60 and record.num_received_bytes > 60 and record.box == "box"
            )
            assert record.dialled == f"{s.book.address_of(OK)}:{s.port}"
        method, path, headers, _ = outside.requests[0]
        assert (method, path, headers["Host"]) == ("GET", "/a?b=c", f"{OK}:{s.port}")
        assert not {"Via", "Forwarded", "X-Forwarded-For"} & set(headers)

    in_time(scene())


def test_python_clients_reach_it_too() -> None:
    async def scene() -> None:
        async with Outside().serve() as port, stage(port, OK) as s:
            url, headers = f"http://{s.book.address_of(OK)}:{s.port}/x", {"Host": OK}

            def fetch() -> bytes:
                opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
                with opener.open(urllib.request.Request(url, headers=headers), timeout=30) as response:
                    return bytes(response.read())

            assert await asyncio.to_thread(fetch) == b"hello from /x"
            async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
                answers = [(await client.get(url, headers=headers)).content for _ in range(3)]
            assert answers == [b"hello from /x"] * 3

    in_time(scene())


def test_bodies_stream_both_ways_with_length_and_chunked(tmp_path: Path) -> None:
    payload = bytes(range(256)) * 4096
    (tmp_path / "up").write_bytes(payload)

    async def scene() -> None:
        outside = Outside()
        async with outside.serve() as port, stage(port, OK) as s:
            up = ["--data-binary", f"@{tmp_path / 'up'}"]
            assert await s.curl(OK, "/up", *up) == (0, payload)
            assert await s.curl(OK, "/up", *up, "-H", "Transfer-Encoding: chunked") == (0, payload)
            assert await s.curl(OK, "/big") == (0, bytes(range(256)) * 8192)
            assert await s.curl(OK, "/chunks") == (0, b"".join(b"%d" % i * 1000 for i in range(5)))
            assert await s.curl(OK, "/empty", "-w", "%{http_code}") == (0, b"204")
            assert (await s.curl(OK, "/head", "-I"))[1].startswith(b"HTTP/1.1 200 OK")
            records = await s.recorded(6)
            assert [r.status for r in records] == [201, 201, 200, 200, 204, 200]
            assert records[0].num_sent_bytes > len(payload) and records[2].num_received_bytes > 256 * 8192
        assert [body for *_, body in outside.requests[:2]] == [payload, payload]

    in_time(scene())


def test_a_connection_is_kept_for_many_requests_and_reused_outside() -> None:
    async def scene() -> None:
        outside = Outside()
        async with outside.serve() as port, stage(port, OK) as s:
            reader, writer = await s.connect(OK)
            for i in range(5):
                writer.write(f"GET /{i} HTTP/1.1\r\nHost: {OK}\r\n\r\n".encode())
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200") and b"onnection: close" not in head
                assert await reader.readexactly(len("hello from /0")) == f"hello from /{i}".encode()
            writer.write(b"".join(f"GET /p{i} HTTP/1.1\r\nHost: {OK}\r\n\r\n".encode() for i in range(3)))  # without waiting between them
            for i in range(3):
                await reader.readuntil(b"\r\n\r\n")
                assert await reader.readexactly(len("hello from /p0")) == f"hello from /p{i}".encode()
            writer.close()
            assert len(await s.recorded(8)) == 8 and len(outside.peers) == 1

    in_time(scene())


def test_an_outside_that_closed_in_between_is_connected_to_again() -> None:
    num = 0

    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num
        num += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        await writer.drain()

    async def scene() -> None:
        async with raw_outside(once) as port, stage(port, OK) as s:
            reader, writer = await s.connect(OK)
            for _ in range(3):
                writer.write(f"GET / HTTP/1.1\r\nHost: {OK}\r\n\r\n".encode())
                assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200 OK")
            writer.close()
            assert {r.verdict for r in await s.recorded(3)} == {Verdict.ALLOWED}
        assert num == 3

    in_time(scene())


def test_a_head_request_leaves_the_connection_usable() -> None:
    async def scene() -> None:
        async with Outside().serve() as port, stage(port, OK) as s:
            reader, writer = await s.connect(OK)
            writer.write(f"HEAD /h HTTP/1.1\r\nHost: {OK}\r\n\r\n".encode())
            assert b"Content-Length: 13" in await reader.readuntil(b"\r\n\r\n")
            writer.write(f"GET /g HTTP/1.1\r\nHost: {OK}\r\nConnection: close\r\n\r\n".encode())
            assert (await reader.read()).endswith(b"\r\n\r\nhello from /g")
            writer.close()

    in_time(scene())


DENIED = {
    "another host": ("evil.example", b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n", 403, "host is not allowed"),
    "fronting": (OK, b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n", 403, "host is not allowed"),
    "another allowed host": (OK, b"GET / HTTP/1.1\r\nHost: two.example\r\n\r\n", 403, "host is not the one that was dialled"),
    "an undialled address": ("evil.example", b"GET / HTTP/1.1\r\nHost: ok.example\r\n\r\n", 403, "host is not the one that was dialled"),
    "an address": (OK, b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", 403, "host is not allowed"),
    "another port": (OK, b"GET / HTTP/1.1\r\nHost: ok.example:1\r\n\r\n", 403, "port of the Host header is not the one that was dialled"),
    "no host": (OK, b"GET / HTTP/1.1\r\n\r\n", 400, "not exactly one Host header"),
    "two hosts": (OK, b"GET / HTTP/1.1\r\nHost: ok.example\r\nHost: evil.example\r\n\r\n", 400, "not exactly one Host header"),
    "a whole URL": (OK, b"GET http://evil.example/ HTTP/1.1\r\nHost: ok.example\r\n\r\n", 400, "request target is not a path"),
    "a tunnel": (OK, b"CONNECT ok.example:443 HTTP/1.1\r\nHost: ok.example\r\n\r\n", 400, "request target is not a path"),
    "two lengths": (
        OK,
        b"POST / HTTP/1.1\r\nHost: ok.example\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        400,
        "not HTTP/1",
    ),
    "HTTP/2": (OK, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "not HTTP/1"),
    "another protocol": (OK, b"SSH-2.0-OpenSSH_9.2\r\n", 400, "not HTTP/1"),
    "a huge head": (OK, b"GET / HTTP/1.1\r\nHost: ok.example\r\nX: " + b"x" * 40000 + b"\r\n\r\n", 431, "head is larger than"),
    "an endless head": (OK, b"GET / HTTP/1.1\r\n" + b"X: x\r\n" * 9000, 431, "head is larger than"),
}


@pytest.mark.parametrize("case", DENIED)
def test_what_is_not_allowed_is_answered_recorded_and_never_leaves(case: str) -> None:
    name, data, status, reason = DENIED[case]

    async def scene() -> None:
        outside = Outside()
        async with outside.serve() as port, stage(port, OK, "two.example") as s:
            answer = await s.say(name, data)
            assert answer.startswith(b"HTTP/1.1 %d " % status)
            (record,) = s.records
            assert (record.verdict, record.status) == (Verdict.DENIED, status) and record.reason.startswith(reason)
        assert outside.requests == [] and not outside.peers

    in_time(scene())


def test_only_the_methods_of_the_rule_leave() -> None:
    async def scene() -> None:
        outside = Outside()
        async with outside.serve() as port, stage(port, OK, methods=("GET",)) as s:
            assert await s.curl(OK, "/a") == (0, b"hello from /a")
            assert await s.curl(OK, "/a", "-d", "secret") == (0, b"Forbidden\n")
            assert [(r.method, r.verdict, r.reason) for r in await s.recorded(2)][1] == ("POST", Verdict.DENIED, "method is not allowed")
        assert [m for m, *_ in outside.requests] == ["GET"]

    in_time(scene())


def test_the_refusal_of_an_upload_is_heard_although_the_upload_goes_on() -> None:
    async def scene() -> None:
        async with Outside().serve() as port, stage(port, OK, methods=("GET",)) as s:
            for _ in range(5):
                reader, writer = await s.connect(OK)
                writer.write(f"POST / HTTP/1.1\r\nHost: {OK}\r\nContent-Length: {4 << 20}\r\n\r\n".encode())
                writer.write(b"x" * (4 << 20))
                await writer.drain()
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 403 Forbidden")
                writer.close()

    in_time(scene())


def test_a_request_after_an_allowed_one_is_judged_again() -> None:
    async def scene() -> None:
        outside = Outside()
        async with outside.serve() as port, stage(port, OK) as s:
            good, bad = (f"GET /{h} HTTP/1.1\r\nHost: {h}\r\n\r\n".encode() for h in (OK, "evil.example"))
            answer = await s.say(OK, good + bad + good)
            assert answer.count(b"HTTP/1.1 200") == 1 and answer.count(b"HTTP/1.1 403") == 1
        assert len(outside.requests) == 1

    in_time(scene())


def test_an_upgrade_is_not_passed_on_but_the_request_is() -> None:
    async def scene() -> None:
        outside = Outside()
        async with outside.serve() as port, stage(port, OK) as s:
            ask = f"GET /u HTTP/1.1\r\nHost: {OK}\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA\r\n\r\n"
            last = f"GET /v HTTP/1.1\r\nHost: {OK}\r\nConnection: close\r\n\r\n"
            answer = await s.say(OK, (ask + last).encode())
            assert b"hello from /u" in answer and b"hello from /v" in answer
        assert not {"Upgrade", "HTTP2-Settings", "Connection"} & set(outside.requests[0][2])

    in_time(scene())


def test_a_connection_header_cannot_take_the_framing_away() -> None:
    headers = ((b"Host", b"a"), (b"Content-Length", b"3"), (b"X-Own", b"1"), (b"Connection", b"content-length, x-own"))
    head = Head(method="POST", target="/", version="1.1", is_kept_alive=True, headers=headers)
    assert head.to_bytes(close=False) == b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\n"


def test_answers_that_end_with_the_connection_and_early_hints_are_passed_on() -> None:
    async def old(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.0 200 OK\r\n\r\nuntil the end")
        await writer.drain()

    async def scene() -> None:
        async with raw_outside(old) as port, stage(port, OK) as s:
            answer = await s.say(OK, f"GET / HTTP/1.1\r\nHost: {OK}\r\n\r\n".encode())
            assert answer.startswith(b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 200 OK\r\n")
            assert answer.endswith(b"\r\n\r\nuntil the end")
            assert (await s.recorded(1))[0].status == 200

    in_time(scene())


SWITCHING = b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"


@pytest.mark.parametrize("words", [b"", b"nonsense\r\n\r\n", SWITCHING, b"HTTP/1.1 200 OK\r\nX: "])
def test_an_outside_that_breaks_off_is_a_failure_not_a_denial(words: bytes) -> None:
    async def broken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(words)
        await writer.drain()

    async def scene() -> None:
        async with raw_outside(broken) as port, stage(port, OK) as s:
            assert (await s.say(OK, f"GET / HTTP/1.1\r\nHost: {OK}\r\n\r\n".encode())).startswith(b"HTTP/1.1 502 Bad Gateway")
            (record,) = s.records
            assert (record.verdict, record.status) == (Verdict.FAILED, 502) and record.reason.startswith("outside broke off")

    in_time(scene())


def test_a_truncated_answer_is_cut_short_for_the_box_too() -> None:
    async def broken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
        await writer.drain()

    async def scene() -> None:
        async with raw_outside(broken) as port, stage(port, OK) as s:
            assert (await s.curl(OK, "/"))[0] == 18  # curl: transfer closed with bytes remaining
            (record,) = await s.recorded(1)
            assert record.verdict is Verdict.FAILED

    in_time(scene())


def test_an_outside_that_cannot_be_reached_is_a_failure() -> None:
    async def scene() -> None:
        with socket.create_server(("127.0.0.1", 0)) as gone:
            port = gone.getsockname()[1]
        async with stage(port, OK) as s:
            assert await s.curl(OK, "/") == (0, b"Bad Gateway\n")
            assert (await s.recorded(1))[0].verdict is Verdict.FAILED

    in_time(scene())


def test_an_early_answer_to_an_unfinished_upload_is_passed_on() -> None:
    async def impatient(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()

    async def scene() -> None:
        async with raw_outside(impatient) as port, stage(port, OK) as s:
            answer = await s.say(OK, f"POST / HTTP/1.1\r\nHost: {OK}\r\nContent-Length: 1000000\r\n\r\nstart".encode())
            assert answer.startswith(b"HTTP/1.1 413")

    in_time(scene())


def test_a_box_that_breaks_off_its_upload_ends_the_exchange() -> None:
    seen = asyncio.Queue[bytes]()

    async def listener(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.put_nowait(await reader.read())

    async def scene() -> None:
        async with raw_outside(listener) as port, stage(port, OK) as s:
            _, writer = await s.connect(OK)
            writer.write(f"POST / HTTP/1.1\r\nHost: {OK}\r\nContent-Length: 1000\r\n\r\nstart".encode())
            writer.write_eof()
            assert (await seen.get()).endswith(b"\r\n\r\nstart")
            (record,) = await s.recorded(1)
            assert record.verdict is Verdict.ALLOWED and record.reason.startswith("box broke off")
            writer.close()

    in_time(scene())


def test_a_slow_head_and_a_silent_connection_are_ended() -> None:
    async def scene() -> None:
        async with Outside().serve() as port, stage(port, OK, limits=Limits(head_s=1)) as s:
            _, silent = await s.connect(OK)
            reader, slow = await s.connect(OK)
            slow.write(b"GET / HTTP/1.1\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 408")
            assert {r.reason for r in await s.recorded(2)} == {"said nothing", "head took too long"}
            silent.close()
            slow.close()

    in_time(scene())


def test_an_outside_that_falls_silent_is_given_up() -> None:
    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async def scene() -> None:
        async with raw_outside(mute) as port, stage(port, OK, limits=Limits(idle_s=0.2)) as s:
            assert await s.curl(OK, "/") == (0, b"Gateway Timeout\n")
            assert (await s.recorded(1))[0].verdict is Verdict.FAILED

    in_time(scene())


def test_connections_beyond_the_limit_wait_their_turn() -> None:
    async def scene() -> None:
        async with Outside().serve() as port, stage(port, OK, limits=Limits(num_connections=2)) as s:
            held = [await s.connect(OK) for _ in range(2)]
            waiting = asyncio.create_task(s.say(OK, f"GET /w HTTP/1.1\r\nHost: {OK}\r\nConnection: close\r\n\r\n".encode()))
            for _, writer in held:
                writer.write(f"GET /h HTTP/1.1\r\nHost: {OK}\r\n\r\n".encode())
            await s.recorded(2)
            assert not waiting.done()
            held[0][1].close()
            assert (await waiting).endswith(b"hello from /w")
            held[1][1].close()

    in_time(scene())


def test_a_box_that_has_spent_its_bytes_moves_no_more() -> None:
    async def scene() -> None:
        async with Outside().serve() as port, stage(port, OK, limits=Limits(total_bytes=100_000)) as s:
            assert (await s.curl(OK, "/big"))[0] != 0
            (record,) = await s.recorded(1)
            assert (record.verdict, record.reason) == (Verdict.DENIED, "byte budget of the box is spent")
            assert record.num_received_bytes <= 100_000
            assert (await s.curl(OK, "/a"))[0] != 0
            assert {r.verdict for r in await s.recorded(2)} == {Verdict.DENIED}

    in_time(scene())


def test_closing_the_guard_ends_connections_and_records_them(tmp_path: Path) -> None:
    reached = asyncio.Event()

    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        reached.set()
        await reader.read()

    async def scene() -> None:
        path = tmp_path / "logs" / "box.jsonl"
        async with raw_outside(mute) as port, stage(port, OK, log_path=path) as s:
            reader, writer = await s.connect(OK)
            writer.write(f"GET / HTTP/1.1\r\nHost: {OK}\r\n\r\n".encode())
            await reached.wait()
            await s.guard.close()
            assert await reader.read() == b""
            assert [(r.verdict, r.reason) for r in s.records] == [(Verdict.ALLOWED, "box closed meanwhile")]
            assert [json.loads(line)["host"] for line in path.read_text().splitlines()] == [OK]
            with pytest.raises(ConnectionRefusedError):
                await s.connect(OK)
            writer.close()

    in_time(scene())


def test_records_and_their_file_are_bounded(tmp_path: Path) -> None:
    journal = Journal("b", Limits(num_records=3, file_bytes=2000), tmp_path / "r.jsonl")
    for i in range(50):
        journal.write(Kind.HTTP, "1.2.3.4:80", Verdict.DENIED, host="h" * 5000, path=f"/{i}")
    for i in range(50):
        journal.write(Kind.HTTP, "1.2.3.4:80", Verdict.DENIED, path=f"/{i}")
    journal.close()
    assert [r.path for r in journal.records] == ["/47", "/48", "/49"] and journal.counts[Verdict.DENIED] == 100
    written = [msgspec.json.decode(line, type=Record) for line in (tmp_path / "r.jsonl").read_bytes().splitlines()]
    assert (tmp_path / "r.jsonl").stat().st_size <= 2000 and len(written) + journal.num_unwritten == 100 and written[-1].schema == 1
