"""Claims about streams of tokens: they say what the whole reply says, survive slow and leaving readers, and can be continued elsewhere."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from itertools import accumulate
from pathlib import Path

import msgspec
import numpy as np
import pytest
from engine_worlds import CONFIG, DEADLINE_S, END, Gate, served, swap_beneath, tiny_model, until, write_tokenizer

from rollmill.engine import replies
from rollmill.engine.calls import Call
from rollmill.engine.client import EngineClient, EngineRejected, EngineUnavailable, VersionUnmet
from rollmill.engine.protocol import (
    Constraint,
    ConstraintKind,
    FinishReason,
    GenerateReply,
    GenerateRequest,
    Piece,
    StreamError,
    StreamFrame,
    SwapMode,
    Timing,
)
from rollmill.engine.scheduler import Sequence, SequenceState
from rollmill.model import MoEConfig
from rollmill.web import ApiError

NO_TIME = Timing(queue_s=0, first_token_s=0, total_s=0)


@pytest.fixture(autouse=True)
def every_step_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "PIECE_S", 0.0)


def ask(**fields) -> GenerateRequest:
    return GenerateRequest(**{"prompt_ids": [1, 2, 3], "max_tokens": 40, "seed": 4, **fields})


def timeless(reply: GenerateReply) -> GenerateReply:
    return msgspec.structs.replace(reply, timing=NO_TIME)


async def read(client: EngineClient, request: GenerateRequest) -> tuple[list[Piece], GenerateReply]:
    *pieces, reply = [item async for item in client.stream(request)]
    assert isinstance(reply, GenerateReply) and all(isinstance(p, Piece) for p in pieces)
    return pieces, reply


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, DEADLINE_S))


def check_pieces(pieces: list[Piece], reply: GenerateReply) -> None:
    assert [t for p in pieces for t in p.token_ids] == reply.token_ids
    assert np.array([lp for p in pieces for lp in p.logprobs], "<f4").tobytes() == reply.logprobs
    assert [p.version for p in pieces for _ in p.token_ids] == reply.versions_T.tolist()
    assert [t for p in pieces for t in p.tops] == reply.tops
    starts = list(accumulate((len(p.token_ids) for p in pieces), initial=0))
    assert tokens_in(reply.forced) == [at + i for p, at in zip(pieces, starts, strict=False) for i in tokens_in(p.forced)]
    stale = [at + p.stale_from for p, at in zip(pieces, starts, strict=False) if p.stale_from is not None]
    assert stale == ([] if reply.stale_from is None else [reply.stale_from])
    assert [(p.replica, p.num_reused) for p in pieces] == [(reply.replica, reply.num_reused)] + [("", 0)] * (len(pieces) - 1)


def tokens_in(spans: list[tuple[int, int]]) -> list[int]:
    return [i for start, end in spans for i in range(start, end)]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.7, "top_p": 0.8, "num_top": 3},
        {"stop_ids": list(range(0, 300, 7))},
        {"max_tokens": 1},
        {"prompt_ids": [*range(150)]},
    ],
)
def test_a_stream_ends_with_the_reply_that_generate_gives(fields: dict) -> None:
    async def main():
        async with served(replica="east-1") as (_, url), EngineClient(url) as client:
            await client.generate(ask(**fields))
            return await read(client, ask(**fields)), await client.generate(ask(**fields))

    (pieces, reply), whole = run(main())
    assert timeless(reply) == timeless(whole) and reply.replica == "east-1"
    check_pieces(pieces, reply)


def test_pieces_of_a_constrained_stream_name_the_forced_tokens(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    write_tokenizer(tmp_path)
    # Runs of one choice that begin, end and go on where pieces do, behind free ones of several lengths.
    constraint = Constraint(kind=ConstraintKind.REGEX, text="abc[xyz]d(yes|no)[0-9]{2}-----(yes|no)")

    async def main():
        async with served(tokenizer=tmp_path / "tokenizer.json") as (engine, url), EngineClient(url) as client:
            gate, items = Gate(engine), []
            gate.allow(1)
            async for item in client.stream(ask(constraint=constraint, stop_ids=[END])):
                items.append(item)
                gate.allow(1 + len(items) % 3)
            return items

    *pieces, reply = run(main())
    check_pieces(pieces, reply)
    assert len(pieces) > 5 and 5 < len(tokens_in(reply.forced)) < len(reply.token_ids)


def test_a_piece_in_mid_stream_is_as_small_as_its_tokens() -> None:
    sent = msgspec.msgpack.decode(frame(piece=PIECE)[4:])
    assert sent == {"piece": {"token_ids": [7], "logprobs": [-1.0], "version": 3}}


def test_a_stream_of_a_model_with_experts_carries_the_same_route_record() -> None:
    config = msgspec.structs.replace(
        CONFIG, family="qwen3_moe", moe=MoEConfig(num_experts=8, top_k=3, expert_size=32, norm_topk=True, dense_layers=(0,))
    )

    async def main():
        async with served(tiny_model(0, config)) as (_, url), EngineClient(url) as client:
            return await read(client, ask(routes_from=1)), await client.generate(ask(routes_from=1))

    (_, reply), whole = run(main())
    assert len(reply.routes) > 0 and timeless(reply) == timeless(whole)


@pytest.mark.parametrize("mode", list(SwapMode))
def test_pieces_carry_the_version_that_sampled_them_across_swaps(mode: SwapMode) -> None:
    async def main():
        async with served(swap_mode=mode) as (engine, url), EngineClient(url) as client:
            gate, pieces, num_read = Gate(engine), [], 0
            gate.allow(5)
            async with aclosing(client.stream(ask(max_tokens=20))) as items:
                async for item in items:
                    pieces.append(item)
                    num_read += len(item.token_ids) if isinstance(item, Piece) else 0
                    if num_read == 5 and engine.version == 1:
                        await swap_beneath(engine, gate, 2, num_steps=4)
                    elif num_read == 9 and engine.version == 2:
                        await swap_beneath(engine, gate, 3, num_steps=None)
            return pieces

    *pieces, reply = run(main())
    assert [s.version for s in reply.spans] == [1, 2, 3] and (reply.stale_from is None) is (mode is SwapMode.RE_PREFILL)
    check_pieces(pieces, reply)


def test_a_reader_that_sleeps_gets_one_piece_per_version() -> None:
    async def main():
        async with served() as (engine, _):
            gate, call = Gate(engine), Call(engine, ask(max_tokens=30), streams=True)
            gate.allow(10)
            await until(lambda: call.seq.num_sampled == 10, "ten tokens are there")
            await swap_beneath(engine, gate, 2, num_steps=None)
            await until(lambda: call._finished is not None, "the request has ended")
            return [p async for p in call.pieces()], call.seq

    pieces, seq = run(main())
    assert [(len(p.token_ids), p.version) for p in pieces] == [(s.end - s.start, s.version) for s in seq.spans] and len(pieces) == 2
    assert [t for p in pieces for t in p.token_ids] == seq.tokens[3:]


def test_tokens_that_wait_for_their_turn_are_told_with_their_own_version_at_a_swap_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "PIECE_S", 1e6)

    async def main():
        async with served() as (engine, url), EngineClient(url) as client:
            gate = Gate(engine)
            gate.allow(6)
            items = client.stream(ask(max_tokens=20))
            # It is told at once of its first token, and then not before it must be.
            pieces = [await anext(items)]
            await until(lambda: engine.metrics.num_tokens == 6, "six tokens are there")
            await swap_beneath(engine, gate, 2, num_steps=None)
            return pieces + [item async for item in items]

    *pieces, reply = run(main())
    assert len(pieces[0].token_ids) == 1 and 2 <= len(pieces) <= 3 and [s.version for s in reply.spans] == [1, 2]
    check_pieces(pieces, reply)


def test_many_streams_are_told_less_often_than_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "PIECE_S", 1.0)

    def stream_of(key: int) -> Sequence:
        seq = Sequence(key=key, request=ask(), seed=0, arrived_at=0.0, on_update=lambda s, u: None, streams=True)
        seq.state = SequenceState.RUNNING
        return seq

    def times_told(seqs: list[Sequence]) -> list[int]:
        return [len(replies.due(seqs, version=1, now=100.0 + t)) for t in range(13)]

    one, four = [stream_of(0)], [stream_of(k) for k in range(4)]
    assert times_told(one) == [1] * 13
    assert times_told(four) == [4 if t % 4 == 0 else 0 for t in range(13)]


def test_what_is_wrong_before_the_first_token_is_refused_as_usual() -> None:
    async def main() -> None:
        async with served(max_waiting=1, num_slots=1) as (engine, url), EngineClient(url) as client:
            with pytest.raises(EngineRejected, match="max_tokens is 0"):
                await read(client, ask(max_tokens=0))
            with pytest.raises(VersionUnmet, match="needs exactly 7") as unmet:
                await read(client, ask(exact_version=7))
            assert unmet.value.version == 1
            gate = Gate(engine)
            open_calls = [asyncio.create_task(read(client, ask(seed=s))) for s in range(2)]
            await until(lambda: engine.pressure().running + engine.pressure().waiting == 2, "the engine is full")
            with pytest.raises(EngineUnavailable, match="wait already"):
                await read(client, ask())
            gate.open()
            await asyncio.gather(*open_calls)

    run(main())


def test_a_swap_beneath_a_stream_with_an_exact_version_is_a_version_unmet() -> None:
    async def main():
        async with served() as (engine, url), EngineClient(url) as client:
            gate, got = Gate(engine), []
            gate.allow(3)
            with pytest.raises(VersionUnmet, match="swapped to version 2") as unmet:
                async with aclosing(client.stream(ask(exact_version=1))) as items:
                    async for item in items:
                        got += item.token_ids
                        if len(got) == 3:
                            await swap_beneath(engine, gate, 2, num_steps=None)
            return got, unmet.value.version

    got, version = run(main())
    assert len(got) in (3, 4) and version == 2


def test_an_engine_that_closes_under_a_stream_is_unavailable() -> None:
    async def main() -> None:
        async with served() as (engine, url), EngineClient(url) as client:
            gate = Gate(engine)
            gate.allow(2)
            with pytest.raises(EngineUnavailable, match="shutting down"):
                async with aclosing(client.stream(ask())) as items:
                    async for _ in items:
                        closing = asyncio.create_task(asyncio.to_thread(engine.close))
                        await until(lambda: engine._inbox.is_shut, "the engine stops")
                        gate.open()
                        await closing

    run(main())


class CutOff:
    """A server that answers a stream with these bytes and hangs up."""

    def __init__(self, body: bytes, *, ends_well: bool = False) -> None:
        self._body, self._ends_well = body, ends_well

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        chunk = f"{len(self._body):x}\r\n".encode() + self._body + b"\r\n" + (b"0\r\n\r\n" if self._ends_well else b"")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunk)
        await writer.drain()
        writer.close()

    async def __aexit__(self, *args: object) -> None:
        self._server.close()
        await self._server.wait_closed()


def frame(**fields) -> bytes:
    return StreamFrame(**fields).to_bytes()


PIECE = Piece(token_ids=[7], logprobs=[-1.0], version=3)


@pytest.mark.parametrize("ends_well", [False, True])
@pytest.mark.parametrize("rest", [b"", b"\x05", b"\x05\0\0\0ab", b"\x01\0\0\0\xc1", frame()])
def test_a_stream_that_is_cut_or_garbled_is_unavailable_after_the_pieces_that_came(rest: bytes, ends_well: bool) -> None:
    async def main() -> list[Piece]:
        got = []
        async with CutOff(frame(piece=PIECE) + rest, ends_well=ends_well) as url, EngineClient(url) as client:
            with pytest.raises(EngineUnavailable):
                async for item in client.stream(ask()):
                    got.append(item)
        return got

    assert run(main()) == [PIECE]


@pytest.mark.parametrize(("status", "kind"), [(409, VersionUnmet), (503, EngineUnavailable), (400, EngineRejected)])
def test_an_error_frame_is_raised_as_its_status_would_be(status: int, kind: type[Exception]) -> None:
    async def main() -> None:
        error = frame(error=StreamError(status=status, message="as it is", version=5))
        async with CutOff(frame(piece=PIECE) + error, ends_well=True) as url, EngineClient(url) as client:
            with pytest.raises(kind, match="as it is"):
                await read(client, ask())

    run(main())


def test_closing_the_generator_frees_the_row_and_a_finished_stream_keeps_its_connection() -> None:
    async def main() -> None:
        async with served() as (engine, url), EngineClient(url) as client:
            for _ in range(3):
                await read(client, ask(max_tokens=3))
            assert client._http.num_idle == 1, "used again and again"
            gate = Gate(engine)
            gate.allow(1)
            items = client.stream(ask(max_tokens=200))
            assert isinstance(await anext(items), Piece)
            await items.aclose()
            gate.open()
            await until(lambda: engine.pressure().running == 0, "the row is free")
            assert engine.metrics.finished.labels(FinishReason.CANCELLED)._value.get() == 1

    run(main())


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.6, "top_p": 0.7}, {"temperature": 0}])
@pytest.mark.parametrize("num_kept", [1, 17, 39])
def test_a_broken_stream_continued_on_a_second_engine_gives_the_unbroken_tokens(num_kept: int, fields: dict) -> None:
    async def main():
        async with served() as (_, url), EngineClient(url) as client:
            unbroken = await client.generate(ask(**fields))
        async with served(tiny_model()) as (_, url), EngineClient(url) as client:
            kept = unbroken.token_ids[:num_kept]
            rest = ask(**{**fields, "prompt_ids": [1, 2, 3, *kept], "max_tokens": 40 - num_kept})
            return unbroken, await read(client, rest)

    unbroken, (_, rest) = run(main())
    assert rest.token_ids == unbroken.token_ids[num_kept:]
    assert rest.logprobs == unbroken.logprobs[4 * num_kept :]


def test_a_call_that_is_refused_says_so_at_once() -> None:
    async def main() -> None:
        async with served() as (engine, _):
            with pytest.raises(ApiError, match="prompt_ids is empty"):
                Call(engine, ask(prompt_ids=[]))

    run(main())
