"""Two engines of one run: the second takes the weights it starts with from the first, over the port on which the first serves."""

from __future__ import annotations

import asyncio
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import pytest

from rollmill.engine.run import run_engine
from rollmill.model import load_model
from rollmill.weights import Publisher, WeightStore, open_store

MODEL = Path(__file__).parents[2] / "models" / "demo"
DEADLINE_S = 60.0


@pytest.fixture(autouse=True)
def switch_interval() -> Iterator[None]:
    """An engine sets its process's own."""
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    """With one version, of other weights than those in the model's directory."""
    found = open_store(tmp_path / "store")
    model, _ = load_model(MODEL)
    with Publisher(found, run_id="t") as publisher:
        publisher.submit({name: 1.25 * tensor for name, tensor in model.serving_tensors().items()}, step=0)
    return found


@asynccontextmanager
async def serving(store: WeightStore, replica: str, *, peers: bool) -> Iterator[str]:
    """The address of an engine that serves what the store has."""
    ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    engine = asyncio.create_task(
        run_engine(MODEL, store=store, replica=replica, peers=peers, num_threads=1, num_slots=2, on_ready=ready.set_result)
    )
    try:
        await asyncio.wait([engine, ready], timeout=DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
        assert not engine.done(), engine.exception()
        url = f"http://127.0.0.1:{ready.result()}"
        async with httpx.AsyncClient() as http:
            await until(lambda: http.get(f"{url}/health"), lambda answer: answer.status_code == 200, f"{replica} serves")
        yield url
    finally:
        engine.cancel()
        with suppress(asyncio.CancelledError):
            await engine


async def until(look: Callable, is_enough: Callable, what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not is_enough(found := await look()):
        assert time.monotonic() < end, f"waited {DEADLINE_S:.0f} s until {what}; last seen: {found}"
        await asyncio.sleep(0.01)


async def leased(store: WeightStore, *replicas: str) -> None:
    """Until these replicas have said in the store that they serve its version."""

    async def look() -> set[str]:
        return {lease.replica for lease in store.leases() if lease.version == 0}

    await until(look, lambda found: found == set(replicas), f"the store knows {replicas}")


def run(main: Callable) -> None:
    """In a thread of its own: two servers in the main thread would take each other's signals."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, main()).result(4 * DEADLINE_S)


def test_a_second_engine_starts_from_the_first_although_the_store_has_lost_its_packs(store: WeightStore, tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(store, "first", peers=True) as first:
            await leased(store, "first")
            # From here on only the first engine has the weights.
            shutil.rmtree(tmp_path / "store" / "packs")
            async with serving(store, "second", peers=True) as second, httpx.AsyncClient() as http:
                await leased(store, "first", "second")
                offers = [(await http.get(f"{url}/weights/version")).json() for url in (first, second)]
                assert offers[0] == offers[1] and offers[0]["version"] == 0 and len(offers[0]["held"]) > 10

    run(main)
    assert {lease.fingerprint for lease in store.leases()} == {store.version(0).fingerprint}
    assert all(lease.problem == "" for lease in store.leases()) and store.quarantined() == {}


def test_an_engine_hands_out_weights_only_when_it_was_told_to(store: WeightStore) -> None:
    async def main() -> None:
        async with serving(store, "alone", peers=False) as url, httpx.AsyncClient() as http:
            await leased(store, "alone")
            assert (await http.get(f"{url}/weights/version")).status_code == 404

    run(main)
    assert [lease.url for lease in store.leases()] == [""]
