"""A stream that breaks goes on elsewhere, and what comes out in the end is what would have come out in one go."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
from replica_worlds import SHAPE, STOP, FakeReplica, WireReplica, pieces_of, reply_to

from rollmill.engine.client import EngineClient, EngineRejected, EngineUnavailable, VersionUnmet
from rollmill.engine.protocol import (
    Constraint,
    ConstraintKind,
    FinishReason,
    GenerateReply,
    GenerateRequest,
    Piece,
    Pressure,
    VersionSpan,
)
from rollmill.gateway.routing import replicas as replicas_module
from rollmill.gateway.routing.continuing import ContinuedReply, sources_of
from rollmill.gateway.routing.replicas import NoAnswer, Replicas
from rollmill.gateway.routing.rotation import Late, Member, ReplicaClient, Running
from rollmill.model.route_record import RouteRecord
from rollmill.records import SourceSpan
from rollmill.telemetry import Waits

LARK = Constraint(kind=ConstraintKind.LARK, text="start: /.*/")
ASKED = GenerateRequest(prompt_ids=[11, 12, 13], max_tokens=40, seed=5, session="s")
DOWN = EngineUnavailable("it broke", retry_after_s=0.0)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas_module, "RETRY_S", 0.002)


@asynccontextmanager
async def over(*fakes: ReplicaClient, waits: Waits | None = None) -> AsyncIterator[Replicas]:
    by_url = {f"http://{i}": fake for i, fake in enumerate(fakes)}
    replicas = Replicas(lambda: list(by_url), waits or Waits(), connect=by_url.__getitem__)
    try:
        yield replicas
    finally:
        await replicas.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}, "a task was left behind"


async def heard(replicas: Replicas, request: GenerateRequest, within_s: float = 60.0) -> tuple[list[Piece], GenerateReply]:
    items = [item async for item in replicas.stream(request, deadline=time.monotonic() + within_s)]
    pieces, reply = items[:-1], items[-1]
    assert isinstance(reply, GenerateReply) and all(isinstance(p, Piece) for p in pieces)
    return pieces, reply  # type: ignore[return-value]


def same(reply: GenerateReply, whole: GenerateReply, *, but: tuple[str, ...] = ()) -> None:
    """Every field that a reply has is equal, bit for bit, but those named."""
    for name in GenerateReply.__struct_fields__:
        if name not in ("timing", "replica", *but):
            assert getattr(reply, name) == getattr(whole, name), name


def passed_on(pieces: list[Piece], reply: GenerateReply) -> None:
    """What was passed on piece by piece is what the reply says."""
    assert [i for p in pieces for i in p.token_ids] == reply.token_ids
    assert [x for p in pieces for x in p.logprobs] == reply.logprobs_T.tolist()
    assert [p.version for p in pieces for _ in p.token_ids] == reply.versions_T.tolist()
    assert [t for p in pieces for t in p.tops] == reply.tops


class Scripted(FakeReplica):
    """Breaks as told: per stream the number of pieces to give first, None for the whole; after the last entry it works."""

    def __init__(self, name: str, *breaks: int | None, version: int = 1) -> None:
        left = list(breaks)
        super().__init__(name, version=version, break_after=lambda: left.pop(0) if left else None)


def test_unbroken_stream_ends_with_the_replicas_own_reply() -> None:
    async def work() -> None:
        fake = FakeReplica("a")
        async with over(fake) as replicas:
            pieces, reply = await heard(replicas, ASKED)
            assert reply == reply_to(ASKED, replica="a") and replicas.num_retries == 0
            passed_on(pieces, reply)
            assert sources_of(reply) == (SourceSpan(0, len(reply.token_ids), "a"),)

    asyncio.run(work())


@pytest.mark.parametrize("num_pieces", [0, 1, 3])
@pytest.mark.parametrize("routes_from", [None, 0, 2])
@pytest.mark.parametrize("num_top", [0, 2])
def test_broken_stream_goes_on_as_if_nothing_had_happened(num_pieces: int, routes_from: int | None, num_top: int) -> None:
    request = msgspec.structs.replace(ASKED, routes_from=routes_from, num_top=num_top)

    async def work() -> None:
        async with over(Scripted("a", num_pieces)) as replicas:
            pieces, reply = await heard(replicas, request)
            whole = reply_to(request, replica="a")
            same(reply, whole)
            passed_on(pieces, whole)
            assert replicas.num_retries == 1 and replicas.num_continued == (num_pieces > 0)
            assert isinstance(reply, ContinuedReply) is (num_pieces > 0)

    asyncio.run(work())


def test_rest_is_asked_for_with_all_that_makes_it_the_same_answer() -> None:
    request = msgspec.structs.replace(ASKED, constraint=LARK, stop_ids=[STOP], temperature=0.7, top_p=0.9, min_version=1, deadline_s=30.0)

    async def work() -> None:
        fake = Scripted("a", 2)
        async with over(fake) as replicas:
            await heard(replicas, request)
            first, second = fake.requests
            num = len(second.prompt_ids) - 3
            assert num > 0 and second.prompt_ids[:3] == first.prompt_ids and second.max_tokens == 40 - num
            assert second.constraint_from == 3 and first.constraint_from is None
            assert first.deadline_s is not None and second.deadline_s is not None and 0 < second.deadline_s < first.deadline_s <= 30.0
            named = ("prompt_ids", "max_tokens", "constraint_from", "deadline_s")
            rest = {n: getattr(second, n) for n in second.__struct_fields__ if n not in named}
            assert rest == {n: getattr(first, n) for n in rest}

    asyncio.run(work())


def test_stream_without_a_seed_draws_one_before_it_begins() -> None:
    async def work() -> None:
        fake = Scripted("a", 2)
        async with over(fake) as replicas:
            _, reply = await heard(replicas, msgspec.structs.replace(ASKED, seed=None))
            seeds = {r.seed for r in fake.requests}
            assert len(fake.requests) == 2 and seeds == {reply.seed} and None not in seeds

    asyncio.run(work())


@pytest.mark.parametrize("num_pieces", [1, 2, 5, 10**6])
def test_forced_tokens_of_a_broken_constrained_answer_are_those_of_the_whole(num_pieces: int) -> None:
    request = msgspec.structs.replace(ASKED, constraint=LARK, stop_ids=[STOP])

    async def work() -> None:
        async with over(Scripted("a", num_pieces)) as replicas:
            _, reply = await heard(replicas, request)
            whole = reply_to(request)
            same(reply, whole)
            assert 0 < sum(b - a for a, b in whole.forced) < len(whole.token_ids)

    asyncio.run(work())


class Changing(FakeReplica):
    """Plays replies by script: (versions of its tokens, stale_from, pieces to give or None)."""

    def __init__(self, name: str, *acts: tuple[list[int], int | None, int | None]) -> None:
        super().__init__(name)
        self.acts = list(acts)

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Piece | GenerateReply, None]:
        self.requests.append(request)
        versions, stale_from, num = self.acts.pop(0)
        reply = reply_to(request, versions + versions[-1:] * 99, replica=self.name, stale_from=stale_from)
        for piece in pieces_of(reply, self.rng, most=1)[:num]:
            yield piece
        if num is not None:
            raise DOWN
        yield reply


def rows(reply: GenerateReply) -> list[list[list[int]]]:
    return RouteRecord.from_bytes(reply.routes).ids_TLK().tolist()


def test_versions_and_sources_of_the_parts_stay_apart() -> None:
    request = msgspec.structs.replace(ASKED, max_tokens=10, routes_from=1)

    async def work() -> None:
        async with over(Changing("a", ([4], None, 3), ([5], None, 2), ([5], None, None))) as replicas:
            _, reply = await heard(replicas, request)
            same(reply, reply_to(request), but=("spans", "routes"))
            assert reply.spans == [VersionSpan(0, 3, 4), VersionSpan(3, 10, 5)] and reply.stale_from is None
            # Positions 1, 2 and the first four sampled tokens were computed by a part that is gone: one of them by other weights.
            found, fresh = rows(reply), rows(reply_to(request, 5))
            assert len(found) == 3 + 10 - 1 - 1
            missing = [[-1, -1]] * SHAPE.num_layers
            assert found == [missing] * 6 + fresh[6:]

    asyncio.run(work())


@pytest.mark.parametrize("names", [("a", "b"), ("", "b"), ("a", ""), ("", "")])
def test_each_part_is_the_work_of_the_replica_that_named_itself_or_of_its_address(names: tuple[str, str]) -> None:
    request = msgspec.structs.replace(ASKED, session=None)

    async def work() -> None:
        async with over(Scripted(names[0], 2), Scripted(names[1])) as replicas:
            pieces, reply = await heard(replicas, request)
            first, second = (name or f"{i}" for i, name in enumerate(names))
            num = len(pieces[0].token_ids) + len(pieces[1].token_ids)
            assert sources_of(reply) == (SourceSpan(0, num, first), SourceSpan(num, 40, second)) and reply.replica == second
            assert [p.replica for p in pieces[:4]] == [first, "", second, ""]

    asyncio.run(work())


def test_routes_that_the_same_version_computed_again_count() -> None:
    request = msgspec.structs.replace(ASKED, max_tokens=10, routes_from=0)

    async def work() -> None:
        async with over(Changing("a", ([4], None, 3), ([4] * 4 + [5], None, None))) as replicas:
            _, reply = await heard(replicas, request)
            assert rows(reply) == rows(reply_to(request, 4)) and reply.spans == [VersionSpan(0, 7, 4), VersionSpan(7, 10, 5)]

    asyncio.run(work())


@pytest.mark.parametrize(
    ("acts", "stale_from"),
    [
        ((([4, 4, 5], None, 4), ([5], None, None)), None),
        ((([4, 4, 5], 2, 4), ([5], None, None)), 2),
        ((([5], 0, 4), ([5], None, None)), 0),
        ((([4], None, 4), ([4, 5], 1, None)), 5),
        ((([4], None, 4), ([5], 0, 3), ([5], None, None)), 4),
        ((([4, 5], 1, 4), ([5, 6], 1, None)), 1),
        ((([4], 3, 3), ([4], None, None)), None),
        ((([4, 5], 1, 99),), 1),
    ],
    ids=[
        "computed again",
        "kept",
        "kept before the first token",
        "in the last part",
        "in the second",
        "first of two",
        "never came",
        "no reply",
    ],
)
def test_staleness_is_what_the_parts_were_told(acts: tuple[tuple[list[int], int | None, int | None], ...], stale_from: int | None) -> None:
    async def work() -> None:
        async with over(Changing("a", *acts)) as replicas:
            _, reply = await heard(replicas, msgspec.structs.replace(ASKED, max_tokens=10))
            assert reply.stale_from == stale_from and len(reply.token_ids) == 10

    asyncio.run(work())


@pytest.mark.parametrize("acts", [(([4], 0, 3), ([4], None, None)), (([4], None, 3), ([4], 0, None))], ids=["before", "behind"])
def test_routes_of_a_context_that_older_weights_had_computed_in_part_are_left_out(acts: tuple[tuple[list[int], int, int], ...]) -> None:
    """All tokens are of one version, and yet what was computed again is not what was computed first."""
    request = msgspec.structs.replace(ASKED, max_tokens=10, routes_from=0)

    async def work() -> None:
        async with over(Changing("a", *acts)) as replicas:
            _, reply = await heard(replicas, request)
            assert rows(reply) == [[[-1, -1]] * SHAPE.num_layers] * 5 + rows(reply_to(request, 4))[5:]

    asyncio.run(work())


@pytest.mark.parametrize(("stop_ids", "reason"), [([], FinishReason.LENGTH), (list(range(1000)), FinishReason.STOP)])
def test_answer_whose_reply_was_lost_at_the_end_is_whole(stop_ids: list[int], reason: FinishReason) -> None:
    """Nothing is left to sample: asking for more would go beyond the stop."""
    request = msgspec.structs.replace(ASKED, stop_ids=stop_ids, routes_from=0)

    async def work() -> None:
        fake = Scripted("a", 10**6)
        async with over(fake) as replicas:
            pieces, reply = await heard(replicas, request)
            same(reply, reply_to(request), but=("routes",))
            passed_on(pieces, reply)
            assert reply.finish_reason is reason and reply.routes == b"" and len(fake.requests) == 1

    asyncio.run(work())


def test_answer_that_filled_the_context_is_whole() -> None:
    class Small(Scripted):
        async def pressure(self) -> Pressure:
            return msgspec.structs.replace(await super().pressure(), max_len=43)

    async def work() -> None:
        fake = Small("a", 10**6)
        async with over(fake) as replicas:
            await replicas.pressures()
            request = msgspec.structs.replace(ASKED, max_tokens=100)
            fake.break_after = lambda: 10**6
            full = reply_to(msgspec.structs.replace(request, max_tokens=40))

            async def cut(_: GenerateRequest) -> AsyncGenerator[Piece | GenerateReply, None]:
                yield Piece(token_ids=full.token_ids, logprobs=full.logprobs_T.tolist(), version=1)
                raise DOWN

            fake.stream = cut  # type: ignore[method-assign]
            _, reply = await heard(replicas, request)
            assert reply.finish_reason is FinishReason.CONTEXT and reply.token_ids == full.token_ids

    asyncio.run(work())


def test_pinned_version_is_continued_by_the_same_version_or_not_at_all() -> None:
    request = msgspec.structs.replace(ASKED, exact_version=4)

    async def work() -> None:
        a, b, c = Scripted("a", 2, version=4), FakeReplica("b", version=5), FakeReplica("c", version=4)
        by_url = {"http://a": a, "http://b": b, "http://c": c}
        urls = ["http://a"]
        replicas = Replicas(lambda: list(urls), Waits(), connect=by_url.__getitem__)
        items = replicas.stream(request, deadline=time.monotonic() + 60)
        await anext(items)
        urls[:] = ["http://b", "http://c"]
        rest = [item async for item in items]
        same(rest[-1], reply_to(request, 4))  # type: ignore[arg-type]
        assert [s.replica for s in sources_of(rest[-1])] == ["a", "c"] and not any(r.prompt_ids != [11, 12, 13] for r in b.requests)  # type: ignore[arg-type]
        a.break_after = iter([2]).__next__  # type: ignore[assignment]
        urls[:] = ["http://a"]
        items = replicas.stream(request, deadline=time.monotonic() + 60)
        await anext(items)
        urls[:] = ["http://b"]
        with pytest.raises(NoAnswer, match="version 4 is past") as caught:
            _ = [item async for item in items]
        assert caught.value.is_version
        await replicas.close()

    asyncio.run(work())


def test_swap_beneath_a_pinned_stream_is_a_version_that_nobody_serves() -> None:
    class Swapped(FakeReplica):
        async def stream(self, request: GenerateRequest) -> AsyncGenerator[Piece | GenerateReply, None]:
            self._take(request)
            yield Piece(token_ids=[50], logprobs=[-1.0], version=1)
            self.version = 2
            raise VersionUnmet("the weights were swapped to version 2 while the request ran", version=2)

    async def work() -> None:
        async with over(Swapped("a")) as replicas:
            with pytest.raises(NoAnswer, match="version 1 is past") as caught:
                await heard(replicas, msgspec.structs.replace(ASKED, exact_version=1))
            assert caught.value.is_version and replicas.num_put_aside == 0

    asyncio.run(work())


class Liar(FakeReplica):
    """Gives these items first, then works."""

    def __init__(self, *items: Piece | GenerateReply) -> None:
        super().__init__("liar")
        self.items = list(items)

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Piece | GenerateReply, None]:
        lies, self.items = self.items, []
        for item in lies:
            yield item
        if not lies:
            async for item in super().stream(request):
                yield item


@pytest.mark.parametrize(
    "lie",
    [
        Piece(token_ids=[50, 51], logprobs=[-1.0], version=1),
        Piece(token_ids=[50] * 41, logprobs=[-1.0] * 41, version=1),
        Piece(token_ids=[50], logprobs=[-1.0], version=1, forced=[(0, 2)]),
        Piece(token_ids=[50, 51], logprobs=[-1.0] * 2, version=1, forced=[(1, 2), (0, 1)]),
        Piece(token_ids=[50], logprobs=[-1.0], version=1, stale_from=1),
        msgspec.structs.replace(reply_to(ASKED), logprobs=b""),
    ],
    ids=["logprobs missing", "more than asked for", "forced beyond it", "forced in disorder", "stale beyond it", "reply without logprobs"],
)
def test_what_cannot_be_trusted_is_not_passed_on(lie: Piece | GenerateReply) -> None:
    async def work() -> None:
        async with over(Liar(lie)) as replicas:
            pieces, reply = await heard(replicas, ASKED)
            same(reply, reply_to(ASKED))
            passed_on(pieces, reply)
            assert replicas.num_retries == 1 and replicas.num_continued == 0

    asyncio.run(work())


def test_replica_that_contradicts_what_it_has_sent_ends_the_call() -> None:
    async def work() -> None:
        async with over(Liar(Piece(token_ids=[50], logprobs=[-1.0], version=1), reply_to(ASKED))) as replicas:
            with pytest.raises(NoAnswer, match="cannot be trusted"):
                await heard(replicas, ASKED)
        async with over(Liar(Piece(token_ids=[50], logprobs=[-1.0], version=1))) as replicas:
            _, reply = await heard(replicas, ASKED)
            assert reply.token_ids[0] == 50 and replicas.num_continued == 1, "a stream without an end has broken"

    asyncio.run(work())


def test_refusal_is_the_callers_before_the_first_token_and_ours_after_a_break() -> None:
    async def work() -> None:
        fake = Scripted("a", 1)
        async with over(fake) as replicas:
            items = replicas.stream(ASKED, deadline=time.monotonic() + 60)
            await anext(items)
            fake.error = EngineRejected("the prompt has too many tokens")
            with pytest.raises(NoAnswer, match="broke off and cannot be continued: the prompt has too many"):
                _ = [item async for item in items]
            with pytest.raises(EngineRejected):
                await heard(replicas, ASKED)

    asyncio.run(work())


def test_refusal_in_mid_answer_is_the_callers_where_nothing_broke() -> None:
    class Refuses(FakeReplica):
        async def stream(self, request: GenerateRequest) -> AsyncGenerator[Piece | GenerateReply, None]:
            yield Piece(token_ids=[50], logprobs=[-1.0], version=1)
            raise EngineRejected("the constraint could not be followed after 1 tokens")

    async def work() -> None:
        async with over(Refuses("a")) as replicas:
            with pytest.raises(EngineRejected, match="could not be followed"):
                await heard(replicas, ASKED)

    asyncio.run(work())


def test_closed_stream_frees_its_row_at_once() -> None:
    async def work() -> None:
        fake, waits = FakeReplica("a"), Waits()
        async with over(fake, waits=waits) as replicas:
            items = replicas.stream(ASKED, deadline=time.monotonic() + 60)
            await anext(items)
            assert fake.num_open == 1 and replicas.in_flight() == {"http://0": 1} and [w.name for w in waits.current()] == ["policy"]
            await items.aclose()
            assert fake.num_open == 0 and replicas.in_flight() == {"http://0": 0} and waits.current() == []

    asyncio.run(work())


def test_row_is_free_when_the_last_item_is_there() -> None:
    async def work() -> None:
        fake = FakeReplica("a")
        async with over(fake) as replicas:
            items = replicas.stream(ASKED, deadline=time.monotonic() + 60)
            while not isinstance(await anext(items), GenerateReply):
                pass
            assert fake.num_open == 0 and replicas.in_flight() == {"http://0": 0}
            await items.aclose()

    asyncio.run(work())


def test_cancelled_stream_frees_its_row() -> None:
    async def work() -> None:
        fake = FakeReplica("a")
        fake.gate = asyncio.Event()
        async with over(fake) as replicas:
            items = replicas.stream(ASKED, deadline=time.monotonic() + 60)
            await anext(items)
            task = asyncio.create_task(anext(items))  # type: ignore[arg-type]
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert fake.num_open == 0

    asyncio.run(work())


def test_stream_that_stands_still_ends_at_the_deadline() -> None:
    async def work() -> None:
        fake, waits = FakeReplica("a"), Waits()
        fake.gate = asyncio.Event()
        async with over(fake, waits=waits) as replicas:
            with pytest.raises(NoAnswer, match="did not answer in time"):
                await heard(replicas, ASKED, within_s=0.05)
            assert fake.num_open == 0 and waits.current() == [] and waits.totals_s()["policy"] > 0

    asyncio.run(work())


def test_reader_who_comes_back_after_the_deadline_is_told_so() -> None:
    async def work() -> None:
        fake = FakeReplica("a")
        async with over(fake) as replicas:
            deadline = time.monotonic() + 0.05
            items = replicas.stream(ASKED, deadline=deadline)
            await anext(items)
            await asyncio.sleep(deadline - time.monotonic() + 0.02)
            with pytest.raises(NoAnswer, match="did not answer in time"):
                await anext(items)
            task = asyncio.current_task()
            assert fake.num_open == 0 and task is not None and task.cancelling() == 0
            await asyncio.sleep(0)

    asyncio.run(work())


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_cancellation_is_not_mistaken_for_the_deadline(is_cancelled: bool) -> None:
    """Both in one turn of the loop: whoever cancelled must see its cancellation."""

    async def work() -> None:
        running = Running(Member("http://a", FakeReplica("a"), 0.0), 60.0)
        task = asyncio.create_task(running.wait(asyncio.Event().wait))
        await asyncio.sleep(0)
        running.end(Late())
        if is_cancelled:
            task.cancel()
        with pytest.raises(asyncio.CancelledError if is_cancelled else Late):
            await task
        assert task.cancelled() is is_cancelled and task.cancelling() == int(is_cancelled)
        running.close()

    asyncio.run(work())


def unsteady(rng: random.Random, share: float) -> Callable[[], int | None]:
    """Breaks this share of streams, after a random number of pieces."""
    return lambda: rng.randint(0, 8) if rng.random() < share else None


def random_request(i: int, rng: random.Random) -> GenerateRequest:
    stop_ids = rng.choice([[], [STOP]])
    return GenerateRequest(
        prompt_ids=[rng.randrange(10, 1000) for _ in range(rng.randint(1, 30))],
        max_tokens=rng.randint(1, 60),
        seed=rng.getrandbits(62),
        stop_ids=stop_ids,
        session=rng.choice([None, f"s{i}"]),
        num_top=rng.choice([0, 0, 3]),
        routes_from=rng.choice([None, 0]),
        constraint=rng.choice([None, LARK]) if stop_ids else None,
    )


async def chaos(replicas: Replicas, num: int, width: int) -> int:
    """So many streams, some of which the client leaves. Returns how many tokens came."""
    rng, num_tokens, left = random.Random(num), 0, iter(range(num))

    async def client() -> None:
        nonlocal num_tokens
        for i in left:
            request = random_request(i, rng)
            if rng.random() < 0.1:
                items = replicas.stream(request, deadline=time.monotonic() + 60)
                await anext(items)
                await items.aclose()
                continue
            pieces, reply = await heard(replicas, request)
            whole = reply_to(request)
            # The reply of an answer that broke after its last token has no routes.
            same(reply, whole, but=() if reply.routes else ("routes",))
            passed_on(pieces, whole)
            num_tokens += len(whole.token_ids)

    await asyncio.gather(*(client() for _ in range(width)))
    return num_tokens


def test_thousands_of_streams_over_breaking_replicas_are_what_they_would_have_been() -> None:
    async def work() -> None:
        fakes = [FakeReplica(f"r{i}", break_after=unsteady(random.Random(i), 0.3)) for i in range(4)]
        async with over(*fakes) as replicas:
            assert await chaos(replicas, 2000, 32) > 20_000
            assert replicas.num_continued > 300 and replicas.num_put_aside > 0
            assert [fake.num_open for fake in fakes] == [0] * 4 and set(replicas.in_flight().values()) == {0}

    asyncio.run(work())


async def chaos_over_http(num: int) -> None:
    async with (
        WireReplica("r0", break_after=unsteady(random.Random(0), 0.3)) as a,
        WireReplica("r1", break_after=unsteady(random.Random(1), 0.3)) as b,
        WireReplica("r2", break_after=unsteady(random.Random(2), 0.6)) as c,
    ):
        wires = [a, b, c]
        clients = {wire.url: EngineClient(wire.url) for wire in wires}
        replicas = Replicas(lambda: list(clients), Waits(), connect=clients.__getitem__)
        try:
            await chaos(replicas, num, 16)
            assert replicas.num_continued > num // 10
            assert set(replicas.in_flight().values()) == {0}
            end = time.monotonic() + 20
            while any(wire.num_open for wire in wires):
                assert time.monotonic() < end, "a row was not freed"
                await asyncio.sleep(0.005)
        finally:
            await replicas.close()
        assert all(client._http is None or client._http.closed for client in clients.values())


def test_streams_over_connections_that_are_really_cut_are_what_they_would_have_been() -> None:
    asyncio.run(chaos_over_http(250))


@pytest.mark.slow
def test_thousands_of_streams_over_connections_that_are_really_cut() -> None:
    asyncio.run(chaos_over_http(5000))
