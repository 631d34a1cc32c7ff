"""Claims about the HTTP manners that all servers share, at the level of ASGI messages."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import msgspec
import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request

from rollmill.web import (
    ApiError,
    ClientGone,
    EventStream,
    PolicyVersion,
    bind,
    decode_json,
    decode_msgpack,
    error_body,
    error_response,
    json_response,
    read_body,
    while_connected,
)

DEADLINE_S = 20.0


class Wire:
    """One HTTP exchange: what the client sends, when it leaves, and what it was sent."""

    def __init__(self, *parts: bytes, headers: dict[str, str] | None = None) -> None:
        self._parts = [*parts] or [b""]
        self.left = asyncio.Event()
        self.sent: list[dict[str, Any]] = []
        raw = [(k.encode(), v.encode()) for k, v in (headers or {}).items()]
        self.scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/", "headers": raw}

    @property
    def http(self) -> Request:
        return Request(self.scope, self.receive)

    async def receive(self) -> dict[str, Any]:
        if self._parts:
            part = self._parts.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(self._parts)}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(m.get("body", b"") for m in self.sent)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, DEADLINE_S))


def test_a_body_is_read_up_to_its_bound_whether_its_length_was_declared_or_not() -> None:
    async def main() -> None:
        assert await read_body(Wire(b"ab", b"cd").http, 4) == b"abcd"
        for wire in (Wire(b"ab", b"cde"), Wire(b"", headers={"content-length": "5"})):
            with pytest.raises(ApiError) as refused:
                await read_body(wire.http, 4)
            assert refused.value.status_code == 413

    run(main())


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 100_000, b'{"a": "x"}', b"\xc1"])
def test_what_does_not_decode_is_a_400_that_names_the_encoding(body: bytes) -> None:
    class Shape(msgspec.Struct):
        a: int

    for decode, name in ((decode_json, "JSON"), (decode_msgpack, "MessagePack")):
        with pytest.raises(ApiError, match=f"not a valid {name} request") as refused:
            decode(body, Shape)
        assert refused.value.status_code == 400


def test_errors_keep_their_status_headers_and_extra_fields() -> None:
    response = error_response(ApiError(409, "older", headers={"retry-after": "1"}, extra={"version": 3}))
    body = json.loads(response.body)
    assert (response.status_code, response.headers["retry-after"], body["version"]) == (409, "1", 3)
    assert body["error"] == {"message": "older", "type": "version_unmet", "param": None, "code": 409}
    assert json.loads(error_response(HTTPException(405)).body)["error"]["type"] == "invalid_request_error"
    assert error_body(503, "x")["error"]["type"] == "server_error"


def test_work_goes_on_while_the_client_is_there_and_is_cancelled_when_it_leaves() -> None:
    async def main() -> None:
        async def quick() -> int:
            return 7

        wire = Wire()
        await read_body(wire.http)
        assert await while_connected(wire.http, quick()) == 7
        started, ended = asyncio.Event(), asyncio.Event()

        async def slow() -> None:
            started.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        waiting = asyncio.create_task(while_connected(wire.http, slow()))
        await started.wait()
        wire.left.set()
        with pytest.raises(ClientGone):
            await waiting
        await ended.wait()

    run(main())


def test_an_error_in_the_middle_of_a_stream_is_its_last_event() -> None:
    async def main() -> None:
        ends: list[int] = []

        async def events():
            yield b"data: 1\n\n"
            raise ApiError(503, "gone", extra={"retryable": True})

        wire = Wire()
        await EventStream(events(), on_end=lambda: ends.append(1), headers={"x-request-id": "r"})(wire.scope, wire.receive, wire.send)
        first, last = wire.body.decode().split("\n\n")[:2]
        assert first == "data: 1" and json.loads(last.removeprefix("data: "))["retryable"] is True
        assert wire.sent[0]["status"] == 200 and (b"x-request-id", b"r") in wire.sent[0]["headers"]
        assert wire.sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False} and ends == [1]
        plain = Wire()
        raw = EventStream(events(), on_end=lambda: None, on_error=lambda e: b"!" + e.detail.encode(), content_type="x/y")
        await raw(plain.scope, plain.receive, plain.send)
        assert plain.body.endswith(b"!gone") and (b"content-type", b"x/y") in plain.sent[0]["headers"]

    run(main())


def test_a_stream_stops_and_tells_when_its_client_leaves() -> None:
    async def main() -> None:
        ended, sent_one = asyncio.Event(), asyncio.Event()

        async def events():
            yield b"one"
            sent_one.set()
            await asyncio.Event().wait()
            yield b"never"

        wire = Wire()
        stream = EventStream(events(), on_end=ended.set)
        task = asyncio.create_task(stream(wire.scope, wire.receive, wire.send))
        await sent_one.wait()
        wire.left.set()
        await task
        assert ended.is_set() and b"never" not in wire.body

    run(main())


def test_every_reply_carries_the_version_of_its_moment() -> None:
    async def main() -> None:
        version, wire = [4], Wire()

        async def app(scope, receive, send) -> None:
            version[0] = 5
            await json_response({})(scope, receive, send)

        await PolicyVersion(app, lambda: version[0])(wire.scope, wire.receive, wire.send)
        assert (b"x-policy-version", b"5") in wire.sent[0]["headers"]

    run(main())


def test_a_port_in_use_or_not_ours_is_refused_in_words() -> None:
    with bind("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(OSError, match=f"port {port} on 127.0.0.1 is in use"):
            bind("127.0.0.1", port)
        with socket.create_connection(("127.0.0.1", port), DEADLINE_S):
            pass
    with pytest.raises(OSError, match="set another host or port"):
        bind("192.0.2.1", 0)


def test_replies_of_two_writes_do_not_wait_for_an_acknowledgement() -> None:
    async def main() -> None:
        found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            found.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        sock = bind("127.0.0.1", 0)
        async with await asyncio.start_server(accepted, sock=sock):
            _, writer = await asyncio.open_connection(*sock.getsockname())
            assert await asyncio.wait_for(found, DEADLINE_S) != 0
            writer.close()

    run(main())
