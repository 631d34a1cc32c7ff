"""A remote service: started once, ended once, whatever is lost on the way; what it breaks is a failure, what it repeats counts once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.harness import remote
from rollmill.harness.program import Endpoint
from rollmill.harness.remote import Init, RemoteService, RemoteStatus, Report, Reports, check_finished, init_of
from rollmill.records import Boundary, RunFailure, Task

TASK = Task(task_id="t/1", family="t", kind="k", level=1, seed=4711, split="train", instruction="x", files={"a": "1"})
WHERE = Endpoint(openai_url="http://gw/e/x/v1", anthropic_url="http://gw/e/x", key="k-1", model="policy")
DEADLINE_S = 30.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class FakeService:
    """A service whose answers are told beforehand; the last one is repeated."""

    def __init__(self, *, init: list[int | Exception] | None = None, status: list[Any] | None = None) -> None:
        self._init, self._status = init or [200], status or [{"status": "running"}]
        self.inits: list[dict[str, Any]] = []
        self.cancelled: list[str] = []
        self.keys: list[str] = []

    async def init(self, request: web.Request) -> web.Response:
        self.inits.append(await request.json())
        self.keys.append(request.headers.get("authorization", ""))
        told = self._init.pop(0) if len(self._init) > 1 else self._init[0]
        if isinstance(told, Exception):
            assert request.transport is not None
            request.transport.abort()  # it has begun, and the answer is lost
            raise told
        return web.Response(status=told, text="no such dataset")

    async def status(self, request: web.Request) -> web.Response:
        told = self._status.pop(0) if len(self._status) > 1 else self._status[0]
        return web.Response(status=told) if isinstance(told, int) else web.json_response(told)

    async def cancel(self, request: web.Request) -> web.Response:
        self.cancelled.append((await request.json())["rollout_id"])
        return web.json_response({})

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_post("/init", self.init)
        app.router.add_get("/status/{id}", self.status)
        app.router.add_post("/cancel", self.cancel)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "RETRY_S", 0.01)


def job(deadline: float) -> Init:
    return init_of(
        TASK, WHERE, run="r", process="r-1", episode="e1", status_url="http://gw/e/x/status", status_key="s-1", deadline=deadline
    )


def play(
    fake: FakeService, *, poll_s: float = 0.0, within_s: float = DEADLINE_S, tell: list[Report] | None = None, key: str = ""
) -> Report:
    """One episode; `tell`: reported to us once the service has begun."""

    async def scene() -> Report:
        async with asyncio.timeout(2 * DEADLINE_S), fake.serve() as url:
            service, reports, deadline = RemoteService(url, key=key, poll_s=poll_s), Reports(), time.monotonic() + within_s
            playing = asyncio.create_task(service.play(job(deadline), reports, "e1", deadline=deadline))
            if tell:
                while not fake.inits:  # noqa: ASYNC110 - the service has no listeners
                    await asyncio.sleep(0.002)
                for report in tell:
                    reports.take("e1", report)
            try:
                return await playing
            finally:
                await service.close()

    return asyncio.run(scene())


def test_service_is_told_all_it_needs_and_nothing_of_the_answer() -> None:
    fake = FakeService()
    done = play(fake, tell=[Report(status=RemoteStatus.FINISHED, reward=0.25)], key="secret")
    (told,) = fake.inits
    assert done.reward == 0.25 and fake.keys == ["Bearer secret"] and fake.cancelled == []
    assert (told["rollout_id"], told["row_id"], told["experiment_id"], told["run_id"]) == ("r-1.e1", "t/1", "r", "r-1")
    assert (told["model_base_url"], told["anthropic_base_url"], told["api_key"]) == ("http://gw/e/x/v1", "http://gw/e/x", "k-1")
    assert (told["status_url"], told["status_key"]) == ("http://gw/e/x/status", "s-1") and 0 < told["deadline_s"] <= DEADLINE_S
    assert told["task"]["files"] == {"a": "1"} and "4711" not in json.dumps(told)


def test_lost_answer_and_a_service_that_is_busy_are_asked_again_with_the_same_id() -> None:
    fake = FakeService(init=[ConnectionResetError("lost"), 503, 429, 200])
    assert play(fake, tell=[Report(status=RemoteStatus.FINISHED)]).status is RemoteStatus.FINISHED
    # The report may be there before the fourth call is made.
    assert len(fake.inits) >= 1 and {i["rollout_id"] for i in fake.inits} == {"r-1.e1"}
    polled = FakeService(init=[ConnectionResetError("lost"), 503, 429, 200], status=[{"status": "finished", "reward": 1}])
    assert play(polled, poll_s=0.01).reward == 1.0
    assert len(polled.inits) == 4 and {i["rollout_id"] for i in polled.inits} == {"r-1.e1"}


def test_refusal_is_a_failure_of_the_harness_with_the_services_words() -> None:
    with pytest.raises(RunFailure, match=r"refused episode r-1\.e1 with 422: no such dataset") as caught:
        play(FakeService(init=[422]))
    assert caught.value.boundary is Boundary.HARNESS


def test_status_is_polled_until_it_is_terminal() -> None:
    fake = FakeService(status=[{"status": "running"}, 500, {"status": "running"}, {"status": "finished", "files": {"a": "2"}}])
    assert play(fake, poll_s=0.01).files == {"a": "2"} and fake.cancelled == []


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ([404], "does not know episode"),
        ([{"status": "done"}], "cannot be used"),
        ([{"status": "finished", "reward": "1"}], "cannot be used"),
        ([{"status": "finished", "reward": 1e308}], "cannot be used"),
        ([{"status": "running", "note": "x" * (33 << 20)}], "more than 32 MiB"),
    ],
)
def test_service_that_forgot_or_talks_nonsense_is_a_failure_and_is_told_to_stop(status: list[Any], words: str) -> None:
    fake = FakeService(status=status)
    with pytest.raises(RunFailure, match=words) as caught:
        play(fake, poll_s=0.01)
    assert caught.value.boundary is Boundary.HARNESS and fake.cancelled == ["r-1.e1"]


def test_silent_service_is_cancelled_at_the_deadline() -> None:
    fake = FakeService()
    with pytest.raises(TimeoutError):
        play(fake, within_s=0.2)
    assert fake.cancelled == ["r-1.e1"]


def test_service_that_died_is_given_up_when_it_is_polled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "GONE_S", 0.05)
    with pytest.raises(RunFailure, match=r"has not answered for 0\.05 s"):
        play(FakeService(status=[500]), poll_s=0.01)


def test_failed_and_cancelled_are_failures_at_the_boundary_that_was_named() -> None:
    check_finished(Report(status=RemoteStatus.FINISHED))
    with pytest.raises(RunFailure, match="failed: the database is down") as caught:
        check_finished(Report(status=RemoteStatus.FAILED, error="the database is down", boundary=Boundary.SANDBOX))
    assert caught.value.boundary is Boundary.SANDBOX
    with pytest.raises(RunFailure, match="cancelled: it gave no reason") as caught:
        check_finished(Report(status=RemoteStatus.CANCELLED))
    assert caught.value.boundary is Boundary.HARNESS


FINISHED, OTHER = b'{"status": "finished", "reward": 1}', b'{"status": "failed"}'


def test_first_status_counts_the_same_again_is_fine_and_another_is_refused() -> None:
    async def scene() -> None:
        reports = Reports()
        assert reports.post("e", FINISHED)[0] == 404
        told = reports.open("e")
        assert [reports.post("e", body)[0] for body in (FINISHED, FINISHED, OTHER)] == [200, 200, 409]
        assert (await told).reward == 1.0
        reports.close("e")
        assert [reports.post("e", body)[0] for body in (FINISHED, OTHER)] == [200, 409], "remembered after the end"
        reports.open("late")
        reports.close("late")
        assert reports.post("late", FINISHED)[0] == 410

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "no terminal status"),
        (b"[]", "no terminal status"),
        (b'{"status": "running"}', "report one of"),
        (b'{"status": "won"}', "won"),
        (b'{"status": "finished", "reward": "1"}', "reward"),
        (b'{"status": "finished", "reward": 1e999}', "reward"),
        (b'{"status": "finished", "reward": -1e308}', "reward is -1e+308"),
        (b'{"status": "finished", "reward": 0, "parts": {"a": 1e10}}', "parts.a"),
        (b'{"status": "finished", "parts": {"a": null}}', "parts"),
        (b'{"status": "failed", "boundary": "moon"}', "moon"),
        (b'\xff{"status": "finished"}', "no terminal status"),
        (b'{"status":' * 5000, "no terminal status"),
    ],
)
def test_report_that_is_none_is_refused_and_the_episode_stays_open(body: bytes, words: str) -> None:
    async def scene() -> None:
        reports = Reports()
        told = reports.open("e")
        status, text = reports.post("e", body)
        assert status == 400 and words in text and not told.done()

    asyncio.run(scene())


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["finished", "failed", "cancelled"]), min_size=1, max_size=6), st.integers(0, 6))
def test_whatever_is_reported_in_whatever_order_the_first_one_stands(statuses: list[str], closed_at: int) -> None:
    async def scene() -> None:
        reports = Reports()
        told = reports.open("e")
        for i, status in enumerate(statuses):
            if i == closed_at:
                reports.close("e")
            answer = reports.post("e", json.dumps({"status": status}).encode())[0]
            expected = 410 if closed_at == 0 else 200 if status == statuses[0] else 409
            assert answer == expected
        assert told.done() == (closed_at > 0) and (not told.done() or told.result().status == statuses[0])

    asyncio.run(scene())
