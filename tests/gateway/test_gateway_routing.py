"""The gateway repeats what is safe to repeat, moves on from a sick replica, and gives up as a failure of the model."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from gateway_fakes import FakeEngine, FakeGateway, answer

from rollmill.engine.client import EngineRejected, EngineUnavailable, VersionUnmet
from rollmill.engine.protocol import FinishReason, GenerateReply, GenerateRequest
from rollmill.gateway import gateway as gateway_module
from rollmill.records import Boundary, RunFailure
from rollmill.telemetry import Waits

ROOT = Path(__file__).parents[2]
GOOD = answer([2], logprobs=[-1.0], versions=[1], finish=FinishReason.STOP)
REQUEST = GenerateRequest(prompt_ids=[5], max_tokens=4, session="g000001.0.0")
Script = Callable[[GenerateRequest], GenerateReply]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_module, "RETRY_S", 0.001)


def failing(num: int, error: Exception) -> Script:
    left = [num]

    def speak(request: GenerateRequest) -> GenerateReply:
        left[0] -= 1
        if left[0] >= 0:
            raise error
        return GOOD

    return speak


def ask(gateway: FakeGateway, within_s: float = 30.0, request: GenerateRequest = REQUEST) -> GenerateReply:
    return asyncio.run(gateway.generate(request, deadline=time.monotonic() + within_s))


@pytest.mark.parametrize(
    "error", [EngineUnavailable("it is down", retry_after_s=0.001), VersionUnmet("version 3 is served", version=3)], ids=["down", "version"]
)
def test_passing_trouble_is_waited_out(error: Exception) -> None:
    gateway = FakeGateway({"http://a": FakeEngine(random.Random(0), failing(3, error))})
    assert ask(gateway) is GOOD and gateway.num_retries == 3


def test_sick_replica_is_left_for_the_next_one() -> None:
    sick = FakeEngine(random.Random(0), failing(10**9, EngineUnavailable("it is down", retry_after_s=0.001)))
    well = FakeEngine(random.Random(0), lambda _: GOOD)
    gateway = FakeGateway({"http://a": sick, "http://b": well})
    for i in range(20):
        ask(gateway, request=GenerateRequest(prompt_ids=[5], max_tokens=4, session=f"s{i}"))
    assert len(well.requests) == 20 and 0 < len(sick.requests) == gateway.num_retries < 20


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (EngineUnavailable("http://a answered 503: the engine is starting", retry_after_s=0.001), "the engine is starting"),
        (VersionUnmet("version 3 is served, the request needs at least 4", version=3), "needs at least 4"),
    ],
)
def test_deadline_turns_lasting_trouble_into_a_failure_of_the_model(error: Exception, told: str) -> None:
    gateway = FakeGateway({"http://a": FakeEngine(random.Random(0), failing(10**9, error))})
    with pytest.raises(RunFailure, match=told) as caught:
        ask(gateway, within_s=0.05)
    assert caught.value.boundary is Boundary.MODEL


def test_replica_that_never_answers_is_left_at_the_deadline() -> None:
    class Silent(FakeEngine):
        async def generate(self, request: GenerateRequest) -> GenerateReply:
            await asyncio.Event().wait()
            raise AssertionError

    waits = Waits()
    with pytest.raises(RunFailure, match="did not answer in time"):
        ask(FakeGateway({"http://a": Silent(random.Random(0))}, waits), within_s=0.05)
    assert waits.current() == [] and waits.totals_s()["policy"] > 0


def test_no_replica_and_late_calls_say_so() -> None:
    with pytest.raises(RunFailure, match="no replica is in rotation"):
        ask(FakeGateway({}), within_s=0.02)
    with pytest.raises(RunFailure, match="the call came after its deadline"):
        ask(FakeGateway({"http://a": FakeEngine(random.Random(0))}), within_s=-1.0)


def test_refused_call_is_a_failure_of_the_model_at_once() -> None:
    """Were it to escape as the ValueError it is, one bad request would end the whole run."""
    engine = FakeEngine(random.Random(0), failing(10**9, EngineRejected("http://a answered 400: prompt_ids holds 99999")))
    with pytest.raises(RunFailure, match="prompt_ids holds 99999") as caught:
        ask(FakeGateway({"http://a": engine}))
    assert caught.value.boundary is Boundary.MODEL and len(engine.requests) == 1


def test_conversation_stays_with_its_replica() -> None:
    engines = {f"http://{c}": FakeEngine(random.Random(0), lambda _: GOOD) for c in "abcd"}
    gateway = FakeGateway(engines)
    for i in range(40):
        for _ in range(2):
            ask(gateway, request=GenerateRequest(prompt_ids=[5], max_tokens=4, session=f"g{i:06d}.0.0"))
    seen = [{r.session for r in e.requests} for e in engines.values()]
    assert sum(len(s) for s in seen) == 40 and all(seen)


def test_route_of_a_conversation_is_the_same_in_every_process() -> None:
    code = (
        "import sys, asyncio, random, time; sys.path.insert(0, 'tests/gateway')\n"
        "from gateway_fakes import *\n"
        "good = answer([2], logprobs=[-1.0], versions=[1], finish=FinishReason.STOP)\n"
        "engines = {f'http://{c}': FakeEngine(random.Random(0), lambda _: good) for c in 'abc'}\n"
        "gateway = FakeGateway(engines)\n"
        "for i in range(30):\n"
        "    request = GenerateRequest(prompt_ids=[5], max_tokens=4, session=f's{i}')\n"
        "    asyncio.run(gateway.generate(request, deadline=time.monotonic() + 30))\n"
        "print([[r.session for r in e.requests] for e in engines.values()])\n"
    )
    said = set()
    for salt in ("1", "2"):
        env = {"PYTHONHASHSEED": salt, "PYTHONPATH": "."}
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=True)
        said.add(done.stdout)
    assert len(said) == 1


def test_pressure_leaves_out_replicas_that_do_not_answer() -> None:
    class Deaf(FakeEngine):
        async def pressure(self) -> object:  # type: ignore[override]
            raise EngineUnavailable("it is down")

    engines = {"http://a": FakeEngine(random.Random(0)), "http://b": Deaf(random.Random(0))}
    gateway = FakeGateway(engines)
    assert [p.slots for p in asyncio.run(gateway.pressures())] == [8]
    asyncio.run(gateway.close())
    assert all(e.is_closed for e in engines.values())
