"""The agent's input and output through the daemon of a hosted sandbox: bytes in events out, bytes in requests in, in order.

The daemon cuts connections when the sandbox is paused or copied; between `detach` and `attach` nothing is read and what is written waits.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator

from rollmill.records import Boundary, RunFailure
from rollmill.sandbox.agent.streams import OnData, OnLost
from rollmill.sandbox.hosted.api import REQUEST_DEADLINE_S, Client, Json

INPUT_BYTES = 1 << 20
"""Of one request; more is sent by the next."""


class DaemonStream:
    """`Stream` over a process that the daemon holds."""

    def __init__(self, daemon: Client) -> None:
        self.why = ""
        """What ended it."""
        self._daemon = daemon
        self._pid = 0
        self._unsent = bytearray()
        self._has_unsent = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._piece: asyncio.Task[None] | None = None
        self._events: AsyncIterator[Json] | None = None
        self._on_data: OnData | None = None
        self._on_lost: OnLost | None = None
        self._is_open = True

    async def start(self, argv: list[str]) -> None:
        """Have the daemon run the agent; `listen` then hears it from its first byte."""
        process = {"cmd": argv[0], "args": argv[1:]}
        await self._open("/process.Process/Start", {"process": process, "stdin": True})

    def listen(self, on_data: OnData, on_lost: OnLost) -> None:
        self._on_data, self._on_lost = on_data, on_lost
        self._begin()

    def write(self, data: bytes) -> None:
        if self._is_open:
            self._unsent += data
            self._has_unsent.set()

    def close(self) -> None:
        self._is_open = False
        mine = asyncio.current_task()
        for task in self._tasks:
            if task is not mine:
                task.cancel()

    async def end(self) -> None:
        """Close the agent's input and wait until it ended, without a call of `on_lost`. A lost connection alone it would outlive."""
        await self._settle()
        self._is_open = False
        with contextlib.suppress(RunFailure):  # it ended already
            await self._daemon.call("POST", "/process.Process/CloseStdin", {"process": {"pid": self._pid}})
            await asyncio.wait(self._tasks[:1], timeout=REQUEST_DEADLINE_S)
        self.close()

    async def detach(self) -> None:
        """Before the daemon cuts the connection; what is written from now on waits."""
        await self._settle()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def attach(self) -> None:
        """The connection again."""
        await self._open("/process.Process/Connect", {"process": {"pid": self._pid}})
        self._begin()

    async def _open(self, path: str, body: Json) -> None:
        events = self._daemon.stream(path, body)
        try:
            async with asyncio.timeout(REQUEST_DEADLINE_S):
                async for message in events:
                    event = message["event"]
                    if "start" in event:
                        self._pid = event["start"]["pid"]
                        self._events = events
                        return
                    if "keepalive" not in event:
                        break
        except TimeoutError:
            raise RunFailure(Boundary.SANDBOX, f"{path} gave no answer within {REQUEST_DEADLINE_S:g} s") from None
        raise RunFailure(Boundary.SANDBOX, f"{path} did not say that the agent runs")

    async def _settle(self) -> None:
        """Until what is on its way has arrived: a piece that was sent twice, or half, would leave the agent out of step."""
        if self._piece is not None:
            await asyncio.gather(self._piece, return_exceptions=True)

    def _begin(self) -> None:
        assert self._events is not None
        self._tasks = [asyncio.ensure_future(self._hear(self._events)), asyncio.ensure_future(self._send())]

    async def _hear(self, events: AsyncIterator[Json]) -> None:
        assert self._on_data is not None
        words = b""
        try:
            async for message in events:
                event = message["event"]
                if "data" in event and "stdout" in event["data"]:
                    self._on_data(base64.b64decode(event["data"]["stdout"]), [])
                elif "data" in event:
                    words = (words + base64.b64decode(event["data"].get("stderr", "")))[-2000:]
                elif "end" in event:
                    self.why = f"its agent ended ({event['end'].get('status', '')}) {words.decode(errors='replace').strip()}".strip()
                    break
        except RunFailure as failure:
            self.why = failure.message
        self._lose()

    async def _send(self) -> None:
        try:
            while True:
                await self._has_unsent.wait()
                self._piece = asyncio.ensure_future(self._send_piece())
                await asyncio.shield(self._piece)
        except RunFailure as failure:
            self.why = self.why or failure.message
            self._lose()

    async def _send_piece(self) -> None:
        data = bytes(self._unsent[:INPUT_BYTES])
        body = {"process": {"pid": self._pid}, "input": {"stdin": base64.b64encode(data).decode()}}
        await self._daemon.call("POST", "/process.Process/SendInput", body)
        del self._unsent[: len(data)]
        if not self._unsent:
            self._has_unsent.clear()

    def _lose(self) -> None:
        assert self._on_lost is not None
        if self._is_open:
            self.close()
            self._on_lost()
