"""From the run file's [agent] to whoever plays the episodes; owns the gateway's HTTP server, which only foreign agents need."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import msgspec

from rollmill.config import AgentSection, RunConfig
from rollmill.gateway import Gateway
from rollmill.gateway.front.route import Incoming, Outgoing, Route, json_out
from rollmill.gateway.front.run import GatewayServer, start_gateway
from rollmill.gateway.front.service import base_urls
from rollmill.harness import Limits
from rollmill.harness.program import Program
from rollmill.harness.remote import RemoteService, Reports
from rollmill.rollout.foreign import Door, ProgramAgent, RemoteAgent, check_machine
from rollmill.rollout.own import OwnAgent
from rollmill.rollout.played import Player
from rollmill.sandbox import SandboxBackend
from rollmill.tasks import TaskFamily
from rollmill.telemetry import Waits
from rollmill.web import ApiError

MakePlayer = Callable[[Limits], Player]
HANG_UP = {"connection": "close"}
"""To who sends a body that nobody will read."""
ANYWHERE = ("0.0.0.0", "::")
"""Hosts that stand for every address of this machine; nobody can call them."""


class HttpDoor:
    """`rollout.foreign.Door` to a gateway that listens; `public_url`: how agents on other machines reach it."""

    def __init__(self, server: GatewayServer, host: str, public_url: str = "") -> None:
        self._keys = server.app.keys
        port = server.origin.rpartition(":")[2]
        near = "127.0.0.1" if host in (*ANYWHERE, "localhost") else host
        self.address = f"[{near}]:{port}" if ":" in near else f"{near}:{port}"
        self._origin = public_url.rstrip("/") or f"http://{self.address}"

    def base_url(self, episode: str) -> tuple[str, str]:
        return base_urls(self._origin, episode)

    def episode_key(self, episode: str) -> str:
        return self._keys.episode_key(episode)


@contextlib.asynccontextmanager
async def players(
    config: RunConfig, family: TaskFamily, gateway: Gateway, sandboxes: SandboxBackend, waits: Waits
) -> AsyncIterator[MakePlayer]:
    """Makes players as long as it is open; training and evaluation have one each."""
    agent = config.agent
    if agent.kind == "default":
        yield lambda limits: OwnAgent(family, gateway, sandboxes, limits, waits)
        return
    if agent.kind == "program" and agent.where == "inside":
        check_machine(await sandboxes.capabilities(), site=agent.site)
    reports = Reports()
    routes = [status_route(reports)] if agent.kind == "remote" else []
    server = await start_gateway(gateway, host=agent.host, port=agent.port, routes=routes)
    door = HttpDoor(server, agent.host, agent.public_url)
    try:
        if agent.kind == "program":
            yield lambda limits: _program(agent, limits, family, gateway, door, sandboxes, waits)
        else:
            yield lambda limits: _remote(agent, limits, config.run.dir.name, gateway, door, reports)
    finally:
        await server.close()


def status_route(reports: Reports) -> Route:
    """`POST /e/{episode}/status`, with the key that only the service was told: an agent that has the model's cannot reward itself."""

    def check(request: Incoming) -> None:
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not key:
            raise ApiError(401, "send the episode's status_key as `Authorization: Bearer`", headers=HANG_UP)
        if not reports.is_key(request.episode, key.strip()):
            raise ApiError(403, "this is not the episode's status_key; its api_key is for model calls only", headers=HANG_UP)

    async def report(request: Incoming) -> Outgoing:
        status, text = reports.post(request.episode, request.body)
        return json_out({"status": status, "message": text}, status)

    return Route(method="POST", path="/status", handler=report, needs_key=False, check=check, error=_status_body)


def _status_body(status: int, message: str, extra: Mapping[str, Any] = {}) -> bytes:
    return msgspec.json.encode({"status": status, "message": message})


def _program(
    agent: AgentSection, limits: Limits, family: TaskFamily, gateway: Gateway, door: Door, sandboxes: SandboxBackend, waits: Waits
) -> ProgramAgent:
    program = Program(command=agent.command, env=agent.env, stdin=agent.stdin, graded_exit_codes=agent.graded_exit_codes)
    return ProgramAgent(
        program,
        family,
        gateway,
        door,
        sandboxes,
        waits,
        is_inside=agent.where == "inside",
        model=agent.model,
        max_answer_tokens=limits.max_tokens_per_turn,
        time_s=agent.time_s,
        image=agent.image,
        site=agent.site,
        memory_bytes=agent.memory_mb << 20,
    )


def _remote(agent: AgentSection, limits: Limits, run: str, gateway: Gateway, door: Door, reports: Reports) -> RemoteAgent:
    key = os.environ.get(agent.key_env, "") if agent.key_env else ""
    if agent.key_env and not key:
        raise ValueError(f"agent.key_env names the environment variable {agent.key_env!r}, which is not set")
    service = RemoteService(agent.url, key=key, poll_s=agent.poll_s)
    return RemoteAgent(service, gateway, door, run=run, reports=reports, model=agent.model, max_answer_tokens=limits.max_tokens_per_turn)
