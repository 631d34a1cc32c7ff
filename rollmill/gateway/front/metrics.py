"""The gateway's counters, each with a unit; names follow the house form `gateway/...` with `_` for `/` in Prometheus text."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from rollmill.gateway.gateway import Gateway

_OVERHEAD_S = (0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.064, 0.256, 1)
_FIRST_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """One registry per gateway, so that several may live in one process."""

    def __init__(self, gateway: Gateway) -> None:
        self.registry = r = CollectorRegistry()
        self._requests = Counter("gateway_requests", "Requests ended, by path and status", ["path", "status"], registry=r)
        self.in_flight = Gauge("gateway_in_flight", "Model calls that run", registry=r)
        self.prompt_tokens = Counter("gateway_prompt_tokens", "Prompt tokens of ended calls", registry=r)
        self.sampled_tokens = Counter("gateway_sampled_tokens", "Tokens sampled for clients", registry=r)
        self.abandoned = Counter("gateway_abandoned_calls", "Calls whose client left before the end", registry=r)
        self.replayed = Counter("gateway_replayed_calls", "Calls answered from memory by their Idempotency-Key", registry=r)
        self.overhead_s = Histogram("gateway_overhead_s", "Seconds of a call that are the gateway's own", registry=r, buckets=_OVERHEAD_S)
        self.first_s = Histogram(
            "gateway_first_event_s", "Seconds from arrival to the first event of a stream", registry=r, buckets=_FIRST_S
        )
        # `labels` hashes and locks; a handful of pairs make up all the traffic.
        self._pairs: dict[tuple[str, int], Counter] = {}
        r.register(_Standing(gateway))

    def count(self, path: str, status: int) -> None:
        pair = self._pairs.get((path, status))
        if pair is None:
            pair = self._pairs[path, status] = self._requests.labels(path, str(status))
        pair.inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _Standing(Collector):
    """What is read off the gateway when somebody looks."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        replicas, recorder = self._gateway.replicas, self._gateway.recorder
        yield CounterMetricFamily("gateway_retries", "Tries on a replica that failed", value=replicas.num_retries)
        yield CounterMetricFamily(
            "gateway_continued", "Streams continued on another replica after they had begun", value=replicas.num_continued
        )
        yield CounterMetricFamily("gateway_put_aside", "Times a replica was left alone for a while", value=replicas.num_put_aside)
        running = GaugeMetricFamily("gateway_replica_in_flight", "Calls that run on a replica", labels=["replica"])
        for url, num in replicas.in_flight().items():
            running.add_metric([url], num)
        yield running
        yield GaugeMetricFamily("gateway_episodes", "Episodes that are open", value=len(self._gateway.episodes))
        total = Tally(self._gateway.ended_tally)
        for episode in self._gateway.episodes:
            total += episode.tally
        tally = CounterMetricFamily("gateway_tally", "What became of requests in episodes, by kind", labels=["kind"])
        for kind, num in sorted(total.items()):
            tally.add_metric([kind], num)
        yield tally
        skew = CounterMetricFamily(
            "gateway_skew", "Retokenisation skew of ended episodes: all and skewed answers and tokens", labels=["what"]
        )
        found = self._gateway.ended_skew
        skew.add_metric(["answers"], found.num_answers)
        skew.add_metric(["skewed_answers"], found.num_skewed)
        skew.add_metric(["tokens"], found.num_tokens)
        skew.add_metric(["skewed_tokens"], found.num_skewed_tokens)
        yield skew
        dropped = getattr(recorder, "num_dropped", 0)
        yield CounterMetricFamily("gateway_unrecorded_calls", "Calls that the recorder had to drop", value=dropped)
