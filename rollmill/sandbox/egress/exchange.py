"""Passes one allowed HTTP request to the outside and its answer back, both as streams; what is allowed was decided before."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from rollmill.sandbox.egress.channel import BudgetSpent, Channel
from rollmill.sandbox.egress.http import BadMessage, Head, MessageReader

Touch = Callable[[], None]
"""Called at every sign of life, to put the idle deadline off."""


class OutsideBroke(ConnectionError):
    """The outside closed or spoke nonsense."""


class BoxBroke(ConnectionError):
    """The box closed or spoke nonsense in the middle of an exchange."""


@contextlib.contextmanager
def _blame(kind: type[ConnectionError]) -> Iterator[None]:
    try:
        yield
    except BudgetSpent:
        raise
    except (BadMessage, EOFError, OSError) as e:
        raise kind(str(e) or type(e).__name__) from e


def _framed(head: Head, piece: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(piece), piece) if head.is_chunked else piece


class Exchange:
    """The outside's end of one connection of a box, kept for the requests that follow on it."""

    def __init__(self, outside: Channel, head_bytes: int) -> None:
        self.outside = outside
        self.reader = MessageReader(outside, is_request=False, head_bytes=head_bytes)
        self.num_done = 0
        self.status = 0
        """Of the answer being passed on; 0: nothing of it was."""
        self.is_box_kept = False
        """After `run`: whether the box may send another request."""
        self.is_outside_kept = False
        """After `run`: whether the outside can take another request."""

    async def run(self, request: Head, box: MessageReader, client: Channel, touch: Touch) -> None:
        self.status = 0
        with _blame(OutsideBroke):
            await self.outside.write(request.to_bytes(close=False))
        sender = asyncio.create_task(self._send_body(request, box, touch))
        try:
            await self._pass_answer(request, client, touch)
        except ConnectionError as e:
            # What the box did wrong shows here only as an outside that was cut off.
            if sender.done() and (cause := sender.exception()):
                raise cause from e
            raise
        finally:
            is_sent = sender.done() and sender.exception() is None
            sender.cancel()
            await asyncio.wait([sender])
        self.num_done += 1
        self.is_box_kept &= is_sent
        self.is_outside_kept &= is_sent

    async def _send_body(self, request: Head, box: MessageReader, touch: Touch) -> None:
        # The outside may answer early and stop listening; then its answer decides, and the rest of the body is read to nowhere.
        try:
            while True:
                with _blame(BoxBroke):
                    piece = await box.body()
                touch()
                data = _framed(request, piece) if piece is not None else b"0\r\n\r\n" if request.is_chunked else b""
                with contextlib.suppress(OSError):
                    await self.outside.write(data)
                if piece is None:
                    return
        except ConnectionError:
            self.outside.cut()  # else the outside would wait for a body that never comes, and so would we
            raise

    async def _pass_answer(self, request: Head, client: Channel, touch: Touch) -> None:
        head = await self._answer_head(request, client, touch)
        has_body = request.method != "HEAD"
        is_open_ended = has_body and head.ends_with_connection
        self.is_box_kept = request.is_kept_alive and not is_open_ended
        # The parser takes the length in a HEAD's answer for a body to come, so that connection cannot be read any further.
        self.is_outside_kept = head.is_kept_alive and has_body and not is_open_ended
        self.status = head.status
        with _blame(BoxBroke):
            await client.write(head.to_bytes(close=not self.is_box_kept))
        while has_body:
            with _blame(OutsideBroke):
                piece = await self._piece(head)
            touch()
            with _blame(BoxBroke):
                if piece is not None:
                    await client.write(_framed(head, piece))
                    continue
                if head.is_chunked:
                    await client.write(b"0\r\n\r\n")
                return

    async def _answer_head(self, request: Head, client: Channel, touch: Touch) -> Head:
        while True:
            with _blame(OutsideBroke):
                head = await self.reader.head()
                if head.status == 101:
                    raise BadMessage("the outside switched protocols unasked")
                touch()
                if head.status >= 200:
                    return head
                await self.reader.body()
            if request.version != "1.0":
                with _blame(BoxBroke):
                    await client.write(head.to_bytes(close=False))

    async def _piece(self, head: Head) -> bytes | None:
        try:
            return await self.reader.body()
        except EOFError:
            if head.ends_with_connection:
                return None
            raise
