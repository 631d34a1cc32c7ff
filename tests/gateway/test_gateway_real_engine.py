"""The `openai` client against a gateway in front of a real engine with the demo model: whole and streamed agree, constraints hold, and
a conversation trains on exactly what the engine sampled."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from live_gateway import LiveGateway
from stub_replica import DEMO

sys.path.append(str(Path(__file__).parents[1] / "engine"))
from engine_worlds import Server, wait_until

from rollmill.engine.protocol import Pressure

HELLO: list[Any] = [{"role": "user", "content": "Make the file `a.txt`."}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "write",
        "parameters": {
            "type": "object",
            "properties": {"path": {"enum": ["a.txt", "b.txt"]}, "times": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["path", "times"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def engine() -> Iterator[Server]:
    server = Server(DEMO, replica="engine-0")
    yield server
    server.close()


@pytest.fixture(scope="module")
def live(engine: Server) -> Iterator[LiveGateway]:
    with LiveGateway(lambda: [engine.url]) as live:
        yield live


@pytest.fixture
def ai(live: LiveGateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=live.url, api_key="x", max_retries=0, timeout=60) as ai:
        yield ai


def running(live: LiveGateway) -> int:
    pressures: list[Pressure] = live.do(live.gateway.replicas.pressures())
    return sum(p.running for p in pressures)


def test_whole_and_streamed_agree_for_one_seed(ai: openai.OpenAI) -> None:
    fields: Any = {"model": "policy", "messages": HELLO, "max_tokens": 24, "seed": 5, "logprobs": True, "top_logprobs": 2}
    whole = ai.chat.completions.create(**fields).choices[0]
    chunks = [c.choices[0] for c in ai.chat.completions.create(**fields, stream=True) if c.choices]
    assert "".join(c.delta.content or "" for c in chunks) == whole.message.content
    assert chunks[-1].finish_reason == whole.finish_reason
    assert whole.logprobs is not None and whole.logprobs.content is not None
    streamed = [e for c in chunks if c.logprobs for e in c.logprobs.content or []]
    assert streamed == whole.logprobs.content, "bit for bit: the engine is exact"
    assert all(len(e.top_logprobs) == 2 for e in streamed)
    assert all(e.top_logprobs[0].logprob >= e.top_logprobs[1].logprob for e in streamed)


def test_forced_call_and_schema_are_kept_to(ai: openai.OpenAI) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "write"}}):
        reply = ai.chat.completions.create(
            model="policy",
            messages=HELLO,
            tools=[TOOL],
            tool_choice=choice,  # type: ignore[arg-type]
            parallel_tool_calls=False,
            seed=1,
            max_tokens=200,
        ).choices[0]
        assert reply.finish_reason == "tool_calls" and reply.message.tool_calls is not None and len(reply.message.tool_calls) == 1
        arguments = json.loads(reply.message.tool_calls[0].function.arguments)
        assert arguments["path"] in ("a.txt", "b.txt") and 1 <= arguments["times"] <= 9
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
    form: Any = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}}
    said = ai.chat.completions.create(model="policy", messages=HELLO, response_format=form, max_tokens=60, seed=2).choices[0]
    assert isinstance(json.loads(said.message.content or "")["ok"], bool)
    either = ai.chat.completions.create(model="policy", messages=HELLO, tools=[TOOL], response_format=form, max_tokens=200, seed=3).choices[
        0
    ]
    assert either.message.tool_calls or isinstance(json.loads(either.message.content or "")["ok"], bool)


def test_a_schema_that_cannot_be_compiled_is_a_bad_request(ai: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "no such type"}}}
    with pytest.raises(openai.BadRequestError):
        ai.chat.completions.create(model="policy", messages=HELLO, response_format=form)


def test_conversation_trains_on_what_the_engine_sampled(live: LiveGateway) -> None:
    messages, ids = list(HELLO), []
    with openai.OpenAI(base_url=live.server.base_url("trained")[0], api_key="x", max_retries=0, timeout=60) as ai:
        for turn in range(4):
            reply = ai.chat.completions.create(
                model="gpt-4o",
                messages=messages,
                max_tokens=20,
                stop=["tool"] if turn == 2 else None,
                extra_body={"return_token_ids": True},
            )
            choice = reply.choices[0]
            ids.append(((reply.model_extra or {})["prompt_token_ids"], (choice.model_extra or {})["token_ids"]))
            messages += [choice.message.to_dict(), {"role": "user", "content": f"Go on, {turn}."}]
    (window,) = live.episode("trained").windows()
    assert window.tokens_T.tolist() == ids[-1][0] + ids[-1][1]
    trained = [int(t) for t, is_ours in zip(window.tokens_T, window.sampled_T, strict=True) if is_ours]
    assert trained == [t for _, sampled in ids for t in sampled]
    for (before, sampled), (after, _) in itertools.pairwise(ids):
        assert after[: len(before) + len(sampled)] == before + sampled


def test_leaving_and_stop_strings_free_the_row(ai: openai.OpenAI, live: LiveGateway) -> None:
    stream = ai.chat.completions.create(model="policy", messages=HELLO, n=4, stream=True, temperature=1.3)
    next(iter(stream))
    stream.close()
    wait_until(lambda: running(live) == 0, "the rows of the client that left are free")
    ai.chat.completions.create(model="policy", messages=HELLO, stop=["e"], temperature=1.3)
    wait_until(lambda: running(live) == 0, "the row of the stopped request is free")
