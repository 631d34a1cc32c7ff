"""The real `openai` client and the OpenAI Agents SDK against `/v1/responses`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import agents
import openai
import pytest
from dialect_worlds import World, calling, scripted
from pydantic import BaseModel

LS: Any = {"type": "function", "name": "ls", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}, "strict": False}


@pytest.fixture
def world() -> Iterator[World]:
    with World(scripted("Hello, world!")) as world:
        yield world


def client_of(world: World, episode: str = "", **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=world.url(episode) + "/v1", api_key="k", **{"max_retries": 0, "timeout": 20, **options})


def test_a_response(world: World) -> None:
    response = client_of(world).responses.create(model="policy", input="hi", instructions="be kind", metadata={"a": "b"})
    assert response.output_text == "Hello, world!"
    assert (response.status, response.model, response.metadata, response.id[:5]) == ("completed", "policy", {"a": "b"}, "resp_")
    (sampled,) = world.stub.sampled
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (len(sampled.request.prompt_ids), len(sampled.token_ids))
    assert "be kind" in world.asked()[0]


def test_a_cut_response(world: World) -> None:
    response = client_of(world).responses.create(model="policy", input="hi", max_output_tokens=2)
    assert response.status == "incomplete" and response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


def test_a_stream(world: World) -> None:
    events = list(client_of(world).responses.create(model="policy", input="hi", stream=True))
    assert [e.sequence_number for e in events] == list(range(len(events)))  # type: ignore[union-attr]
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "Hello, world!"
    last = events[-1]
    assert last.type == "response.completed" and last.response.output_text == "Hello, world!"


def test_the_stream_helper(world: World) -> None:
    with client_of(world).responses.stream(model="policy", input="hi") as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == "Hello, world!"


def test_structured_output_is_parsed() -> None:
    class City(BaseModel):
        name: str

    with World(scripted('{"name": "Bern"}')) as world:
        parsed = client_of(world).responses.parse(model="policy", input="which?", text_format=City)
        assert parsed.output_parsed == City(name="Bern")
        (request,) = world.stub.requests
        assert request.constraint is not None and '"name"' in request.constraint.text


def loop(client: openai.OpenAI, *, streams: bool, by_id: bool) -> None:
    """Tools are called until none is."""
    items: list[Any] = [{"role": "user", "content": "what is here?"}]
    previous: str | None = None
    while True:
        fields: dict[str, Any] = {"model": "policy", "input": items, "tools": [LS], "instructions": "be brief"}
        fields |= {"previous_response_id": previous} if by_id else {"store": False}
        if streams:
            with client.responses.stream(**fields) as stream:
                response = stream.get_final_response()
        else:
            response = client.responses.create(**fields)
        uses = [item for item in response.output if item.type == "function_call"]
        results = [{"type": "function_call_output", "call_id": use.call_id, "output": "a b"} for use in uses]
        previous = response.id
        items = results if by_id else [*items, *response.output, *results]
        if not uses:
            return


@pytest.mark.parametrize("by_id", [False, True])
@pytest.mark.parametrize("streams", [False, True])
def test_a_tool_loop_is_token_exact(streams: bool, by_id: bool) -> None:
    say = scripted(calling("ls", '{"path": "é"}', "Let me look.\n"), calling("ls") + "\n" + calling("ls", '{"path": "b"}'), "Two: 日本 🙂.")
    with World(say) as world:
        loop(client_of(world, "e1"), streams=streams, by_id=by_id)
        assert len(world.stub.requests) == 3
        world.check_one_exact_window("e1")


def test_kept_responses_are_told_and_forgotten(world: World) -> None:
    client = client_of(world)
    response = client.responses.create(model="policy", input="hi")
    assert client.responses.retrieve(response.id).output_text == "Hello, world!"
    client.responses.delete(response.id)
    for gone in (
        lambda: client.responses.retrieve(response.id),
        lambda: client.responses.delete(response.id),
        lambda: client.responses.create(model="policy", input="on", previous_response_id=response.id),
    ):
        with pytest.raises(openai.NotFoundError):
            gone()


@pytest.mark.parametrize(
    "fields",
    [
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x/y.png"}]}]},
        {"input": []},
        {"tools": [{"type": "web_search"}]},
        {"max_output_tokens": 0},
        {"background": True},
    ],
)
def test_bad_requests_raise_bad_request(world: World, fields: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError):
        client_of(world).responses.create(**{"model": "policy", "input": "hi", **fields})
    assert not world.stub.requests


def test_a_stream_that_cannot_go_on_says_so() -> None:
    with World(scripted("a long answer that breaks"), die_after=3) as world:
        client = client_of(world, default_headers={"x-request-timeout-s": "0.5"})
        events = []
        for event in client.responses.create(model="policy", input="hi", stream=True):
            events.append(event)
            world.stub.refuse_next = [503] * 1000
        last = events[-1]
        assert last.type == "response.failed"
        assert last.response.error is not None and last.response.error.message


@pytest.mark.parametrize("streams", [False, True])
def test_the_agents_sdk_runs_a_token_exact_loop(streams: bool) -> None:
    seen: list[str] = []

    @agents.function_tool
    def ls(path: str) -> str:
        """List files."""
        seen.append(path)
        return f"{path}/a {path}/b"

    say = scripted(
        calling("ls", '{"path": "."}', "I look. "), calling("ls", '{"path": "x"}') + calling("ls", '{"path": "y"}'), "All seen.", "Bye."
    )

    async def main(world: World) -> list[str]:
        client = openai.AsyncOpenAI(base_url=world.url("e1") + "/v1", api_key="k", max_retries=0, timeout=20)
        model = agents.OpenAIResponsesModel(model="gpt-of-some-name", openai_client=client)
        agent = agents.Agent(name="a", instructions="be brief", tools=[ls], model=model)
        given: Any = "look around"
        outputs = []
        for _ in range(2):
            if streams:
                streaming = agents.Runner.run_streamed(agent, given)
                async for _event in streaming.stream_events():
                    pass
                outputs.append(streaming.final_output)
                given = [*streaming.to_input_list(), {"role": "user", "content": "thanks"}]
            else:
                result = await agents.Runner.run(agent, given)
                outputs.append(result.final_output)
                given = [*result.to_input_list(), {"role": "user", "content": "thanks"}]
        await client.close()
        return outputs

    agents.set_tracing_disabled(True)
    with World(say) as world:
        assert asyncio.run(main(world)) == ["All seen.", "Bye."]
        assert seen[0] == "." and sorted(seen[1:]) == ["x", "y"]
        assert len(world.stub.requests) == 4
        world.check_one_exact_window("e1")
