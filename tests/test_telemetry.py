"""Telemetry: waits say who waits for whom, metrics survive torn files and full disks, the health port answers."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest

from rollmill.telemetry import Metrics, RoleServer, Waits, WaitTimeout, read_metrics


class HandClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_wait_names_owner_and_raises_after_its_deadline() -> None:
    clock = HandClock()
    waits = Waits(clock)
    with waits.of("batch", owner="rollout", deadline_s=10.0) as check:
        clock.now += 10.0
        check()
        clock.now += 1.0
        with pytest.raises(WaitTimeout, match="waited 11 s for batch, which rollout must provide; the limit is 10 s"):
            check()
        assert [(w.name, w.owner) for w in waits.current()] == [("batch", "rollout")]
        assert waits.totals_s() == {"batch": 11.0}
    assert waits.current() == [] and waits.totals_s() == {"batch": 11.0}


def test_equal_waits_are_counted_apart_and_an_exception_ends_one() -> None:
    clock = HandClock()
    waits = Waits(clock)
    with pytest.raises(KeyError), waits.of("policy", owner="engine", deadline_s=9.0), waits.of("policy", owner="engine", deadline_s=9.0):
        clock.now += 2.0
        assert len(waits.current()) == 2
        raise KeyError
    assert waits.current() == [] and waits.totals_s() == {"policy": 4.0}


def test_metrics_stream_skips_a_torn_last_line(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, "trainer")
    metrics.write({"reward/mean": 0.5}, step=3)
    metrics.write({"reward/mean": 0.75}, step=4)
    file = tmp_path / "metrics" / "trainer.jsonl"
    file.write_bytes(file.read_bytes() + b'{"t": 1.0, "ste')
    assert [(r["step"], r["reward/mean"]) for r in read_metrics(tmp_path, "trainer")] == [(3, 0.5), (4, 0.75)]
    assert b"rollmill_reward_mean 0.75" in metrics.prometheus()
    assert read_metrics(tmp_path, "nobody") == []


class FullDisk:
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


def test_full_disk_loses_a_metric_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics(tmp_path, "trainer")
    monkeypatch.setattr(metrics, "_file", FullDisk())
    metrics.write({"reward/mean": 0.5}, step=3)
    assert metrics.num_lost == 1 and b"rollmill_reward_mean 0.5" in metrics.prometheus()


def test_health_port_tells_current_waits_and_metrics(tmp_path: Path) -> None:
    metrics, waits = Metrics(tmp_path, "trainer"), Waits()
    metrics.write({"reward/mean": 0.5}, step=1)
    server = RoleServer(metrics, waits, lambda: {"step": 7})
    url = f"http://127.0.0.1:{server.start()}"
    try:
        with waits.of("batch", owner="rollout", deadline_s=600.0):
            health = json.loads(urllib.request.urlopen(f"{url}/health", timeout=20).read())
        assert (health["role"], health["step"]) == ("trainer", 7)
        assert [(w["name"], w["owner"], w["deadline_s"]) for w in health["waits"]] == [("batch", "rollout", 600.0)]
        assert b"rollmill_reward_mean 0.5" in urllib.request.urlopen(f"{url}/metrics", timeout=20).read()
    finally:
        server.stop()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_taken_port_is_an_error_not_a_hang(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, "trainer")
    first = RoleServer(metrics, Waits(), dict)
    port = first.start()
    try:
        with pytest.raises(OSError, match="the health port of trainer did not open"):
            RoleServer(metrics, Waits(), dict, port=port).start(deadline_s=5.0)
    finally:
        first.stop()
