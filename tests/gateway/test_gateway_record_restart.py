"""A gateway that starts again goes on with the episodes that were open, token for token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from dialect_worlds import World, calling, scripted
from live_gateway import wait_until

from rollmill.gateway.recording.recorded import open_episodes, read_calls, rebuild, restore_episodes
from rollmill.gateway.sessions.episode import Episode
from rollmill.gateway.sessions.placement import Sampling
from rollmill.records import Window

LS: Any = {"name": "ls", "input_schema": {"type": "object"}}


def say(request: Any) -> str:
    """Another text for every prompt, and calls of tools now and then."""
    num = len(request.prompt_ids)
    return calling("ls", f'{{"n": {num}}}', f"Turn of {num}. ") if num % 2 else f"Said after {num}."


def as_lists(windows: tuple[Window, ...]) -> list[tuple[Any, ...]]:
    return [(w.tokens_T.tolist(), w.sampled_T.tolist(), w.logprobs_T.tolist(), w.versions_T.tolist(), w.sources) for w in windows]


def converse(world: World, messages: list[Any], num: int) -> None:
    client = anthropic.Anthropic(base_url=world.url("e1"), api_key="k", max_retries=0, timeout=20)
    for _ in range(num):
        message = client.messages.create(model="m", max_tokens=64, messages=messages, tools=[LS])
        messages.append({"role": "assistant", "content": message.content})
        results = [{"type": "tool_result", "tool_use_id": b.id, "content": "x"} for b in message.content if b.type == "tool_use"]
        messages.append({"role": "user", "content": [*results, {"type": "text", "text": "go on"}]})


def branch_out(world: World) -> None:
    """Forks, a retry, several choices, raw text, a client that leaves."""
    client = openai.OpenAI(base_url=world.url("e1") + "/v1", api_key="k", max_retries=0, timeout=20)
    for text in ("another", "another", "third"):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}], n=2, stop=["after"])
    client.completions.create(model="m", prompt=["plain", "text"], n=2, max_tokens=5)
    before = world.stub.num_cut
    world.stub.hold_after = 2
    stream = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "leave"}], stream=True)
    next(iter(stream))
    stream.close()
    world.stub.wait_idle()
    assert world.stub.num_cut == before + 1
    wait_until(lambda: world.episode("e1").tally["abandoned"] == 1)
    world.stub.release()


def test_an_episode_is_rebuilt_and_goes_on(tmp_path: Path) -> None:
    messages: list[Any] = [{"role": "user", "content": "begin"}]
    with World(say, record=tmp_path) as world:
        world.server.open_episode("e1", seed=5, sampling=Sampling(temperature=0.5), min_version=0)
        converse(world, messages, 3)
        branch_out(world)
        old = world.episode("e1")
        before, tally, num_seeds = as_lists(old.windows()), dict(old.tally), old.num_seeds
    assert [r.key for r in open_episodes(tmp_path / "calls.db")] == ["e1"]
    kinds = [kind for record in read_calls(tmp_path / "calls.db", "e1") for kind in record.kinds]
    assert {"first", "append", "fork", "retry"} <= set(kinds)
    with World(say, record=tmp_path) as world:

        async def restore() -> int:
            return restore_episodes(world.gateway, tmp_path / "calls.db")

        assert world.run(restore()) == 1
        episode = world.episode("e1")
        assert (episode.seed, episode.sampling, episode.min_version) == (5, Sampling(temperature=0.5), 0)
        assert as_lists(episode.windows()) == before
        assert episode.num_seeds == num_seeds
        ours = {k: v for k, v in tally.items() if k != "overridden"}
        assert {k: v for k, v in dict(episode.tally).items() if k != "overridden"} == ours
        converse(world, messages, 2)
        assert dict(episode.tally)["appended"] == tally["appended"] + 2


def test_another_model_does_not_take_over(tmp_path: Path) -> None:
    with World(scripted("a", "b"), record=tmp_path) as world:
        converse(world, [{"role": "user", "content": "begin"}], 2)
        chat = world.gateway.chat
    calls = list(read_calls(tmp_path / "calls.db", "e1"))
    assert rebuild(Episode("e1", chat), calls) == 2
    calls[1].prompts[0][3] += 1
    with pytest.raises(ValueError, match="would not render the same"):
        rebuild(Episode("e1", chat), calls)
