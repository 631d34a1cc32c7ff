"""A call is repeated where that is safe, moves on from a sick replica, and ends as NoAnswer with the last problem named."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest
from replica_worlds import FakeReplica, reply_to

from rollmill.engine.client import EngineRejected, EngineUnavailable, VersionUnmet
from rollmill.engine.protocol import GenerateReply, GenerateRequest, Pressure
from rollmill.gateway.routing import replicas as replicas_module
from rollmill.gateway.routing import rotation as rotation_module
from rollmill.gateway.routing.replicas import NoAnswer, Replicas
from rollmill.telemetry import Waits

ROOT = Path(__file__).parents[2]
REQUEST = GenerateRequest(prompt_ids=[5], max_tokens=4, seed=3, session="g000001.0.0")
DOWN = EngineUnavailable("http://a answered 503: the engine is starting", retry_after_s=0.0)
T = TypeVar("T")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas_module, "RETRY_S", 0.001)


class World:
    """Fake replicas by address, and the Replicas over them."""

    def __init__(self, *fakes: FakeReplica, waits: Waits | None = None) -> None:
        self.fakes = {f"http://{chr(ord('a') + i)}": fake for i, fake in enumerate(fakes)}
        self.urls = list(self.fakes)
        self.waits = waits or Waits()

    def run(self, work: Callable[[Replicas], Awaitable[T]]) -> T:
        async def main() -> T:
            self.replicas = Replicas(lambda: list(self.urls), self.waits, connect=self.fakes.__getitem__)
            try:
                return await work(self.replicas)
            finally:
                await self.replicas.close()
                assert asyncio.all_tasks() == {asyncio.current_task()}, "a task was left behind"

        return asyncio.run(main())

    def ask(self, request: GenerateRequest = REQUEST, within_s: float = 30.0) -> GenerateReply:
        return self.run(lambda replicas: replicas.generate(request, deadline=time.monotonic() + within_s))


def failing(num: int, error: Exception) -> FakeReplica:
    """Fails so often, then works."""

    class Failing(FakeReplica):
        async def generate(self, request: GenerateRequest) -> GenerateReply:
            self.error = error if len(self.requests) < num else None
            return await super().generate(request)

    return Failing("one")


async def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, f"gave up waiting until {what}"
        await asyncio.sleep(0.002)


@pytest.mark.parametrize("error", [DOWN, VersionUnmet("version 3 is served", version=3)], ids=["down", "version"])
def test_passing_trouble_is_waited_out(error: Exception) -> None:
    world = World(failing(3, error))
    assert world.ask() == reply_to(REQUEST, replica="one") and world.replicas.num_retries == 3


def test_sick_replica_is_put_aside_and_the_others_do_its_work() -> None:
    sick, well = FakeReplica("sick"), FakeReplica("well")
    sick.error = EngineUnavailable("it is down", retry_after_s=1.0)
    world = World(sick, well)

    async def work(replicas: Replicas) -> None:
        for i in range(50):
            request = GenerateRequest(prompt_ids=[5], max_tokens=4, seed=3, session=f"s{i}")
            await replicas.generate(request, deadline=time.monotonic() + 30)

    world.run(work)
    assert len(well.requests) == 50
    assert 0 < len(sick.requests) == world.replicas.num_retries and world.replicas.num_put_aside >= 1
    assert len(sick.requests) < 10, "half of the sessions live there: they leave it alone while it is put aside"


@pytest.mark.parametrize(
    ("error", "told"),
    [(DOWN, "the engine is starting"), (VersionUnmet("version 3 is served, the request needs at least 4", version=3), "needs at least 4")],
)
def test_lasting_trouble_ends_at_the_deadline_with_the_problem_named(error: Exception, told: str) -> None:
    with pytest.raises(NoAnswer, match=told) as caught:
        World(failing(10**9, error)).ask(within_s=0.05)
    assert caught.value.is_version is isinstance(error, VersionUnmet) and told in caught.value.reason


def test_replica_that_never_answers_is_left_at_the_deadline() -> None:
    silent = FakeReplica()
    silent.gate = asyncio.Event()
    world = World(silent)
    with pytest.raises(NoAnswer, match="did not answer in time"):
        world.ask(within_s=0.05)
    assert silent.num_open == 0 and world.waits.current() == [] and world.waits.totals_s()["policy"] > 0


def test_no_replica_and_late_calls_say_so() -> None:
    with pytest.raises(NoAnswer, match="no replica is in rotation"):
        World().ask(within_s=0.02)
    with pytest.raises(NoAnswer, match="the call came after its deadline"):
        World(FakeReplica()).ask(within_s=-1.0)


def test_refused_call_is_the_callers_at_once() -> None:
    world = World(failing(10**9, EngineRejected("http://a answered 400: prompt_ids holds 99999")))
    with pytest.raises(EngineRejected, match="prompt_ids holds 99999"):
        world.ask()
    assert len(world.fakes["http://a"].requests) == 1 and world.replicas.num_put_aside == 0


def test_conversation_stays_with_its_replica() -> None:
    world = World(*(FakeReplica(c) for c in "abcd"))

    async def work(replicas: Replicas) -> None:
        for i in range(40):
            for _ in range(2):
                request = GenerateRequest(prompt_ids=[5], max_tokens=4, seed=3, session=f"g{i:06d}.0.0")
                await replicas.generate(request, deadline=time.monotonic() + 30)

    world.run(work)
    seen = [{r.session for r in fake.requests} for fake in world.fakes.values()]
    assert sum(len(s) for s in seen) == 40 and all(seen)


def test_route_of_a_conversation_is_the_same_in_every_process() -> None:
    code = (
        "from rollmill.gateway.routing.balance import *\n"
        "standings = [Standing.of(f'http://{c}', 0.0) for c in 'abc']\n"
        "print([choose(standings, Need(session=f's{i}'), 0.0) for i in range(30)])\n"
    )
    said = set()
    for salt in ("1", "2"):
        env = {"PYTHONHASHSEED": salt, "PYTHONPATH": "."}
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=True)
        said.add(done.stdout)
    assert len(said) == 1


def test_call_waits_for_its_version_and_goes_to_whoever_serves_it() -> None:
    old, new = FakeReplica("old", version=1), FakeReplica("new", version=1)
    world = World(old, new)
    request = GenerateRequest(prompt_ids=[5], max_tokens=4, seed=3, session="a", min_version=2)

    async def work(replicas: Replicas) -> GenerateReply:
        call = asyncio.create_task(replicas.generate(request, deadline=time.monotonic() + 30))
        await until(lambda: old.num_polls + new.num_polls > 4, "the replicas were looked at")
        num_before = len(old.requests) + len(new.requests)
        assert num_before <= 2, "those known to serve another version are not asked"
        new.version = 2
        return await call

    assert world.run(work).replica == "new"


def test_version_that_is_past_is_refused_without_waiting() -> None:
    world = World(FakeReplica(version=5), FakeReplica(version=6))
    with pytest.raises(NoAnswer, match=r"version 4 is past; served now: \[5, 6\]") as caught:
        world.ask(GenerateRequest(prompt_ids=[5], max_tokens=4, exact_version=4), within_s=600.0)
    assert caught.value.is_version
    with pytest.raises(NoAnswer, match="version 9 is asked for; served now") as caught:
        world.ask(GenerateRequest(prompt_ids=[5], max_tokens=4, exact_version=9), within_s=0.3)
    assert caught.value.is_version


def test_full_replica_is_left_for_one_with_room() -> None:
    fakes = [FakeReplica(c) for c in "ab"]
    for fake in fakes:
        fake.slots = 2
        fake.gate = asyncio.Event()
    world = World(*fakes)

    async def work(replicas: Replicas) -> None:
        await replicas.pressures()
        calls = [asyncio.create_task(replicas.generate(REQUEST, deadline=time.monotonic() + 30)) for _ in range(4)]
        await until(lambda: sum(len(fake.requests) for fake in fakes) == 4, "all were sent")
        assert [len(fake.requests) for fake in fakes] == [2, 2], "one session, and its home has two slots"
        assert sorted(replicas.in_flight().values()) == [2, 2]
        for fake in fakes:
            assert fake.gate is not None
            fake.gate.set()
        await asyncio.gather(*calls)
        assert sorted(replicas.in_flight().values()) == [0, 0]

    world.run(work)


def test_replica_that_leaves_finishes_its_calls_and_is_closed_then() -> None:
    fakes = [FakeReplica(c) for c in "ab"]
    world = World(*fakes)

    async def work(replicas: Replicas) -> None:
        fakes[0].gate = asyncio.Event()
        world.urls = ["http://a"]
        running = asyncio.create_task(replicas.generate(REQUEST, deadline=time.monotonic() + 30))
        await until(lambda: fakes[0].num_open == 1, "the call runs")
        world.urls = ["http://b"]
        assert (await replicas.generate(REQUEST, deadline=time.monotonic() + 30)).replica == "b"
        assert not fakes[0].is_closed
        fakes[0].gate.set()
        assert (await running).replica == "a"
        await until(lambda: fakes[0].is_closed, "its connection is closed")
        assert list(replicas.in_flight()) == ["http://b"] and not fakes[1].is_closed
        world.urls = []
        await replicas.pressures()
        await until(lambda: fakes[1].is_closed, "an idle one is closed as soon as it leaves")

    world.run(work)


def test_replica_that_returns_before_its_calls_ended_is_kept() -> None:
    fake = FakeReplica("a")
    world = World(fake)

    async def work(replicas: Replicas) -> None:
        fake.gate = asyncio.Event()
        running = asyncio.create_task(replicas.generate(REQUEST, deadline=time.monotonic() + 30))
        await until(lambda: fake.num_open == 1, "the call runs")
        world.urls = []
        await replicas.pressures()
        world.urls = ["http://a"]
        fake.gate.set()
        await running
        assert (await replicas.generate(REQUEST, deadline=time.monotonic() + 30)).replica == "a" and not fake.is_closed

    world.run(work)


def test_replicas_are_looked_at_only_while_there_is_traffic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotation_module, "POLL_S", 0.005)
    fake = FakeReplica("a")
    world = World(fake)

    async def work(replicas: Replicas) -> None:
        await replicas.generate(REQUEST, deadline=time.monotonic() + 30)
        await until(lambda: len(asyncio.all_tasks()) == 1, "the last look has ended")
        num = fake.num_polls
        assert num >= 1
        await replicas.generate(REQUEST, deadline=time.monotonic() + 30)
        await until(lambda: fake.num_polls > num, "the next call has woken it")

    world.run(work)


def test_calls_of_a_replica_that_fell_silent_go_on_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is gone closes no connection: only the questions it does not answer tell."""
    monkeypatch.setattr(rotation_module, "POLL_S", 0.005)
    monkeypatch.setattr(rotation_module, "PROBE_S", 0.01)
    monkeypatch.setattr(rotation_module, "SILENT_S", 0.05)

    class Gone(FakeReplica):
        async def pressure(self) -> Pressure:
            if self.num_open:
                await asyncio.Event().wait()
            return await super().pressure()

    gone, well = Gone("gone"), FakeReplica("well")
    gone.gate = asyncio.Event()
    world = World(gone, well)

    async def work(replicas: Replicas) -> GenerateReply:
        world.urls = ["http://a"]
        call = asyncio.create_task(replicas.generate(REQUEST, deadline=time.monotonic() + 60))
        await until(lambda: gone.num_open == 1, "the call runs")
        world.urls = ["http://a", "http://b"]
        return await call

    assert world.run(work) == reply_to(REQUEST, replica="well") and gone.num_open == 0


def test_pressure_leaves_out_replicas_that_do_not_answer_and_is_asked_once() -> None:
    class Deaf(FakeReplica):
        async def pressure(self) -> Pressure:
            raise EngineUnavailable("it is down")

    fake, deaf = FakeReplica("a"), Deaf("b")
    world = World(fake, deaf)

    async def work(replicas: Replicas) -> None:
        found = await asyncio.gather(*(replicas.pressures() for _ in range(5)))
        assert [[p.slots for p in pressures] for pressures in found] == [[8]] * 5 and fake.num_polls == 1

    world.run(work)
    assert fake.is_closed and deaf.is_closed


def test_cancelled_call_frees_its_row() -> None:
    fake = FakeReplica("a")
    world = World(fake)

    async def work(replicas: Replicas) -> None:
        fake.gate = asyncio.Event()
        call = asyncio.create_task(replicas.generate(REQUEST, deadline=time.monotonic() + 30))
        await until(lambda: fake.num_open == 1, "the call runs")
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert fake.num_open == 0 and replicas.in_flight() == {"http://a": 0}

    world.run(work)
    assert world.waits.current() == []


def test_replica_without_a_name_goes_by_its_address() -> None:
    assert World(FakeReplica("")).ask().replica == "a"


def test_deadline_of_the_call_travels_with_it() -> None:
    fake = FakeReplica("a")
    World(fake).ask(within_s=20.0)
    World(fake).ask(GenerateRequest(prompt_ids=[5], max_tokens=4, deadline_s=2.0), within_s=20.0)
    World(fake).ask(within_s=10**6)
    first, second, third = (r.deadline_s for r in fake.requests)
    assert first is not None and 20 < first <= 25, "a little later than ours, so that it is ours that ends the call"
    assert second is not None and 1 < second <= 2 and third == 86400.0
