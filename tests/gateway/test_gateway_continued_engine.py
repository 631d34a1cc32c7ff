"""Streams of a real engine that break, with a constraint or with new weights beneath them: the reply says what the unbroken one says."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[1] / "engine"))
from engine_worlds import DEADLINE_S, END, Gate, served, swap_beneath, tiny_model, until, write_tokenizer

from rollmill.engine import replies
from rollmill.engine.client import EngineClient, EngineUnavailable
from rollmill.engine.engine import Engine
from rollmill.engine.protocol import Constraint, ConstraintKind, FinishReason, GenerateReply, GenerateRequest, Piece, SwapMode, VersionSpan
from rollmill.engine.replies import piece_of, reply_of
from rollmill.engine.scheduler import Sequence
from rollmill.gateway.routing import replicas as replicas_module
from rollmill.gateway.routing.continuing import Gathered, sources_of
from rollmill.gateway.routing.replicas import Replicas
from rollmill.records import SourceSpan
from rollmill.telemetry import Waits

REGEX = Constraint(kind=ConstraintKind.REGEX, text="abc[xyz]d(yes|no)[0-9]{2}-----(yes|no)")
SCHEMA = Constraint(
    kind=ConstraintKind.JSON_SCHEMA,
    text='{"type":"object","properties":{"name":{"enum":["ls","cat"]},"depth":{"type":"integer","minimum":0,"maximum":99}},'
    '"required":["name","depth"],"additionalProperties":false,"x-guidance":{"whitespace_flexible":false}}',
)


@pytest.fixture(autouse=True)
def every_step_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "PIECE_S", 0.0)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas_module, "RETRY_S", 0.002)


def ask(**fields: Any) -> GenerateRequest:
    # Two pages of prompt, so that there is something to be reused.
    return GenerateRequest(**{"prompt_ids": [i % 250 for i in range(140)], "max_tokens": 40, "seed": 4, **fields})


class Breaking(EngineClient):
    """Loses the connection of its first stream after so many tokens."""

    def __init__(self, url: str, num_tokens: int) -> None:
        super().__init__(url)
        self._left: int | None = num_tokens

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Piece | GenerateReply, None]:
        left, self._left = self._left, None
        items = super().stream(request)
        try:
            async for item in items:
                if left is not None and isinstance(item, GenerateReply):
                    break
                yield item
                if left is not None and isinstance(item, Piece) and (left := left - len(item.token_ids)) <= 0:
                    break
        finally:
            await items.aclose()
        if left is not None:
            raise EngineUnavailable("the connection broke", retry_after_s=0.0)


async def read(
    url: str, num_tokens: int, request: GenerateRequest, at_piece: Callable[[int], Awaitable[None]] | None = None, *, heir: str = ""
) -> GenerateReply:
    """The whole reply of a stream that broke after so many tokens and went on at the same engine, or at the heir. `at_piece` is
    awaited with the number of tokens so far.
    """
    urls, num = [url], 0
    replicas = Replicas(lambda: list(urls), Waits(), connect=lambda at: Breaking(at, num_tokens) if at == url else EngineClient(at))
    try:
        async for item in replicas.stream(request, deadline=time.monotonic() + DEADLINE_S):
            if isinstance(item, GenerateReply):
                assert replicas.num_continued == 1
                return item
            num += len(item.token_ids)
            urls[:] = [heir or url]
            if at_piece is not None:
                await at_piece(num)
    finally:
        await replicas.close()
    raise AssertionError("the stream had no end")


def same(reply: GenerateReply, whole: GenerateReply) -> None:
    for name in GenerateReply.__struct_fields__:
        if name != "timing":
            assert getattr(reply, name) == getattr(whole, name), name


def run(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, DEADLINE_S))


@pytest.mark.parametrize("constraint", [REGEX, SCHEMA], ids=["regex", "schema"])
def test_constrained_answer_that_broke_anywhere_is_the_unbroken_one(tmp_path: Path, constraint: Constraint) -> None:
    pytest.importorskip("llguidance")
    write_tokenizer(tmp_path)
    request = ask(constraint=constraint, stop_ids=[END], num_top=2)

    async def work() -> None:
        async with served(tokenizer=tmp_path / "tokenizer.json", replica="one") as (_, url), EngineClient(url) as client:
            await client.generate(request)
            whole = await client.generate(request)
            num = len(whole.token_ids)
            forced = sum(end - start for start, end in whole.forced)
            assert whole.finish_reason is FinishReason.STOP and 0 < forced < num and whole.num_reused == 128
            for num_tokens in range(1, num + 1):
                reply = await read(url, num_tokens, request)
                same(reply, whole)
                assert sources_of(reply) == (SourceSpan(0, num, "one"),)

    run(work())


@asynccontextmanager
async def stepped(**options: Any) -> AsyncIterator[tuple[Engine, Gate, str]]:
    async with served(tiny_model(), replica="one", **options) as (engine, url):
        gate = Gate(engine)
        try:
            yield engine, gate, url
        finally:
            gate.open()


def swap_at(engine: Engine, gate: Gate, num_tokens: int) -> Callable[[int], Awaitable[None]]:
    """Swaps when so many tokens have been read and the engine waits to sample the next; then lets it run."""

    async def at_piece(num: int) -> None:
        if num == num_tokens:
            await swap_beneath(engine, gate, 2, num_steps=None)

    return at_piece


async def unbroken(mode: SwapMode) -> GenerateReply:
    async with stepped(swap_mode=mode) as (engine, gate, url), EngineClient(url) as client:
        gate.allow(5)
        at_piece, num = swap_at(engine, gate, 5), 0
        async for item in client.stream(ask()):
            if isinstance(item, GenerateReply):
                return item
            num += len(item.token_ids)
            await at_piece(num)
    raise AssertionError("the stream had no end")


@pytest.mark.parametrize("mode", list(SwapMode))
@pytest.mark.parametrize("num_broken", [9, 40])
def test_answer_that_broke_behind_a_swap_is_as_stale_as_the_unbroken_one(mode: SwapMode, num_broken: int) -> None:
    """The new version has the same weights, so that all else is equal too; the second breaks after its last token."""

    async def work() -> None:
        async with stepped(swap_mode=mode) as (engine, gate, url):
            gate.allow(5)
            reply = await read(url, num_broken, ask(), swap_at(engine, gate, 5))
        whole = await unbroken(mode)
        # One step was under way when the swap was offered.
        assert whole.spans == [VersionSpan(0, 6, 1), VersionSpan(6, 40, 2)]
        assert whole.stale_from == (6 if mode is SwapMode.KEEP_KV else None)
        same(reply, whole)

    run(work())


@pytest.mark.parametrize("mode", list(SwapMode))
def test_answer_that_broke_before_a_swap_is_as_stale_as_the_unbroken_one(mode: SwapMode) -> None:
    async def work() -> None:
        async with stepped() as (_, first, url), stepped(swap_mode=mode) as (engine, gate, heir):
            first.allow(3)
            gate.allow(2)
            same(await read(url, 3, ask(), swap_at(engine, gate, 5), heir=heir), await unbroken(mode))

    run(work())


def test_answer_that_went_on_with_newer_weights_from_the_start_is_not_stale() -> None:
    async def work() -> None:
        async with stepped() as (engine, gate, url):
            gate.allow(5)
            reply = await read(url, 5, ask(), swap_at(engine, gate, 5))
            assert reply.spans == [VersionSpan(0, 5, 1), VersionSpan(5, 40, 2)] and reply.stale_from is None

    run(work())


def test_answer_whose_prompt_was_computed_in_part_by_older_weights_is_stale_from_its_first_token() -> None:
    """All its tokens are of one version: nothing but the flag tells."""

    async def work() -> None:
        async with stepped(step_tokens=16) as (engine, gate, url):
            gate.allow(3)
            reading = asyncio.create_task(read(url, 4, ask()))
            await until(lambda: any(seq.num_computed >= 48 for seq in engine.scheduler.running), "a part of the prompt is computed")
            await swap_beneath(engine, gate, 2, num_steps=None)
            reply = await reading
            assert reply.versions_T.tolist() == [2] * 40 and reply.stale_from == 0

    run(work())


class Forcing:
    """A guide as far as a sequence knows one."""

    is_forced = False


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 2**32), st.integers(1, 60), st.integers(0, 5))
def test_pieces_cut_anywhere_gather_to_the_reply(seed: int, num: int, num_cuts: int) -> None:
    rng = random.Random(seed)
    request = GenerateRequest(prompt_ids=[1, 2], max_tokens=60, num_top=2)
    seq = Sequence(key=0, request=request, seed=seed, arrived_at=0.0, on_update=lambda s, u: None, streams=True)
    seq.num_reused, stale_at, swaps = rng.randint(0, 2), rng.randint(0, 80), sorted(rng.sample(range(1, 61), 3))
    seq.guide = Forcing()  # type: ignore[assignment]
    for i in range(num):
        if i in swaps:
            seq.stamp(swaps.index(i))
        seq.is_clean = i < stale_at
        seq.guide.is_forced = rng.random() < 0.5  # type: ignore[union-attr]
        seq.add(rng.randrange(300), float(np.float32(-rng.random())), [(rng.randrange(300), -0.5)])
    seq.end(FinishReason.LENGTH, version=3, now=1.0)
    whole = reply_of(seq, "r")
    edges = sorted({0, num, *(s.end for s in seq.spans), *(rng.randint(0, num) for _ in range(num_cuts))})
    gathered = Gathered()
    for start, end in pairwise(edges):
        gathered.add(piece_of(seq, start, end, version=int(whole.versions_T[start]), replica="r"))
    reply = gathered.reply(FinishReason.LENGTH, seed=seed, timing=whole.timing)
    same(reply, whole)
    assert reply.sources == (SourceSpan(0, num, "r"),)
