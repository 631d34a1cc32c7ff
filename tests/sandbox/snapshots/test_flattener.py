"""Chains get short in the background while snapshots come and go, and a flattening that fails or is broken off harms nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from pathlib import Path

from folder_courier import FolderCourier

from rollmill.records import Boundary, RunFailure
from rollmill.sandbox.snapshots.chains import ChainBook
from rollmill.sandbox.snapshots.flattener import Flattener

DEADLINE_S = 60.0


def run(scene: Awaitable[None]) -> None:
    async def whole() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await scene

    asyncio.run(whole())


def deep_chain(courier: FolderCourier, depth: int) -> tuple[Path, ...]:
    chain = tuple(courier.fresh() for _ in range(depth))
    for number, layer in enumerate(chain):
        (layer / "last").write_text(str(number))
        (layer / f"f{number}").write_text("")
    return chain


def test_two_deep_chains_become_short_and_their_old_layers_go(tmp_path: Path) -> None:
    async def scene() -> None:
        courier = FolderCourier(tmp_path)
        book = ChainBook[Path](max_depth=3, keep_last=1)
        flattener = Flattener(book, courier)
        one, two = deep_chain(courier, 5), deep_chain(courier, 4)
        book.add("one", one)
        book.add("two", two)
        flattener.look()
        flattener.look()
        await flattener.idle()
        assert flattener.num_done == 2 and flattener.num_failed == 0
        assert sorted(courier.left()) == sorted(path.name for path in (*book.chain("one"), *book.chain("two")))
        whole, top = book.chain("one")
        assert top == one[-1] and (whole / "last").read_text() == "3" and {f"f{n}" for n in range(4)} < {p.name for p in whole.iterdir()}
        await flattener.close()

    run(scene())


class LosingCourier(FolderCourier):
    async def pack(self, layer: Path) -> AsyncGenerator[bytes, None]:
        raise RunFailure(Boundary.SANDBOX, "the courier's box is gone")
        yield b""


def test_flattening_that_fails_is_counted_and_the_chain_stays(tmp_path: Path) -> None:
    async def scene() -> None:
        courier = LosingCourier(tmp_path)
        book = ChainBook[Path](max_depth=3, keep_last=1)
        flattener = Flattener(book, courier)
        chain = deep_chain(courier, 4)
        book.add("s", chain)
        flattener.look()
        await flattener.idle()
        assert flattener.num_failed == 1 and "courier's box" in flattener.last_failure
        assert book.chain("s") == chain and len(courier.left()) == 4 and book.next() is None

    run(scene())


class SlowCourier(FolderCourier):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reached = asyncio.Event()

    async def pack(self, layer: Path) -> AsyncGenerator[bytes, None]:
        self.reached.set()
        await asyncio.Event().wait()
        yield b""


def test_flattening_broken_off_gives_up_what_nobody_else_needs(tmp_path: Path) -> None:
    async def scene() -> None:
        courier = SlowCourier(tmp_path)
        book = ChainBook[Path](max_depth=3, keep_last=1)
        flattener = Flattener(book, courier)
        book.add("s", deep_chain(courier, 4))
        flattener.look()
        await courier.reached.wait()
        for layer in book.drop("s"):
            await courier.discard(layer)
        assert len(courier.left()) == 3, "the flattening under way holds its layers"
        await flattener.close()
        assert courier.left() == []

    run(scene())
