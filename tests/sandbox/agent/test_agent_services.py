"""Services: ready when they say so, loud when they are not, stopped in reverse and gone."""

from __future__ import annotations

import pytest

from rollmill.records import RunFailure
from rollmill.sandbox.records import Service

LOUD = "trap 'echo {0} >> stopped; exit 0' TERM; yes 'a line of its log' | head -c 2000000; touch {0}.ready; while :; do sleep 0.02; done"


def service(name: str, line: str, **rest) -> Service:
    return Service(name=name, argv=("sh", "-c", line), **rest)


def test_service_is_usable_when_serve_returns_and_its_log_holds_nothing_up(play):
    async def scene(box):
        for name in ("db", "web"):
            await box.serve(service(name, LOUD.format(name), ready_argv=("test", "-e", f"{name}.ready")))
            assert f"{name}.ready" in await box.list()
        assert [running.name for running in box.services] == ["db", "web"]
        with pytest.raises(ValueError, match="runs already"):
            await box.serve(service("db", "true"))
        await box.services.stop()
        assert await box.read("stopped") == b"web\ndb\n"
        assert [*box.services] == []
        await box.serve(service("db", LOUD.format("db"), ready_argv=("test", "-e", "db.ready")))

    play(scene)


def test_service_without_a_question_is_ready_as_soon_as_it_runs(play):
    async def scene(box):
        await box.serve(service("idle", "exec sleep 1000", cwd="/", env={"A": "b"}))
        assert len(box.services) == 1

    play(scene)


def test_service_that_ends_before_it_is_ready_fails_at_once_with_its_words(play):
    async def scene(box):
        with pytest.raises(RunFailure, match=r"service db ended with status 3 .*: no disk"):
            await box.serve(service("db", "echo no disk >&2; exit 3", ready_argv=("false",), ready_s=1000))
        with pytest.raises(RunFailure, match=r"service db could not be started.*no-such"):
            await box.serve(Service(name="db", argv=("no-such-program",)))
        assert [*box.services] == []

    play(scene)


def test_service_that_is_not_ready_in_time_fails_with_its_last_words_and_is_killed(play):
    async def scene(box):
        with pytest.raises(RunFailure, match=r"service slow was not ready within 0.3 s: still migrating$"):
            await box.serve(service("slow", "echo still migrating; exec sleep 1000", ready_argv=("false",), ready_s=0.3))
        assert (await box.exec("while pgrep -x sleep; do :; done", timeout_s=30)).exit_code == 0

    play(scene)


def test_question_that_hangs_does_not_outlast_ready_s(play):
    async def scene(box):
        with pytest.raises(RunFailure, match=r"not ready within 0\.2 s: it printed nothing"):
            await box.serve(service("mute", "exec sleep 1000", ready_argv=("sleep", "1000"), ready_s=0.2))

    play(scene)


def test_stubborn_service_is_killed_after_its_stop_time(play):
    async def scene(box):
        line = "trap '' TERM; touch up; while :; do sleep 0.02; done"
        await box.serve(service("rock", line, ready_argv=("test", "-e", "up"), stop_s=0.1))
        await box.services.stop()
        assert (await box.exec("while pgrep -f 'touch [u]p'; do :; done", timeout_s=30)).exit_code == 0

    play(scene)
