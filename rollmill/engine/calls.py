"""Engine requests as the event loop sees them: submitted together, heard through one queue, cancelled together when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request

from rollmill.engine.engine import Engine, NotServing, QueueFull, VersionMismatch
from rollmill.engine.protocol import FinishReason, GenerateRequest
from rollmill.engine.scheduler import Sequence, Update

R = TypeVar("R")
RETRY_AFTER_S = 1


class ApiError(HTTPException):
    """An answer other than 200, with a text that says what to change; `extra` joins the JSON body."""

    def __init__(self, status: int, message: str, *, headers: dict[str, str] | None = None, extra: dict[str, Any] | None = None) -> None:
        super().__init__(status, message, headers)
        self.extra = extra or {}


class ClientGone(Exception):
    """The client closed its connection; there is nobody to answer."""


def _unmet(engine: Engine, message: str) -> ApiError:
    return ApiError(409, message, extra={"retryable": True, "version": engine.version})


def _unavailable(message: str) -> ApiError:
    return ApiError(503, message, headers={"retry-after": str(RETRY_AFTER_S)}, extra={"retryable": True})


class Calls:
    """One or more engine requests of one HTTP request. Iterate to hear (index, update) until all have ended."""

    def __init__(self, engine: Engine, requests: list[GenerateRequest], *, streams: bool, score_from: int | None = None) -> None:
        self._engine = engine
        self._queue: asyncio.Queue[tuple[int, Update]] = asyncio.Queue()
        self._open: set[int] = set()
        self.seqs: list[Sequence] = []
        try:
            for index, request in enumerate(requests):
                self.seqs.append(engine.submit(request, self._listener(index), streams=streams, score_from=score_from))
                self._open.add(index)
        except ValueError as error:
            raise self._refused(ApiError(400, str(error))) from error
        except VersionMismatch as error:
            raise self._refused(_unmet(engine, str(error))) from error
        except (QueueFull, NotServing) as error:
            raise self._refused(_unavailable(str(error))) from error

    def _listener(self, index: int) -> Callable[[Sequence, Update], None]:
        return lambda seq, update: self._queue.put_nowait((index, update))

    def _refused(self, error: ApiError) -> ApiError:
        self.cancel()
        return error

    def end(self, index: int) -> None:
        """This one has all it needs; whatever it still samples is not heard."""
        if index in self._open:
            self._open.discard(index)
            self._engine.cancel(self.seqs[index])

    def cancel(self) -> None:
        for index in list(self._open):
            self.end(index)

    async def __aiter__(self) -> AsyncIterator[tuple[int, Update]]:
        while self._open:
            index, update = await self._queue.get()
            if index not in self._open:
                continue
            if update.finished is not None:
                self._open.discard(index)
                self._check_end(update.finished)
            yield index, update

    def _check_end(self, reason: FinishReason) -> None:
        if reason is FinishReason.VERSION:
            raise _unmet(self._engine, f"the weights were swapped to version {self._engine.version} while the request ran")
        if reason in (FinishReason.ERROR, FinishReason.CANCELLED):
            stopping = reason is FinishReason.CANCELLED
            raise _unavailable("the engine is shutting down" if stopping else "the model gave no usable logits, or the engine failed")


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def while_connected(request: Request, calls: Calls, work: Coroutine[Any, Any, R]) -> R:
    """Await `work`, but give up and free the rows as soon as the client leaves or anything fails."""
    task, gone = asyncio.create_task(work), asyncio.create_task(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        calls.cancel()
