"""A real engine is killed in mid-answer: a second one with the same weights goes on, and the answer is the unbroken one bit for bit."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "engine"))
from engine_worlds import CONFIG, Server, tiny_model, write_model

from rollmill.engine.client import EngineClient
from rollmill.engine.protocol import GenerateReply, GenerateRequest, Piece
from rollmill.gateway.routing.continuing import sources_of
from rollmill.gateway.routing.replicas import Replicas
from rollmill.model import ModelConfig, MoEConfig
from rollmill.telemetry import Waits

ROOT = Path(__file__).parents[2]
VICTIM = """
import asyncio, sys
from pathlib import Path
from rollmill.engine.run import run_engine
asyncio.run(run_engine(Path(sys.argv[1]), on_ready=lambda port: print(port, flush=True), num_threads=1, num_slots=8, replica="victim"))
"""
SIZES = "vocab_size hidden_size intermediate_size num_layers num_heads num_kv_heads head_dim max_position".split()
SPARSE = ModelConfig(
    family="qwen3_moe",
    **{name: getattr(CONFIG, name) for name in SIZES},
    moe=MoEConfig(num_experts=8, top_k=3, expert_size=32, norm_topk=True, dense_layers=(0,)),
)
REQUEST = GenerateRequest(
    prompt_ids=[65, 66, 67, 68], max_tokens=220, temperature=1.0, seed=11, session="s", routes_from=2, num_top=3, exact_version=0
)


class Victim:
    """An engine in a process of its own, which can be killed."""

    def __init__(self, model: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", VICTIM, str(model)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self.process.stdout is not None
        port = self.process.stdout.readline().strip()
        assert port, "the engine did not come up"
        self.url = f"http://127.0.0.1:{port}"

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(20)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("killed") / "model", tiny_model(0, SPARSE))


@pytest.fixture
def victim(model: Path) -> Iterator[Victim]:
    found = Victim(model)
    try:
        yield found
    finally:
        found.kill()


def test_answer_of_a_killed_engine_goes_on_bit_for_bit(model: Path, victim: Victim) -> None:
    async def work(heir: str) -> None:
        async with EngineClient(heir) as client:
            whole = await client.generate(REQUEST)
        urls = [victim.url]
        replicas = Replicas(lambda: list(urls), Waits())
        try:
            pieces, reply = list[Piece](), None
            async for item in replicas.stream(REQUEST, deadline=time.monotonic() + 60):
                if isinstance(item, GenerateReply):
                    reply = item
                    continue
                pieces.append(item)
                if len(pieces) == 1:
                    urls.append(heir)
                    victim.kill()
            assert reply is not None and replicas.num_continued == 1
            for name in ("token_ids", "logprobs", "spans", "finish_reason", "seed", "stale_from", "routes", "tops", "forced"):
                assert getattr(reply, name) == getattr(whole, name), name
            assert whole.routes and [i for p in pieces for i in p.token_ids] == whole.token_ids
            first, second = sources_of(reply)
            assert 0 == first.start < first.end == second.start < second.end == len(whole.token_ids)
            assert (first.replica, second.replica) == ("victim", "heir") and reply.num_reused == 0
        finally:
            await replicas.close()

    with closing(Server(model, replica="heir")) as server:
        asyncio.run(work(server.url))
