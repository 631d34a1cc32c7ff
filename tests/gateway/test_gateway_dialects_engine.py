"""The `anthropic` client and Responses against a gateway in front of a real engine with the demo model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from live_gateway import LiveGateway
from stub_replica import DEMO

sys.path.append(str(Path(__file__).parents[1] / "engine"))
from engine_worlds import Server

WRITE = {"type": "object", "properties": {"path": {"enum": ["a.txt", "b.txt"]}}, "required": ["path"], "additionalProperties": False}
NUM_TURNS = 3


@pytest.fixture(scope="module")
def live() -> Iterator[LiveGateway]:
    server = Server(DEMO, replica="engine-0")
    try:
        with LiveGateway(lambda: [server.url]) as live:
            yield live
    finally:
        server.close()


def check_appended(live: LiveGateway, key: str) -> None:
    """One window: every turn went on from the tokens of the one before."""
    episode = live.episode(key)
    (window,) = episode.windows()
    assert dict(episode.tally) == {"first": 1, "appended": NUM_TURNS - 1, "orphaned": 0}
    # Where a constraint left one choice there is nothing to learn.
    chosen = [
        token
        for sample in episode.graph.samples
        for i, token in enumerate(sample.ids.tolist())
        if not any(start <= i < end for start, end in sample.forced)
    ]
    assert window.tokens_T[window.sampled_T == 1].tolist() == chosen
    assert window.sources and all(source.replica == "engine-0" for source in window.sources)


def test_anthropic_conversation_trains_on_what_was_sampled(live: LiveGateway) -> None:
    messages: list[Any] = [{"role": "user", "content": "Make the file `a.txt`."}]
    tools: Any = [{"name": "write", "input_schema": WRITE}]
    with anthropic.Anthropic(base_url=live.server.base_url("a")[1], api_key="x", max_retries=0, timeout=60) as client:
        for turn in range(NUM_TURNS):
            choice: Any = {"type": "any", "disable_parallel_tool_use": True} if turn == 0 else {"type": "auto"}
            fields: Any = {"model": "m", "max_tokens": 40, "messages": messages, "tools": tools, "tool_choice": choice}
            if turn == 1:
                with client.messages.stream(**fields) as stream:
                    message = stream.get_final_message()
            else:
                message = client.messages.create(**fields)
            uses = [b for b in message.content if b.type == "tool_use"]
            if turn == 0:
                assert message.stop_reason == "tool_use" and len(uses) == 1
                assert uses[0].name == "write" and uses[0].input["path"] in ("a.txt", "b.txt")
            messages.append({"role": "assistant", "content": message.content})
            results = [{"type": "tool_result", "tool_use_id": use.id, "content": "done"} for use in uses]
            messages.append({"role": "user", "content": [*results, {"type": "text", "text": f"Go on, {turn}."}]})
    check_appended(live, "a")


def test_responses_by_id_train_on_what_was_sampled(live: LiveGateway) -> None:
    previous: str | None = None
    with openai.OpenAI(base_url=live.server.base_url("r")[0], api_key="x", max_retries=0, timeout=60) as client:
        for turn in range(NUM_TURNS):
            fields: Any = {"model": "m", "input": f"Say {turn}.", "max_output_tokens": 20, "previous_response_id": previous}
            if turn == 1:
                with client.responses.stream(**fields) as stream:
                    previous = stream.get_final_response().id
            else:
                previous = client.responses.create(**fields).id
    check_appended(live, "r")
