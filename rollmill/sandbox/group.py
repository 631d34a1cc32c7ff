"""Several boxes at once, all or none: when one fails, or the caller gives up, those that stand are closed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol, TypeVar


class Closable(Protocol):
    async def close(self) -> None: ...


Box = TypeVar("Box", bound=Closable)


async def all_or_none(makers: Sequence[Coroutine[Any, Any, Box]]) -> list[Box]:
    tasks = [asyncio.ensure_future(maker) for maker in makers]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.shield(asyncio.ensure_future(_close_made(tasks)))
        raise


async def _close_made(tasks: Sequence[asyncio.Task[Box]]) -> None:
    made = await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.gather(*(box.close() for box in made if not isinstance(box, BaseException)))


async def fork_by_snapshot(box: Any, num: int) -> list[Any]:
    """What `Sandbox.fork` means everywhere: the forks keep what they stand on, the snapshot in between is nobody's."""
    snapshot = await box.snapshot()
    try:
        return list(await snapshot.fork(num))
    finally:
        await snapshot.close()
