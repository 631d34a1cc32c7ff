"""The client's connections, on both event loops: used again when clean, closed when not, and nobody waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.engine.client import EngineClient, EngineUnavailable, Frames
from rollmill.engine.protocol import FinishReason, GenerateReply, GenerateRequest, Piece, StreamFrame, Timing, VersionSpan

T = TypeVar("T")
Run = Callable[[Coroutine[Any, Any, T]], T]
Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
REPLY = GenerateReply(
    token_ids=[5, 6],
    logprobs=b"\0" * 8,
    spans=[VersionSpan(0, 2, 1)],
    finish_reason=FinishReason.STOP,
    seed=1,
    num_reused=0,
    timing=Timing(queue_s=0.0, first_token_s=0.0, total_s=0.0),
)
BODY = msgspec.msgpack.encode(REPLY)
ASK = GenerateRequest(prompt_ids=[1, 2], max_tokens=4, seed=1)
PIECE = Piece(token_ids=[5], logprobs=[-0.5], version=1)
OK = b"HTTP/1.1 200 OK\r\n"


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    return asyncio.run if request.param == "asyncio" else uvloop.run


class RawServer:
    """Calls `answer` with every request that came whole, connection by connection; hangs up when it returns False."""

    def __init__(self, answer: Callable[[asyncio.StreamWriter, int], Awaitable[bool]]) -> None:
        self._answer = answer
        self.num_connections = self.num_requests = 0
        self.num_open = 0
        self.writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> RawServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=2048)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self.num_open += 1
        self.writers.append(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length"))
                await reader.readexactly(length)
                self.num_requests += 1
                if not await self._answer(writer, self.num_requests):
                    break
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.num_open -= 1
            writer.close()

    async def __aexit__(self, *args: object) -> None:
        self._server.close()


def whole(body: bytes) -> bytes:
    return OK + f"content-length: {len(body)}\r\n\r\n".encode() + body


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 (a server in the same loop, seen from outside)
            await asyncio.sleep(0.001)


def test_one_connection_serves_call_after_call(run: Run) -> None:
    async def answer(writer: asyncio.StreamWriter, number: int) -> bool:
        writer.write(
            whole(BODY) if number % 2 else OK + b"transfer-encoding: chunked\r\n\r\n" + chunk(BODY[:7]) + chunk(BODY[7:]) + b"0\r\n\r\n"
        )
        return True

    async def main() -> int:
        async with RawServer(answer) as server, EngineClient(server.url) as client:
            for _ in range(6):
                assert await client.generate(ASK) == REPLY
            return server.num_connections

    assert run(main()) == 1


def test_a_body_without_a_length_ends_with_its_connection(run: Run) -> None:
    async def answer(writer: asyncio.StreamWriter, number: int) -> bool:
        writer.write(OK + b"\r\n" + BODY)
        return False

    async def main() -> int:
        async with RawServer(answer) as server, EngineClient(server.url) as client:
            for _ in range(2):
                assert await client.generate(ASK) == REPLY
            return server.num_connections

    assert run(main()) == 2


def test_a_connection_that_the_server_closed_while_idle_is_not_a_failure(run: Run) -> None:
    async def answer(writer: asyncio.StreamWriter, number: int) -> bool:
        if number == 2:
            # Just when it is used again.
            return False
        writer.write(whole(BODY))
        return True

    async def main() -> None:
        async with RawServer(answer) as server, EngineClient(server.url) as client:
            assert await client.generate(ASK) == REPLY
            assert await client.generate(ASK) == REPLY
            assert (server.num_connections, server.num_requests) == (2, 3)
            server.writers[-1].close()
            await until(lambda: client._http.num_idle == 0)
            assert await client.generate(ASK) == REPLY

    run(main())


def test_a_new_connection_that_is_cut_at_once_is_unavailable(run: Run) -> None:
    async def answer(writer: asyncio.StreamWriter, number: int) -> bool:
        return False

    async def main() -> int:
        async with RawServer(answer) as server, EngineClient(server.url) as client:
            with pytest.raises(EngineUnavailable, match="closed the connection"):
                await client.generate(ASK)
            return server.num_requests

    assert run(main()) == 1


@pytest.mark.parametrize(
    "data",
    [b"SSH-2.0-OpenSSH\r\n", whole(BODY)[:-3], OK + b"transfer-encoding: chunked\r\n\r\nzz\r\n", whole(b"\xc1"), whole(BODY) + whole(BODY)],
)
def test_what_is_no_reply_is_unavailable_and_its_connection_is_not_used_again(run: Run, data: bytes) -> None:
    async def answer(writer: asyncio.StreamWriter, number: int) -> bool:
        writer.write(data if number == 1 else whole(BODY))
        return not data.endswith(BODY[:-3])

    async def main() -> int:
        async with RawServer(answer) as server, EngineClient(server.url) as client:
            if data == whole(BODY) + whole(BODY):
                assert await client.generate(ASK) == REPLY
            else:
                with pytest.raises(EngineUnavailable):
                    await client.generate(ASK)
            if data == whole(b"\xc1"):
                return 2
            assert await client.generate(ASK) == REPLY
            return server.num_connections

    assert run(main()) == 2


def test_a_server_that_says_nothing_is_given_up_on(run: Run) -> None:
    async def answer(writer: asyncio.StreamWriter, number: int) -> bool:
        await asyncio.sleep(60)
        return False

    async def main() -> None:
        async with RawServer(answer) as server, EngineClient(server.url, timeout_s=0.05) as client:
            with pytest.raises(EngineUnavailable, match=r"no whole reply within 0\.05 s"):
                await client.generate(ASK)
            with pytest.raises(EngineUnavailable, match=r"no whole reply within 0\.05 s"):
                await anext(client.stream(ASK))

    run(main())


def test_cancelling_a_call_closes_its_connection(run: Run) -> None:
    async def answer(writer: asyncio.StreamWriter, number: int) -> bool:
        writer.write(OK + b"transfer-encoding: chunked\r\n\r\n")
        await asyncio.get_running_loop().create_future()
        return False

    async def main() -> None:
        async with RawServer(answer) as server, EngineClient(server.url) as client:
            task = asyncio.create_task(client.generate(ASK))
            await until(lambda: server.num_requests == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            with pytest.raises(ConnectionError):
                await until(lambda: _is_cut(server.writers[0]))
            assert client._http.num_idle == 0

    def _is_cut(writer: asyncio.StreamWriter) -> bool:
        if writer.transport.is_closing():
            raise ConnectionError
        writer.write(b"1\r\nx\r\n")
        return False

    run(main())


def test_closing_the_client_ends_what_runs(run: Run) -> None:
    async def answer(writer: asyncio.StreamWriter, number: int) -> bool:
        await asyncio.get_running_loop().create_future()
        return False

    async def main() -> None:
        async with RawServer(answer) as server:
            client = EngineClient(server.url)
            task = asyncio.create_task(client.generate(ASK))
            await until(lambda: server.num_requests == 1)
            await client.aclose()
            with pytest.raises(EngineUnavailable, match="this client was closed"):
                await task
            with pytest.raises(EngineUnavailable, match="this client was closed"):
                await client.generate(ASK)

    run(main())


def test_hundreds_of_streams_run_at_once_and_their_connections_are_used_again(run: Run) -> None:
    num, gate = 300, asyncio.Event()

    async def answer(writer: asyncio.StreamWriter, number: int) -> bool:
        writer.write(OK + b"transfer-encoding: chunked\r\n\r\n" + chunk(StreamFrame(piece=PIECE).to_bytes()))
        await gate.wait()
        writer.write(chunk(StreamFrame(reply=REPLY).to_bytes()) + b"0\r\n\r\n")
        return True

    async def one(client: EngineClient) -> list[Piece | GenerateReply]:
        async with aclosing(client.stream(ASK)) as items:
            return [item async for item in items]

    async def main() -> None:
        async with RawServer(answer) as server, EngineClient(server.url) as client:
            tasks = [asyncio.create_task(one(client)) for _ in range(num)]
            await until(lambda: server.num_requests == num)
            gate.set()
            assert await asyncio.gather(*tasks) == [[PIECE, REPLY]] * num
            assert client._http.num_idle == num
            await one(client)
            assert server.num_connections == num

    run(main())


def test_a_reader_that_sleeps_makes_the_sender_wait(run: Run) -> None:
    big = Piece(token_ids=[5] * 20_000, logprobs=[-0.5] * 20_000, version=1)
    data, num = StreamFrame(piece=big).to_bytes(), 200
    sent = 0

    async def answer(writer: asyncio.StreamWriter, number: int) -> bool:
        nonlocal sent
        writer.write(OK + b"transfer-encoding: chunked\r\n\r\n")
        for _ in range(num):
            writer.write(chunk(data))
            await writer.drain()
            sent += 1
        writer.write(chunk(StreamFrame(reply=REPLY).to_bytes()) + b"0\r\n\r\n")
        return True

    async def main() -> None:
        async with RawServer(answer) as server, EngineClient(server.url) as client, aclosing(client.stream(ASK)) as items:
            assert await anext(items) == big
            last = -1
            while last != sent:
                last = sent
                await asyncio.sleep(0.05)
            assert sent < num, "the sender did not wait"
            assert len([item async for item in items]) == num

    run(main())


@given(sizes=st.lists(st.integers(0, 40), max_size=6), cuts=st.lists(st.integers(1, 9), min_size=1, max_size=4))
@settings(max_examples=200, derandomize=True, deadline=None)
def test_frames_come_out_however_the_bytes_are_cut(sizes: list[int], cuts: list[int]) -> None:
    bodies = [bytes([n]) * size for n, size in enumerate(sizes)]
    data = b"".join(len(b).to_bytes(4, "little") + b for b in bodies)
    frames, got, at, turn = Frames(), [], 0, 0
    while at < len(data):
        size = cuts[turn % len(cuts)]
        got += frames.feed(data[at : at + size])
        at, turn = at + size, turn + 1
    assert got == bodies and Frames().feed(data) == bodies


@pytest.mark.parametrize("url", ["127.0.0.1:80", "ftp://host", "http://"])
def test_an_address_that_is_none_is_refused_in_words(url: str) -> None:
    with pytest.raises(ValueError, match="write http://host:port"):
        EngineClient(url)
