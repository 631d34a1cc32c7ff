"""The replicas in rotation: their connections and what is known of them, kept fresh while there is traffic; decides nothing.

A replica that leaves gets no new calls; its connection is closed once the last of its calls has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import Protocol, TypeVar

from rollmill.engine.client import EngineRejected, EngineUnavailable, VersionUnmet
from rollmill.engine.protocol import GenerateReply, GenerateRequest, Piece, Pressure
from rollmill.gateway.routing.balance import Standing

POLL_S = 0.5
# While a call waits for a version: what it waits for is news of the replicas.
POLL_WAITING_S = 0.1
PROBE_S = 2.0
# A replica that gives no sign of life for so long, although it is asked, has lost its calls: a machine that is gone closes no connection.
SILENT_S = 30.0
T = TypeVar("T")


class ReplicaClient(Protocol):
    """What is asked of a connection; `EngineClient` is one."""

    async def generate(self, request: GenerateRequest) -> GenerateReply: ...

    def stream(self, request: GenerateRequest) -> AsyncGenerator[Piece | GenerateReply, None]: ...

    async def pressure(self) -> Pressure: ...

    async def aclose(self) -> None: ...


class Late(Exception):
    """The call's deadline passed."""


class Member:
    """One replica: its connection, its standing, and the calls that run on it now."""

    def __init__(self, url: str, client: ReplicaClient, now: float) -> None:
        self.url, self.client, self.standing = url, client, Standing.of(url, now)
        self.name = url.rpartition("//")[2]
        """What it goes by where it tells no name of its own."""
        self.is_leaving = False
        self.silent_since: float | None = None
        """Since when it has owed us an answer to the simplest question."""
        self.running: set[Running] = set()


class Running:
    """One call that runs on a replica. One timer for all its waits: a stream waits once per token."""

    def __init__(self, member: Member, left_s: float) -> None:
        self.member = member
        self._task: asyncio.Task[object] | None = None
        self._end: Exception | None = None
        self._timer = asyncio.get_running_loop().call_later(max(0.0, left_s), self.end, Late())

    async def wait(self, work: Callable[[], Awaitable[T]]) -> T:
        """Await what the replica owes. Late at the deadline, EngineUnavailable when the replica is lost before."""
        if self._end is not None:
            raise self._end
        task = self._task = asyncio.current_task()
        assert task is not None
        num_cancelled = task.cancelling()
        try:
            return await work()
        except asyncio.CancelledError:
            if self._end is not None and task.cancelling() == num_cancelled + 1:
                raise self._end from None
            raise
        finally:
            self._task = None
            if self._end is not None:
                task.uncancel()

    def end(self, error: Exception) -> None:
        """Whoever waits gets this instead."""
        if self._end is None:
            self._end = error
            if self._task is not None:
                self._task.cancel()

    def close(self) -> None:
        self._timer.cancel()


class Rotation:
    """`urls` names who is in rotation now; it may change at any time."""

    def __init__(self, urls: Callable[[], list[str]], connect: Callable[[str], ReplicaClient]) -> None:
        self._urls, self._connect = urls, connect
        self._members: dict[str, Member] = {}
        self._named: list[str] = []
        self._active: list[Standing] = []
        self._jitter = random.Random()
        self._num_calls = 0
        self._num_waiting = 0
        self._news = asyncio.Event()
        self._poller: asyncio.Task[None] | None = None
        self._round: asyncio.Task[list[Pressure]] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self.num_put_aside = 0

    def standings(self) -> list[Standing]:
        """Of those that may be called now."""
        named = self._urls()
        if named != self._named:
            self._named = list(named)
            self._follow()
        return self._active

    def member(self, url: str) -> Member:
        return self._members[url]

    @contextlib.contextmanager
    def calling(self, url: str, left_s: float) -> Iterator[Running]:
        """One call to a replica, counted while it lasts; its waits end in so many seconds."""
        member = self._members[url]
        standing, running = member.standing, Running(member, left_s)
        standing.start(time.monotonic())
        member.running.add(running)
        self._num_calls += 1
        self._wake()
        try:
            yield running
        finally:
            running.close()
            member.running.discard(running)
            standing.num_in_flight -= 1
            if member.is_leaving and not standing.num_in_flight:
                # It may have returned since anybody looked.
                self.standings()
                if member.is_leaving:
                    self._part(member)

    def failed(self, member: Member, error: Exception) -> None:
        """What a failed call tells of its replica."""
        now = time.monotonic()
        if isinstance(error, VersionUnmet):
            member.standing.serves(error.version, now)
            member.standing.heard_at = now
        else:
            pause_s = min(error.retry_after_s, 1.0) if isinstance(error, EngineUnavailable) else 1.0
            self.num_put_aside += member.standing.fail(now, pause_s=pause_s, jitter=self._jitter.random())

    async def pause(self, wait_s: float) -> None:
        """Until the replicas have changed, or about this long."""
        self._num_calls += 1
        self._num_waiting += 1
        self._wake()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s * self._jitter.uniform(0.75, 1.25)):
                    await self._news.wait()
        finally:
            self._num_waiting -= 1

    async def pressures(self) -> list[Pressure]:
        """Ask all, once, however many want to know at the same time; those that do not answer are left out."""
        if self._round is None or self._round.done():
            self._round = asyncio.create_task(self._ask_all())
        return await asyncio.shield(self._round)

    def in_flight(self) -> dict[str, int]:
        """Our own calls by replica, those that are leaving included."""
        return {url: member.standing.num_in_flight for url, member in self._members.items()}

    async def close(self) -> None:
        tasks = [task for task in (self._poller, self._round) if task is not None and not task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        members, self._members, self._active, self._named = list(self._members.values()), {}, [], []
        await asyncio.gather(*self._closing, *(member.client.aclose() for member in members))

    def _follow(self) -> None:
        """Bring the members in line with who is named."""
        named = list(dict.fromkeys(self._named))
        for url in named:
            if url not in self._members:
                self._members[url] = Member(url, self._connect(url), time.monotonic())
            self._members[url].is_leaving = False
        for member in [m for url, m in self._members.items() if url not in named]:
            member.is_leaving = True
            self._part(member)
        self._active = [self._members[url].standing for url in named]
        self._tell()

    def _part(self, member: Member) -> None:
        if member.standing.num_in_flight or self._members.get(member.url) is not member:
            return
        del self._members[member.url]
        task = asyncio.ensure_future(member.client.aclose())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def _wake(self) -> None:
        if self._poller is None or self._poller.done():
            self._poller = asyncio.create_task(self._poll())

    async def _poll(self) -> None:
        """Ask the replicas for as long as calls come or run."""
        num_before = -1
        while self._num_calls != num_before or any(m.standing.num_in_flight for m in self._members.values()):
            num_before = self._num_calls
            await self.pressures()
            await asyncio.sleep(POLL_WAITING_S if self._num_waiting else POLL_S)

    async def _ask_all(self) -> list[Pressure]:
        self.standings()
        found = await asyncio.gather(*(self._ask(member) for member in list(self._members.values())))
        return [pressure for pressure in found if pressure is not None]

    async def _ask(self, member: Member) -> Pressure | None:
        began = time.monotonic()
        try:
            async with asyncio.timeout(PROBE_S):
                pressure = await member.client.pressure()
        except TimeoutError:
            # Slow is not sick: it may be in the midst of a large step. Only a long silence is a verdict.
            pass
        except (EngineUnavailable, EngineRejected, VersionUnmet) as error:
            self.failed(member, error)
        else:
            if member.standing.hear(pressure, time.monotonic()):
                self._tell()
            return None if member.is_leaving else pressure
        if member.silent_since is None or member.standing.heard_at > member.silent_since:
            member.silent_since = began
        elif time.monotonic() - member.silent_since > SILENT_S:
            for running in member.running:
                running.end(EngineUnavailable(f"{member.url} gives no sign of life"))
        return None
