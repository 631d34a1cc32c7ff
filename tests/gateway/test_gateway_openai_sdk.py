"""The real `openai` clients, sync and async, against a gateway that listens: what they send is understood, what they get they can read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from live_gateway import LiveGateway, wait_until
from stub_replica import StubReplica, logprob_of

from rollmill.engine.protocol import ConstraintKind, GenerateRequest

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "ls",
            "description": "List a folder.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
        },
    }
]
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
CALL = '<tool_call>{"name": "ls", "arguments": {"path": "."}}</tool_call>'


class Script:
    """What the stub says next; the last line is repeated."""

    def __init__(self) -> None:
        self.lines: list[str | list[int]] = ["Hello, world."]

    def __call__(self, request: GenerateRequest) -> str | list[int]:
        return self.lines.pop(0) if len(self.lines) > 1 else self.lines[0]


@pytest.fixture(scope="module")
def world() -> Iterator[tuple[LiveGateway, StubReplica, Script]]:
    script = Script()
    with StubReplica(script, version=7) as stub, LiveGateway(lambda: [stub.url]) as live:
        yield live, stub, script


@pytest.fixture
def live(world: tuple[LiveGateway, StubReplica, Script]) -> LiveGateway:
    return world[0]


@pytest.fixture
def stub(world: tuple[LiveGateway, StubReplica, Script]) -> StubReplica:
    stub = world[1]
    stub.wait_idle()
    stub.requests.clear()
    stub.sampled.clear()
    return stub


@pytest.fixture
def script(world: tuple[LiveGateway, StubReplica, Script]) -> Script:
    world[2].lines = ["Hello, world."]
    return world[2]


def client(live: LiveGateway, episode: str = "", **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=live.server.base_url(episode)[0], api_key="sk-any", **{"max_retries": 0, **options})


def test_chat_answers_with_text_counts_and_version(live: LiveGateway, stub: StubReplica, script: Script) -> None:
    with client(live) as ai:
        raw = ai.chat.completions.with_raw_response.create(model="policy", messages=HELLO, max_tokens=32)
    reply = raw.parse()
    assert reply.choices[0].message.content == "Hello, world."
    assert reply.choices[0].finish_reason == "stop"
    assert reply.id.startswith("chatcmpl-") and reply.object == "chat.completion" and reply.model == "policy"
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == len(stub.requests[0].prompt_ids)
    assert reply.usage.completion_tokens == len(stub.sampled[0].token_ids)
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert raw.headers["x-policy-version"] == "7"
    assert float(raw.headers["x-gateway-overhead-ms"]) > 0
    assert raw.headers["x-request-id"] in reply.id


def test_stream_gives_the_text_of_every_step_and_then_the_counts(live: LiveGateway, stub: StubReplica, script: Script) -> None:
    with client(live) as ai:
        chunks = list(
            ai.chat.completions.create(model="policy", messages=HELLO, stream=True, stream_options={"include_usage": True}, max_tokens=32)
        )
    texts = [c.choices[0].delta.content for c in chunks if c.choices and c.choices[0].delta.content]
    assert "".join(texts) == "Hello, world."
    assert len(texts) > 3, "every step of the replica is passed on"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(stub.sampled[0].token_ids)
    assert all(c.usage is None for c in chunks[:-1])


def test_async_client_streams_many_at_once(live: LiveGateway, stub: StubReplica, script: Script) -> None:
    async def one(ai: openai.AsyncOpenAI) -> str:
        stream = await ai.chat.completions.create(model="policy", messages=HELLO, stream=True)
        return "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])

    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=live.url, api_key="x", max_retries=0) as ai:
            return await asyncio.gather(*(one(ai) for _ in range(50)))

    assert asyncio.run(main()) == ["Hello, world."] * 50


def test_tool_calls_come_whole_and_in_deltas(live: LiveGateway, stub: StubReplica, script: Script) -> None:
    script.lines = [f"Let me look.\n{CALL}"]
    with client(live) as ai:
        whole = ai.chat.completions.create(model="policy", messages=HELLO, tools=TOOLS)
        chunks = list(ai.chat.completions.create(model="policy", messages=HELLO, tools=TOOLS, stream=True))
        with ai.chat.completions.stream(model="policy", messages=HELLO, tools=TOOLS) as events:
            helped = events.get_final_completion()
    message = whole.choices[0].message
    assert message.content == "Let me look." and whole.choices[0].finish_reason == "tool_calls"
    assert message.tool_calls is not None and message.tool_calls[0].type == "function"
    assert message.tool_calls[0].function.name == "ls"
    assert json.loads(message.tool_calls[0].function.arguments) == {"path": "."}
    deltas = [t for c in chunks if c.choices for t in c.choices[0].delta.tool_calls or []]
    assert deltas[0].id and deltas[0].function is not None and deltas[0].function.name == "ls"
    assert json.loads("".join(d.function.arguments or "" for d in deltas if d.function)) == {"path": "."}
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "tool_calls"
    said = helped.choices[0].message.tool_calls
    assert said is not None and json.loads(said[0].function.arguments) == {"path": "."}


def test_tools_that_must_not_be_called_leave_text(live: LiveGateway, stub: StubReplica, script: Script) -> None:
    script.lines = [CALL]
    with client(live) as ai:
        reply = ai.chat.completions.create(model="policy", messages=HELLO, tools=TOOLS, tool_choice="none")
    assert reply.choices[0].message.tool_calls is None and reply.choices[0].message.content == CALL


@pytest.mark.parametrize("streams", [False, True])
def test_conversation_with_tools_goes_on_from_the_sampled_tokens(
    live: LiveGateway, stub: StubReplica, script: Script, streams: bool
) -> None:
    script.lines = [f"First.\n{CALL}", f"Second.  {CALL} {CALL}", "Done."]
    episode = f"tools-{streams}"
    messages: list[Any] = [{"role": "system", "content": "Use tools."}, {"role": "user", "content": "Look around."}]
    with client(live, episode) as ai:
        for _ in range(3):
            if streams:
                with ai.chat.completions.stream(model="gpt-4o", messages=messages, tools=TOOLS) as events:
                    message = events.get_final_completion().choices[0].message
            else:
                message = ai.chat.completions.create(model="gpt-4o", messages=messages, tools=TOOLS).choices[0].message
            messages.append(message.to_dict(exclude_unset=False, mode="json") if not streams else message.to_dict())
            for call in message.tool_calls or []:
                messages.append({"role": "tool", "tool_call_id": call.id, "content": f"result of {call.function.name}\n"})
    first, second, third = stub.sampled
    assert second.request.prompt_ids[: len(first.request.prompt_ids)] == first.request.prompt_ids
    assert second.request.prompt_ids[len(first.request.prompt_ids) :][: len(first.token_ids)] == first.token_ids
    assert third.request.prompt_ids[: len(second.request.prompt_ids)] == second.request.prompt_ids
    assert third.request.prompt_ids[len(second.request.prompt_ids) :][: len(second.token_ids)] == second.token_ids
    kept = live.episode(episode)
    assert dict(kept.tally) | {"orphaned": 0} == {"first": 1, "appended": 2, "orphaned": 0}
    (window,) = kept.windows()
    assert window.tokens_T.tolist() == third.request.prompt_ids + third.token_ids
    sampled = [int(t) for t, is_ours in zip(window.tokens_T, window.sampled_T, strict=True) if is_ours]
    assert sampled == first.token_ids + second.token_ids + third.token_ids
    assert [float(x) for x, is_ours in zip(window.logprobs_T, window.sampled_T, strict=True) if is_ours] == [logprob_of(t) for t in sampled]


def test_choices_have_seeds_of_their_own(live: LiveGateway, stub: StubReplica, script: Script) -> None:
    script.lines = ["one", "two", "three"]
    with client(live) as ai:
        reply = ai.chat.completions.create(model="policy", messages=HELLO, n=3, seed=11)
        chunks = list(ai.chat.completions.create(model="policy", messages=HELLO, n=2, stream=True))
    assert sorted(c.message.content or "" for c in reply.choices) == ["one", "three", "two"]
    assert [c.index for c in reply.choices] == [0, 1, 2]
    assert sorted(r.seed or 0 for r in stub.requests[:3]) == [11, 12, 13]
    assert {c.choices[0].index for c in chunks if c.choices} == {0, 1}
    assert reply.usage is not None and reply.usage.prompt_tokens == len(stub.requests[0].prompt_ids)


@pytest.mark.parametrize("streams", [False, True])
def test_stop_string_ends_the_text_and_frees_the_row(live: LiveGateway, stub: StubReplica, script: Script, streams: bool) -> None:
    script.lines = ["keep this STOP" + " never shown" * 200]
    # Were the rest waited for, the test would stand still.
    stub.hold_after = 40
    with client(live) as ai:
        if streams:
            chunks = list(ai.chat.completions.create(model="policy", messages=HELLO, stop=["STOP"], stream=True))
            text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            finish = [c.choices[0].finish_reason for c in chunks if c.choices][-1]
        else:
            reply = ai.chat.completions.create(model="policy", messages=HELLO, stop="STOP")
            text, finish = reply.choices[0].message.content or "", reply.choices[0].finish_reason
    assert (text, finish) == ("keep this ", "stop")
    stub.wait_idle()
    assert len(stub.sampled[0].token_ids) <= 40
    stub.release()


def test_logprobs_with_the_most_likely_tokens(live: LiveGateway, stub: StubReplica, script: Script) -> None:
    with client(live) as ai:
        reply = ai.chat.completions.create(model="policy", messages=HELLO, logprobs=True, top_logprobs=3)
        chunks = list(ai.chat.completions.create(model="policy", messages=HELLO, logprobs=True, top_logprobs=3, stream=True))
    assert reply.choices[0].logprobs is not None
    entries = reply.choices[0].logprobs.content
    ids = stub.sampled[0].token_ids
    assert entries is not None and [e.logprob for e in entries] == [logprob_of(i) for i in ids]
    assert "".join(e.token for e in entries).startswith("Hello, world.")
    assert bytes(entries[0].bytes or []).decode() == entries[0].token
    assert all(len(e.top_logprobs) == 3 and e.top_logprobs[0].token == e.token for e in entries)
    streamed = [e for c in chunks if c.choices and c.choices[0].logprobs for e in c.choices[0].logprobs.content or []]
    assert [e.logprob for e in streamed] == [e.logprob for e in entries]


def test_token_ids_of_prompt_and_answer_are_what_the_replica_saw(live: LiveGateway, stub: StubReplica, script: Script) -> None:
    with client(live) as ai:
        reply = ai.chat.completions.create(model="policy", messages=HELLO, extra_body={"return_token_ids": True})
        chunks = list(ai.chat.completions.create(model="policy", messages=HELLO, stream=True, extra_body={"return_token_ids": True}))
    sampled = stub.sampled[0]
    assert reply.model_extra is not None and reply.model_extra["prompt_token_ids"] == sampled.request.prompt_ids
    extra = reply.choices[0].model_extra or {}
    assert extra["token_ids"] == sampled.token_ids and extra["policy_versions"] == [[0, 7]]
    assert (chunks[0].model_extra or {})["prompt_token_ids"] == sampled.request.prompt_ids
    assert [t for c in chunks for t in (c.choices[0].model_extra or {}).get("token_ids", [])] == stub.sampled[1].token_ids


def test_schema_and_forced_tools_become_constraints(live: LiveGateway, stub: StubReplica, script: Script) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
    form: Any = {"type": "json_schema", "json_schema": {"name": "out", "schema": schema, "strict": True}}
    script.lines = ['{"n": 3}', '{"n": 3}', CALL, CALL, "{}"]
    with client(live) as ai:
        ai.chat.completions.create(model="policy", messages=HELLO, response_format=form)
        ai.chat.completions.create(model="policy", messages=HELLO, response_format={"type": "json_object"})
        ai.chat.completions.create(model="policy", messages=HELLO, tools=TOOLS, tool_choice="required")
        ai.chat.completions.create(
            model="policy", messages=HELLO, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "ls"}}
        )
        ai.chat.completions.create(model="policy", messages=HELLO, tools=TOOLS, response_format=form)
    given = [r.constraint for r in stub.requests]
    assert all(c is not None for c in given)
    kinds = [c.kind for c in given if c is not None]
    assert kinds == [ConstraintKind.JSON_SCHEMA] * 2 + [ConstraintKind.LARK] * 3
    texts = [c.text for c in given if c is not None]
    assert json.loads(texts[0]).items() >= schema.items() and json.loads(texts[1])["type"] == "object"
    assert "start: calls | answer" in texts[4] and "ls" in texts[4], "an agent with tools and a schema may do either"


def test_one_call_at_a_time_is_kept_to(live: LiveGateway, stub: StubReplica, script: Script) -> None:
    script.lines = [f"Both.\n{CALL}\n{CALL}", f"Both.\n{CALL}\n{CALL}", "Done."]
    messages: list[Any] = list(HELLO)
    with client(live, "one-call") as ai:
        for streams in (False, True):
            if streams:
                with ai.chat.completions.stream(model="policy", messages=messages, tools=TOOLS, parallel_tool_calls=False) as events:
                    message = events.get_final_completion().choices[0].message
            else:
                message = (
                    ai.chat.completions.create(model="policy", messages=messages, tools=TOOLS, parallel_tool_calls=False).choices[0].message
                )
            assert message.tool_calls is not None and len(message.tool_calls) == 1 and message.content == "Both."
            messages += [message.to_dict(), {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "ok"}]
        ai.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
    tally = live.episode("one-call").tally
    assert tally["appended"] == 2 and tally["forked"] == 0
    text = stub.tokenizer.decode(stub.requests[-1].prompt_ids)
    assert text.count('"path": "."') == 2, "what came after the first call is no part of the conversation"


def test_completions_of_text_and_ids(live: LiveGateway, stub: StubReplica, script: Script) -> None:
    ids = stub.tokenizer.encode("Once upon")
    with client(live) as ai:
        texts = ai.completions.create(model="policy", prompt=["Once upon", "a time"], max_tokens=64)
        by_ids = ai.completions.create(model="policy", prompt=ids, max_tokens=64, echo=True)
        ended = ai.completions.create(model="policy", prompt="Once upon", max_tokens=2, logprobs=1)
        chunks = list(ai.completions.create(model="policy", prompt="Once upon", max_tokens=64, stream=True))
    assert [c.text for c in texts.choices] == ["Hello, world."] * 2 and [c.index for c in texts.choices] == [0, 1]
    assert by_ids.choices[0].text == "Once upon" + "Hello, world."
    assert [r.prompt_ids for r in stub.requests][:3] == [ids, stub.tokenizer.encode("a time"), ids]
    assert ended.choices[0].finish_reason == "length"
    logprobs = ended.choices[0].logprobs
    assert logprobs is not None and logprobs.token_logprobs == [logprob_of(i) for i in stub.sampled[3].token_ids]
    assert "".join(c.choices[0].text for c in chunks if c.choices) == "Hello, world."
    assert ended.usage is not None and ended.usage.completion_tokens == 2
    assert texts.usage is not None and texts.usage.prompt_tokens == len(ids) + len(stub.tokenizer.encode("a time"))


def test_default_length_of_completions_is_sixteen(live: LiveGateway, stub: StubReplica, script: Script) -> None:
    with client(live) as ai:
        ai.completions.create(model="policy", prompt="Once")
        ai.chat.completions.create(model="policy", messages=HELLO)
    assert stub.requests[0].max_tokens == 16
    assert stub.requests[1].max_tokens > 1_000_000, "a chat answer may use all of the context"


def test_models_are_listed_and_looked_up(live: LiveGateway) -> None:
    with client(live) as ai:
        assert [m.id for m in ai.models.list()] == ["policy"]
        assert ai.models.retrieve("policy:12").id == "policy:12"
        with pytest.raises(openai.NotFoundError, match="policy:VERSION"):
            ai.models.retrieve("gpt-4o")


def test_pinned_version_that_is_not_served_is_a_conflict(live: LiveGateway, stub: StubReplica, script: Script) -> None:
    with client(live) as ai:
        assert ai.chat.completions.create(model="policy:7", messages=HELLO).choices[0].message.content == "Hello, world."
        with pytest.raises(openai.ConflictError):
            ai.chat.completions.create(model="policy:3", messages=HELLO, extra_headers={"x-request-timeout-s": "1"})


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"messages": []}, "messages"),
        ({"temperature": 3.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"n": 0}, "n is 0"),
        ({"n": 1_000_000}, "n is 1000000"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logit_bias": {"1": 5}}, "logit_bias"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "web_search"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "robot"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, r"messages\[0\].content\[0\]"),
        ({"functions": [{"name": "x"}]}, "functions"),
        ({"modalities": ["audio"]}, "modalities"),
    ],
)
def test_bad_requests_name_the_field(live: LiveGateway, stub: StubReplica, body: dict[str, Any], named: str) -> None:
    with client(live) as ai, pytest.raises(openai.BadRequestError, match=named):
        ai.chat.completions.create(model="policy", messages=HELLO, extra_body=body)
    assert stub.requests == []


def test_prompt_beyond_the_context_is_a_bad_request(live: LiveGateway, stub: StubReplica, script: Script) -> None:
    with client(live) as ai, pytest.raises(openai.BadRequestError, match="the prompt has") as caught:
        ai.completions.create(model="policy", prompt=[5] * (stub.max_len + 1))
    assert caught.value.code == "context_length_exceeded"
    assert "127.0.0.1" not in str(caught.value), "where replicas live is nobody's business"


def test_unknown_model_outside_an_episode_is_not_found(live: LiveGateway, script: Script) -> None:
    with client(live) as ai, pytest.raises(openai.NotFoundError, match="policy"):
        ai.chat.completions.create(model="gpt-4o", messages=HELLO)


def test_sdk_retries_past_a_replica_that_refuses(live: LiveGateway, stub: StubReplica, script: Script) -> None:
    stub.refuse_next = [503, 503]
    with client(live) as ai:
        assert ai.chat.completions.create(model="policy", messages=HELLO).choices[0].message.content == "Hello, world."


def test_client_that_leaves_mid_stream_frees_the_row(live: LiveGateway, stub: StubReplica, script: Script) -> None:
    script.lines = ["word " * 50]
    stub.hold_after = 5
    before = stub.num_cut
    try:
        with client(live, "leaver") as ai:
            stream = ai.chat.completions.create(model="policy", messages=HELLO, stream=True)
            next(iter(stream))
            stream.close()
        stub.wait_idle()
    finally:
        stub.release()
    assert stub.num_cut == before + 1
    wait_until(lambda: live.episode("leaver").tally["abandoned"] == 1)
    assert live.episode("leaver").windows() == ()


def test_client_that_times_out_frees_the_row(live: LiveGateway, stub: StubReplica, script: Script) -> None:
    stub.hold_after = 0
    try:
        with client(live, timeout=0.3) as ai, pytest.raises(openai.APITimeoutError):
            ai.chat.completions.create(model="policy", messages=HELLO)
        stub.wait_idle()
    finally:
        stub.release()
    assert stub.num_cut > 0


def test_answer_that_is_late_is_a_gateway_timeout(live: LiveGateway, stub: StubReplica, script: Script) -> None:
    stub.hold_after = 0
    try:
        with client(live, "late") as ai, pytest.raises(openai.InternalServerError) as caught:
            ai.chat.completions.create(model="policy", messages=HELLO, extra_headers={"x-request-timeout-s": "0.2"})
    finally:
        stub.release()
    assert caught.value.status_code == 504
    assert live.episode("late").tally["impatient"] == 1


def test_same_idempotency_key_is_sampled_once(live: LiveGateway, stub: StubReplica, script: Script) -> None:
    script.lines = ["first", "second"]
    headers = {"Idempotency-Key": "k-1"}
    with client(live, "twice") as ai:
        a = ai.chat.completions.create(model="policy", messages=HELLO, extra_headers=headers)
        b = ai.chat.completions.create(model="policy", messages=HELLO, extra_headers=headers)
        with pytest.raises(openai.BadRequestError, match="another body"):
            ai.chat.completions.create(model="policy", messages=[*HELLO, *HELLO], extra_headers=headers)
        streamed = {"Idempotency-Key": "k-2"}
        once = list(ai.chat.completions.create(model="policy", messages=HELLO, stream=True, extra_headers=streamed))
        again = list(ai.chat.completions.create(model="policy", messages=HELLO, stream=True, extra_headers=streamed))
    assert a == b and once == again
    assert len(stub.requests) == 2


def test_raw_stream_has_the_framing_that_browsers_expect(live: LiveGateway, stub: StubReplica, script: Script) -> None:
    body = {"model": "policy", "messages": HELLO, "stream": True}
    with httpx.stream("POST", f"{live.url}/chat/completions", json=body, headers={"x-request-id": "mine-1"}) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert reply.headers["x-request-id"] == "mine-1"
        assert reply.headers["x-policy-version"] == "7"
        lines = [line for line in reply.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
    assert all(json.loads(line[6:])["object"] == "chat.completion.chunk" for line in lines[:-1])


def test_training_episode_imposes_its_sampling(live: LiveGateway, stub: StubReplica, script: Script) -> None:
    opened = httpx.post(f"{live.url}/episodes", json={"id": "trained", "temperature": 0.7, "seed": 5, "metadata": {"row": 3}})
    assert opened.status_code == 201
    facts = opened.json()
    with openai.OpenAI(base_url=facts["openai_base_url"], api_key=facts["key"], max_retries=0) as ai:
        ai.chat.completions.create(model="gpt-4o", messages=HELLO, temperature=0.0, seed=99)
    request = stub.requests[0]
    assert request.temperature == 0.7 and request.seed != 99 and request.session == "trained"
    ended = httpx.post(f"{live.url}/episodes/trained/end").json()
    assert ended["tally"]["overridden"] == 1 and ended["metadata"] == {"row": 3} and ended["num_windows"] == 1
    assert ended["num_trained_tokens"] == len(stub.sampled[0].token_ids)
    late = openai.OpenAI(base_url=facts["openai_base_url"], api_key=facts["key"], max_retries=0)
    with late as ai, pytest.raises(openai.APIStatusError) as caught:
        ai.chat.completions.create(model="gpt-4o", messages=HELLO)
    assert caught.value.status_code == 410


def test_ending_an_episode_stops_what_runs_in_it(live: LiveGateway, stub: StubReplica, script: Script) -> None:
    httpx.post(f"{live.url}/episodes", json={"id": "cut-off"}).raise_for_status()
    stub.hold_after = 3
    try:
        with client(live, "cut-off") as ai:
            stream = ai.chat.completions.create(model="policy", messages=HELLO, stream=True)
            next(iter(stream))
            httpx.post(f"{live.url}/episodes/cut-off/end").raise_for_status()
            with pytest.raises(openai.APIError, match="has ended"):
                list(stream)
        stub.wait_idle()
    finally:
        stub.release()


def test_header_names_the_episode_when_the_url_does_not(live: LiveGateway, stub: StubReplica, script: Script) -> None:
    with client(live, default_headers={"x-multi-turn-session-id": "by-header"}) as ai:
        ai.chat.completions.create(model="anything", messages=HELLO)
    assert live.episode("by-header").tally["first"] == 1
    assert stub.requests[0].session == "by-header"


def test_nothing_is_left_behind(live: LiveGateway, stub: StubReplica) -> None:
    stub.wait_idle()
    wait_until(lambda: live.server.app.num_running == 0)
    # The server, its sweeper, uvicorn's tick, and a poll of the replicas may run; calls may not.
    wait_until(lambda: live.num_tasks() <= 6)


def test_logprobs_survive_as_float32(live: LiveGateway, stub: StubReplica, script: Script) -> None:
    with client(live, "exact") as ai:
        ai.chat.completions.create(model="policy", messages=HELLO)
    (window,) = live.episode("exact").windows()
    ids = stub.sampled[0].token_ids
    assert np.array_equal(window.logprobs_T[-len(ids) :], np.asarray([logprob_of(i) for i in ids], np.float32))
