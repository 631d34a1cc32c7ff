"""The server around the calls: who is let in, how many at once, what silence and slowness do, and how it ends."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from live_gateway import LiveGateway, wait_until
from stub_replica import StubReplica

from rollmill.fleet.serve import check_engines
from rollmill.gateway.front.keys import KeyRing, KeySpec, digest_of
from rollmill.gateway.front.model_call import Limits
from rollmill.gateway.front.route import Incoming, Outgoing, Route, json_out
from rollmill.gateway.recording.record import SqliteRecorder
from rollmill.gateway.recording.recorded import read_calls
from rollmill.gateway.recording.restore import kept_secret, restore
from rollmill.gateway.routing.pins import Pins
from rollmill.gateway.sessions.placement import Sampling

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
BODY = {"model": "policy", "messages": HELLO, "max_tokens": 64}


@pytest.fixture
def stub() -> Iterator[StubReplica]:
    with StubReplica(lambda request: "Hello, world.") as stub:
        yield stub


def spec(name: str, **limits: Any) -> KeySpec:
    return KeySpec(name=name, digest=digest_of(f"sk-{name}"), **limits)


def ask(live: LiveGateway, key: str, episode: str = "", **body: Any) -> httpx.Response:
    url = f"{live.server.base_url(episode)[0]}/chat/completions"
    return httpx.post(url, json={**BODY, **body}, headers={"authorization": f"Bearer {key}"} if key else {}, timeout=20)


def test_sdk_sees_keys_quotas_and_episodes_as_its_own_exceptions(stub: StubReplica) -> None:
    ring = KeyRing([spec("boss", may_admin=True), spec("small", requests_per_min=1)])
    with LiveGateway(lambda: [stub.url], keys=ring, opens_unknown=False) as live:

        def create(key: str, episode: str = "") -> None:
            with openai.OpenAI(base_url=live.server.base_url(episode)[0], api_key=key, max_retries=0) as ai:
                ai.chat.completions.create(model="policy", messages=HELLO)

        with pytest.raises(openai.AuthenticationError, match="not known"):
            create("sk-nobody")
        create("sk-small")
        with pytest.raises(openai.RateLimitError) as caught:
            create("sk-small")
        assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
        _, key = live.do(opened(live, "e1"))
        live.do(opened(live, "e2"))
        create(key, "e1")
        create(key)
        assert stub.requests[-1].session == "e1", "the key names the episode where the URL does not"
        with pytest.raises(openai.PermissionDeniedError, match="'e1' only"):
            create(key, "e2")
        with pytest.raises(openai.NotFoundError, match="no episode"):
            create("sk-boss", "never-opened")
        live.do(ended(live, "e1"))
        with pytest.raises(openai.APIStatusError, match="has ended"):
            create(key, "e1")


async def opened(live: LiveGateway, key: str, **options: Any) -> Any:
    return live.server.open_episode(key, **options)


async def ended(live: LiveGateway, key: str) -> Any:
    return live.server.end_episode(key)


def test_who_may_not_admin_opens_nothing(stub: StubReplica) -> None:
    ring = KeyRing([spec("boss", may_admin=True), spec("user")])
    with LiveGateway(lambda: [stub.url], keys=ring) as live, httpx.Client(base_url=live.url) as http:
        episode_key = ring.episode_key("e")
        for key, status in (("sk-user", 403), (episode_key, 403), ("", 401), ("sk-boss", 201)):
            assert http.post("/episodes", headers={"x-api-key": key}).status_code == status
        assert httpx.get(f"{live.server.origin}/metrics", headers={"x-api-key": "sk-user"}).status_code == 403
        assert httpx.get(f"{live.server.origin}/metrics", headers={"x-api-key": "sk-boss"}).status_code == 200
        assert httpx.get(f"{live.server.origin}/health").status_code == 200, "a balancer has no key"
        assert http.get("/models", headers={"x-api-key": "sk-user"}).status_code == 200
        assert http.get("/models").status_code == 401


def test_session_headers_of_two_clients_do_not_meet(stub: StubReplica) -> None:
    with LiveGateway(lambda: [stub.url], keys=KeyRing([spec("a"), spec("b")])) as live:
        for name in "ab":
            headers = {"x-api-key": f"sk-{name}", "x-session-affinity": "1"}
            assert httpx.post(f"{live.url}/chat/completions", json=BODY, headers=headers).status_code == 200
        assert [r.session for r in stub.requests] == ["a/1", "b/1"]
        assert [r.queue for r in stub.requests] == ["a", "b"], "each client waits in a line of its own"


def test_more_calls_than_allowed_are_sent_away_and_sdk_comes_back(stub: StubReplica) -> None:
    stub.hold_after = 0
    with LiveGateway(lambda: [stub.url], limits=Limits(max_running=1)) as live:
        first = threading.Thread(target=ask, args=(live, "", "busy"))
        first.start()
        stub.wait_requests(1)
        refused = ask(live, "", "busy")
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1" and refused.json()["retryable"]
        assert live.episode("busy").tally["failed"] == 1, "the owner of the episode learns of it"
        threading.Timer(0.2, stub.release).start()
        with openai.OpenAI(base_url=live.url, api_key="x", max_retries=8) as ai:
            reply = ai.chat.completions.create(model="policy", messages=HELLO)
        assert reply.choices[0].message.content == "Hello, world."
        first.join(20)


def test_silent_stream_keeps_its_connection_alive(stub: StubReplica) -> None:
    stub.hold_after = 3
    with LiveGateway(lambda: [stub.url], limits=Limits(keep_alive_s=0.05)) as live:
        with httpx.stream("POST", f"{live.url}/chat/completions", json={**BODY, "stream": True}, timeout=20) as reply:
            lines = reply.iter_lines()
            seen = [line for line, _ in zip(lines, range(40), strict=False) if line]
            assert seen.count(": keep-alive") > 3
            stub.release()
            rest = [line for line in lines if line.startswith("data: ")]
        texts = [json.loads(line[6:])["choices"] for line in [*seen, *rest] if line.startswith("data: {")]
        assert "".join(c[0]["delta"].get("content") or "" for c in texts if c) == "Hello, world."


def test_stream_that_waits_for_its_first_token_says_so(stub: StubReplica) -> None:
    stub.hold_after = 0
    with (
        LiveGateway(lambda: [stub.url], limits=Limits(keep_alive_s=0.05)) as live,
        httpx.stream("POST", f"{live.url}/chat/completions", json={**BODY, "stream": True}, timeout=20) as reply,
    ):
        lines = reply.iter_lines()
        assert '"role":"assistant"' in next(lines)
        stub.release()
        assert [line for line in lines if line][-1] == "data: [DONE]"


def test_client_that_does_not_read_is_dropped_after_the_deadline() -> None:
    with StubReplica(lambda request: [40] * 60_000, piece_size=500) as stub:
        limits = Limits(call_s=0.5, slow_s=0.2)
        with LiveGateway(lambda: [stub.url], limits=limits) as live:
            body = json.dumps({**BODY, "max_tokens": 60_000, "stream": True, "logprobs": True, "top_logprobs": 5}).encode()
            host, _, port = live.server.origin.rpartition("//")[2].partition(":")
            with socket.socket() as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                sock.connect((host, int(port)))
                sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
                wait_until(lambda: live.server.app.num_running == 1)
                wait_until(lambda: live.server.app.num_running == 0)
                stub.wait_idle()


def test_broken_stream_is_continued_on_another_replica_token_by_token() -> None:
    memory: dict[int, tuple[list[int], list[int]]] = {}
    text = "The quick brown fox jumps over the lazy dog."
    with (
        StubReplica(lambda r: text, name="a", die_after=5, memory=memory) as a,
        StubReplica(lambda r: text, name="b", memory=memory) as b,
        LiveGateway(lambda: [a.url, b.url]) as live,
    ):
        for i in range(8):
            with openai.OpenAI(base_url=live.server.base_url(f"e{i}")[0], api_key="x", max_retries=0) as ai:
                chunks = list(ai.chat.completions.create(model="policy", messages=HELLO, stream=True))
            assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
            (window,) = live.episode(f"e{i}").windows()
            num = int(window.sampled_T.sum())
            assert window.tokens_T[-num:].tolist() == [*a.tokenizer.encode(text), a._stop_id()]
        assert live.gateway.replicas.num_continued > 0, "both replicas had their share"


def test_without_a_replica_health_and_calls_are_503() -> None:
    with LiveGateway(list) as live:
        assert httpx.get(f"{live.server.origin}/health").status_code == 503
        reply = httpx.post(f"{live.url}/chat/completions", json=BODY, headers={"x-request-timeout-s": "0.2"})
        assert reply.status_code == 503 and "retry-after" in reply.headers
        streamed = httpx.post(f"{live.url}/chat/completions", json={**BODY, "stream": True}, headers={"x-request-timeout-s": "0.2"})
        assert streamed.status_code == 503, "nothing is out yet, so the status tells"


def test_metrics_tell_what_happened(stub: StubReplica) -> None:
    with LiveGateway(lambda: [stub.url]) as live:
        assert ask(live, "", "m").status_code == 200
        assert ask(live, "", "m", temperature=9).status_code == 400
        list(openai.OpenAI(base_url=live.url, api_key="x").chat.completions.create(model="policy", messages=HELLO, stream=True))
        httpx.post(f"{live.url}/episodes/m/end").raise_for_status()
        text = httpx.get(f"{live.server.origin}/metrics").text
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if not line.startswith("#")}
    assert values['gateway_requests_total{path="/v1/chat/completions",status="200"}'] == 2
    assert values['gateway_requests_total{path="/v1/chat/completions",status="400"}'] == 1
    assert values["gateway_in_flight"] == 0 and values["gateway_episodes"] == 0
    assert values["gateway_sampled_tokens_total"] == sum(len(s.token_ids) for s in stub.sampled)
    assert values["gateway_prompt_tokens_total"] == sum(len(r.prompt_ids) for r in stub.requests)
    assert values["gateway_overhead_s_count"] == 2 and values["gateway_first_event_s_count"] == 1
    assert values['gateway_tally_total{kind="first"}'] == 1
    assert values['gateway_skew_total{what="answers"}'] == 1 and values['gateway_skew_total{what="skewed_answers"}'] == 0


def test_other_parts_mount_their_own_endpoints(stub: StubReplica) -> None:
    async def status(request: Incoming) -> Outgoing:
        return json_out({"episode": request.episode, "word": request.params["word"], "body": request.body.decode()}, 202)

    ring = KeyRing()
    with LiveGateway(lambda: [stub.url], keys=ring, routes=[Route(method="POST", path="/status/{word}", handler=status)]) as live:
        headers = {"authorization": f"Bearer {ring.episode_key('e/1')}"}
        reply = httpx.post(f"{live.server.origin}/e/e%2F1/status/done", content=b"x", headers=headers)
        assert reply.status_code == 202 and reply.json() == {"episode": "e/1", "word": "done", "body": "x"}
        assert httpx.post(f"{live.server.origin}/e/other/status/done", headers=headers).status_code == 403
        assert httpx.post(f"{live.server.origin}/status/done").status_code == 401


def test_tags_pin_versions() -> None:
    with StubReplica(lambda r: "new", version=9) as new, StubReplica(lambda r: "old", version=4) as old:
        pins = Pins("policy", {"best": 4}.get)
        with LiveGateway(lambda: [new.url, old.url], gateway_options={"pins": pins}) as live:
            said = {name: ask(live, "", model=name) for name in ("policy@best", "policy:9")}
            assert {n: r.json()["choices"][0]["message"]["content"] for n, r in said.items()} == {"policy@best": "old", "policy:9": "new"}
            assert {n: r.headers["x-policy-version"] for n, r in said.items()} == {"policy@best": "4", "policy:9": "9"}
            assert ask(live, "", model="policy@none").status_code == 404
            assert ask(live, "", "e", model="policy@none").status_code == 404, "a pin that cannot be met is no foreign name"
            assert ask(live, "", "e", model="gpt-4o").status_code == 200


def test_running_streams_end_before_the_server_does(stub: StubReplica) -> None:
    stub.hold_after = 3
    live = LiveGateway(lambda: [stub.url], graceful_s=10.0)
    with live:
        stream = openai.OpenAI(base_url=live.url, api_key="x").chat.completions.create(model="policy", messages=HELLO, stream=True)
        first = next(iter(stream))
        assert first.choices[0].delta.role == "assistant"
        live.server._server.should_exit = True
        wait_until(lambda: not live.server._server.servers or not live.server._server.servers[0].is_serving())
        stub.release()
        assert "".join(c.choices[0].delta.content or "" for c in stream if c.choices) == "Hello, world."


@pytest.mark.parametrize("episode", ["", "e/told/"])
def test_stream_that_outlives_the_server_is_told_why(stub: StubReplica, episode: str) -> None:
    stub.hold_after = 3
    body = {"model": "policy", "messages": HELLO, "stream": True}
    live = LiveGateway(lambda: [stub.url], graceful_s=1.0)
    with live:
        url = f"{live.server.origin}/{episode}v1/chat/completions"
        with httpx.stream("POST", url, json=body, timeout=30.0) as reply:
            lines = reply.iter_lines()
            next(lines)
            live.do(live.server.close())
            last = [line for line in lines if line][-1]
    assert "the gateway is shutting down" in last and '"code":503' in last
    stub.release()


def test_gateway_before_a_gateway_is_refused_at_the_start(stub: StubReplica) -> None:
    with LiveGateway(lambda: [stub.url]) as live:
        with pytest.raises(ValueError, match=f"--replica {live.server.origin} is no engine"):
            asyncio.run(check_engines([stub.url, live.server.origin]))
        asyncio.run(check_engines([stub.url, "http://127.0.0.1:9"]))


def test_restarted_gateway_goes_on_with_its_episodes(stub: StubReplica, tmp_path: Path) -> None:
    def start() -> LiveGateway:
        recorder = SqliteRecorder(tmp_path)
        return LiveGateway(
            lambda: [stub.url],
            keys=KeyRing(secret=kept_secret(tmp_path)),
            gateway_options={"recorder": recorder},
            opens_unknown=False,
        )

    with start() as live:
        _, key = live.do(opened(live, "kept", seed=3, sampling=Sampling(temperature=0.5)))
        live.do(opened(live, "closed"))
        live.do(ended(live, "closed"))
        said = ask(live, key, "kept").json()["choices"][0]["message"]
    rows = list(read_calls(tmp_path / "calls.db", "kept"))
    assert len(rows) == 1 and rows[0].status == 200 and rows[0].dialect == "openai_chat" and rows[0].key == "episode:kept"
    with start() as live:

        async def bring_back() -> int:
            return restore(live.gateway, tmp_path)

        assert live.do(bring_back()) == 1
        messages = [*HELLO, said, {"role": "user", "content": "Go on."}]
        assert ask(live, key, "kept", messages=messages).status_code == 200
        before, after = stub.sampled
        path = before.request.prompt_ids + before.token_ids
        assert after.request.prompt_ids[: len(path)] == path, "it goes on from the sampled tokens"
        assert after.request.temperature == 0.5 and after.request.seed != before.request.seed
        assert live.episode("kept").tally["appended"] == 1


def test_failed_and_abandoned_calls_are_recorded_too(stub: StubReplica, tmp_path: Path) -> None:
    with LiveGateway(lambda: [stub.url], gateway_options={"recorder": SqliteRecorder(tmp_path)}) as live:
        ask(live, "", "r", temperature=9)
        stub.hold_after = 2
        with httpx.stream("POST", f"{live.server.base_url('r')[0]}/chat/completions", json={**BODY, "stream": True}) as reply:
            next(reply.iter_lines())
        stub.wait_idle()
        wait_until(lambda: live.server.app.num_running == 0)
        stub.release()
    refused, left = read_calls(tmp_path / "calls.db", "r")
    assert refused.status == 400 and "temperature" in refused.error and refused.call is None
    assert left.status == 499 and left.num_abandoned == 2 and left.prompts == [stub.requests[0].prompt_ids]


def test_overhead_is_told_and_small_change(stub: StubReplica) -> None:
    stub.delay_s = 0.02
    with LiveGateway(lambda: [stub.url]) as live:
        began = time.monotonic()
        reply = ask(live, "")
        took_ms = (time.monotonic() - began) * 1e3
        assert 0 < float(reply.headers["x-gateway-overhead-ms"]) < took_ms - 100, "the replica's time is not ours"


def test_a_gateway_without_keys_refuses_to_be_reached_from_elsewhere(stub: StubReplica) -> None:
    with pytest.raises(ValueError, match="no API keys"), LiveGateway(lambda: [stub.url], host="0.0.0.0"):
        pass
    with LiveGateway(lambda: [stub.url], host="0.0.0.0", is_open_anywhere=True) as live:
        assert live.server.origin.startswith("http://0.0.0.0:")
