"""Blocking work beside the event loop, in steps: a cancelled caller waits for the step under way, so no thread outlives its files."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")
PIECE_BYTES = 1 << 20


async def in_thread(work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """What `work` returns. Cancellation arrives once it ended."""
    step = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))
    try:
        return await asyncio.shield(step)
    except asyncio.CancelledError:
        while not step.done():
            try:
                await asyncio.wait([step])
            except asyncio.CancelledError:
                continue
        if not step.cancelled():
            step.exception()  # nobody asks for it any more
        raise


async def in_steps(pieces: Iterator[bytes]) -> AsyncGenerator[bytes, None]:
    """The pieces of a blocking iterator, gathered to about a megabyte for each step in a thread."""
    while piece := await in_thread(_gather, pieces):
        yield piece


def _gather(pieces: Iterator[bytes]) -> bytes:
    held, num_bytes = [], 0
    for piece in pieces:
        held.append(piece)
        num_bytes += len(piece)
        if num_bytes >= PIECE_BYTES:
            break
    return b"".join(held)
