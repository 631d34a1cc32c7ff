"""Whose doing it is that a call got no answer: what an agent can bring about is never counted as ours, and only what left is kept."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import httpx
import msgspec
import pytest
from call_worlds import END, HELLO, TOKENIZER, FakeReplicas, gateway_of
from hypothesis import given, settings
from hypothesis import strategies as st
from live_gateway import LiveGateway, wait_until
from stub_replica import StubReplica

from rollmill.chat.messages import Tool
from rollmill.engine.client import EngineRejected
from rollmill.engine.protocol import FinishReason, GenerateReply, GenerateRequest, Piece
from rollmill.gateway.answering import CROWD
from rollmill.gateway.call import Answer, ChatCall, EventKind, ToolChoice
from rollmill.gateway.front.crowd import Crowd
from rollmill.gateway.front.model_call import Limits
from rollmill.gateway.front.route import Incoming, Outgoing, Route, json_out
from rollmill.gateway.routing.replicas import NoAnswer
from rollmill.gateway.sessions.placement import Sampling
from rollmill.web import ApiError

SLOW = NoAnswer("the replica did not answer in time", is_slow=True)
BODY = {"model": "policy", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64}
LS = Tool(name="ls", parameters={"type": "object"})


def refused(error: Exception | None, reason: FinishReason, *, is_hurried: bool = False, num_choices: int = 1) -> dict[str, int]:
    """What an episode's tally says of a call that ends like this."""

    async def main() -> dict[str, int]:
        replicas = FakeReplicas(lambda r: TOKENIZER.encode("some words"))
        replicas.error, replicas.reason = error, reason
        gateway = gateway_of(replicas)
        episode = gateway.open_episode("e")
        call = ChatCall(messages=HELLO, num_choices=num_choices)
        with pytest.raises(ApiError):
            await gateway.answer(call, episode, deadline=time.monotonic() + 60, is_hurried=is_hurried).whole()
        return {kind: episode.tally[kind] for kind in ("failed", "impatient", "crowded") if episode.tally[kind]}

    return asyncio.run(main())


def test_deadline_that_the_client_set_itself_is_not_our_failure() -> None:
    for error, reason in ((SLOW, FinishReason.STOP), (NoAnswer("no replica"), FinishReason.STOP), (None, FinishReason.DEADLINE)):
        assert refused(error, reason) == {"failed": 1}
        assert refused(error, reason, is_hurried=True) == {"impatient": 1}
    for error, reason in ((NoAnswer("it broke", is_late=False), FinishReason.STOP), (None, FinishReason.ERROR)):
        assert refused(error, reason, is_hurried=True) == {"failed": 1}, "no patience would have helped"


def test_late_answers_of_a_crowd_are_its_own_doing() -> None:
    assert set(refused(SLOW, FinishReason.STOP, num_choices=CROWD)) == {"failed"}
    assert set(refused(SLOW, FinishReason.STOP, num_choices=CROWD + 1)) == {"crowded"}
    assert set(refused(NoAnswer("no replica"), FinishReason.STOP, num_choices=CROWD + 1)) == {"failed"}, "nobody was at work"


def test_all_of_a_crowd_of_calls_are_crowded_whichever_gives_up_last() -> None:
    class GivesUp(FakeReplicas):
        async def generate(self, request: GenerateRequest, *, deadline: float) -> GenerateReply:
            self.requests.append(request)
            number = len(self.requests)
            while len(self.requests) < 2 * CROWD:  # noqa: ASYNC110 - the fake has no listeners
                await asyncio.sleep(0)
            for _ in range(10 * number):
                await asyncio.sleep(0)
            raise SLOW

    async def main() -> None:
        gateway = gateway_of(GivesUp(lambda r: []))
        episode = gateway.open_episode("e")
        calls = [gateway.answer(ChatCall(messages=HELLO), episode, deadline=time.monotonic() + 60).whole() for _ in range(2 * CROWD)]
        await asyncio.gather(*calls, return_exceptions=True)
        assert (episode.tally["crowded"], episode.tally["failed"]) == (2 * CROWD, 0)

    asyncio.run(main())


@pytest.mark.parametrize("model", ["policy:99", "policy@best", "policy:x", "gpt-4o", "policy"])
def test_no_agent_picks_the_weights_that_it_is_trained_on(model: str) -> None:
    async def main() -> None:
        replicas = FakeReplicas(lambda r: [*TOKENIZER.encode("hi"), END])
        gateway = gateway_of(replicas)
        episode = gateway.open_episode("e", sampling=Sampling(temperature=1.0))
        await gateway.answer(ChatCall(messages=HELLO, model=model), episode, deadline=time.monotonic() + 60).whole()
        assert replicas.requests[0].exact_version is None
        assert episode.tally["overridden"] == (":" in model or "@" in model)

    asyncio.run(main())


@pytest.mark.parametrize("stops", [(), ("never",)])
def test_whole_call_whose_client_leaves_keeps_none_of_its_choices(stops: tuple[str, ...]) -> None:
    class LastHangs(FakeReplicas):
        is_asked = asyncio.Event()

        async def generate(self, request: GenerateRequest, *, deadline: float) -> GenerateReply:
            if len(self.requests) == 2:
                self.is_asked.set()
                await asyncio.get_running_loop().create_future()
            return await super().generate(request, deadline=deadline)

        async def stream(self, request: GenerateRequest, *, deadline: float) -> AsyncGenerator[Piece | GenerateReply, None]:
            if len(self.requests) == 2:
                self.is_asked.set()
                await asyncio.get_running_loop().create_future()
            async with contextlib.aclosing(super().stream(request, deadline=deadline)) as items:
                async for item in items:
                    yield item

    async def main() -> None:
        replicas = LastHangs(lambda r: [*TOKENIZER.encode("hi"), END])
        gateway = gateway_of(replicas)
        episode = gateway.open_episode("e")
        answering = gateway.answer(ChatCall(messages=HELLO, num_choices=3, stops=stops), episode, deadline=time.monotonic() + 60)
        task = asyncio.create_task(answering.whole())
        await asyncio.wait_for(replicas.is_asked.wait(), 10)
        while sum(c.ended is not None for c in answering._choices) < 2:  # noqa: ASYNC110 - nothing tells of one choice
            await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert episode.windows() == () and answering.recorded == []
        assert episode.tally["abandoned"] == 3 and episode.untrained()["abandoned"] == answering.num_abandoned > 0

    asyncio.run(main())


def test_streamed_choice_counts_when_its_end_leaves_and_not_before() -> None:
    async def main() -> None:
        replicas = FakeReplicas(lambda r: [*TOKENIZER.encode("hi")[:1] * 20 * len(replicas.requests), END])
        gateway = gateway_of(replicas)
        episode = gateway.open_episode("e")
        answering = gateway.answer(ChatCall(messages=HELLO, num_choices=3, stream=True), episode, deadline=time.monotonic() + 60)
        steps, num_left = answering.steps(), 0
        while not num_left:
            num_left = sum(e.kind is EventKind.END for e in await anext(steps))
            assert len(episode.windows()) == len(answering.recorded) == num_left
        # The client reads slowly, the replicas do not wait for it.
        while sum(c.ended is not None for c in answering._choices) < 3:  # noqa: ASYNC110 - nothing tells of one choice
            await asyncio.sleep(0)
        await steps.aclose()
        assert len(episode.windows()) == num_left < 3 and episode.tally["abandoned"] == 3 - num_left

    asyncio.run(main())


class TellingReplicas(FakeReplicas):
    """Its pieces say all that the reply would have said."""

    async def stream(self, request: GenerateRequest, *, deadline: float) -> AsyncGenerator[Piece | GenerateReply, None]:
        number = 0
        async with contextlib.aclosing(super().stream(request, deadline=deadline)) as items:
            async for item in items:
                assert isinstance(item, Piece), "it is heard to its end"
                yield msgspec.structs.replace(
                    item,
                    version=3 if number == 0 else 4,
                    forced=[(0, 1)],
                    stale_from=0 if number == 1 else None,
                    replica="engine-7" if number == 0 else "",
                    num_reused=5 if number == 0 else 0,
                )
                number += 1


@pytest.mark.parametrize("is_constrained", [False, True])
def test_answer_cut_by_a_stop_string_keeps_its_evidence(is_constrained: bool) -> None:
    async def main() -> None:
        ids = [*TOKENIZER.encode('{"a": "x STOP and much more'), END]
        replicas = TellingReplicas(lambda r: ids)
        gateway = gateway_of(replicas)
        episode = gateway.open_episode("e")
        call = ChatCall(messages=HELLO, stops=("STOP",), schema={} if is_constrained else None)
        (answer,) = await gateway.answer(call, episode, deadline=time.monotonic() + 60).whole()
        assert replicas.num_cut == 1 and (replicas.requests[0].constraint is not None) == is_constrained
        (sample,) = episode.graph.samples
        num = len(answer.token_ids)
        assert answer.replica == "engine-7" and answer.num_reused == 5
        assert [(s.start, s.end, s.replica) for s in sample.sources] == [(0, num, "engine-7")]
        assert [(s.start, s.end, s.version) for s in sample.spans] == [(0, 1, 3), (1, num, 4)]
        assert sample.stale_from == 1 and sample.forced == ((0, num),)

    asyncio.run(main())


def test_ids_of_calls_are_the_same_every_time() -> None:
    def called(key: str, seed: int | None) -> list[str]:
        async def main() -> list[Answer]:
            text = '<tool_call>{"name": "ls", "arguments": {}}</tool_call>'
            gateway = gateway_of(FakeReplicas(lambda r: [*TOKENIZER.encode(text + text), END]))
            episode = gateway.open_episode(key, seed=seed) if seed is not None else None
            call = ChatCall(messages=HELLO, tools=(LS,), num_choices=2, tool_choice=ToolChoice.AUTO)
            return await gateway.answer(call, episode, deadline=time.monotonic() + 60).whole()

        return [c.id for answer in asyncio.run(main()) for c in answer.calls]

    assert called("e", 1) == called("e", 1) and len(set(called("e", 1))) == 4
    assert not set(called("e", 1)) & {*called("e", 2), *called("f", 1)}
    assert not set(called("", None)) & set(called("", None)), "without a seed they are drawn"


def test_constraint_that_leads_nowhere_is_the_callers_own_doing() -> None:
    async def main() -> None:
        replicas = FakeReplicas(lambda r: TOKENIZER.encode("some words"))
        replicas.error = EngineRejected("http://10.0.0.1:1 answered 400: the constraint could not be followed after 2 tokens")
        replicas.error_after = 2
        gateway = gateway_of(replicas)
        episode = gateway.open_episode("e")
        with pytest.raises(ApiError, match="could not be followed") as caught:
            async for _ in gateway.answer(ChatCall(messages=HELLO, stream=True), episode, deadline=time.monotonic() + 60):
                pass
        assert caught.value.status_code == 400 and episode.tally["failed"] == 0

    asyncio.run(main())


def test_an_episode_waits_for_its_own_calls_and_for_nobody_elses() -> None:
    crowd = Crowd(max_running=5, max_per_episode=3)
    for _ in range(3):
        crowd.enter("a")
    with pytest.raises(ApiError, match="3 calls of episode 'a'") as caught:
        crowd.enter("a")
    assert caught.value.status_code == 429 and caught.value.headers == {"retry-after": "1"}
    crowd.enter("b")
    crowd.enter("")
    with pytest.raises(ApiError, match="5 calls are running") as caught:
        crowd.enter("c")
    assert caught.value.status_code == 503
    for name in ("a", "a", "a", "b", ""):
        crowd.leave(name, 0)
    assert crowd.num_running == 0 and not crowd._loads


def test_who_has_more_than_its_part_of_a_full_house_is_why_it_is_full() -> None:
    crowd = Crowd(max_running=4, max_per_episode=64)
    for name in ("a", "a", "a", "b"):
        crowd.enter(name)
    for name, status in (("a", 429), ("b", 503), ("c", 503), ("", 503)):
        with pytest.raises(ApiError) as caught:
            crowd.enter(name)
        assert caught.value.status_code == status


@given(steps=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5)), max_size=40))
@settings(max_examples=100, derandomize=True, deadline=None)
def test_choices_at_one_time_are_bounded_and_one_call_is_always_let_in(steps: list[tuple[str, int]]) -> None:
    crowd, running = Crowd(max_running=100, max_per_episode=4), dict[str, list[int]]()
    for name, num in steps:
        mine = running.setdefault(name, [])
        if num == 0:
            if mine:
                crowd.leave(name, mine.pop())
            continue
        try:
            crowd.enter(name)
        except ApiError:
            assert len(mine) == 4
            continue
        try:
            crowd.sample(name, num)
        except ApiError:
            assert sum(mine) and sum(mine) + num > 4
            crowd.leave(name, 0)
        else:
            mine.append(num)
        assert sum(mine) <= max(4, *mine, 0)
    assert crowd.num_running == sum(map(len, running.values()))


@pytest.fixture(scope="module")
def stub() -> Iterator[StubReplica]:
    with StubReplica(lambda request: "fine") as stub:
        yield stub


async def told_first(request: Incoming) -> Outgoing:
    return json_out({"num": len(request.body)})


def only_friends(request: Incoming) -> None:
    assert request.body == b""
    if request.headers.get("authorization") != "Bearer friend":
        raise ApiError(403, "strangers are not read", headers={"connection": "close"})


@pytest.fixture(scope="module")
def live(stub: StubReplica) -> Iterator[LiveGateway]:
    limits = Limits(max_body_bytes=10_000, max_running_per_episode=2)
    route = Route(method="POST", path="/told", handler=told_first, needs_key=False, check=only_friends)
    with LiveGateway(lambda: [stub.url], limits=limits, routes=[route]) as live:
        yield live
        stub.wait_idle()
        wait_until(lambda: live.server.app.num_running == 0)


def ask(live: LiveGateway, episode: str, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    return httpx.post(f"{live.server.base_url(episode)[0]}/chat/completions", json={**BODY, **body}, headers=headers, timeout=20)


def test_body_that_is_too_large_is_told_to_its_episode(live: LiveGateway) -> None:
    assert ask(live, "large").status_code == 200
    assert ask(live, "large", messages=[{"role": "user", "content": "x" * 20_000}]).status_code == 413
    assert live.episode("large").tally["oversized"] == 1 and live.episode("large").tally["failed"] == 0


def test_own_timeout_over_http_is_impatient(live: LiveGateway, stub: StubReplica) -> None:
    stub.hold_after = 0
    try:
        assert ask(live, "hasty", {"x-request-timeout-s": "0.1"}).status_code == 504
    finally:
        stub.release()
    assert live.episode("hasty").tally["impatient"] == 1 and live.episode("hasty").tally["failed"] == 0


def test_flood_of_one_episode_is_429_and_others_are_answered(live: LiveGateway, stub: StubReplica) -> None:
    async def main() -> None:
        async with httpx.AsyncClient(timeout=20) as http:

            async def post(episode: str, **body: Any) -> httpx.Response:
                return await http.post(f"{live.server.base_url(episode)[0]}/chat/completions", json={**BODY, **body})

            stub.hold_after = 0
            num = len(stub.requests)
            held = [asyncio.create_task(post("flood")) for _ in range(2)]
            await asyncio.to_thread(stub.wait_requests, num + 2)
            third = await post("flood")
            assert third.status_code == 429 and third.headers["retry-after"] == "1" and third.json()["retryable"]
            other = asyncio.create_task(post("calm", n=5))
            await asyncio.to_thread(stub.wait_requests, num + 7)
            assert (await post("calm")).status_code == 429, "as many choices as two calls may have are sampled"
            stub.release()
            assert [(await reply).status_code for reply in (*held, other)] == [200] * 3
            assert (await post("flood")).status_code == 200

    try:
        asyncio.run(main())
    finally:
        stub.release()
    for name in ("flood", "calm"):
        assert live.episode(name).tally["flooded"] == 1 and live.episode(name).tally["failed"] == 0


def test_what_breaks_in_us_is_our_failure(live: LiveGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(live, "broken").status_code == 200

    def breaks(*args: object, **rest: object) -> None:
        raise ZeroDivisionError("as told")

    monkeypatch.setattr(live.gateway, "answer", breaks)
    assert ask(live, "broken").status_code == 500
    assert live.episode("broken").tally["failed"] == 1


def test_route_with_a_key_of_its_own_reads_no_strangers_body(live: LiveGateway) -> None:
    url = f"{live.server.origin}/e/x/told"

    with httpx.Client(timeout=20) as http:
        assert http.post(url, content=b"12345", headers={"authorization": "Bearer friend"}).json() == {"num": 5}
        reply = http.post(url, content=b"x" * 9_000)
        assert reply.status_code == 403 and reply.headers["connection"] == "close"
    host, _, port = live.server.origin.rpartition("//")[2].partition(":")
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        sock.sendall(b"POST /e/x/told HTTP/1.1\r\nhost: x\r\ncontent-length: 9000\r\n\r\n")
        assert sock.recv(65536).startswith(b"HTTP/1.1 403 "), "answered although none of the body has come"


def test_half_a_surrogate_pair_that_was_sampled_comes_back_and_is_gone_on_from() -> None:
    written = '{"path": "a\\ud83d!", "n": 1}'
    say = iter([f'<tool_call>{{"name": "ls", "arguments": {written}}}</tool_call>', "done"])
    with StubReplica(lambda request: next(say)) as stub, LiveGateway(lambda: [stub.url]) as live:
        url = f"{live.server.base_url('half')[1]}/v1/messages"
        rest = {"tools": [{"name": "ls", "input_schema": {"type": "object"}}], "max_tokens": 200}
        first: list[Any] = [{"role": "user", "content": "go \ud83d"}]
        reply = httpx.post(url, content=json.dumps({"messages": first, **rest}), timeout=20)
        assert reply.status_code == 200, reply.text
        (block,) = [b for b in reply.json()["content"] if b["type"] == "tool_use"]
        assert block["input"] == {"path": "a\ud83d!", "n": 1}
        result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": block["id"], "content": "no such file: a\ud83d!"}]}
        again = json.dumps({"messages": [*first, {"role": "assistant", "content": [block]}, result], **rest})
        reply = httpx.post(url, content=again, timeout=20)
        assert reply.status_code == 200, reply.text
        before, after = stub.sampled
        path = before.request.prompt_ids + before.token_ids
        assert after.request.prompt_ids[: len(path)] == path and live.episode("half").tally["appended"] == 1
