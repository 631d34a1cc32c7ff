"""A replica that joins takes its weights from one that serves them, proves them, and is never worse off for having asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from interop_worlds import served
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rollmill.weights import peer as peer_module
from rollmill.weights.errors import WrongBase, WrongWeights
from rollmill.weights.follower import Follower
from rollmill.weights.live import HostWeights
from rollmill.weights.peer import fetch_from_peer, peer_app
from rollmill.weights.publisher import Publisher
from rollmill.weights.shard import all_of, columns_of, rows_of
from rollmill.weights.store import WeightStore, open_store


def weights_at(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    found = {"wide": torch.randn(40, 32, generator=generator).bfloat16(), "gain": torch.full((9,), float(step)), "empty": torch.empty(0, 4)}
    found["wide"][step] += 1
    return found


def raw(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b"" for name, tensor in tensors.items()}


class Replica:
    """Live weights of zeros and a follower of them."""

    def __init__(self, store: WeightStore, name: str, url: str = "") -> None:
        self.tensors = {key: torch.zeros_like(tensor) for key, tensor in weights_at(0).items()}
        self.live = HostWeights(self.tensors)
        self.follower = Follower(store, self.live, replica=name, url=url)
        self.app = peer_app(self.live, self.follower)

    def start(self) -> None:
        self.follower.swap(self.follower.bootstrap())


@pytest.fixture
def store(tmp_path: Path) -> Iterator[WeightStore]:
    found = open_store(tmp_path / "store")
    with Publisher(found, run_id="test") as publisher:
        publisher.submit(weights_at(0), step=0)
        publisher.submit(weights_at(1), step=1)
    yield found


def publish(store: WeightStore, step: int) -> None:
    with Publisher(store, run_id="test") as publisher:
        publisher.resume(weights_at(step), step=step)


def test_joiner_takes_its_weights_from_a_replica_and_reads_nothing_from_the_store(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_module, "PIECE_BYTES", 1000)
    first = Replica(store, "first")
    first.start()
    with served(first.app) as url:
        first.follower._url = url
        assert first.follower.renew(time.time())
        joiner = Replica(store, "joiner")
        staged = joiner.follower.bootstrap()
        assert staged.bytes_read == 0 and staged.num_packs == 0
        joiner.follower.swap(staged)
    assert joiner.follower.stats().num_from_peer == 1 and joiner.follower.version == 1
    assert raw(joiner.tensors) == raw(weights_at(1))
    publish(store, 2)
    update = joiner.follower.poll()
    assert update is not None
    joiner.follower.swap(update)
    assert raw(joiner.tensors) == raw(weights_at(2))


@pytest.mark.parametrize("trouble", ["gone", "moved_on", "expired", "itself", "lies"])
def test_whatever_is_wrong_with_the_peer_the_store_gives_the_weights(store: WeightStore, trouble: str) -> None:
    first = Replica(store, "first")
    first.start()
    with served(first.app) as url:
        first.follower._url = url
        first.follower.renew(time.time() - (1000 if trouble == "expired" else 0))
        if trouble == "moved_on":
            publish(store, 2)
            update = first.follower.poll()
            assert update is not None
            first.follower.swap(update)
            store.objects.delete(["latest.json"])
            store.repoint(store.version(1))
        if trouble == "lies":
            first.tensors["wide"][3, 3] = 99.0
        if trouble != "gone":
            joiner = Replica(store, "first" if trouble == "itself" else "joiner")
            joiner.start()
    if trouble == "gone":
        joiner = Replica(store, "joiner")
        joiner.start()
    stats = joiner.follower.stats()
    assert stats.num_from_peer == 0 and stats.bytes_read > 0
    assert stats.num_peers_failed == (0 if trouble in ("expired", "itself") else 1)
    assert joiner.follower.version == 1 and raw(joiner.tensors) == raw(weights_at(1))


def test_peer_tells_what_it_serves_and_refuses_other_versions_names_and_ranges(store: WeightStore) -> None:
    replica = Replica(store, "first")
    with httpx.Client() as client, served(replica.app) as url:
        assert client.get(f"{url}/weights/version").json() == {"version": None, "held": ["wide", "gain", "empty"]}
        assert client.get(f"{url}/weights/1/tensor?name=wide&start=0&stop=4").status_code == 409
        replica.start()
        answer = client.get(f"{url}/weights/1/tensor?name=wide&start=2&stop=10")
        assert answer.content == raw(weights_at(1))["wide"][2:10]
        answer = client.get(f"{url}/weights/0/tensor?name=wide&start=0&stop=4")
        assert (answer.status_code, answer.json()) == (409, {"version": 1})
        assert client.get(f"{url}/weights/1/tensor?name=nix&start=0&stop=4").status_code == 404
        for query in ("start=4&stop=2", "start=0&stop=99999", "start=-1&stop=2", "start=a&stop=2", "stop=2", "start=0"):
            assert client.get(f"{url}/weights/1/tensor?name=wide&{query}").status_code == 400, query


class SlowToRead:
    """Live weights whose reader waits until it is told to go on."""

    def __init__(self, real: HostWeights) -> None:
        self._real = real
        self.reading, self.go_on = threading.Event(), threading.Event()

    def read(self, name: str) -> np.ndarray:
        self.reading.set()
        assert self.go_on.wait(20)
        return self._real.read(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


@pytest.mark.parametrize("when", ["whole_swap_during_the_read", "half_way_through_the_swap"])
def test_range_that_a_swap_touched_is_not_sent(store: WeightStore, when: str) -> None:
    replica = Replica(store, "first")
    replica.start()
    publish(store, 2)
    update = replica.follower.poll()
    assert update is not None
    slow = SlowToRead(replica.live)
    answers: list[httpx.Response] = []
    with served(peer_app(slow, replica.follower)) as url:
        asking = threading.Thread(target=lambda: answers.append(httpx.get(f"{url}/weights/1/tensor?name=wide&start=0&stop=80", timeout=30)))
        if when == "whole_swap_during_the_read":
            asking.start()
            assert slow.reading.wait(20)
            replica.follower.swap(update)
            slow.go_on.set()
            asking.join(20)
            assert answers[0].json() == {"version": 2}
        else:
            slow.go_on.set()
            proving = replica.live.lanes

            def lanes_while_asked() -> Any:
                # The new bytes are in place and not yet proved.
                asking.start()
                asking.join(20)
                return proving()

            replica.live.lanes = lanes_while_asked  # type: ignore[method-assign]
            replica.follower.swap(update)
        assert answers[0].status_code == 409
    assert replica.follower.version == 2


def test_joiner_cuts_its_shard_out_of_whole_tensors(store: WeightStore) -> None:
    replica = Replica(store, "first")
    replica.start()
    record = store.version(1)
    schema = store.schema(record.schema)
    spec = next(spec for spec in schema.tensors if spec.name == "wide")
    wide = raw(weights_at(1))["wide"]
    matrix = np.frombuffer(wide, np.uint8).reshape(40, 64)
    with served(replica.app) as url:
        assert dict(fetch_from_peer(url, record, schema, {"wide": rows_of(spec, 10, 20)}))["wide"].tobytes() == matrix[10:20].tobytes()
        assert dict(fetch_from_peer(url, record, schema, {"wide": columns_of(spec, 8, 16)}))["wide"].tobytes() == matrix[:, 16:32].tobytes()


def test_replica_with_shards_only_is_passed_by(store: WeightStore) -> None:
    record = store.version(1)
    schema = store.schema(record.schema)
    spec = next(spec for spec in schema.tensors if spec.name == "wide")
    shard = torch.zeros(20, 32, dtype=torch.bfloat16)
    live = HostWeights({"wide": shard}, {"wide": rows_of(spec, 0, 20)})
    follower = Follower(store, live)
    follower._held = Replica(store, "x").follower._held
    with served(peer_app(live, follower)) as url:
        with pytest.raises(WrongBase, match="serves version None"):
            list(fetch_from_peer(url, record, schema, all_of(schema)))
        assert httpx.get(f"{url}/weights/version").json()["held"] == []


def answering(body: bytes, version: int = 1) -> Starlette:
    """A replica that sends these bytes for every range."""

    async def offer(request: Request) -> Response:
        return JSONResponse({"version": version, "held": ["wide", "gain", "empty"]})

    async def tensor(request: Request) -> Response:
        return Response(body)

    return Starlette(routes=[Route("/weights/version", offer), Route("/weights/{version:int}/tensor", tensor)])


def test_bytes_that_are_too_many_too_few_or_wrong_are_refused(store: WeightStore) -> None:
    record = store.version(1)
    schema = store.schema(record.schema)
    held = {name: part for name, part in all_of(schema).items() if name == "gain"}
    for body, error in ((bytes(36), WrongWeights), (bytes(35), ValueError), (bytes(1000), WrongBase)):
        with served(answering(body)) as url, pytest.raises(error):
            list(fetch_from_peer(url, record, schema, held))
    with served(answering(b"", version=7)) as url, pytest.raises(WrongBase, match="serves version 7"):
        list(fetch_from_peer(url, record, schema, held))
    with pytest.raises(WrongBase, match="no address"):
        list(fetch_from_peer("replica:80", record, schema, held))


def test_request_that_drips_is_given_up_at_its_deadline(store: WeightStore) -> None:
    record = store.version(1)
    schema = store.schema(record.schema)

    async def drip(scope: Any, receive: Any, send: Any) -> None:
        import asyncio

        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1000000")]})
        while True:
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
            message = asyncio.create_task(receive())
            done, _ = await asyncio.wait([message], timeout=0.02)
            if done and message.result()["type"] == "http.disconnect":
                return
            message.cancel()

    with served(drip) as url, pytest.raises(TimeoutError):
        list(fetch_from_peer(url, record, schema, all_of(schema), timeout_s=0.2))
