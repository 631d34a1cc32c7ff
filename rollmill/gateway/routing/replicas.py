"""Sends a call to a replica and tries again where that is token-safe, until the call's deadline; which one is `balance`'s to say.

A call is safe to repeat because it carries its whole prompt and a failed one returned nothing. A stream that breaks is safe to go on with
elsewhere because the sampler is keyed by (seed, position): prompt and tokens so far, same seed, the rest of the tokens.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Callable
from functools import partial

import msgspec

from rollmill.engine.client import EngineClient, EngineRejected, EngineUnavailable, VersionUnmet
from rollmill.engine.protocol import GenerateReply, GenerateRequest, Piece, Pressure, Timing
from rollmill.gateway.routing.balance import Need, choose, is_hopeless
from rollmill.gateway.routing.continuing import Contradiction, Unfinished, bounded
from rollmill.gateway.routing.rotation import Late, Member, ReplicaClient, Rotation
from rollmill.telemetry import Waits

RETRY_S = 0.2
PASSING = (EngineUnavailable, VersionUnmet, Contradiction)
"""What another try, here or elsewhere, may get past."""


class NoAnswer(RuntimeError):
    """No replica answered; asking again later may help."""

    def __init__(self, reason: str, *, is_version: bool = False, is_late: bool = True, is_slow: bool = False) -> None:
        """`reason`: the last problem. `is_version`: a version was asked for that nobody serves. `is_late`: the deadline has passed.
        `is_slow`: while a replica was at work."""
        super().__init__(f"no answer before the deadline; the last problem was: {reason}" if is_late else f"no answer: {reason}")
        self.reason, self.is_version, self.is_late, self.is_slow = reason, is_version, is_late, is_slow


class _Trip:
    """One call on its way: whom to ask next, and what went wrong so far."""

    def __init__(self, rotation: Rotation, request: GenerateRequest, deadline: float) -> None:
        self._rotation, self.deadline = rotation, deadline
        self.began = time.monotonic()
        self.need = Need(session=request.session, min_version=request.min_version, exact_version=request.exact_version)
        self._first_token_at = 0.0
        self._tried: set[str] = set()
        self._problem, self._is_version = "none: the call came after its deadline", False

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.began

    async def next(self) -> str:
        """The replica to ask, as soon as there is one. NoAnswer when there will be none in time."""
        while (left_s := self.left_s) > 0:
            now = time.monotonic()
            standings = self._rotation.standings()
            order = choose(standings, self.need, now)
            # Those that are put aside are a last resort, one at a time.
            if order and self._tried and self._rotation.member(order[0]).standing.is_aside(now):
                order = []
            for url in order:
                if url not in self._tried:
                    return url
            if not standings:
                self._problem = "no replica is in rotation"
            elif is_hopeless(standings, self.need, now):
                served = sorted({s.version for s in standings if s.version is not None})
                raise NoAnswer(f"version {self.need.exact_version} is past; served now: {served}", is_version=True, is_late=False)
            elif not self._tried and not order:
                served = sorted({s.version for s in standings if s.version is not None})
                wanted = self.need.exact_version if self.need.exact_version is not None else f"{self.need.min_version} or newer"
                self._problem, self._is_version = f"version {wanted} is asked for; served now: {served}", True
            self._tried.clear()
            await self._rotation.pause(min(RETRY_S, left_s))
        raise self.given_up()

    def failed(self, member: Member, error: Exception) -> None:
        self._rotation.failed(member, error)
        self._tried.add(member.url)
        self._problem, self._is_version = str(error), isinstance(error, VersionUnmet)

    def heard(self, member: Member) -> None:
        """Tokens came."""
        member.standing.heard_at = now = time.monotonic()
        self._first_token_at = self._first_token_at or now

    def timing(self, queue_s: float) -> Timing:
        """Of the whole call, as seen from here."""
        first_token_s = self._first_token_at - self.began if self._first_token_at else 0.0
        return Timing(queue_s=queue_s, first_token_s=first_token_s, total_s=self.elapsed_s)

    def given_up(self) -> NoAnswer:
        return NoAnswer(self._problem, is_version=self._is_version)


class Replicas:
    """Owns the connections. `urls` names the base URLs that are in rotation now; it may change at any time."""

    def __init__(self, urls: Callable[[], list[str]], waits: Waits, *, connect: Callable[[str], ReplicaClient] = EngineClient) -> None:
        self._rotation, self._waits = Rotation(urls, connect), waits
        self.num_retries = 0
        """Tries that failed."""
        self.num_continued = 0
        """Breaks in mid-answer: what was sampled is kept, and another replica goes on."""

    @property
    def num_put_aside(self) -> int:
        """Times that a replica failed and was left alone for a while."""
        return self._rotation.num_put_aside

    def in_flight(self) -> dict[str, int]:
        """Calls that run now, by replica."""
        return self._rotation.in_flight()

    async def generate(self, request: GenerateRequest, *, deadline: float) -> GenerateReply:
        """Sample on the replica this session belongs to, on another when that one fails. `deadline`: in `time.monotonic` seconds.

        NoAnswer at the deadline, EngineRejected when a replica refuses the call itself.
        """
        trip = _Trip(self._rotation, request, deadline)
        with self._waits.of("policy", owner="engine", deadline_s=max(0.0, trip.left_s)):
            while True:
                url = await trip.next()
                left_s = trip.left_s
                with self._rotation.calling(url, left_s) as running:
                    member = running.member
                    try:
                        wire = bounded(request, elapsed_s=trip.elapsed_s, left_s=left_s)
                        reply = await running.wait(partial(member.client.generate, wire))
                    except PASSING as error:
                        self.num_retries += 1
                        trip.failed(member, error)
                    except Late as error:
                        raise NoAnswer("the replica did not answer in time", is_slow=True) from error
                    else:
                        return _answered(member, reply)

    async def stream(self, request: GenerateRequest, *, deadline: float) -> AsyncGenerator[Piece | GenerateReply, None]:
        """The same, piece by piece as it is sampled; the last item is the whole reply. Closing the generator frees the replica's row.

        NoAnswer also when what was passed on already cannot be continued: it stays true, and the call can be made again.
        """
        if request.seed is None:
            request = msgspec.structs.replace(request, seed=secrets.randbits(63))
        work, trip = Unfinished(request), _Trip(self._rotation, request, deadline)
        with self._waits.of("policy", owner="engine", deadline_s=max(0.0, trip.left_s)):
            whole: GenerateReply | None = None
            while whole is None:
                url = await trip.next()
                with self._rotation.calling(url, trip.left_s) as running:
                    member = running.member
                    items = member.client.stream(work.rest(elapsed_s=trip.elapsed_s, left_s=trip.left_s))
                    step = partial(anext, items, None)
                    try:
                        while whole is None:
                            item = await running.wait(step)
                            if isinstance(item, GenerateReply):
                                reply = _answered(member, item)
                                whole = work.finish(reply, timing=trip.timing(reply.timing.queue_s))
                            elif item is None:
                                raise EngineUnavailable(f"{url} ended a stream without a reply")
                            elif item.token_ids:
                                if not work.num_of_part and not item.replica:
                                    item = msgspec.structs.replace(item, replica=member.name)
                                work.take(item)
                                trip.heard(member)
                                yield item
                    except PASSING as error:
                        whole = self._broken(work, trip, member, error)
                    except Late as error:
                        raise NoAnswer("the replica did not answer in time", is_slow=True) from error
                    except EngineRejected as error:
                        if not work.is_continued:
                            raise
                        # The caller's request was accepted once: what is wrong is how it goes on.
                        raise NoAnswer(f"the answer broke off and cannot be continued: {error}", is_late=False) from error
                    finally:
                        await items.aclose()
        yield whole

    def _broken(self, work: Unfinished, trip: _Trip, member: Member, error: Exception) -> GenerateReply | None:
        """A stream broke: note what that tells. Returns the reply when nothing was left to sample."""
        self.num_retries += 1
        trip.failed(member, error)
        if isinstance(error, Contradiction) and work.num_of_part:
            raise NoAnswer(f"{error}; what it has sent cannot be trusted", is_late=False) from error
        self.num_continued += work.num_of_part > 0
        work.broke()
        pressure = member.standing.pressure
        if reason := work.reached(elapsed_s=trip.elapsed_s, max_len=pressure.max_len if pressure else 0):
            return work.finish_without(reason, timing=trip.timing(0.0))
        trip.need = msgspec.structs.replace(trip.need, liked_version=work.version)
        return None

    async def pressures(self) -> list[Pressure]:
        """How busy the replicas are; those that do not answer are left out. Replicas that left are forgotten here."""
        return await self._rotation.pressures()

    async def close(self) -> None:
        await self._rotation.close()


def _answered(member: Member, reply: GenerateReply) -> GenerateReply:
    now = time.monotonic()
    member.standing.answer(now)
    if reply.spans:
        member.standing.serves(reply.spans[-1].version, now)
    return reply if reply.replica else msgspec.structs.replace(reply, replica=member.name)
