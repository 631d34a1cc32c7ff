"""The reference remote environment as a process of its own: it plays, reports once, and may be killed without a false reward."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import aiohttp
import pytest
from agent_stage import DEADLINE_S, EXAMPLES, FAMILY, LIMITS, TASK, ScriptedPolicy, Stage, check_exact, tiny_model

from rollmill.chat.format import ChatFormat
from rollmill.gateway import Gateway
from rollmill.gateway.front.run import start_gateway
from rollmill.gateway.routing.replicas import Replicas
from rollmill.harness import remote
from rollmill.harness.remote import RemoteService, Reports
from rollmill.records import Boundary, RunFailure, StopReason
from rollmill.rollout.cast import HttpDoor, status_route
from rollmill.rollout.episode import EpisodeRunner
from rollmill.rollout.foreign import RemoteAgent
from rollmill.sandbox.namespace import NamespaceBackend
from rollmill.telemetry import Waits


class RemoteEnv:
    """The example, in its own process, on a port that it keeps over its lives."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        argv = [sys.executable, "-m", "uvicorn", "remote_env:app", "--port", str(self.port), "--log-level", "error"]
        self._process = await asyncio.to_thread(subprocess.Popen, argv, cwd=EXAMPLES)
        async with aiohttp.ClientSession() as http:
            until = time.monotonic() + DEADLINE_S
            while time.monotonic() < until and self._process.poll() is None:
                with contextlib.suppress(aiohttp.ClientError):
                    async with http.get(f"{self.url}/status/none") as answer:
                        assert answer.status == 404
                        return
                await asyncio.sleep(0.02)
        raise AssertionError("the remote environment did not start")

    def kill(self) -> None:
        if self._process is not None:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait(10)
            self._process = None


@contextlib.asynccontextmanager
async def stage(policy: ScriptedPolicy, url: str, *, poll_s: float) -> AsyncIterator[Stage]:
    waits, reports, backend = Waits(), Reports(), NamespaceBackend(num_prepared=1)
    gateway = Gateway(ChatFormat(policy.tokenizer), Replicas(lambda: [policy.url], waits))
    server = await start_gateway(gateway, routes=[status_route(reports)], graceful_s=1.0)
    player = RemoteAgent(RemoteService(url, poll_s=poll_s), gateway, HttpDoor(server, "127.0.0.1"), run="r", reports=reports)
    runner = EpisodeRunner(FAMILY, gateway, backend, LIMITS, waits, player=player)
    try:
        yield Stage(runner, policy, gateway)
    finally:
        await runner.close()
        await server.close()
        await backend.close()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def policy(model_dir: Path) -> Iterator[ScriptedPolicy]:
    with ScriptedPolicy(model_dir, lambda episode, turn: "short" if episode.endswith("good") else "long " * 40) as made:
        yield made


@pytest.fixture(scope="module")
def env() -> Iterator[RemoteEnv]:
    made = RemoteEnv()
    try:
        yield made
    finally:
        made.kill()


def play(policy: ScriptedPolicy, env: RemoteEnv, scene: Callable[[Stage], Awaitable[None]], *, poll_s: float = 0.0) -> None:
    async def whole() -> None:
        async with asyncio.timeout(DEADLINE_S):
            if env._process is None:
                await env.start()
            async with stage(policy, env.url, poll_s=poll_s) as made:
                await scene(made)
                assert len(made.gateway.episodes) == 0

    asyncio.run(whole())


@pytest.mark.parametrize("poll_s", [0.0, 0.02])
def test_remote_environment_plays_rewards_and_is_trained(policy: ScriptedPolicy, env: RemoteEnv, poll_s: float) -> None:
    async def scene(made: Stage) -> None:
        done = await asyncio.gather(made.play("good"), made.play("bad"))
        assert [(d.grade.reward, d.grade.success, d.trace.stop) for d in done] == [
            (1.0, True, StopReason.EXITED),
            (0.0, False, StopReason.EXITED),
        ]
        assert done[0].grade.note == "5 characters"
        for attempt, episode in zip(done, ("good", "bad"), strict=True):
            check_exact(attempt, policy, episode)

    play(policy, env, scene, poll_s=poll_s)


def test_status_is_taken_once_and_only_from_the_service_never_from_the_agent_it_runs(policy: ScriptedPolicy, env: RemoteEnv) -> None:
    async def scene(made: Stage) -> None:
        seat = made.runner.open_session("x.good", seed=0, temperature=1.0, min_version=None)
        done = await made.runner.run(TASK, "x.good", seat, seed=0, deadline=time.monotonic() + DEADLINE_S)
        same = {"status": "finished", "reward": 1.0, "note": "5 characters"}
        url, reports = seat.endpoint.anthropic_url + "/status", made.runner._player._reports  # type: ignore[attr-defined]
        mine, others = reports.key("x.good"), reports.key("y.good")
        async with aiohttp.ClientSession() as http:
            for key, body, status in (
                (mine, same, 200),
                (mine, {"status": "failed"}, 409),
                (mine, {"status": "won"}, 400),
                (others, same, 403),
                (seat.endpoint.key, same, 403),
                ("guess", same, 403),
                ("", same, 401),
            ):
                async with http.post(url, json=body, headers={"authorization": f"Bearer {key}"}) as answer:
                    assert answer.status == status, await answer.text()
        assert done.grade.reward == 1.0

    play(policy, env, scene)


@pytest.mark.parametrize("poll_s", [0.0, 0.02])
def test_service_killed_in_the_middle_is_never_a_reward_and_the_next_attempt_works(
    policy: ScriptedPolicy, env: RemoteEnv, poll_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "GONE_S", 0.2)
    monkeypatch.setattr(remote, "RETRY_S", 0.05)

    async def scene(made: Stage) -> None:
        policy.hold_after = 0
        playing = asyncio.create_task(made.play("one.good", within_s=DEADLINE_S if poll_s else 4.0))
        while not policy.requests and not playing.done():  # noqa: ASYNC110 - the replica runs in another thread
            await asyncio.sleep(0.01)
        env.kill()
        if poll_s:
            with pytest.raises(RunFailure, match="has not answered") as caught:
                await playing
            assert caught.value.boundary is Boundary.HARNESS
        else:
            with pytest.raises(TimeoutError):
                await playing
        policy.release()
        await asyncio.to_thread(policy.wait_idle)
        again = asyncio.create_task(made.play("two.good"))
        await env.start()
        assert (await again).grade.reward == 1.0, "a service that comes back is told again"

    play(policy, env, scene, poll_s=poll_s)
