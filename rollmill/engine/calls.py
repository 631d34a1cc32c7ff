"""One engine request as the event loop sees it: submitted, heard piece by piece or at its end, cancelled when the client leaves.

What waits for a slow reader is told by numbers, not copied: it finds the tokens in the sequence, so it holds one entry per version.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from rollmill.engine.constrain import Guide, StillCompiling
from rollmill.engine.engine import Engine, NotServing, VersionMismatch
from rollmill.engine.inbox import QueueFull
from rollmill.engine.protocol import FinishReason, GenerateRequest, Piece
from rollmill.engine.replies import piece_of
from rollmill.engine.scheduler import Sequence, Update
from rollmill.engine.service import Service
from rollmill.web import ApiError

RETRY_AFTER_S = 1


def _unmet(engine: Engine, message: str) -> ApiError:
    return ApiError(409, message, extra={"retryable": True, "version": engine.version})


def _unavailable(message: str) -> ApiError:
    return ApiError(503, message, headers={"retry-after": str(RETRY_AFTER_S)}, extra={"retryable": True})


class Call:
    """A submitted request; whoever made it calls `cancel` at the end, however it ended."""

    def __init__(
        self, engine: Engine, request: GenerateRequest, *, streams: bool = False, score_from: int | None = None, guide: Guide | None = None
    ) -> None:
        self._engine, self._news = engine, asyncio.Event()
        self._unread: list[tuple[int, int]] = []
        """(version, number of tokens once it had sampled its last), for what no piece has told yet."""
        self._finished: FinishReason | None = None
        try:
            self.seq = engine.submit(request, self._hear, streams=streams, score_from=score_from, guide=guide)
        except ValueError as error:
            raise ApiError(400, str(error)) from error
        except VersionMismatch as error:
            raise _unmet(engine, str(error)) from error
        except (QueueFull, NotServing) as error:
            raise _unavailable(str(error)) from error

    def _hear(self, seq: Sequence, update: Update) -> None:
        if self._unread and self._unread[-1][0] == update.version:
            self._unread.pop()
        self._unread.append((update.version, update.num_sampled))
        self._finished = update.finished
        self._news.set()

    def cancel(self) -> None:
        """Free the row; a request that has ended is left alone."""
        if self._finished is None:
            self._engine.cancel(self.seq)

    async def ended(self) -> FinishReason:
        """Why it ended; ApiError when there is nothing to return."""
        while self._finished is None:
            await self._news.wait()
            self._news.clear()
        self._check_end(self._finished)
        return self._finished

    async def pieces(self) -> AsyncIterator[Piece]:
        """What has been sampled since the last piece, as soon as there is something and the reader asks; ends with the request."""
        start = 0
        while True:
            await self._news.wait()
            self._news.clear()
            unread, self._unread, finished = self._unread, [], self._finished
            for version, end in unread:
                if end > start:
                    yield piece_of(self.seq, start, end, version=version, replica=self._engine.replica)
                    start = end
            if finished is not None:
                self._check_end(finished)
                return

    def _check_end(self, reason: FinishReason) -> None:
        if reason is FinishReason.VERSION:
            raise _unmet(self._engine, f"the weights were swapped to version {self._engine.version} while the request ran")
        if reason is FinishReason.CONSTRAINT:
            why = self.seq.guide.problem if self.seq.guide else ""
            raise ApiError(400, f"the constraint could not be followed after {self.seq.num_sampled} tokens: {why}")
        if reason in (FinishReason.ERROR, FinishReason.CANCELLED):
            stopping = reason is FinishReason.CANCELLED
            raise _unavailable("the engine is shutting down" if stopping else "the model gave no usable logits, or the engine failed")


async def open_call(service: Service, request: GenerateRequest, *, streams: bool) -> Call:
    """Compile the request's constraint, if it has one, and submit it."""
    guide = None
    if request.constraint is not None:
        try:
            request.check(vocab_size=service.engine.config.vocab_size, max_len=service.engine.max_len)
            guide = await service.constraints.guide(request)
        except ValueError as error:
            raise ApiError(400, str(error)) from error
        except StillCompiling as error:
            raise _unavailable(str(error)) from error
    return Call(service.engine, request, streams=streams, guide=guide)
