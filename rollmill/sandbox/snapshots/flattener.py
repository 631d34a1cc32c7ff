"""Shortens deep chains in the background, one at a time, as the book of chains says; a failure costs depth and never a snapshot."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from typing import Generic, TypeVar

from rollmill.records import RunFailure
from rollmill.sandbox.snapshots.chains import ChainBook, Flattening
from rollmill.sandbox.snapshots.saved import Courier, flatten

L = TypeVar("L", bound=Hashable)


class Flattener(Generic[L]):
    """Call `look` after every change of the book. What a flattening frees is discarded here, what `ChainBook.drop` frees by its caller."""

    def __init__(self, book: ChainBook[L], courier: Courier[L]) -> None:
        self._book = book
        self._courier = courier
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False
        self.num_done = 0
        self.num_failed = 0
        self.last_failure = ""

    def look(self) -> None:
        """Begin with the next deep chain, if there is one and nothing is under way."""
        if self._is_closed or (self._task is not None and not self._task.done()):
            return
        work = self._book.next()
        if work is not None:
            self._task = asyncio.get_running_loop().create_task(self._all(work))

    async def close(self) -> None:
        """Break off what is under way; the chains stay as they are."""
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def idle(self) -> None:
        """Wait until nothing is under way."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _all(self, first: Flattening[L]) -> None:
        work: Flattening[L] | None = first
        while work is not None:
            free = await self._one(work)
            for layer in free:
                try:
                    await self._courier.discard(layer)
                except RunFailure as failure:
                    self.last_failure = failure.message
            work = self._book.next()

    async def _one(self, work: Flattening[L]) -> tuple[L, ...]:
        try:
            whole = await flatten(self._courier, work.layers)
        except (RunFailure, ValueError) as failure:
            # Forks from a deep chain are slower, and otherwise right.
            self.num_failed += 1
            self.last_failure = str(failure)
            return self._book.failed(work)
        except BaseException:
            free = self._book.failed(work)
            for layer in free:
                await asyncio.shield(self._courier.discard(layer))
            raise
        self.num_done += 1
        return self._book.done(work, whole).free
