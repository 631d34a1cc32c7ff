"""The run file's [agent]: what cannot be meant is refused with the way out, and what is meant is who plays."""

from __future__ import annotations

import asyncio
import tomllib
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest

from rollmill.chat.format import ChatFormat
from rollmill.config import ConfigError, RunConfig, dump_config, parse_config
from rollmill.gateway import Gateway
from rollmill.gateway.routing.replicas import Replicas
from rollmill.harness import Limits
from rollmill.model import Tokenizer
from rollmill.rollout.cast import MakePlayer, players
from rollmill.rollout.foreign import ProgramAgent, RemoteAgent
from rollmill.rollout.own import OwnAgent
from rollmill.sandbox.records import Capabilities
from rollmill.tasks import open_family
from rollmill.telemetry import Waits

DEMO = Path(__file__).parents[2] / "models" / "demo"
LIMITS = Limits(max_turns=1, max_tokens_per_turn=8, max_context=64, tool_s=1.0)
PROGRAM = {"kind": "program", "command": ["agent", "{instruction}"], "where": "beside"}
REMOTE = {"kind": "remote", "url": "http://env.example"}


def config_of(**agent: object) -> RunConfig:
    return parse_config({"model": {"path": str(DEMO)}, "agent": agent}, "test")


@pytest.mark.parametrize(
    ("agent", "words"),
    [
        ({"kind": "program"}, "needs a command"),
        ({"command": ["x"]}, "command means nothing with kind = 'default'"),
        ({"port": 80}, "port means nothing with kind = 'default'"),
        ({**PROGRAM, "url": "http://x"}, "url means nothing with kind = 'program'"),
        ({**PROGRAM, "poll_s": 1}, "poll_s means nothing"),
        ({**PROGRAM, "image": "shop"}, "image is for where"),
        ({**PROGRAM, "where": "around"}, "'inside' or 'beside'"),
        ({**PROGRAM, "where": "inside", "site": "/no/such/folder"}, "no folder of this machine"),
        ({**PROGRAM, "time_s": 120}, "rollout.episode_s"),
        ({"kind": "remote"}, "needs the url"),
        ({"kind": "remote", "url": "env.example"}, "http:// or https://"),
        ({**REMOTE, "command": ["x"]}, "command means nothing with kind = 'remote'"),
        ({**PROGRAM, "comand": ["x"]}, "agent.command"),
    ],
)
def test_agent_that_cannot_be_meant_is_refused(agent: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(**agent)
    assert words in str(caught.value)


@pytest.mark.parametrize("agent", [{}, PROGRAM | {"env": {"A": "1"}, "time_s": 5.0}, REMOTE | {"poll_s": 2.0, "public_url": "https://gw"}])
def test_resolved_agent_feeds_back_in(agent: dict[str, object]) -> None:
    config = config_of(**agent)
    assert parse_config(tomllib.loads(dump_config(config)), "again") == config


class BoxlessBackend:
    """Never asked for a box."""

    def __init__(self, able: Capabilities) -> None:
        self._able = able

    async def capabilities(self) -> Capabilities:
        return self._able


def cast(config: RunConfig, scene: Callable[[MakePlayer], Awaitable[None]], *, egress: bool = True) -> None:
    async def whole() -> None:
        waits = Waits()
        gateway = Gateway(ChatFormat(Tokenizer(DEMO)), Replicas(list, waits))
        backend = BoxlessBackend(Capabilities(backend="fake", isolation="none", fork=False, egress=egress))
        async with asyncio.timeout(30), players(config, open_family("repo"), gateway, backend, waits) as make:  # type: ignore[arg-type]
            await scene(make)
        await gateway.close()

    asyncio.run(whole())


def test_default_harness_needs_no_server() -> None:
    async def scene(make: MakePlayer) -> None:
        assert isinstance(make(LIMITS), OwnAgent)

    cast(config_of(), scene)


def test_program_finds_a_gateway_that_knows_no_other_key_than_its_own() -> None:
    async def scene(make: MakePlayer) -> None:
        player = make(LIMITS)
        assert isinstance(player, ProgramAgent)
        seat = player.open("eval/before/0/1", seed=0, temperature=1.0, min_version=None)
        assert seat.endpoint.openai_url.endswith("/e/eval.before.0.1/v1") and seat.endpoint.model == "me"
        async with aiohttp.ClientSession() as http, http.get(f"{seat.endpoint.anthropic_url}/v1/models") as answer:
            assert answer.status == 401
        assert seat.oldest_version is None, "nothing is open before it is played"

    cast(config_of(**PROGRAM, model="me"), scene)


def test_remote_service_is_told_the_address_by_which_it_reaches_us(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(make: MakePlayer) -> None:
        player = make(LIMITS)
        assert isinstance(player, RemoteAgent)
        seat = player.open("g.0.0", seed=0, temperature=1.0, min_version=None)
        assert seat.endpoint.openai_url == "https://trainer.example/e/g.0.0/v1"

    config = config_of(**REMOTE, public_url="https://trainer.example/", key_env="ENV_KEY")
    with pytest.raises(ValueError, match="'ENV_KEY', which is not set"):
        cast(config, scene)
    monkeypatch.setenv("ENV_KEY", "s")
    cast(config, scene)


def test_program_inside_a_sandbox_without_egress_is_refused_before_anything_starts() -> None:
    async def scene(make: MakePlayer) -> None:
        raise AssertionError("it was started")

    with pytest.raises(ValueError, match=r"rollout\.sandbox"):
        cast(config_of(**{**PROGRAM, "where": "inside"}), scene, egress=False)
