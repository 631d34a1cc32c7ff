"""The real `anthropic` client against the gateway: messages, streams, tools, errors, retries, cancellation."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from dialect_worlds import World, calling, scripted

from rollmill.gateway.dialects.anthropic import Messages
from rollmill.gateway.front.keys import KeyRing, KeySpec, digest_of

LS: Any = {"name": "ls", "description": "list", "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}}}
HI: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture
def world() -> Iterator[World]:
    with World(scripted("Hello, world!")) as world:
        yield world


def client_of(world: World, episode: str = "", **options: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=world.url(episode), api_key="k", **{"max_retries": 0, "timeout": 20, **options})


def async_client_of(world: World, episode: str = "", **options: Any) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=world.url(episode), api_key="k", **{"max_retries": 0, "timeout": 20, **options})


def ask(client: anthropic.Anthropic, **fields: Any) -> anthropic.types.Message:
    message: anthropic.types.Message = client.messages.create(**{"model": "policy", "max_tokens": 64, "messages": HI, **fields})
    return message


def test_a_message(world: World) -> None:
    message = ask(client_of(world), system="be kind")
    assert [b.to_dict() for b in message.content] == [{"type": "text", "text": "Hello, world!"}]
    assert (message.role, message.model, message.stop_reason, message.id[:4]) == ("assistant", "policy", "end_turn", "msg_")
    (sampled,) = world.stub.sampled
    assert message.usage.input_tokens == len(sampled.request.prompt_ids)
    assert message.usage.output_tokens == len(sampled.token_ids)
    assert "be kind" in world.asked()[0]


def test_an_async_message(world: World) -> None:
    async def main() -> str:
        async with async_client_of(world) as client:
            message = await client.messages.create(model="policy", max_tokens=64, messages=HI)
            return message.content[0].text  # type: ignore[union-attr]

    assert asyncio.run(main()) == "Hello, world!"


def test_what_the_client_wishes_reaches_the_replica(world: World) -> None:
    ask(client_of(world), max_tokens=3, extra_body={"temperature": 0.5, "top_p": 0.25, "top_k": 4})
    (request,) = world.stub.requests
    assert (request.max_tokens, request.temperature, request.top_p, request.top_k) == (3, 0.5, 0.25, 4)


def test_an_answer_that_is_cut(world: World) -> None:
    assert ask(client_of(world), max_tokens=2).stop_reason == "max_tokens"


def test_stop_sequences_end_the_answer() -> None:
    with World(scripted("one, two, three")) as world:
        message = ask(client_of(world), stop_sequences=["two", "zzz"])
        assert message.content[0].text == "one, "  # type: ignore[union-attr]
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "two")
        with client_of(world).messages.stream(model="policy", max_tokens=64, messages=HI, stop_sequences=["two"]) as stream:
            assert "".join(stream.text_stream) == "one, "
            assert stream.get_final_message().stop_sequence == "two"


def test_a_stream_of_raw_events(world: World) -> None:
    stream = client_of(world).messages.create(model="policy", max_tokens=64, messages=HI, stream=True)
    events = list(stream)
    kinds = [e.type for e in events]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 1
    text = "".join(e.delta.text for e in events if e.type == "content_block_delta")  # type: ignore[union-attr]
    assert text == "Hello, world!"


def test_the_stream_helper_builds_the_same_message(world: World) -> None:
    whole = ask(client_of(world))

    async def main() -> tuple[str, anthropic.types.Message]:
        async with async_client_of(world) as client, client.messages.stream(model="policy", max_tokens=64, messages=HI) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            return text, await stream.get_final_message()

    text, final = asyncio.run(main())
    assert text == "Hello, world!"
    assert [b.text for b in final.content] == [b.text for b in whole.content]  # type: ignore[union-attr]
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def test_a_tool_loop_is_token_exact() -> None:
    say = scripted(calling("ls", '{"path": "."}', "Let me look.\n"), calling("ls", '{"path": "é"}') + "\n" + calling("ls"), "Two files.")
    with World(say) as world:
        client = client_of(world, "e1")
        messages: list[Any] = list(HI)
        for turn in range(3):
            message = ask(client, messages=messages, tools=[LS], system="sys", model="claude-of-some-name")
            messages.append({"role": "assistant", "content": message.content})
            uses = [b for b in message.content if b.type == "tool_use"]
            assert len(uses) == (1, 2, 0)[turn]
            assert message.stop_reason == ("tool_use" if uses else "end_turn")
            assert all(u.id.startswith("toolu_") and u.name == "ls" for u in uses)
            messages.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": u.id, "content": "a b"} for u in uses]})
        assert messages[1]["content"][1].input == {"path": "."}
        world.check_one_exact_window("e1")


def test_a_streamed_tool_loop_is_token_exact() -> None:
    say = scripted(calling("ls", '{"path": "a\\nb", "n": 1.50}', "Let me look. "), calling("ls") + calling("ls"), "Done: 日本 🙂.")
    with World(say) as world:
        client = client_of(world, "e1")
        messages: list[Any] = list(HI)
        for _ in range(3):
            with client.messages.stream(model="policy", max_tokens=256, messages=messages, tools=[LS]) as stream:
                message = stream.get_final_message()
            messages.append({"role": "assistant", "content": message.content})
            results = [{"type": "tool_result", "tool_use_id": b.id, "content": "x"} for b in message.content if b.type == "tool_use"]
            messages.append({"role": "user", "content": [*results, {"type": "text", "text": "go on"}]})
        assert messages[1]["content"][1].input == {"path": "a\nb", "n": 1.5}
        assert messages[-2]["content"][0].text == "Done: 日本 🙂."
        world.check_one_exact_window("e1")


def test_the_clients_own_tool_runner_drives_the_loop() -> None:
    @anthropic.beta_tool
    def ls(path: str) -> str:
        """List files.

        Args:
            path: where
        """
        return json.dumps([path, "b"])

    with World(scripted(calling("ls", '{"path": "."}'), "There are two.")) as world:
        runner = client_of(world, "e1").beta.messages.tool_runner(model="policy", max_tokens=64, messages=HI, tools=[ls])
        final = runner.until_done()
        assert final.content[0].text == "There are two."  # type: ignore[union-attr]
        assert '[".", "b"]' in world.asked()[-1]
        world.check_one_exact_window("e1")


def test_threads_are_token_exact_and_survive_their_loss(world: World) -> None:
    thread = client_of(world, "e1").beta.messages.thread(model="policy", max_tokens=64, messages=[], system="be kind")
    thread.send({"role": "user", "content": "hi"})
    assert thread.previous_message_id is not None and len(thread.messages) == 2
    with thread.stream({"role": "user", "content": "again"}) as stream:
        assert stream.get_final_message().stop_reason == "end_turn"
    dialect = world.server.app._dialects["/v1/messages"]
    assert isinstance(dialect, Messages)
    assert dialect.store.drop(thread.previous_message_id)
    thread.send({"role": "user", "content": "once more"})
    assert len(world.stub.requests) == 3
    world.check_one_exact_window("e1")


def test_count_tokens(world: World) -> None:
    client = client_of(world, "e1")
    counted = client.messages.count_tokens(model="policy", messages=HI, system="be kind", tools=[LS])
    assert counted.input_tokens == ask(client, system="be kind", tools=[LS]).usage.input_tokens
    assert dict(world.episode("e1").tally)["first"] == 1


def test_a_given_beginning_is_continued(world: World) -> None:
    ask(client_of(world), messages=[*HI, {"role": "assistant", "content": "Well, "}])
    assert world.asked()[0].endswith("Well, ")


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 0},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}]}]},
        {"messages": []},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"messages": [{"role": "user", "content": []}, {"role": "user", "content": [{"type": "document"}]}]},
    ],
)
def test_bad_requests_raise_bad_request(world: World, fields: dict[str, Any]) -> None:
    with pytest.raises(anthropic.BadRequestError) as error:
        ask(client_of(world), **fields)
    assert error.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    assert not world.stub.requests


def test_errors_by_class() -> None:
    keys = KeyRing([KeySpec(name="a", digest=digest_of("good"), requests_per_min=2)])
    with World(scripted("ok"), keys=keys) as world:
        with pytest.raises(anthropic.AuthenticationError) as unknown:
            ask(client_of(world))
        assert unknown.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
        opened = anthropic.Anthropic(base_url=world.url("other"), api_key=keys.episode_key("mine"), max_retries=0)
        with pytest.raises(anthropic.PermissionDeniedError):
            ask(opened)
        good = anthropic.Anthropic(base_url=world.url(), api_key="good", max_retries=0)
        with pytest.raises(anthropic.NotFoundError) as missing:
            ask(good, model="gpt-unknown")
        assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
        ask(good)
        with pytest.raises(anthropic.RateLimitError) as limited:
            ask(good)
        assert limited.value.response.headers["retry-after"]


def test_the_client_retries_when_told_to(world: World) -> None:
    world.stub.refuse_next = [400]
    with pytest.raises(anthropic.BadRequestError):
        ask(client_of(world))
    world.stub.refuse_next = [503]
    assert ask(client_of(world, max_retries=2)).stop_reason == "end_turn"


def test_no_replica_is_an_overload() -> None:
    with World(scripted("ok"), urls=list) as world:
        with pytest.raises(anthropic.InternalServerError) as error:
            ask(client_of(world, default_headers={"x-request-timeout-s": "0.3"}))
        assert error.value.status_code == 503
        assert error.value.body["error"]["type"] == "overloaded_error"  # type: ignore[index]


def test_leaving_a_stream_frees_the_row() -> None:
    with World(scripted("a long answer that nobody waits for")) as world:
        world.stub.hold_after = 3
        stream = client_of(world, "e1").messages.create(model="policy", max_tokens=64, messages=HI, stream=True)
        assert next(iter(stream)).type == "message_start"
        stream.close()
        world.stub.wait_idle()
        assert world.stub.num_cut == 1


def test_cancelling_a_whole_call_frees_the_row() -> None:
    with World(scripted("never told")) as world:
        world.stub.hold_after = 0

        async def main() -> None:
            async with async_client_of(world, "e1") as client:
                call = asyncio.create_task(client.messages.create(model="policy", max_tokens=64, messages=HI))
                await asyncio.to_thread(world.stub.wait_requests, 1)
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await call

        asyncio.run(main())
        world.stub.wait_idle()
        assert world.stub.num_cut == 1


def test_a_stream_that_cannot_go_on_raises() -> None:
    with World(scripted("a long answer that breaks"), die_after=3) as world:
        client = client_of(world, default_headers={"x-request-timeout-s": "0.5"})
        stream = client.messages.create(model="policy", max_tokens=64, messages=HI, stream=True)
        with pytest.raises(anthropic.APIStatusError):
            for _ in stream:
                world.stub.refuse_next = [503] * 1000
