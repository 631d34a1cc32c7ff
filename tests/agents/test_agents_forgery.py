"""Agents and services that try to get a reward they did not earn, or to get out of one they did: neither works."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Iterator

import aiohttp
import msgspec
import pytest
from agent_stage import DEADLINE_S, FAMILY, LIMITS, TASK, ScriptedPolicy, Stage, stage, tiny_model
from aiohttp import web
from test_agents_failures import ASK, say

from rollmill.chat.format import ChatFormat
from rollmill.gateway import Gateway
from rollmill.gateway.front.run import start_gateway
from rollmill.gateway.routing.replicas import Replicas
from rollmill.harness.program import Program
from rollmill.harness.remote import RemoteService, Reports
from rollmill.records import Boundary, Grade, RunFailure, StopReason, Task
from rollmill.rollout.cast import HttpDoor, status_route
from rollmill.rollout.episode import EpisodeRunner
from rollmill.rollout.foreign import RemoteAgent
from rollmill.sandbox.namespace import NamespaceBackend
from rollmill.telemetry import Waits


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedPolicy]:
    with ScriptedPolicy(tiny_model(tmp_path_factory.mktemp("tiny") / "model"), say) as made:
        yield made


class SelfPayer:
    """A service whose agent, given the model's key, pays itself before the service has judged it."""

    def __init__(self) -> None:
        self.paid: list[int] = []
        self._work: set[asyncio.Task[None]] = set()

    async def init(self, request: web.Request) -> web.Response:
        self._work.add(asyncio.create_task(self._play(await request.json())))
        return web.json_response({})

    async def _play(self, job: dict[str, str]) -> None:
        async with aiohttp.ClientSession() as http:
            agent = {"authorization": f"Bearer {job['api_key']}"}
            body = {"messages": [{"role": "user", "content": "hi"}]}
            async with http.post(f"{job['model_base_url']}/chat/completions", json=body, headers=agent) as answer:
                assert answer.status == 200
            for name in ("authorization", "x-api-key"):
                won = {"status": "finished", "reward": 1.0}
                async with http.post(job["status_url"], json=won, headers={name: agent["authorization"]}) as answer:
                    self.paid.append(answer.status)
            service = {"authorization": f"Bearer {job['status_key']}"}
            async with http.post(job["status_url"], json={"status": "finished", "reward": 0.0}, headers=service) as answer:
                self.paid.append(answer.status)


@contextlib.asynccontextmanager
async def remote_stage(policy: ScriptedPolicy, service: SelfPayer) -> AsyncIterator[Stage]:
    app = web.Application()
    app.router.add_post("/init", service.init)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    waits, reports, backend = Waits(), Reports(), NamespaceBackend(num_prepared=0)
    gateway = Gateway(ChatFormat(policy.tokenizer), Replicas(lambda: [policy.url], waits))
    server = await start_gateway(gateway, routes=[status_route(reports)], graceful_s=1.0)
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    player = RemoteAgent(RemoteService(url), gateway, HttpDoor(server, "127.0.0.1"), run="r", reports=reports)
    episodes = EpisodeRunner(FAMILY, gateway, backend, LIMITS, waits, player=player)
    try:
        yield Stage(episodes, policy, gateway)
    finally:
        await episodes.close()
        await server.close()
        await backend.close()
        await runner.cleanup()


def test_agent_of_a_remote_environment_cannot_reward_itself_with_the_models_key(policy: ScriptedPolicy) -> None:
    service = SelfPayer()

    async def scene() -> None:
        async with asyncio.timeout(DEADLINE_S), remote_stage(policy, service) as made:
            done = await made.play("e")
            assert done.grade.reward == 0.0

    asyncio.run(scene())
    assert service.paid == [403, 401, 200]


def program(code: str) -> Program:
    return Program(command=(sys.executable, "-c", ASK + code))


def test_agent_that_fills_its_episode_and_crashes_is_graded(policy: ScriptedPolicy) -> None:
    async def scene() -> None:
        async with asyncio.timeout(DEADLINE_S), stage(policy, program("while True: ask([user('again')])")) as made:
            made.gateway.episodes._options["max_answers"] = 3
            done = await made.play("f")
            assert (done.trace.stop, done.grade.reward) == (StopReason.MAX_TOKENS, 0.0)
            assert made.runner.tally["full"] == 1 and made.runner.num_untrained > 0, "the answers it threw away are counted"

    asyncio.run(scene())


def test_agent_that_waits_for_no_answer_is_told_apart_from_one_that_never_called(policy: ScriptedPolicy) -> None:
    code = """
import socket
url = os.environ["OPENAI_BASE_URL"].removeprefix("http://")
host, _, path = url.partition("/")
body = json.dumps({"messages": [user("hi")]}).encode()
with socket.create_connection((host.split(":")[0], int(host.split(":")[1]))) as s:
    head = f"POST /{path}/chat/completions HTTP/1.1\\r\\nhost: x\\r\\nauthorization: Bearer {os.environ['OPENAI_API_KEY']}\\r\\n"
    s.sendall(head.encode() + b"content-type: application/json\\r\\ncontent-length: %d\\r\\n\\r\\n" % len(body) + body)
    until = time.monotonic() + 30
    while not json.load(urllib.request.urlopen(f"http://{host}/health"))["running"] and time.monotonic() < until: time.sleep(0.01)
"""

    async def scene() -> None:
        async with asyncio.timeout(DEADLINE_S), stage(policy, program(code)) as made:
            policy.hold_after = 0
            with pytest.raises(RunFailure, match="waited for none of its 1 model calls") as caught:
                await made.play("g")
            assert caught.value.boundary is Boundary.HARNESS
            policy.release()
            policy.hold_after = None

    asyncio.run(scene())


@pytest.mark.parametrize("words", ["a\0b", "half \ud800 a pair"])
@pytest.mark.parametrize("is_inside", [False, True])
def test_task_that_no_program_can_be_told_is_the_tasks_failure_and_ends_no_run(policy: ScriptedPolicy, words: str, is_inside: bool) -> None:
    if is_inside and (reason := NamespaceBackend.probe()) is not None:
        pytest.skip(reason)
    task: Task = msgspec.structs.replace(TASK, instruction=words)

    async def scene() -> None:
        echo = Program(command=("python3", "-c", "0", "{instruction}"))
        async with asyncio.timeout(DEADLINE_S), stage(policy, echo, is_inside=is_inside) as made:
            with pytest.raises(RunFailure) as caught:
                await made.play("h", task=task)
            assert caught.value.boundary is Boundary.TASK

    asyncio.run(scene())


def test_grade_that_no_loss_can_hold_is_the_graders_failure(policy: ScriptedPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    async def huge(task: object, attempt: object) -> Grade:
        return Grade(reward=1e308, success=True)

    async def scene() -> None:
        async with asyncio.timeout(DEADLINE_S), stage(policy, program("ask([user('hi')])")) as made:
            monkeypatch.setattr(made.runner._grader._family, "grade", huge)
            with pytest.raises(RunFailure, match=r"gave the reward 1e\+308") as caught:
                await made.play("j")
            assert caught.value.boundary is Boundary.GRADER

    asyncio.run(scene())
