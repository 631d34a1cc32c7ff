"""An episode that somebody else's service plays: it is started once however often we ask, and ends in exactly one terminal status.

The service gets metadata and the address of the model; where and how it runs its agent is its own affair.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import math
import secrets
import time
from collections import OrderedDict
from enum import StrEnum
from typing import Any

import aiohttp
import msgspec
from blake3 import blake3

from rollmill.harness.program import Endpoint
from rollmill.records import Boundary, RunFailure, Task

RETRY_S = 0.5
CALL_S = 30.0
"""One call to the service; the start is repeated until the episode's deadline."""
CANCEL_S = 5.0
GONE_S = 30.0
"""A service that is asked for its status and cannot be reached for this long is taken for dead."""
NUM_REMEMBERED = 4096
"""Ended episodes whose status may be reported again."""
MAX_REWARD = 1e9
"""Beyond this a reward overflows the arithmetic of a loss in float32."""
MAX_ANSWER_BYTES = 32 << 20
"""Of the service; as much as a report that is posted may have."""
MAX_NOTE_CHARS = 2000
"""Of what a service says in words; the rest is cut."""


class RemoteStatus(StrEnum):
    """RUNNING -> FINISHED | FAILED | CANCELLED; the service says so once."""

    RUNNING = "running"
    """Only in answer to a question."""
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A status as the service tells it.

    >>> msgspec.json.decode(b'{"status": "finished", "reward": 1.0}', type=Report).reward
    1.0
    """

    status: RemoteStatus
    reward: float | None = None
    """None: our own grader judges the files and the answer."""
    success: bool | None = None
    """None: a reward above 0.5."""
    parts: dict[str, float] = {}
    note: str = ""
    error: str = ""
    """What went wrong, when it failed."""
    boundary: Boundary = Boundary.HARNESS
    """Where it went wrong."""
    files: dict[str, str] = {}
    """What the agent left, path -> text."""
    facts: dict[str, Any] = {}
    """For our grader: `Attempt.facts`."""

    def check(self) -> None:
        if self.status is RemoteStatus.RUNNING:
            raise ValueError("status is 'running'; report one of finished, failed, cancelled, once")
        for name, value in (("reward", self.reward), *((f"parts.{k}", v) for k, v in self.parts.items())):
            if value is not None and not (math.isfinite(value) and abs(value) <= MAX_REWARD):
                raise ValueError(f"{name} is {value}; it must be a finite number, at most {MAX_REWARD:g} either way")


class Init(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `POST {url}/init`."""

    rollout_id: str
    """What makes it one episode: the same id again is the same episode, which must not start twice."""
    invocation_id: str
    """This attempt at the task; the same as `rollout_id`."""
    run_id: str
    """The process that asks."""
    experiment_id: str
    """The run."""
    row_id: str
    """The task."""
    model_base_url: str
    anthropic_base_url: str
    api_key: str
    model: str
    status_url: str
    """Where the terminal status is posted."""
    status_key: str
    """Comes with the status, as `Authorization: Bearer`. It must stay with the service: an agent that has it can reward itself."""
    deadline_s: float
    """Seconds from now; later the episode is cancelled."""
    task: dict[str, Any]


class Reports:
    """The terminal statuses of episodes: the first one counts, the same again is fine, another one is refused."""

    def __init__(self) -> None:
        self._open: dict[str, asyncio.Future[Report]] = {}
        self._ended: OrderedDict[str, Report | None] = OrderedDict()
        self._secret = secrets.token_bytes(32)

    def key(self, episode: str) -> str:
        """By which the service shows that it is the one who reports. The key of the episode's model calls does not: agents have that."""
        return f"rms-{blake3(episode.encode(), key=self._secret).hexdigest(length=16)}"

    def is_key(self, episode: str, key: str) -> bool:
        return hmac.compare_digest(key.encode("utf-8", "replace"), self.key(episode).encode())

    def open(self, episode: str) -> asyncio.Future[Report]:
        assert episode not in self._open, f"episode {episode} is open already"
        self._open[episode] = asyncio.get_running_loop().create_future()
        return self._open[episode]

    def close(self, episode: str) -> None:
        future = self._open.pop(episode)
        self._ended[episode] = future.result() if future.done() and not future.cancelled() else None
        while len(self._ended) > NUM_REMEMBERED:
            self._ended.popitem(last=False)

    def post(self, episode: str, body: bytes) -> tuple[int, str]:
        """The HTTP status and a sentence for whoever reported."""
        try:
            report = msgspec.json.decode(body, type=Report)
            report.check()
        except (msgspec.DecodeError, ValueError) as error:
            return 400, f"this is no terminal status: {error}"
        return self.take(episode, report)

    def take(self, episode: str, report: Report) -> tuple[int, str]:
        future = self._open.get(episode)
        if future is None and episode not in self._ended:
            return 404, f"there is no episode {episode!r}"
        known = self._ended[episode] if future is None else future.result() if future.done() else None
        if known is not None:
            same = known == report
            return (200, "known already") if same else (409, f"the episode has ended with another status: {known.status}")
        if future is None:
            return 410, "the episode is over: its deadline passed or it was cancelled"
        future.set_result(report)
        return 200, "taken"


class RemoteService:
    """The customer's service, as seen from here. One connection pool for all episodes."""

    def __init__(self, url: str, *, key: str = "", poll_s: float = 0.0) -> None:
        self._url, self._poll_s = url.rstrip("/"), poll_s
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._http: aiohttp.ClientSession | None = None
        self.num_retries = 0

    async def play(self, init: Init, reports: Reports, episode: str, *, deadline: float) -> Report:
        """Start the episode and wait for its one terminal status; TimeoutError at `deadline`, and the service is told to stop."""
        told = reports.open(episode)
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await self._init(init)
                if self._poll_s:
                    return await self._poll(init.rollout_id, told, reports, episode)
                return await told
        finally:
            if not told.done() or told.cancelled():
                await asyncio.shield(self._cancel(init.rollout_id))
            reports.close(episode)

    async def close(self) -> None:
        http, self._http = self._http, None
        if http is not None:
            await http.close()

    async def _init(self, init: Init) -> None:
        """Until the service has it. An answer that was lost is asked for again: the id tells that it is the same episode."""
        body = msgspec.json.encode(init)
        while True:
            try:
                status, text = await self._call("POST", "/init", body)
                if status < 300:
                    return
                if status < 500 and status not in (408, 425, 429):
                    raise RunFailure(
                        Boundary.HARNESS, f"the service at {self._url} refused episode {init.rollout_id} with {status}: {text}"
                    )
            except (aiohttp.ClientError, OSError):
                pass  # down or restarting: asked again until the deadline
            self.num_retries += 1
            await asyncio.sleep(RETRY_S)

    async def _poll(self, rollout_id: str, told: asyncio.Future[Report], reports: Reports, episode: str) -> Report:
        """Ask, and listen as well: a service may report to us even so."""
        heard = time.monotonic()
        while not told.done():
            with contextlib.suppress(aiohttp.ClientError, OSError):
                status, text = await self._call("GET", f"/status/{rollout_id}")
                if status == 404:
                    raise RunFailure(Boundary.HARNESS, f"the service at {self._url} does not know episode {rollout_id} any more")
                if status == 200:
                    heard = time.monotonic()
                    self._take_polled(text, reports, episode)
            if time.monotonic() - heard > GONE_S:
                raise RunFailure(Boundary.HARNESS, f"the service at {self._url} has not answered for {GONE_S:g} s")
            await asyncio.wait([told], timeout=self._poll_s)
        return told.result()

    def _take_polled(self, text: str, reports: Reports, episode: str) -> None:
        try:
            report = msgspec.json.decode(text, type=Report)
            if report.status is not RemoteStatus.RUNNING:
                report.check()
                reports.take(episode, report)
        except (msgspec.DecodeError, ValueError) as error:
            raise RunFailure(Boundary.HARNESS, f"the service at {self._url} told a status that cannot be used: {error}") from error

    async def _cancel(self, rollout_id: str) -> None:
        """Best effort: a service that is gone has nothing to stop."""
        with contextlib.suppress(aiohttp.ClientError, OSError):
            async with asyncio.timeout(CANCEL_S):
                await self._call("POST", "/cancel", msgspec.json.encode({"rollout_id": rollout_id}))

    async def _call(self, method: str, path: str, body: bytes | None = None) -> tuple[int, str]:
        if self._http is None:
            self._http = aiohttp.ClientSession(headers=self._headers, timeout=aiohttp.ClientTimeout(total=CALL_S))
        headers = {"content-type": "application/json"} if body is not None else {}
        async with self._http.request(method, self._url + path, data=body, headers=headers) as answer:
            read = bytearray()
            async for chunk in answer.content.iter_any():
                read += chunk
                if len(read) > MAX_ANSWER_BYTES:
                    raise RunFailure(Boundary.HARNESS, f"the service at {self._url} answered with more than {MAX_ANSWER_BYTES >> 20} MiB")
            return answer.status, read.decode("utf-8", "replace")


def init_of(
    task: Task, endpoint: Endpoint, *, run: str, process: str, episode: str, status_url: str, status_key: str, deadline: float
) -> Init:
    rollout_id = f"{process}.{episode}"
    metadata = {"family": task.family, "kind": task.kind, "level": task.level, "split": task.split}
    return Init(
        rollout_id=rollout_id,
        invocation_id=rollout_id,
        run_id=process,
        experiment_id=run,
        row_id=task.task_id,
        model_base_url=endpoint.openai_url,
        anthropic_base_url=endpoint.anthropic_url,
        api_key=endpoint.key,
        model=endpoint.model,
        status_url=status_url,
        status_key=status_key,
        deadline_s=max(0.0, deadline - time.monotonic()),
        task={"task_id": task.task_id, "instruction": task.instruction, "files": task.files, "metadata": metadata},
    )


def check_finished(report: Report) -> None:
    """RunFailure unless it ended well enough to be graded."""
    if report.status is not RemoteStatus.FINISHED:
        words = (report.error or report.note or "it gave no reason")[:MAX_NOTE_CHARS]
        raise RunFailure(report.boundary, f"the service reported {report.status}: {words}")
